"""The governor for any training loop: splits a batch, recovers, and steps once.

Knows no trainer; `integrations` builds on the same `parts`.

    governor = Governor()
    for batch in loader:
        loss = governor.accumulate(batch, loss_fn, optimizer)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from grpo_lite.cards.card import Card
from grpo_lite.cards.probe import open_card
from grpo_lite.errors import BudgetExceeded, UsageError
from grpo_lite.loop_batches import LossGuard, count_rows, join, row_size, take_rows
from grpo_lite.parts import Job, PartRunner, missing_gradient_bytes
from grpo_lite.plan import Phase
from grpo_lite.report.runlog import Decision
from grpo_lite.stepping import require_resumable

REDUCTIONS = ("mean", "sum")


class Governor(PartRunner):
    """Watches one loop on one card, from the thread that made it.

    A batch is a tensor, a mapping or tuple of tensors and lists with equally many rows, or a list
    of rows.
    After an out-of-memory all gradients of the update are thrown away and it is made again in
    smaller parts, with the random state it began with; the optimizer's step is resumed, never
    repeated.
    """

    def __init__(
        self,
        card: Card | str = "auto",
        *,
        report: Callable[[Decision], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open `card`: one that is open, or what `--card` takes ("auto", "virtual:8GiB").

        `report` is told of every decision; by default they are logged.

        Raises:
            UsageError: there is no such card.
        """
        opened = open_card(card) if isinstance(card, str) else card
        super().__init__(card=opened, report=report, clock=clock)
        self._guard = LossGuard()

    def accumulate(
        self,
        batch: Any,
        loss_fn: Callable[[Any], torch.Tensor],
        optimizer: torch.optim.Optimizer,
        *,
        reduction: str = "mean",
        max_grad_norm: float | None = None,
    ) -> float:
        """Make one whole update of `batch` and return its loss.

        Args:
            batch: all rows of the update; `loss_fn` gets some of them, in the same form.
            loss_fn: returns the loss of the rows it is given, a scalar; it changes nothing.
            optimizer: one of torch's, or `OffloadedAdamW`; it holds no gradients.
            reduction: "mean" where the loss is a mean over rows, "sum" where it is a sum over
                them (divide by the tokens of the whole batch inside `loss_fn`).
            max_grad_norm: global L2 norm to clip to.

        Raises:
            UsageError: the batch, the loss or the optimizer cannot be meant.
            BudgetExceeded: one row alone does not fit, and nothing is changed; or the optimizer's
                step does not, and `step_optimizer` goes on with it once there is memory.
        """
        parameters = _checked_parameters(optimizer, reduction)
        num_rows = count_rows(batch)
        total = [0.0]

        def run(part: range) -> None:
            piece = batch if len(part) == num_rows else take_rows(batch, part)
            loss = self._guard.call(loss_fn, piece, parameters)
            is_whole = len(part) == num_rows or reduction == "sum"
            share = loss if is_whole else loss * (len(part) / num_rows)
            share.backward()
            total[0] += float(share.detach())

        def undo() -> None:
            optimizer.zero_grad(set_to_none=True)
            total[0] = 0.0

        job = Job(
            phase=Phase.BACKWARD,
            num_rows=num_rows,
            row_size=row_size(batch, num_rows),
            run=run,
            undo=undo,
            extra_bytes=lambda: missing_gradient_bytes(parameters),
        )
        with self.governing(parameters):
            try:
                self.run(job)
                if max_grad_norm is not None:
                    self.again(lambda: torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm))
            except (UsageError, BudgetExceeded):
                undo()
                raise
            self.step_optimizer(optimizer)
            optimizer.zero_grad(set_to_none=True)
            self.updated()
        return total[0]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure seconds and peak bytes of a part of the loop, into `records[name]`."""
        with self.governing():
            began_s = self.clock()
            self.card.reset_peak()
            try:
                yield
            finally:
                self.record(name, self.clock() - began_s, self.card.peak_bytes())

    def recoverable(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Make `function`, from a batch to one result for each row, survive an out-of-memory.

        It is called again with fewer rows; rows that are finished stay finished.
        The results, tensors or lists or mappings of them, come back as of one call.
        """

        def governed(batch: Any) -> Any:
            num_rows = count_rows(batch)

            def run(part: range) -> Any:
                piece = batch if len(part) == num_rows else take_rows(batch, part)
                result = function(piece)
                if count_rows(result) != len(part):
                    raise UsageError(
                        f"a recoverable function returned {count_rows(result)} results for "
                        f"{len(part)} rows; it must return one for each"
                    )
                return result

            job = Job(
                phase=Phase.ROLLOUT,
                num_rows=num_rows,
                row_size=row_size(batch, num_rows),
                run=run,
            )
            with self.governing():
                results = self.run(job)
                return results[0] if len(results) == 1 else self.again(lambda: join(results))

        return governed


def _checked_parameters(optimizer: torch.optim.Optimizer, reduction: str) -> list[torch.Tensor]:
    """Return the parameters of `optimizer`; it is known then that their update can be rescued."""
    require_resumable(optimizer)
    if reduction not in REDUCTIONS:
        raise UsageError(f"reduction is {reduction!r}; it must be one of {REDUCTIONS}")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if any(parameter.grad is not None for parameter in parameters):
        raise UsageError(
            "the optimizer's parameters hold gradients already, which a rescue would lose",
            hint="optimizer.zero_grad() before, and all rows of the update in one batch",
        )
    return parameters
