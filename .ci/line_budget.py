"""Prints the files and functions over the healthy band of docs/decisions.md; never fails the build."""

import ast
import subprocess
from pathlib import Path

FILE_LINES, FUNCTION_LINES, PARAMETERS = 300, 40, 6


def main() -> None:
    files = subprocess.run(["git", "ls-files", "*.py"], capture_output=True, text=True, check=True).stdout.split()
    rows = []
    for name in files:
        text = Path(name).read_text(encoding="utf-8")
        if text.count("\n") > FILE_LINES:
            rows.append((text.count("\n"), name))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                count = (
                    len(node.args.args)
                    + len(node.args.kwonlyargs)
                    - (node.args.args[:1] != [] and node.args.args[0].arg == "self")
                )
                if lines > FUNCTION_LINES or (count > PARAMETERS and not name.startswith("tests/")):
                    rows.append((lines, f"{name}:{node.lineno} {node.name} ({count} parameters)"))
    for lines, name in sorted(rows, reverse=True):
        print(f"{lines:5} {name}")
    print(f"{len(files)} files, {sum(Path(f).read_text(encoding='utf-8').count(chr(10)) for f in files)} lines")


if __name__ == "__main__":
    main()
