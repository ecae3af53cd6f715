"""Entry point: `python treinar.py --config my_config.yaml`."""

import sys

from lora_trainer.cli import main

if __name__ == "__main__":
    sys.exit(main())
