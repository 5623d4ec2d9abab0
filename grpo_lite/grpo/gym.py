"""Problems that reasoning_gym generates, as rows with a prompt and columns.

The package is an extra: it is imported when a task asks for it.
Scoring is in `builtin_rewards`.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_lite.errors import UsageError, unknown_name

GYM_PREFIX = "reasoning_gym:"
PROMPT_STYLES = ("chat", "plain", "few_shot")
NUM_DRAWN = 1000
"""Problems drawn unless the setting `size` says otherwise; repeated ones are dropped."""
NUM_SHOTS = 2
SHOT_SEED = 0
"""Draws the solved lines: they are the same whatever the run's seed, so that runs compare."""
ANSWER_FORMAT = "Write only the final answer between <answer> and </answer>."


def gym_rows(name: str, settings: Mapping[str, Any], *, seed: int) -> list[dict[str, Any]]:
    """Return distinct problems of generator `name`, each with question, answer and metadata.

    The setting `prompt_style` is ours, all others are reasoning_gym's:

    - "chat" (default): the question and how to mark the answer, as a user's message;
    - "plain": the question as text;
    - "few_shot": two solved lines `expression = answer`, then `expression =`, for a model too small
      to follow instructions. The lines are the same for every seed and left out of the task.

    Raises:
        UsageError: reasoning_gym is missing, or does not know the name or a setting.
    """
    own = dict(settings)
    style = own.pop("prompt_style", "chat")
    if style not in PROMPT_STYLES:
        raise unknown_name("prompt_style", str(style), PROMPT_STYLES)
    problems = _draw(name, {"seed": seed, "size": NUM_DRAWN, **own})
    if style == "few_shot":
        shots = _draw(name, {**own, "seed": SHOT_SEED, "size": NUM_SHOTS})
        return _few_shot_rows(name, problems, shots)
    return [
        _row(
            problem["question"] if style == "plain" else _as_chat(problem["question"]),
            problem,
        )
        for problem in problems
    ]


def import_gym() -> Any:
    """Return the package reasoning_gym.

    Raises:
        UsageError: it is not installed.
    """
    try:
        return importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise UsageError(
            f"this needs the package reasoning_gym, which cannot be imported: {error}",
            hint='pip install "grpo-lite[demo]"',
        ) from error


def _draw(name: str, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what the generator yields, without repeated questions."""
    factory = import_gym().factory
    if name not in factory.DATASETS:
        raise unknown_name("reasoning_gym task", name, factory.DATASETS)
    known = [field.name for field in dataclasses.fields(factory.DATASETS[name][1])]
    for setting in settings:
        if setting not in known:
            raise unknown_name(f"setting of {GYM_PREFIX}{name}", setting, [*known, "prompt_style"])
    try:
        problems = list(factory.create_dataset(name, **settings))
    except (AssertionError, TypeError, ValueError) as error:
        # Its settings are checked by assert; the message is theirs.
        given = ", ".join(f"{key} = {value!r}" for key, value in settings.items())
        raise UsageError(
            f"{GYM_PREFIX}{name} refuses its settings ({given}): {error or type(error).__name__}",
            hint=f"it knows the settings {', '.join(known)}",
        ) from error
    first_of: dict[str, dict[str, Any]] = {}
    for problem in problems:
        first_of.setdefault(problem["question"], problem)
    return list(first_of.values())


def _few_shot_rows(
    name: str, problems: Sequence[dict[str, Any]], shots: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    if "expression" not in shots[0]["metadata"]:
        raise UsageError(
            f'prompt_style = "few_shot" needs a bare expression, which {GYM_PREFIX}{name} '
            "does not give",
            hint='prompt_style = "chat", or "plain"',
        )
    lines = "".join(f"{shot['metadata']['expression']} = {shot['answer']}\n" for shot in shots)
    shown = {shot["question"] for shot in shots}
    return [
        _row(f"{lines}{problem['metadata']['expression']} =", problem)
        for problem in problems
        # A problem whose answer stands in the prompt would teach and measure copying.
        if problem["question"] not in shown
    ]


def _row(prompt: str | list[dict[str, str]], problem: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "question": problem["question"],
        "answer": problem["answer"],
        "metadata": problem["metadata"],
    }


def _as_chat(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{question}\n{ANSWER_FORMAT}"}]
