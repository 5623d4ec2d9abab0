"""Run grpo-lite from a checkout: `python cli.py fit MODEL`."""

import sys

from grpo_lite.commands.main import main

if __name__ == "__main__":
    sys.exit(main())
