"""The log of a run: JSON lines, one whole record each, so that a crash leaves complete lines only.

Knows what a step and a decision are; knows not how either came about.
A record is a flat dict with "event" (one of EVENTS) and "time" (seconds since 1970, UTC).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from grpo_lite.errors import UsageError
from grpo_lite.plan import Phase

EVENTS = ("start", "step", "decision", "eval", "end")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One finished update: what was learnt, how fast, and in how many bytes."""

    step: int
    """Number of the update, from 1."""
    loss: float
    """The loss of the update, over all its rows."""
    reward: float
    """Mean over the rows of the weighted sum of all rewards."""
    rewards: Mapping[str, float]
    """Mean over the rows of each reward function, unweighted, by name."""
    dead_group_fraction: float
    """Share of groups whose rewards are all equal, so that they teach nothing."""
    gradient_norm: float
    """Norm of the whole gradient before clipping."""
    learning_rate: float
    """Rate with which this update was made."""
    completion_tokens: int
    """Tokens that were sampled for this update, without padding."""
    mean_completion_tokens: float
    """Mean length of a completion."""
    truncated_fraction: float
    """Share of completions that reached the length cap without an end token."""
    seconds: Mapping[Phase, float]
    """Wall-clock seconds by phase."""
    tokens_per_s: float
    """Completion tokens for each second of the whole update."""
    predicted_peak_bytes: Mapping[Phase, int]
    """Predicted allocated peak by phase, at the shapes that ran."""
    measured_peak_bytes: Mapping[Phase, int]
    """Measured allocated peak by phase."""
    plan: Mapping[str, Any]
    """Fields of the plan that finished the update."""
    allocated_bytes: int
    """Tensor bytes still alive after the update: growth from step to step is a leak."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Means over the update of the loss's own figures: importance ratio, clipped shares, KL."""

    @property
    def peak_phase(self) -> Phase | None:
        """The phase with the largest measured peak; None where nothing was measured."""
        return max(
            self.measured_peak_bytes,
            key=lambda phase: self.measured_peak_bytes[phase],
            default=None,
        )

    @property
    def peak_bytes(self) -> int:
        """Largest measured allocated peak of the update."""
        return max(self.measured_peak_bytes.values(), default=0)

    @property
    def total_s(self) -> float:
        """Seconds of the whole update."""
        return sum(self.seconds.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One change that the governor made to the plan, and why."""

    step: int
    """The update in which it was made."""
    phase: Phase
    """The phase that made it necessary."""
    kind: str
    """What happened, in the governor's words, as in "out of memory"."""
    before: Mapping[str, Any]
    """Values of the changed fields until now."""
    after: Mapping[str, Any]
    """Values of the same fields from now on."""
    reason: str
    """Why this change, with its bytes."""
    asked_bytes: int | None
    """Bytes of the allocation that failed; None where none did or where it is unknown."""
    allocated_bytes: int
    """Tensor bytes alive when it was made."""
    budget_bytes: int
    """Tensor bytes that may be alive."""

    @property
    def change(self) -> str:
        """The changed fields in words: "micro_batch 8 -> 4"."""
        return ", ".join(
            f"{name} {self.before.get(name)} -> {value}" for name, value in self.after.items()
        )


class RunLog:
    """An append-only log file.

    Contract:
        A record counts once its newline is written; each call returns with its record flushed.
        Opening an existing log goes on behind its last whole record and drops a torn one.
        A number that is not finite (a loss of NaN) is written as null, so every line is JSON.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        """Open `path` for appending, made with its folders if missing.

        Raises:
            OSError: the file cannot be made or written.
        """
        self.path = path
        self._clock = clock
        path.parent.mkdir(parents=True, exist_ok=True)
        _drop_torn_line(path)
        self._file = path.open("ab")

    def append(self, event: str, fields: Mapping[str, Any]) -> None:
        """Write one record of `event` with `fields`.

        Raises:
            OSError: the disk is full or gone.
        """
        assert event in EVENTS, event
        record = _plain({"event": event, "time": round(self._clock(), 3), **fields})
        self._file.write(json.dumps(record, allow_nan=False).encode() + b"\n")
        self._file.flush()

    def step(self, record: StepRecord) -> None:
        """Write a finished update."""
        self.append("step", asdict(record))

    def decision(self, decision: Decision) -> None:
        """Write a change of plan."""
        self.append("decision", asdict(decision))

    def close(self) -> None:
        """Close the file; what was written stays."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def read_runlog(path: Path) -> list[dict[str, Any]]:
    """Return the records of a log, oldest first; a torn last line is left out.

    Raises:
        UsageError: a line that was written whole is no record.
        OSError: the file cannot be read.
    """
    *lines, _torn = path.read_bytes().split(b"\n")
    return [_parse(path, number, line) for number, line in enumerate(lines, start=1)]


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict) or record.get("event") not in EVENTS:
        raise UsageError(
            f"line {number} of {path} is no record of a run log; "
            f"expected a JSON object whose event is one of {', '.join(EVENTS)}"
        )
    return record


def _drop_torn_line(path: Path) -> None:
    if not path.exists():
        return
    with path.open("r+b") as file:
        file.truncate(file.read().rfind(b"\n") + 1)


def _plain(value: Any) -> Any:
    """Return `value` as JSON can hold it: names as text, numbers that are not finite as None."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    return str(value)
