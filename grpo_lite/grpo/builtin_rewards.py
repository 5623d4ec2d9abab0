"""Reward functions that come with grpo-lite: plain functions, called like a user's own.

They take and return lists, one value a completion (see `rewards`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_lite.grpo.gym import import_gym

logger = logging.getLogger(__name__)

_INTEGER = re.compile(r"[-+]?[0-9]+")
_TAGGED_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def first_integer(
    completions: Sequence[str], answer: Sequence[str | int], **_: Any
) -> list[float | None]:
    """Return 1 where the first signed integer of a completion is the answer, else 0."""
    return [
        float(_first_integer(completion) == int(right))
        for completion, right in zip(completions, answer, strict=True)
    ]


def reasoning_gym(
    completions: Sequence[str],
    question: Sequence[str],
    answer: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
    **_: Any,
) -> list[float | None]:
    """Return 1 where reasoning_gym gives the extracted answer its full score, else 0.

    The answer is what stands between the last <answer> and </answer>, or else the whole completion.
    Partial scores count as 0: many of its tasks pay for any text that contains the answer, which a
    policy learns instead of answering.
    """
    rewards: list[float | None] = []
    scorers: dict[str, Any] = {}
    for completion, asked, right, facts in zip(
        completions, question, answer, metadata, strict=True
    ):
        name = facts["source_dataset"]
        if name not in scorers:
            scorers[name] = import_gym().get_score_answer_fn(name)
        entry = {"question": asked, "answer": right, "metadata": facts}
        try:
            score = scorers[name](_extract_answer(completion), entry)
        except Exception as error:  # some of its scorers raise on text that they cannot parse
            logger.debug("reasoning_gym's %s scorer raised: %r", name, error)
            score = 0.0
        rewards.append(float(score >= 1.0))
    return rewards


def _first_integer(text: str) -> int | None:
    match = _INTEGER.search(text)
    try:
        return int(match.group()) if match else None
    except ValueError:  # Python refuses more than some 4300 digits, which a policy may well write
        return None


def _extract_answer(completion: str) -> str:
    tagged = _TAGGED_ANSWER.findall(completion)
    return str(tagged[-1] if tagged else completion).strip()
