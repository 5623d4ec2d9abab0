"""`python -m grpo_lite.commands`: the command line where its script is not on the path."""

import sys

from grpo_lite.commands.main import main

sys.exit(main())
