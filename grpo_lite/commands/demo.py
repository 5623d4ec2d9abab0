"""`grpo-lite demo`: fit and train a real small model offline, and show that it learns in budget."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import platformdirs
from rich.console import Console

from grpo_lite.commands.flags import add_verbosity, positive
from grpo_lite.commands.train import Outcome, show_outcome, train_recipe
from grpo_lite.demo import prepare_demo_model
from grpo_lite.errors import UsageError
from grpo_lite.fit import FitRequest, fit
from grpo_lite.plan import Workload
from grpo_lite.recipe import (
    OffloadSettings,
    Recipe,
    RewardSettings,
    TaskSettings,
    TrainingSettings,
    write_recipe,
)
from grpo_lite.report.render import render, report_console
from grpo_lite.units import GIB, MIB, format_seconds

CARD = "virtual:3GiB"
SMALL_CARD = "virtual:1.5GiB"
ACT_TWO_STEPS = 3
AMPLE_HOST_BYTES = 4 * GIB
SCARCE_HOST_BYTES = 1900 * MIB
"""Too little RAM for gradients and states, so that states go to files."""
WORKLOAD = Workload(
    method="full",
    prompts_per_step=8,
    num_generations=8,
    max_prompt_length=21,
    max_completion_length=4,
)
TASK = TaskSettings(
    name="reasoning_gym:chain_sum",
    settings={
        "prompt_style": "few_shot",
        "min_terms": 2,
        "max_terms": 2,
        "min_digits": 1,
        "max_digits": 1,
    },
    held_out=64,
)


def add_parser(commands: Any) -> None:
    """Add `demo` to the command line."""
    parser = commands.add_parser(
        "demo",
        help="fit and train SmolLM2-135M offline inside 3 GiB",
        description="Full fine-tuning of SmolLM2-135M by GRPO on sums, inside a budget of 3 GiB "
        "on the CPU: fit, train, held-out accuracy before and after.",
    )
    parser.add_argument("--output", type=Path, default=Path("runs/demo"), metavar="FOLDER")
    parser.add_argument("--card", default=CARD, metavar="NAME", help=f"default: {CARD}")
    parser.add_argument("--steps", type=positive, default=25, metavar="N")
    parser.add_argument(
        "--skip-offload", action="store_true", help="leave out the second act (RAM and disk tiers)"
    )
    add_verbosity(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the demo and return its exit code."""
    out = report_console(sys.stdout)
    started_s = time.monotonic()
    _make_room(options.output)
    cache_dir = Path(platformdirs.user_cache_path("grpo-lite"))
    model = prepare_demo_model(cache_dir, tell=lambda line: out.print(line, soft_wrap=True))
    request = FitRequest(model=str(model), card=options.card, workload=WORKLOAD, method="full")
    answer = fit(request, cache_dir=cache_dir)
    chosen = answer.document.chosen
    recipe = Recipe(
        model=str(model),
        card=options.card,
        workload=chosen.workload,
        plan=chosen.plan,
        task=TASK,
        reward=RewardSettings(functions=["first_integer"]),
        training=TrainingSettings(steps=options.steps, learning_rate=1e-5, eval_samples=8),
    )
    options.output.parent.mkdir(parents=True, exist_ok=True)
    path = options.output.with_suffix(".toml")
    write_recipe(recipe, path)
    render(replace(answer.document, recipe_path=str(path)), "text", out)
    out.print()
    outcome = train_recipe(recipe, options.output)
    out.print()
    show_outcome(outcome, out)
    seconds = time.monotonic() - started_s
    out.print(f"the demo took {format_seconds(seconds)} up to here")
    summary = summarise(outcome, recipe, seconds)
    if not options.skip_offload:
        second_act(recipe, options.output, cache_dir, out)
    out.print(summary, soft_wrap=True, highlight=False)
    return 0


def second_act(recipe: Recipe, folder: Path, cache_dir: Path, out: Console) -> None:
    """Run the same full fine-tuning in half the memory: blocks in RAM, then in files."""
    out.print(
        f"\nSecond act: {ACT_TWO_STEPS} updates of the same training inside {SMALL_CARD}, with "
        "gradients and optimizer state off the card"
    )
    weights = []
    for offload, host_bytes in (("host", AMPLE_HOST_BYTES), ("disk", SCARCE_HOST_BYTES)):
        blocks = folder.with_name(f"{folder.name}-blocks")
        blocks.mkdir(parents=True, exist_ok=True)
        on_disk = offload == "disk"
        request = FitRequest(
            model=recipe.model,
            card=SMALL_CARD,
            workload=WORKLOAD,
            method="full",
            host_bytes=host_bytes,
            disk_bytes=shutil.disk_usage(blocks).free if on_disk else None,
        )
        document = fit(request, cache_dir=cache_dir).document
        small = replace(
            recipe,
            card=SMALL_CARD,
            workload=document.chosen.workload,
            plan=document.chosen.plan,
            offload=OffloadSettings(
                host_budget=f"{host_bytes}", disk_dir=str(blocks) if on_disk else ""
            ),
            training=replace(recipe.training, steps=ACT_TWO_STEPS, eval_samples=0),
        )
        place = folder.with_name(f"{folder.name}-{offload}")
        _make_room(place)
        out.print(f"\n{offload} tier: {document.assumptions[2]}")
        outcome = train_recipe(small, place)
        shutil.rmtree(blocks)
        show_outcome(outcome, out)
        weights.append((outcome.folder.final / "model.safetensors").read_bytes())
    equal = "the same, to the bit" if weights[0] == weights[1] else "DIFFERENT"
    out.print(f"\nweights after {ACT_TWO_STEPS} updates, RAM tier against disk tier: {equal}")


def _make_room(path: Path) -> None:
    """Remove an earlier demo's folder, and nothing else.

    Raises:
        UsageError: there is something else in `path`.
    """
    if not path.exists():
        return
    if not (path / "recipe.toml").is_file():
        raise UsageError(
            f"{path} exists and is no run of the demo", hint="--output runs/another-demo"
        )
    shutil.rmtree(path)


def summarise(outcome: Outcome, recipe: Recipe, seconds: float) -> str:
    """Write demo.json and return it: one flat JSON object on one line."""
    errors = [abs(row.error_fraction) for row in outcome.peaks if row.error_fraction is not None]
    summary = {
        "accuracy_before": outcome.reward_before,
        "accuracy_after": outcome.reward_after,
        "budget_bytes": outcome.budget_bytes,
        "measured_peak_bytes": outcome.largest_bytes,
        "worst_phase_error": max(errors),
        "steps": recipe.training.steps,
        "seconds": round(seconds, 1),
    }
    text = json.dumps(summary)
    (outcome.folder.path / "demo.json").write_text(text + "\n", encoding="utf-8")
    return text
