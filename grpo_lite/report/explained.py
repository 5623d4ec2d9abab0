"""An explanation of an out-of-memory error, for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from grpo_lite.cards.oom_text import FailureKind
from grpo_lite.explain import Certainty, Change, Explanation
from grpo_lite.units import format_bytes

SCHEMA = 1
"""Version of the JSON keys."""
MAX_MATCHES = 5
"""Matches that are listed."""


def explanation_to_text(explanation: Explanation) -> str:
    """Return `explanation` as lines, the answer first, ending in a newline."""
    lines = [_answer(explanation), *_tensor(explanation)]
    if explanation.holders:
        lines.append("who held the card when it ran out (figures of the message):")
        lines.extend(
            f"  {format_bytes(holder.num_bytes):>9}  {holder.who}" for holder in explanation.holders
        )
    if explanation.changes:
        lines.append("what helps, the smallest change that is enough first:")
        lines.extend(f"  - {_change(change)}" for change in explanation.changes)
    lines.extend(f"note: {note}" for note in explanation.notes)
    return "\n".join(lines) + "\n"


def explanation_to_json(explanation: Explanation) -> str:
    """Return `explanation` as one JSON object, ending in a newline."""
    data: dict[str, Any] = {"schema": SCHEMA, **asdict(explanation)}
    for match in data["matches"]:
        match["phases"] = sorted(match["phases"])
    return json.dumps(data, indent=2, allow_nan=False) + "\n"


def _answer(explanation: Explanation) -> str:
    oom = explanation.oom
    where = f" in {oom.phase}" if oom.phase else ""
    if oom.kind is not FailureKind.CARD:
        return f"out of {oom.kind}{where}"
    assert oom.asked_bytes is not None
    sentence = f"out of the card's memory{where}: asked for {format_bytes(oom.asked_bytes)}"
    if explanation.missing_bytes is not None:
        sentence += f", {format_bytes(explanation.missing_bytes)} more than there was"
    return sentence


def _tensor(explanation: Explanation) -> Iterator[str]:
    """Yield what tensor it was, only as certain as it is."""
    if explanation.oom.kind is not FailureKind.CARD:
        return
    matches = explanation.matches
    if explanation.certainty is Certainty.CANNOT_TELL:
        yield "the tensor: cannot tell from what is known"
        return
    yield f"the tensor: its size {explanation.certainty}"
    for match in matches[:MAX_MATCHES]:
        yield f"  {format_bytes(match.num_bytes):>9}  = {match.arithmetic}"
        yield f"             {match.what}{_phases(match.phases)}"
    if len(matches) > MAX_MATCHES:
        yield f"  and {len(matches) - MAX_MATCHES} more of this size"


def _phases(phases: Iterable[str]) -> str:
    named = ", ".join(sorted(phases))
    return f" ({named})" if named else ""


def _change(change: Change) -> str:
    if change.frees_bytes is None:
        return change.what
    enough = {True: ", enough", False: ", not enough by itself", None: ""}[change.covers]
    return f"{change.what}: frees {format_bytes(change.frees_bytes)}{enough}"
