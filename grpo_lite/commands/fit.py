"""`grpo-lite fit MODEL`: which settings fit, and which of them are the fastest."""

from __future__ import annotations

import argparse
import gc
import io
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import platformdirs

from grpo_lite.commands.flags import add_verbosity, positive, size
from grpo_lite.errors import UsageError
from grpo_lite.fit import FitAnswer, FitRequest, exit_code, fit
from grpo_lite.plan import LOSS_TYPES, Workload, require_runnable
from grpo_lite.recipe import (
    OffloadSettings,
    Recipe,
    RewardSettings,
    TaskSettings,
    TrainingSettings,
    recipe_to_toml,
    write_recipe,
)
from grpo_lite.report.document import Document
from grpo_lite.report.render import RENDERERS, render, report_console
from grpo_lite.search import Verdict


def add_parser(commands: Any) -> None:
    """Add `fit` to the command line."""
    parser = commands.add_parser(
        "fit",
        help="find the fastest settings that fit a card",
        description="Find the fastest GRPO settings that fit a card, without loading a weight.",
        epilog="examples: grpo-lite fit Qwen/Qwen2.5-1.5B-Instruct --card rtx-3080-laptop-16gb "
        "--method lora; grpo-lite fit ./my-model --card virtual:8GiB --recipe recipe.toml",
    )
    parser.add_argument("model", metavar="MODEL", help="a folder, a config.json, or a model id")
    parser.add_argument(
        "--card",
        default="auto",
        metavar="NAME",
        help="a card's name (rtx-4060-laptop-8gb), virtual:SIZE, or auto (default)",
    )
    parser.add_argument("--reserve", type=size, default=0, metavar="SIZE", help="keep this free")
    parser.add_argument(
        "--host-budget",
        type=size,
        metavar="SIZE",
        help="RAM that gradient blocks and optimizer state may take (full fine-tuning)",
    )
    parser.add_argument(
        "--disk-budget", type=size, metavar="SIZE", help="disk for them where RAM is short"
    )
    parser.add_argument(
        "--disk-dir", type=Path, metavar="FOLDER", help="folder on a local disk for block files"
    )
    parser.add_argument("--allow-network", action="store_true", help="look MODEL up on the hub")
    _add_experiment(parser)
    _add_run(parser)
    parser.add_argument("--format", choices=sorted(RENDERERS), default="text")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the report here")
    parser.add_argument(
        "--recipe", type=Path, metavar="FILE", help="write the recipe that `train` runs here"
    )
    add_verbosity(parser)
    parser.set_defaults(run=run)


def _add_experiment(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the experiment (never changed silently)")
    default = Workload()
    group.add_argument("--method", choices=("full", "lora", "qlora", "auto"), default="auto")
    group.add_argument("--lora-rank", type=positive, default=default.lora_rank, metavar="N")
    group.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="auto")
    group.add_argument(
        "--prompts-per-step", type=positive, default=default.prompts_per_step, metavar="N"
    )
    group.add_argument(
        "--num-generations", type=positive, default=default.num_generations, metavar="N"
    )
    group.add_argument(
        "--max-prompt-length", type=positive, default=default.max_prompt_length, metavar="N"
    )
    group.add_argument(
        "--max-completion-length",
        type=_length_range,
        default=(default.max_completion_length,) * 2,
        metavar="N|LO..HI",
        help="tokens; a range may be tuned",
    )
    group.add_argument("--loss-type", choices=LOSS_TYPES, default=default.loss_type)
    group.add_argument("--beta", type=float, default=default.beta, help="weight of the KL term")
    group.add_argument("--num-iterations", type=positive, default=1, metavar="N")


