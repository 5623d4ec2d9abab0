"""`grpo-lite train RECIPE.toml`: run a recipe under the governor."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import platformdirs
from rich.console import Console

from grpo_lite.commands.flags import add_verbosity, positive
from grpo_lite.plan import Phase
from grpo_lite.predict.memory import MemoryEstimate, estimate_memory
from grpo_lite.recipe import Recipe, read_recipe
from grpo_lite.report.peaks import PeakRow, peak_table
from grpo_lite.report.progress import Progress
from grpo_lite.report.render import report_console
from grpo_lite.report.runlog import RunLog
from grpo_lite.run_folder import RunFolder, create_run_folder
from grpo_lite.units import format_bytes


def add_parser(commands: Any) -> None:
    """Add `train` to the command line."""
    parser = commands.add_parser(
        "train",
        help="run a recipe under the governor",
        description="Train by GRPO as a recipe says, inside its card's budget.",
    )
    parser.add_argument("recipe", type=Path, metavar="RECIPE.toml")
    parser.add_argument(
        "--output", type=Path, metavar="FOLDER", help="run folder (default: runs/RECIPE)"
    )
    parser.add_argument("--steps", type=positive, metavar="N", help="instead of the recipe's")
    parser.add_argument("--card", metavar="NAME", help="instead of the recipe's")
    add_verbosity(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run `train` and return its exit code."""
    recipe = read_recipe(options.recipe)
    if options.steps is not None:
        recipe = replace(recipe, training=replace(recipe.training, steps=options.steps))
    if options.card is not None:
        recipe = replace(recipe, card=options.card)
    path = options.output or Path("runs") / options.recipe.stem
    show_outcome(train_recipe(recipe, path), report_console(sys.stdout))
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a finished run came to."""

    folder: RunFolder
    """Where everything lies."""
    reward_before: float | None
    """Mean held-out reward before the first update; None without held-out problems."""
    reward_after: float | None
    """The same after the last update."""
    peaks: tuple[PeakRow, ...]
    """Predicted and measured peaks by phase."""
    largest_bytes: int
    """The largest allocated peak of the whole run."""
    budget_bytes: int
    """What it was allowed."""


def train_recipe(recipe: Recipe, path: Path) -> Outcome:
    """Train as `recipe` says and leave everything in the new folder `path`.

    Raises:
        KeyboardInterrupt: interrupted; log and a checkpoint of the last whole step are kept.
    """
    from transformers.utils import logging as transformers_logging

    from grpo_lite.train import evaluate, open_run, read_inputs, save_weights, train_steps

    transformers_logging.disable_progress_bar()  # one progress display is enough
    inputs = read_inputs(recipe, Path(platformdirs.user_cache_path("grpo-lite")))
    folder = create_run_folder(path, recipe)
    budget_bytes = inputs.question.budget.card_bytes
    with (
        RunLog(folder.log) as log,
        Progress(recipe.training.steps, budget_bytes, report_console(sys.stderr)) as progress,
        open_run(recipe, inputs, log, progress) as opened,
    ):
        log.append(
            "start",
            {"model": recipe.model, "card": recipe.card, "budget_bytes": budget_bytes},
        )
        reason = "failed"
        try:
            with opened.interrupts.caught():
                before = evaluate(opened)
                train_steps(opened, folder)
                after = evaluate(opened)
            reason = "done"
        except KeyboardInterrupt:
            reason = "interrupted"
            opened.engine.zero_grad()
            save_weights(opened, folder.checkpoint(opened.last_step))
            progress.note(
                f"interrupted; weights after step {opened.last_step} are in "
                f"{folder.checkpoint(opened.last_step)}"
            )
            raise
        finally:
            log.append("end", {"reason": reason, "last_step": opened.last_step})
        save_weights(opened, folder.final)
    planned = estimate_memory(inputs.question.footprint, recipe.workload, recipe.plan)
    return Outcome(
        folder=folder,
        reward_before=before,
        reward_after=after,
        peaks=tuple(
            PeakRow(
                phase=phase,
                planned_bytes=_planned(planned, phase),
                predicted_bytes=record.predicted_bytes,
                measured_bytes=record.measured_bytes,
            )
            for phase, record in opened.peaks.items()
        ),
        largest_bytes=opened.governor.largest_bytes,
        budget_bytes=budget_bytes,
    )


def show_outcome(outcome: Outcome, out: Console) -> None:
    """Print what a run came to: peaks, held-out rewards, where the weights are."""
    out.print(peak_table(outcome.peaks))
    share = outcome.largest_bytes / outcome.budget_bytes
    out.print(
        f"largest peak {format_bytes(outcome.largest_bytes)} (measured), "
        f"{share:.0%} of the budget of {format_bytes(outcome.budget_bytes)}"
    )
    if outcome.reward_before is not None and outcome.reward_after is not None:
        out.print(
            f"held-out reward (measured, sampled): {outcome.reward_before:.3f} before, "
            f"{outcome.reward_after:.3f} after"
        )
    out.print(f"weights: {outcome.folder.final}\nlog: {outcome.folder.log}", soft_wrap=True)


def _planned(memory: MemoryEstimate, phase: Phase) -> int:
    estimate = memory.of(phase)
    return 0 if estimate is None else estimate.allocated_bytes
