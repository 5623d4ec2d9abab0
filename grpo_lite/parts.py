"""Work on rows, cut into parts that fit, run again after an out-of-memory: the core of any loop.

`train` predicts from a traced footprint; here nothing is known of the model, so how many rows fit
is learnt from what this loop's own rows have taken (`predict.measured`).
Knows neither batches nor losses nor trainers.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from grpo_lite.cards.card import Card
from grpo_lite.errors import BudgetExceeded, UsageError
from grpo_lite.plan import Phase
from grpo_lite.predict.measured import MeasuredRows
from grpo_lite.recovery import Rescue, collect, random_state, restore_random_state, try_once
from grpo_lite.report.runlog import Decision
from grpo_lite.stepping import ResumableStep
from grpo_lite.units import format_bytes

Result = TypeVar("Result")

LAST_TRIES = 3
"""Times that the smallest part is tried before giving up."""

logger = logging.getLogger(__name__)
_active = threading.local()
"""Which governor is at work in a thread: only this lets a nested one be told from the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Work on rows that can be cut into parts."""

    phase: Phase
    """For the records."""
    num_rows: int
    """Rows in all."""
    row_size: int
    """Elements of one row: what its bytes are taken to grow with."""
    run: Callable[[range], Any]
    """Does the work of some rows."""
    undo: Callable[[], None] | None = None
    """Throws away what all parts have left, so that they are run again from the first; None: parts
    that are finished are kept."""
    extra_bytes: Callable[[], int] = lambda: 0
    """Bytes that the next part will make and leave behind: gradients that do not exist yet."""
    max_rows: int | None = None
    """Most rows of a part."""


@dataclass(slots=True)
class LoopRecord:
    """What one phase of the loop has taken so far."""

    seconds: float = 0.0
    """Wall-clock seconds."""
    measured_bytes: int = 0
    """Largest allocated peak."""
    num_rows: int = 0
    """Rows of the last part."""


@dataclass(slots=True)
class PartRunner:
    """Runs the work of one loop on one card, from the thread that made it."""

    card: Card
    """Where the loop's tensors live."""
    report: Callable[[Decision], None] | None = None
    """Told of every decision; None: it is logged."""
    clock: Callable[[], float] = time.monotonic
    """Seconds."""
    step: int = 0
    """Number of whole updates."""
    decisions: list[Decision] = field(default_factory=list)
    """Every change of how the loop is run."""
    records: dict[str, LoopRecord] = field(default_factory=dict)
    """What each phase took, by name."""
    measured: dict[Phase, MeasuredRows] = field(default_factory=dict)
    """What is known of each phase."""
    _thread: int = field(default_factory=threading.get_ident)
    _steps: dict[int, ResumableStep] = field(default_factory=dict)

    @property
    def num_rescues(self) -> int:
        """Out-of-memory errors that the loop has survived."""
        return sum(decision.kind == "out of memory" for decision in self.decisions)

    @contextmanager
    def governing(self, tensors: Iterable[torch.Tensor] = ()) -> Iterator[None]:
        """Count this thread's allocations and `tensors`, and keep other governors out.

        Raises:
            UsageError: called from a second thread, or inside another governor.
        """
        if threading.get_ident() != self._thread:
            raise UsageError(
                "a governor was used from a second thread; its counts would mix",
                hint="make one Governor in each thread",
            )
        other = getattr(_active, "governor", None)
        if other is not None and other is not self:
            raise UsageError(
                "a governor was used inside another one; both would answer the same out-of-memory",
                hint="share one Governor",
            )
        _active.governor = self
        try:
            with self.card.attach():
                self._adopt(tensors)
                yield
        finally:
            _active.governor = other

    def run(self, job: Job) -> list[Any]:
        """Return the results of all parts of `job`, cut so that they fit.

        Raises:
            BudgetExceeded: the smallest part does not fit.
        """
        card = self.card
        measured = self.measured.setdefault(job.phase, MeasuredRows())
        first_state = state = random_state(card.device)
        results: list[Any] = []
        start, tries, most = 0, 0, job.max_rows or job.num_rows
        while start < job.num_rows:
            extra_bytes = job.extra_bytes()
            free_bytes = max(0, card.free_bytes() - extra_bytes)
            rest = job.num_rows - start
            rows = _even(rest, min(most, measured.rows(rest, job.row_size, free_bytes)))
            tried = self._run_part(job, range(start, start + rows), extra_bytes, measured)
            if not isinstance(tried, Rescue):
                results.append(tried)
                start += rows
                state = random_state(card.device) if start < job.num_rows else state
                continue
            # Outside the handler: the error, its traceback and the frames it held are gone.
            fewer = measured.failed(rows, job.row_size, free_bytes)
            most = min(most, fewer or 1)
            tries += fewer is None
            if tries == LAST_TRIES:
                raise self._out_of_moves(job.phase, tried, rows)
            self._tell(job.phase, tried, {"rows": (rows, most)}, _reason(rows, fewer))
            if job.undo is not None:
                results, start, state = [], 0, first_state
                job.undo()
            collect(card)
            restore_random_state(card.device, state)
        return results

    def again(self, function: Callable[[], Result], undo: Callable[[], None] | None = None) -> Any:
        """Return `function()`, run again from its start after an out-of-memory: nothing is cut.

        Raises:
            BudgetExceeded: it ran out of memory three times.
        """
        card = self.card
        state = random_state(card.device)
        for tries in range(1, LAST_TRIES + 1):
            tried = try_once(card, function)
            if not isinstance(tried, Rescue):
                return tried
            if undo is not None:
                undo()
            collect(card)
            restore_random_state(card.device, state)
            if tries == LAST_TRIES:
                raise self._out_of_moves(Phase.FORWARD, tried, 1)
            self._tell(Phase.FORWARD, tried, {}, "run again with caches freed")

    def step_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Step `optimizer` once; a call after an error goes on where that one stopped."""
        began_s = self.clock()
        self.card.reset_peak()
        self.resumable_step(optimizer)()
        self.record("step", self.clock() - began_s, self.card.peak_bytes())

    def resumable_step(self, optimizer: torch.optim.Optimizer) -> ResumableStep:
        """Return the one resumable step of `optimizer`."""
        if id(optimizer) not in self._steps:

            def tell(rescue: Rescue, done: int) -> None:
                self._tell(Phase.STEP, rescue, {}, f"resumed behind {done} finished blocks")

            self._steps[id(optimizer)] = ResumableStep(
                optimizer=optimizer, card=self.card, report=tell
            )
        return self._steps[id(optimizer)]

    def updated(self) -> None:
        """Count one whole update; after enough quiet ones, parts may grow again."""
        self.step += 1
        for phase, measured in self.measured.items():
            failed_size = measured.failed_size
            if measured.updated():
                self._decide(
                    Decision(
                        step=self.step,
                        phase=phase,
                        kind="quiet",
                        before={"largest_size": failed_size},
                        after={"largest_size": None},
                        reason=f"{measured.wait_updates} updates without an out-of-memory",
                        asked_bytes=None,
                        allocated_bytes=self.card.allocated_bytes(),
                        budget_bytes=self.card.budget_bytes,
                    )
                )

    def _adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        tried = try_once(self.card, lambda: self.card.adopt(tensors))
        if isinstance(tried, Rescue):
            raise BudgetExceeded(
                f"the weights alone do not fit a budget of {format_bytes(self.card.budget_bytes)}",
                hint="a smaller model, bf16 weights with LoRA, or a larger budget",
            )

    def _run_part(self, job: Job, part: range, extra_bytes: int, measured: MeasuredRows) -> Any:
        card = self.card
        size = len(part) * job.row_size
        before_bytes = card.allocated_bytes() + extra_bytes
        began_s = self.clock()
        card.reset_peak()
        tried = try_once(card, lambda: job.run(part))
        if isinstance(tried, Rescue):
            # Where it failed it had at least this much: a lower bound of what it needs.
            needed_bytes = tried.allocated_bytes + (tried.oom.asked_bytes or 0)
            measured.worked(size, needed_bytes - before_bytes)
            return tried
        peak_bytes = card.peak_bytes()
        measured.worked(size, peak_bytes - before_bytes)
        self.record(job.phase.value, self.clock() - began_s, peak_bytes, len(part))
        return tried

    def record(self, name: str, seconds: float, peak_bytes: int, rows: int | None = None) -> None:
        """Add what a phase took to its record."""
        record = self.records.setdefault(name, LoopRecord())
        record.seconds += seconds
        record.measured_bytes = max(record.measured_bytes, peak_bytes)
        record.num_rows = record.num_rows if rows is None else rows

    def _tell(
        self, phase: Phase, rescue: Rescue, changed: dict[str, tuple[int, int]], reason: str
    ) -> None:
        self._decide(
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

    def _decide(self, decision: Decision) -> None:
        self.decisions.append(decision)
        if self.report is not None:
            self.report(decision)
        else:
            text = (decision.phase, decision.kind, decision.change, decision.reason)
            logger.warning("%s: %s; %s (%s)", *text)

    def _out_of_moves(self, phase: Phase, rescue: Rescue, rows: int) -> BudgetExceeded:
        asked = rescue.oom.asked_bytes
        wanted = "an allocation" if asked is None else f"another {format_bytes(asked)}"
        return BudgetExceeded(
            f"{phase} of {rows} row needs {wanted} beside "
            f"{format_bytes(rescue.allocated_bytes)} in a budget of "
            f"{format_bytes(self.card.budget_bytes)}, and no smaller part is left",
            hint="shorter rows, gradient checkpointing, LoRA, or a larger budget",
        )


def missing_gradient_bytes(parameters: list[torch.Tensor]) -> int:
    """Return the bytes of gradients that a backward will make and leave behind."""
    return sum(
        parameter.numel() * parameter.element_size()
        for parameter in parameters
        if parameter.requires_grad and parameter.grad is None
    )


def _even(num_rows: int, rows: int) -> int:
    """Return the rows of a part where parts of at most `rows` are as even as they can be."""
    return math.ceil(num_rows / math.ceil(num_rows / rows))


def _reason(rows: int, fewer: int | None) -> str:
    return f"{rows} rows at once do not fit" if fewer else "one row is tried again, caches freed"
