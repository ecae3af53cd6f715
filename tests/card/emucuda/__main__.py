"""python -m emucuda script.py args  ·  python -m emucuda -m module args: run it on the pretended card."""

import faulthandler
import runpy
import sys

import emucuda  # noqa: F401


def main() -> None:
    faulthandler.enable()  # the host that reads the card's memory dies of SIGSEGV: say where
    sys.argv = sys.argv[1:]
    sys.path.insert(0, "")
    if sys.argv[0] == "-m":
        sys.argv = sys.argv[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
