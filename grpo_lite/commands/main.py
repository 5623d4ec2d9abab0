"""The command `grpo-lite`: parses, calls one command, and turns errors into exit codes.

0 fits or done, 1 a store, reward or I/O error, 2 wrong use, 3 does not fit, 4 the governor is out
of moves, 130 interrupted.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from importlib import metadata

from grpo_lite.commands import demo, explain, fit, profile, report, train
from grpo_lite.errors import GrpoLiteError

COMMANDS = (fit, train, report, profile, explain, demo)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line `arguments` (default: the process's own); return its exit code."""
    # Before torch starts its threads: spinning ones are ten times slower on a busy machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    parser = build_parser()
    options = parser.parse_args(arguments)
    _quiet_libraries(verbose=options.verbose)
    try:
        code: int = options.run(options)
    except GrpoLiteError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201  # the one place that prints errors
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)  # noqa: T201  # likewise
        return 130
    except BrokenPipeError:
        # The reader of our output (head, less) has gone; that is no error of ours.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def build_parser() -> argparse.ArgumentParser:
    """Return the parser with every command."""
    parser = argparse.ArgumentParser(
        prog="grpo-lite", description="A memory governor for GRPO on one consumer GPU."
    )
    parser.add_argument("--version", action="version", version=metadata.version("grpo-lite"))
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(commands)
    return parser


def _quiet_libraries(*, verbose: bool) -> None:
    """Keep other libraries' notices off the screen and off the network, unless asked for."""
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="%(message)s")
    if verbose:
        return
    warnings.simplefilter("ignore", FutureWarning)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
