"""`grpo-lite train RECIPE.toml`: run a recipe under the governor."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import platformdirs

from grpo_lite.commands.flags import add_verbosity, positive
from grpo_lite.plan import Phase
from grpo_lite.predict.memory import MemoryEstimate, estimate_memory
from grpo_lite.recipe import Recipe, read_recipe
from grpo_lite.report.peaks import PeakRow, peak_table
from grpo_lite.report.progress import Progress
from grpo_lite.report.render import report_console
from grpo_lite.report.runlog import RunLog
from grpo_lite.run_folder import RunFolder, create_run_folder


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
    train_recipe(recipe, path)
    return 0


def train_recipe(recipe: Recipe, path: Path) -> RunFolder:
    """Train as `recipe` says and leave everything in the new folder `path`.

    Raises:
        KeyboardInterrupt: interrupted; log and a checkpoint of the last whole step are kept.
    """
    from grpo_lite.train import open_run, read_inputs, save_weights, train_steps

    console = report_console(sys.stderr)
    inputs = read_inputs(recipe, Path(platformdirs.user_cache_path("grpo-lite")))
    folder = create_run_folder(path, recipe)
    budget_bytes = inputs.question.budget.card_bytes
    with (
        RunLog(folder.log) as log,
        Progress(recipe.training.steps, budget_bytes, console) as progress,
        open_run(recipe, inputs, log, progress) as opened,
    ):
        log.append("start", {"model": recipe.model, "card": recipe.card})
        reason = "failed"
        try:
            with opened.interrupts.caught():
                train_steps(opened, folder)
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
    rows = [
        PeakRow(
            phase=phase,
            planned_bytes=_planned(planned, phase),
            predicted_bytes=record.predicted_bytes,
            measured_bytes=record.measured_bytes,
        )
        for phase, record in opened.peaks.items()
    ]
    out = report_console(sys.stdout)
    out.print(peak_table(rows))
    out.print(f"weights: {folder.final}\nlog: {folder.log}", soft_wrap=True)
    return folder


def _planned(memory: MemoryEstimate, phase: Phase) -> int:
    estimate = memory.of(phase)
    return 0 if estimate is None else estimate.allocated_bytes
