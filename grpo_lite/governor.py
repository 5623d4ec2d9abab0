"""Keeps an update inside the card's budget and carries it through an out-of-memory.

Three laws: it recovers outside `except` (inside, the traceback keeps the tensors alive); the
optimizer's step is never repeated, only resumed; and a rescued update is the same update, since
all its gradients are thrown away and it is replayed with the random state it began with.
What to do next is asked of `search.step_down`; nothing is decided here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from grpo_lite.cards.card import Card
from grpo_lite.errors import BudgetExceeded
from grpo_lite.plan import Category, Phase, Plan, Workload
from grpo_lite.predict.footprint import Shape
from grpo_lite.predict.memory import (
    PhaseEstimate,
    Standing,
    estimate_logprob,
    estimate_micro_batch,
    estimate_rollout,
    estimate_step,
)
from grpo_lite.recovery import (
    Rescue,
    collect,
    random_state,
    restore_random_state,
    try_once,
)
from grpo_lite.report.runlog import Decision
from grpo_lite.search import Question, step_down
from grpo_lite.units import format_bytes

Result = TypeVar("Result")
Report = Callable[[Decision], None]


@dataclass(slots=True)
class PhaseRecord:
    """What one phase of one update took."""

    seconds: float = 0.0
    """Wall-clock seconds, all its parts together."""
    measured_bytes: int = 0
    """Largest allocated peak of its parts."""
    predicted_bytes: int = 0
    """The prediction for the part that made that peak."""


@dataclass(slots=True)
class _Running:
    """The phase that is under way."""

    phase: Phase
    began_s: float
    predicted_bytes: int


@dataclass(slots=True)
class Governor:
    """Watches one run on one card; not for use from several threads."""

    card: Card
    """Where the run's tensors live."""
    question: Question
    """Footprint, profile and budget, for predictions and decisions."""
    workload: Workload
    """The experiment: never changed."""
    plan: Plan
    """How updates are run from now on."""
    report: Report
    """Told of every decision."""
    clock: Callable[[], float] = time.monotonic
    """Seconds."""
    step: int = 0
    """Number of the update under way, for the records."""
    records: dict[Phase, PhaseRecord] = field(default_factory=dict)
    """What the phases of this update took so far."""
    largest_bytes: int = 0
    """Largest allocated peak of the whole run, between phases too."""
    has_states: bool = False
    """Whether the optimizer's states exist: they are made in the first step."""
    _running: _Running | None = None
    _num_micro_batches: int = 0

    def begin_update(self, step: int) -> None:
        """Start the records of update number `step`."""
        self.leave()
        self.step = step
        self.records = {}
        self._num_micro_batches = 0

    def watch(self, phase: Phase, shape: Shape) -> None:
        """Begin `phase` on `shape`: the one before ends, and a new peak is measured."""
        self._num_micro_batches += phase is Phase.FORWARD
        self._begin(phase, self._predict(phase, shape))

    def amend(self, shape: Shape) -> None:
        """Say on what shape the phase under way really worked, once that is known."""
        if self._running is not None:
            self._running.predicted_bytes = self._predict(self._running.phase, shape)

    def leave(self) -> None:
        """End the phase under way and record what it took."""
        running, self._running = self._running, None
        if running is None:
            return
        record = self.records.setdefault(running.phase, PhaseRecord())
        record.seconds += self.clock() - running.began_s
        measured_bytes = self._read_peak()
        if measured_bytes > record.measured_bytes:
            record.measured_bytes = measured_bytes
            record.predicted_bytes = running.predicted_bytes

    def attempt(
        self, function: Callable[[Plan], Result], *, undo: Callable[[], None] | None = None
    ) -> Result:
        """Return `function(plan)`, tried again with a lower plan after each out-of-memory.

        `function` begins its phases with `watch` and may be run again from its start; `undo`
        throws away what a failed try has left (gradients).
        Random state is restored before each new try.

        Raises:
            BudgetExceeded: no lower plan is left.
        """
        state = random_state(self.card.device)
        self._num_micro_batches = 0
        while True:
            tried = try_once(self.card, lambda: function(self.plan))
            if not isinstance(tried, Rescue):
                self.leave()
                return tried
            # Outside the handler: the error, its traceback and the frames it held are gone.
            phase = self._abandon(undo)
            restore_random_state(self.card.device, state)
            self._lower(phase, tried)

    def finish(self, function: Callable[[], Result]) -> Result:
        """Return `function()`, which resumes where it stopped if it is called again: the STEP.

        Raises:
            BudgetExceeded: it is out of memory again after all that could be freed was freed.
        """
        self._begin(Phase.STEP, estimate_step(self._standing).allocated_bytes)
        last: Rescue | None = None
        while True:
            tried = try_once(self.card, function)
            if not isinstance(tried, Rescue):
                self.has_states = True
                self.leave()
                return tried
            collect(self.card)
            if last is not None and tried.allocated_bytes <= last.allocated_bytes:
                raise self._out_of_moves(Phase.STEP, tried)
            last = tried
            self._tell(Phase.STEP, tried, self.plan, "resumed behind the last finished block")

    def _begin(self, phase: Phase, predicted_bytes: int) -> None:
        self.leave()
        self._read_peak()
        self.card.reset_peak()
        self._running = _Running(phase=phase, began_s=self.clock(), predicted_bytes=predicted_bytes)

    def _read_peak(self) -> int:
        peak_bytes = self.card.peak_bytes()
        self.largest_bytes = max(self.largest_bytes, peak_bytes)
        return peak_bytes

    def _predict(self, phase: Phase, shape: Shape) -> int:
        """Return the allocated peak of `phase` on `shape`, as things stand in this run."""
        estimate = self._estimate(phase, shape)
        states_bytes = estimate.by_category.get(Category.OPTIMIZER_STATE, 0)
        return estimate.allocated_bytes - (0 if self.has_states else states_bytes)

    def _estimate(self, phase: Phase, shape: Shape) -> PhaseEstimate:
        if phase is Phase.ROLLOUT:
            return estimate_rollout(
                self._standing,
                rows=shape.rows,
                prompt=shape.tokens - shape.completion,
                completion=shape.completion,
            )
        if phase is Phase.LOGPROB:
            return estimate_logprob(self._standing, shape)
        return estimate_micro_batch(
            self._standing,
            shape,
            phase=phase,
            checkpointing=self.plan.gradient_checkpointing,
            has_earlier=self._num_micro_batches > 1,
        )

    @property
    def _standing(self) -> Standing:
        return Standing(
            footprint=self.question.footprint,
            workload=self.workload,
            offload=self.plan.offload,
        )

    def _abandon(self, undo: Callable[[], None] | None) -> Phase:
        """Throw away what the failed try left; return the phase in which it failed."""
        running, self._running = self._running, None
        self._num_micro_batches = 0
        if undo is not None:
            undo()
        collect(self.card)
        return Phase.ROLLOUT if running is None else running.phase

    def _lower(self, phase: Phase, rescue: Rescue) -> None:
        lower = step_down(
            self.question, self.workload, self.plan, phase, rescue.oom.shortfall_bytes
        )
        if lower is None:
            raise self._out_of_moves(phase, rescue)
        before, self.plan = self.plan, lower
        changed = before.changes_to(lower)
        self._tell(phase, rescue, before, lower.reasons[next(iter(changed))])

    def _tell(self, phase: Phase, rescue: Rescue, before: Plan, reason: str) -> None:
        changed = before.changes_to(self.plan)
        self.report(
            Decision(
                step=self.step,
                phase=phase,
                kind="out of memory",
                before={name: pair[0] for name, pair in changed.items()},
                after={name: pair[1] for name, pair in changed.items()},
                reason=reason,
                asked_bytes=rescue.oom.asked_bytes,
                allocated_bytes=rescue.allocated_bytes,
                budget_bytes=self.card.budget_bytes,
            )
        )

    def _out_of_moves(self, phase: Phase, rescue: Rescue) -> BudgetExceeded:
        asked = rescue.oom.asked_bytes
        wanted = "an allocation" if asked is None else f"another {format_bytes(asked)}"
        return BudgetExceeded(
            f"{phase} needs {wanted} beside {format_bytes(rescue.allocated_bytes)} in a budget of "
            f"{format_bytes(self.card.budget_bytes)}, and no lower plan is left "
            f"(micro-batch {self.plan.micro_batch}, rollout batch {self.plan.rollout_batch})",
            hint="a shorter --max-completion-length, --method lora, or a larger budget; "
            "`grpo-lite fit` says which would fit",
        )
