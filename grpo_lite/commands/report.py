"""`grpo-lite report RUN`: what a run came to, from its log."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from grpo_lite.commands.flags import add_verbosity
from grpo_lite.errors import UsageError
from grpo_lite.report.run_render import RUN_RENDERERS
from grpo_lite.report.run_report import run_report
from grpo_lite.report.runlog import read_runlog


def add_parser(commands: Any) -> None:
    """Add `report` to the command line."""
    parser = commands.add_parser(
        "report",
        help="show what a run came to",
        description="Show a run from its log: rewards, lengths, predicted and measured peaks, "
        "and every decision of the governor.",
        epilog="example: grpo-lite report runs/recipe --format html -o run.html",
    )
    parser.add_argument("run_path", type=Path, metavar="RUN", help="run folder, or its run.jsonl")
    parser.add_argument("--format", choices=sorted(RUN_RENDERERS), default="text")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write it here")
    add_verbosity(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run `report` and return its exit code."""
    path: Path = options.run_path / "run.jsonl" if options.run_path.is_dir() else options.run_path
    try:
        records = read_runlog(path)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror}",
            hint="grpo-lite report runs/NAME, the folder that `train` made",
        ) from error
    text = RUN_RENDERERS[options.format](run_report(records, str(path)))
    if options.output is None:
        sys.stdout.write(text)
        return 0
    try:
        options.output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{options.output} cannot be written: {error.strerror}") from error
    return 0
