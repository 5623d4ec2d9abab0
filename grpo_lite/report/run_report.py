"""A run as a report: what its log says, gathered for every rendering.

Pure over the records of `run.jsonl`; a number that is null in the log (a loss of NaN) stays None.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from grpo_lite.errors import UsageError
from grpo_lite.plan import Phase
from grpo_lite.units import format_bytes, format_seconds

ENDS_FRACTION = 0.1
"""Share of the updates whose mean reward stands for the start and for the end of a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPhase:
    """One phase over a whole run."""

    phase: Phase
    """The phase."""
    predicted_bytes: int | None
    """Prediction for the shapes of the update with the largest measured peak."""
    measured_bytes: int | None
    """Largest measured allocated peak."""
    seconds: float
    """Mean seconds of an update."""

    @property
    def error_fraction(self) -> float | None:
        """Prediction against measurement, above zero where too much; None without either."""
        if not self.measured_bytes or self.predicted_bytes is None:
            return None
        return self.predicted_bytes / self.measured_bytes - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """What a run came to."""

    model: str
    """The model."""
    card: str
    """The card."""
    end: str
    """"done", "interrupted", "failed", or "still running, or killed" without an end record."""
    steps: tuple[int, ...]
    """Numbers of the finished updates."""
    curves: Mapping[str, tuple[float | None, ...]]
    """By name, a value for each update: reward, loss, lengths, tokens/s, peak bytes."""
    phases: tuple[MeasuredPhase, ...]
    """The phases in the order of an update."""
    decisions: tuple[Mapping[str, Any], ...]
    """The governor's changes of plan, as logged."""
    held_out: tuple[tuple[int, float | None], ...]
    """(update, mean held-out reward)."""
    budget_bytes: int | None
    """What the run was allowed; None where the log does not say."""
    seconds: float
    """Seconds of all updates together."""

    @property
    def peak_bytes(self) -> int:
        """Largest measured allocated peak of the run."""
        return max((phase.measured_bytes or 0 for phase in self.phases), default=0)


CURVES = (
    "reward",
    "loss",
    "mean_completion_tokens",
    "truncated_fraction",
    "dead_group_fraction",
    "tokens_per_s",
)
"""Fields of a step record that are drawn or listed."""


def run_report(records: Sequence[Mapping[str, Any]], origin: str) -> RunReport:
    """Return the report on the run whose log holds `records`; `origin` names it in errors.

    Raises:
        UsageError: no update was finished, or a record lacks what a step has.
    """
    events = _by_event(records)
    steps = events["step"]
    if not steps:
        raise UsageError(
            f"{origin} holds no finished update", hint="a report needs one; is the run at work?"
        )
    try:
        return _gather(events, steps)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{origin} has a record without {error}: another program's?") from error


def run_sentence(report: RunReport) -> str:
    """Return the run in one sentence."""
    first, last = _ends(report.curves["reward"])
    text = f"{report.model} on {report.card}: {len(report.steps):,} updates, {report.end}"
    if first is not None and last is not None:
        text += f"; reward {first:.3f} at the start, {last:.3f} at the end"
    text += f"; peak {format_bytes(report.peak_bytes)}"
    if report.budget_bytes:
        share = report.peak_bytes / report.budget_bytes
        text += f", {share:.0%} of the budget of {format_bytes(report.budget_bytes)}"
    return text


def phase_rows(report: RunReport) -> list[tuple[str, str, str, str, str]]:
    """Return (phase, predicted, measured, error, seconds) as text."""
    rows = []
    for phase in report.phases:
        error = phase.error_fraction
        rows.append(
            (
                phase.phase.value,
                "" if phase.predicted_bytes is None else format_bytes(phase.predicted_bytes),
                "" if phase.measured_bytes is None else format_bytes(phase.measured_bytes),
                "" if error is None else f"{error:+.2%}",
                format_seconds(phase.seconds) if phase.seconds else "",
            )
        )
    return rows


def decision_rows(report: RunReport) -> list[tuple[str, str, str, str]]:
    """Return (update, phase, change, reason) of the governor's decisions as text."""
    return [
        (
            str(decision.get("step", "")),
            str(decision.get("phase", "")),
            ", ".join(
                f"{name} {decision.get('before', {}).get(name)} -> {value}"
                for name, value in decision.get("after", {}).items()
            ),
            str(decision.get("reason", "")),
        )
        for decision in report.decisions
    ]


def held_out_rows(report: RunReport) -> list[tuple[str, str]]:
    """Return (update, held-out reward) as text."""
    return [
        (str(step), "not a number" if reward is None else f"{reward:.3f}")
        for step, reward in report.held_out
    ]


def _short(model: str) -> str:
    """Return an id as it is, and the last part of a folder's path."""
    return PurePath(model).name if PurePath(model).is_absolute() else model


def _by_event(records: Iterable[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    events: dict[str, list[Mapping[str, Any]]] = {
        name: [] for name in ("start", "step", "decision", "eval", "end")
    }
    for record in records:
        events[record["event"]].append(record)
    return events


def _gather(
    events: Mapping[str, Sequence[Mapping[str, Any]]], steps: Sequence[Mapping[str, Any]]
) -> RunReport:
    start = events["start"][-1] if events["start"] else {}
    curves = {name: tuple(_number(step[name]) for step in steps) for name in CURVES}
    for curve, field in (
        ("peak_bytes", "measured_peak_bytes"),
        ("predicted_peak_bytes", "predicted_peak_bytes"),
    ):
        curves[curve] = tuple(float(max(step[field].values(), default=0)) for step in steps)
    budgets = [start.get("budget_bytes"), *(d.get("budget_bytes") for d in events["decision"])]
    return RunReport(
        model=_short(str(start.get("model", "a model"))),
        card=str(start.get("card", "a card")),
        end=_end(events),
        steps=tuple(int(step["step"]) for step in steps),
        curves=curves,
        phases=tuple(_phase(phase, steps) for phase in Phase if _has(phase, steps)),
        decisions=tuple(events["decision"]),
        held_out=tuple((int(e["step"]), _number(e["reward"])) for e in events["eval"]),
        budget_bytes=next((int(budget) for budget in budgets if budget), None),
        seconds=sum(sum(step["seconds"].values()) for step in steps),
    )


def _end(events: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Return how the run ended; a run that went on after its last end is not over."""
    ends, steps = events["end"], events["step"]
    if not ends or ends[-1].get("last_step", 0) < steps[-1]["step"]:
        return "still running, or killed"
    return str(ends[-1].get("reason", "ended"))


def _has(phase: Phase, steps: Sequence[Mapping[str, Any]]) -> bool:
    return any(phase in step["measured_peak_bytes"] or phase in step["seconds"] for step in steps)


def _phase(phase: Phase, steps: Sequence[Mapping[str, Any]]) -> MeasuredPhase:
    worst = max(steps, key=lambda step: step["measured_peak_bytes"].get(phase, 0))
    return MeasuredPhase(
        phase=phase,
        predicted_bytes=worst["predicted_peak_bytes"].get(phase),
        measured_bytes=worst["measured_peak_bytes"].get(phase),
        seconds=sum(step["seconds"].get(phase, 0.0) for step in steps) / len(steps),
    )


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _ends(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    """Return the means of the first and of the last updates; None where none is a number."""
    count = max(1, round(len(values) * ENDS_FRACTION))
    return _mean(values[:count]), _mean(values[-count:])


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
