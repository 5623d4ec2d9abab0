"""`grpo-lite profile`: measure this machine, or show what is known of cards."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import platformdirs

from grpo_lite.cards.profile import CardProfile, list_profiles, load_profile, save_profile
from grpo_lite.commands.flags import add_verbosity
from grpo_lite.report.card_table import profile_screen
from grpo_lite.report.render import report_console

FIGURE_S = 3.0
"""Seconds for each of at most 12 figures: a minute, with what lies between them."""
QUICK_FIGURE_S = 0.4
"""The same for a rough answer in ten seconds."""


def add_parser(commands: Any) -> None:
    """Add `profile` to the command line."""
    parser = commands.add_parser(
        "profile",
        help="measure this machine's card, link, RAM and disk",
        description="Measure this machine and keep the figures, so that predictions of time rest "
        "on it. Without a GPU the processor is measured as a card, called cpu.",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--list", action="store_true", help="list the known cards")
    what.add_argument("--show", metavar="NAME", help="show what is known of a card")
    what.add_argument("--quick", action="store_true", help="10 s instead of 60")
    parser.add_argument(
        "--disk", type=Path, metavar="FOLDER", help="measure the disk here, where offload would go"
    )
    add_verbosity(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run `profile` and return its exit code."""
    out = report_console(sys.stdout)
    if options.list:
        for name in list_profiles():
            out.print(f"{name:26} {load_profile(name).title}", soft_wrap=True)
        return 0
    if options.show is not None:
        out.print(profile_screen(load_profile(options.show)))
        return 0
    profile = _measure(options)
    file = save_profile(profile)
    out.print(profile_screen(profile))
    out.print(f"written to {file}", soft_wrap=True)
    return 0


def _measure(options: argparse.Namespace) -> CardProfile:
    import torch

    from grpo_lite.cards.measure import Pace, measure_cpu
    from grpo_lite.cards.measure_cuda import measure_cuda

    errors = report_console(sys.stderr)
    pace = Pace(
        figure_s=QUICK_FIGURE_S if options.quick else FIGURE_S,
        clock=time.perf_counter,
        tell=lambda what: errors.print(f"measuring {what}", soft_wrap=True),
    )
    folder = options.disk or Path(platformdirs.user_cache_path("grpo-lite"))
    measure = measure_cuda if torch.cuda.is_available() else measure_cpu
    return measure(folder, pace)
