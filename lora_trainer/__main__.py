"""`python -m lora_trainer` is `python treinar.py`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
