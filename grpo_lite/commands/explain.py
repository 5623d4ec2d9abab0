"""`grpo-lite explain`: what a pasted out-of-memory error means and what helps."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import platformdirs

from grpo_lite.cards.oom_text import read_oom_text
from grpo_lite.commands.flags import add_verbosity, positive
from grpo_lite.errors import UsageError
from grpo_lite.explain import explain
from grpo_lite.models import resolve_model
from grpo_lite.recipe import Recipe, read_recipe
from grpo_lite.report.explained import explanation_to_json, explanation_to_text
from grpo_lite.suspects import Planned, Setting

MAX_INPUT_BYTES = 16 * 1024**2
"""More is a log of hours, of which the end matters."""


def add_parser(commands: Any) -> None:
    """Add `explain` to the command line."""
    parser = commands.add_parser(
        "explain",
        help="say which tensor an out-of-memory error was about, and what helps",
        description="Explain a pasted out-of-memory error: which tensor, who held the rest, how "
        "much was missing, and the smallest change that covers it.",
        epilog="examples: grpo-lite explain error.txt --model Qwen/Qwen3-0.6B --micro-batch 8 "
        "--max-completion-length 512; grpo-lite explain --recipe recipe.toml < train.log",
    )
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE", help="default: stdin")
    parser.add_argument("--model", metavar="MODEL", help="the model that was trained")
    parser.add_argument("--micro-batch", type=positive, metavar="N", help="rows in one forward")
    parser.add_argument("--max-prompt-length", type=positive, metavar="N", help="tokens")
    parser.add_argument("--max-completion-length", type=positive, metavar="N", help="tokens")
    parser.add_argument(
        "--recipe", type=Path, metavar="FILE", help="the recipe of a run of grpo-lite, for all that"
    )
    parser.add_argument("--allow-network", action="store_true", help="look MODEL up on the hub")
    parser.add_argument("--format", choices=("json", "text"), default="text")
    add_verbosity(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run `explain` and return its exit code."""
    oom = read_oom_text(_read_error(options.file))
    recipe = None if options.recipe is None else read_recipe(options.recipe)
    setting = Setting(
        rows=options.micro_batch,
        prompt_tokens=options.max_prompt_length,
        completion_tokens=options.max_completion_length,
    )
    model = options.model
    if recipe is not None:
        if any((model, setting.rows, setting.prompt_tokens, setting.completion_tokens)):
            raise UsageError(
                "--recipe names the model and its settings already", hint="leave the others out"
            )
        model = recipe.model
        setting = Setting(
            rows=recipe.plan.micro_batch,
            prompt_tokens=recipe.workload.max_prompt_length,
            completion_tokens=recipe.workload.max_completion_length,
        )
    if model is not None:
        setting = with_model(setting, model, allow_network=options.allow_network)
    explanation = explain(oom, setting, None if recipe is None else _planned(recipe))
    write = explanation_to_json if options.format == "json" else explanation_to_text
    sys.stdout.write(write(explanation))
    return 0


def with_model(setting: Setting, model: str, *, allow_network: bool = False) -> Setting:
    """Return `setting` with the weights of `model`, asked of the model's own code.

    Raises:
        UsageError: nothing is called `model`, or the installed transformers does not know it.
    """
    source = resolve_model(model, allow_network=allow_network)
    from grpo_lite.trace.build import build_config
    from grpo_lite.trace.shapes import list_weights

    config = build_config(source.config)
    return replace(
        setting,
        weights=list_weights(config),
        vocabulary=config.get_text_config().vocab_size,
        num_heads=getattr(config, "num_attention_heads", None),
    )


def _planned(recipe: Recipe) -> Planned:
    from grpo_lite.cards.probe import plan_card
    from grpo_lite.footprints import get_footprint
    from grpo_lite.search import Question

    card = plan_card(recipe.card, reserve_bytes=recipe.reserve_bytes)
    cache_dir = Path(platformdirs.user_cache_path("grpo-lite"))
    source = resolve_model(recipe.model)
    return Planned(
        question=Question(
            footprint=get_footprint(source, recipe.workload, cache_dir),
            profile=card.profile,
            budget=card.budget,
        ),
        workload=recipe.workload,
        plan=recipe.plan,
    )


def _read_error(file: Path | None) -> str:
    """Return the pasted text; of a long log its end."""
    if file is None:
        if sys.stdin.isatty():
            sys.stderr.write("paste the error, then press Ctrl-D\n")
        data = sys.stdin.buffer.read()
    else:
        try:
            data = file.read_bytes()
        except OSError as error:
            raise UsageError(f"{file} cannot be read: {error.strerror}") from error
    return data[-MAX_INPUT_BYTES:].decode("utf-8", errors="replace")