def _add_run(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("for the recipe")
    default = TrainingSettings()
    group.add_argument("--task", default="", metavar="FILE|reasoning_gym:NAME")
    group.add_argument("--reward", action="append", default=[], metavar="MODULE:FUNCTION")
    group.add_argument("--steps", type=positive, default=default.steps, metavar="N")
    group.add_argument("--learning-rate", type=float, default=default.learning_rate)
    group.add_argument("--seed", type=int, default=default.seed)


def run(options: argparse.Namespace) -> int:
    """Run `fit` and return its exit code."""
    with _no_collection():
        answer = fit(request_of(options), cache_dir=Path(platformdirs.user_cache_path("grpo-lite")))
    document = answer.document
    if document.verdict is not Verdict.DOES_NOT_FIT:
        recipe = recipe_of(options, answer)
        document = replace(document, recipe_text=recipe_to_toml(recipe))
        if options.recipe is not None:
            write_recipe(recipe, options.recipe)
            document = replace(document, recipe_path=str(options.recipe))
    elif options.recipe is not None:
        print(  # noqa: T201  # stderr
            f"no recipe is written to {options.recipe}: nothing fits", file=sys.stderr
        )
    _show(document, options)
    return exit_code(document)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Hold the garbage collector back: a short question makes many objects and little garbage."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def request_of(options: argparse.Namespace) -> FitRequest:
    """Return the question that the flags ask.

    Raises:
        UsageError: flags that contradict each other.
    """
    low, high = options.max_completion_length
    workload = Workload(
        method="full" if options.method == "auto" else options.method,
        lora_rank=options.lora_rank,
        lora_alpha=2 * options.lora_rank,
        prompts_per_step=options.prompts_per_step,
        num_generations=options.num_generations,
        max_prompt_length=options.max_prompt_length,
        max_completion_length=high,
        loss_type=options.loss_type,
        epsilon_high=5.0 if options.loss_type == "cispo" else 0.2,
        beta=options.beta,
        num_iterations=options.num_iterations,
    )
    method = options.method
    if method == "auto" and workload.beta > 0:
        method = "lora"  # only adapters have a reference model for free
    require_runnable(replace(workload, method="full" if method == "auto" else method))
    return FitRequest(
        model=options.model,
        card=options.card,
        workload=workload,
        method=method,
        dtype=options.dtype,
        completion_range=None if low == high else (low, high),
        reserve_bytes=options.reserve,
        host_bytes=options.host_budget,
        disk_bytes=disk_bytes_of(options),
        allow_network=options.allow_network,
    )


def disk_bytes_of(options: argparse.Namespace) -> int | None:
    """Return the bytes of disk that the flags allow; None without a folder.

    Raises:
        UsageError: a disk without a folder or without RAM for its buffers, or a missing folder.
    """
    if options.disk_dir is None:
        if options.disk_budget is not None:
            raise UsageError("--disk-budget needs a folder", hint="--disk-dir FOLDER")
        return None
    if options.host_budget is None:
        raise UsageError("--disk-dir needs RAM for its buffers", hint="--host-budget 8GiB")
    if not options.disk_dir.is_dir():
        raise UsageError(f"--disk-dir {options.disk_dir} is no folder", hint="mkdir it first")
    free_bytes = shutil.disk_usage(options.disk_dir).free
    return free_bytes if options.disk_budget is None else int(options.disk_budget)


def recipe_of(options: argparse.Namespace, answer: FitAnswer) -> Recipe:
    """Return the recipe of the chosen plan, with what the flags say of task and training."""
    chosen = answer.document.chosen
    return Recipe(
        model=options.model,
        card=options.card if options.card.startswith("virtual:") else "auto",
        reserve=f"{options.reserve}",
        workload=chosen.workload,
        plan=chosen.plan,
        offload=OffloadSettings(
            host_budget="" if options.host_budget is None else f"{options.host_budget}",
            disk_dir="" if options.disk_dir is None else str(options.disk_dir),
            disk_budget="" if options.disk_budget is None else f"{options.disk_budget}",
        ),
        task=TaskSettings(name=options.task),
        reward=RewardSettings(functions=options.reward),
        training=TrainingSettings(
            steps=options.steps, learning_rate=options.learning_rate, seed=options.seed
        ),
    )


def _show(document: Document, options: argparse.Namespace) -> None:
    if options.output is None:
        render(document, options.format, report_console(sys.stdout))
        return
    text = io.StringIO()
    render(document, options.format, report_console(text))
    try:
        options.output.write_text(text.getvalue(), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{options.output} cannot be written: {error.strerror}") from error


def _length_range(text: str) -> tuple[int, int]:
    low, dots, high = text.partition("..")
    try:
        lengths = (int(low), int(high if dots else low))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a number of tokens nor a range LO..HI"
        ) from None
    if not 1 <= lengths[0] <= lengths[1]:
        raise argparse.ArgumentTypeError(f"{text!r}: LO must be at least 1 and at most HI")
    return lengths
