"""The block engine: takes gradients as they are made, and updates parameters block by block.

A step is recorded while it runs: whatever ends it, the next call goes on behind the last finished
block and never updates one twice. Knows AdamW's formula only through torch's fused kernel.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from grpo_lite.errors import StoreError, UsageError
from grpo_lite.offload.blocks import BlockStatus, Layout, Piece
from grpo_lite.offload.gradients import GradientBank
from grpo_lite.offload.interrupt import interrupts_held
from grpo_lite.offload.link import link_to
from grpo_lite.offload.memory import HostMemory
from grpo_lite.offload.options import EngineOptions, open_gradient_store
from grpo_lite.offload.placement import Placement, Tier, record_bytes, sweep
from grpo_lite.offload.states import BlockStates
from grpo_lite.offload.step import AdamWSettings, Progress, StepReport
from grpo_lite.offload.weights import Weights
from grpo_lite.units import format_bytes

logger = logging.getLogger(__name__)

STEP_ELEMENTS = 2**20
"""Elements that are stepped at a time: new masters are still in the last-level cache when they are
cast to weights, and threads have enough to do (smaller chunks cost 10 %, none at all 7 %)."""
IMPORTANCE_DECAY = 0.9
"""Share of the old moving average that a step keeps."""


class BlockEngine:
    """Gradients and AdamW state of `parameters`, placed by `placement`."""

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        layout: Layout,
        placement: Placement,
        options: EngineOptions,
    ) -> None:
        """Reserve memory and files; masters are made from the weights at the first gradient."""
        self.layout = layout
        self.placement = placement
        self.options = options
        self.memory = HostMemory(options.card)
        self.device = parameters[0].device
        self.completed_steps = 0
        self.num_updates = [0] * len(parameters)
        self.importance = [0.0] * len(layout.blocks)
        self.last_step: StepReport | None = None
        self._sensitivity = [0.0] * len(layout.blocks)
        self._link = link_to(self.device, self.memory, in_flight_bytes=options.in_flight_bytes)
        with self._on_card():
            self.states = BlockStates(
                layout,
                placement,
                self.memory,
                self.device,
                disk_dir=options.disk_dir,
                disk_settings=options.disk_settings,
            )
        open_gradients = partial(open_gradient_store, options, layout, self.memory)
        self._bank = GradientBank(
            layout, placement, self.states, self._link, self.memory, open_gradients
        )
        devices = {self.device, torch.device("cpu")}
        self._update_counts = {device: self._scalar(device) for device in devices}
        self._divisors = {device: self._scalar(device) for device in devices}
        self._weights = Weights(parameters, self._link, self._scalar(torch.device("cpu")))
        self.has_masters = False
        self._progress: Progress | None = None
        self._counted_bytes = (0, 0)
        self._meta: dict[str, Any] = {}

    @property
    def has_gradients(self) -> bool:
        """Whether a gradient was taken since the last step."""
        return bool(self._bank.filled)

    @property
    def is_interrupted(self) -> bool:
        """Whether a step has begun and not ended."""
        return self._progress is not None

    def status(self, index: int) -> BlockStatus:
        """Return where the state of block `index` is now."""
        return self.states.status(index)

    @torch.no_grad()
    def accumulate(self, parameter: int, gradient: torch.Tensor) -> None:
        """Add `gradient` of parameter number `parameter` to its blocks."""
        if self._progress is not None:
            raise UsageError(
                f"the last step was interrupted with {len(self._progress.remaining)} of "
                f"{len(self.layout.blocks)} blocks to go; a new gradient would be lost",
                hint="call step() once more to finish it",
            )
        self.require_masters()
        self._bank.add(parameter, gradient)

    def clear_gradients(self) -> None:
        """Forget gradients, unless an interrupted step still needs them."""
        if self._progress is None:
            self._bank.clear()

    @torch.no_grad()
    def step(self, settings: Sequence[AdamWSettings], meta: dict[str, Any]) -> StepReport:
        """Update every parameter that has a gradient once; go on with a step that was interrupted.

        Args:
            settings: by parameter; an interrupted step goes on with those that it began with.
            meta: recorded with the generation on disk.

        Raises:
            StoreError: a tier failed; call again to go on.
        """
        began = time.perf_counter()
        if self._progress is None:
            self.require_masters()
            self._progress = self._begin(settings)
        progress = self._progress
        skipped = not math.isfinite(progress.gradient_norm)
        while progress.remaining:
            with interrupts_held():
                self._step_block(progress)
        with interrupts_held():
            self._link.join()
            if not skipped:
                for parameter, count in progress.num_updates.items():
                    self.num_updates[parameter] = count
            self._meta = meta
            self._commit(self.completed_steps + 1)
            self.completed_steps += 1
            self._progress = None
        self._bank.clear()
        self.last_step = self._report(began, progress, skipped=skipped)
        return self.last_step

    @torch.no_grad()
    def require_masters(self) -> None:
        """Make masters of the weights as they are now, and zero moments, unless there are any."""
        if self.has_masters:
            return
        for block in self.layout.blocks:
            with interrupts_held(), self.states.lent(block.index, fresh=True) as state:
                state.zero_()
                self._sensitivity[block.index] = self._weights.read(block, state[0])
        self._commit(0)
        self.has_masters = True

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Take the weights as they are now for the masters; moments stay."""
        if not self.has_masters:
            return
        for block in self.layout.blocks:
            with interrupts_held(), self.states.lent(block.index) as state:
                self._sensitivity[block.index] = self._weights.read(block, state[0])
        self._commit(self.completed_steps)

    @torch.no_grad()
    def restore_weights(self) -> None:
        """Set every weight from its master."""
        for block in self.layout.blocks:
            with self.states.lent(block.index, changed=False) as state:
                self._weights.send_all(block, state[0])
        self._link.join()

    def take_up(self, meta: dict[str, Any]) -> None:
        """Go on from the generation on disk that `meta` describes: masters become the weights."""
        self.completed_steps = meta["completed_steps"]
        self.num_updates = list(meta["num_updates"])
        self.has_masters = True
        self._meta = meta
        self.restore_weights()

    def restart_from(self, num_updates: Mapping[int, int]) -> None:
        """Count updates anew after states were replaced; masters become the weights."""
        self.num_updates = [num_updates.get(i, 0) for i in range(len(self.num_updates))]
        self.completed_steps = max(self.num_updates)
        self._commit(self.completed_steps)
        self.restore_weights()

    def move(self, placement: Placement) -> list[int]:
        """Move blocks until they lie as `placement` says; return those that moved.

        Those for the disk move first and those for the card last, so that each makes room.

        Raises:
            StoreError: a tier failed; blocks that have moved stay moved, and a next call goes on.
        """
        assert not self.has_gradients, "gradients are not moved; call zero_grad first"
        assert self._progress is None, "a step is under way"
        self.require_masters()
        changed = [i for i, home in enumerate(placement.homes) if home != self.placement.homes[i]]
        rank = {Tier.DISK: 0, Tier.HOST: 1, Tier.CARD: 2}
        for index in sorted(changed, key=lambda i: rank[placement.homes[i].state]):
            home = placement.homes[index]
            with interrupts_held(), self._on_card():
                if home.state is not self.placement.homes[index].state:
                    self.states.move(index, home.state)
                self._bank.move(index, home)
                homes = list(self.placement.homes)
                homes[index] = home
                self.placement = Placement(homes=tuple(homes))
        return changed

    def settle(self, *, durable: bool = False) -> None:
        """Wait until all blocks are in their places; `durable`: even if the power fails."""
        if durable and self.states.disk is not None and self.states.disk.meta is not None:
            self.states.settle()
            self.states.commit(self.states.disk.meta, durable=True)
        self.states.settle()

    def close(self, *, keep_files: bool = False) -> None:
        """Free memory, and files unless a later run is to resume from them."""
        self._link.close()
        self._bank.close()
        self.states.close(keep_files=keep_files)

    # -- the step -----------------------------------------------------------------------------

    def _begin(self, settings: Sequence[AdamWSettings]) -> Progress:
        """Return a new step, without blocks if gradients are not finite; nothing is changed yet."""
        squares = self._bank.sums_of_squares()
        self._bank.settle()
        norm = math.sqrt(math.fsum(squares))
        filled = self._bank.filled
        order = []
        if math.isfinite(norm):
            self._require_write_allowance()
            self._update_importance(squares)
            order = [
                index
                for index in sweep(self.placement, self.completed_steps)
                if any(p.parameter in filled for p in self.layout.blocks[index].pieces)
            ]
        else:
            logger.warning("step skipped: the gradient norm is %s", norm)
        return Progress(
            remaining=order,
            settings=list(settings),
            num_updates={parameter: self.num_updates[parameter] + 1 for parameter in filled},
            gradient_norm=norm,
            gradient_divisor=self._clip_divisor(norm),
        )

    def _update_importance(self, squares: Sequence[float]) -> None:
        for index, square in enumerate(squares):
            new = math.sqrt(square) * self._sensitivity[index]
            old = self.importance[index] if self.completed_steps else new
            self.importance[index] = IMPORTANCE_DECAY * old + (1 - IMPORTANCE_DECAY) * new

    def _clip_divisor(self, norm: float) -> float | None:
        """Return (norm + 1e-6) / max_grad_norm in fp32 where that is above 1, as torch clips."""
        limit = self.options.max_grad_norm
        if limit is None or not limit < norm + 1e-6 < math.inf:
            return None
        for divisor in self._divisors.values():
            divisor.fill_((norm + 1e-6) / limit)
        return float(self._divisors[torch.device("cpu")])

    def _step_block(self, progress: Progress) -> None:
        """Update the next block; it is done, and recorded as done, or as it was."""
        index = progress.remaining[0]
        began = time.perf_counter()
        self._look_ahead(progress)
        state = self.states.fetch(index)
        try:
            gradient = self._bank.fetch(index)
        except BaseException:
            self.states.put(index, changed=False)
            raise
        self._look_ahead(progress)
        progress.wait_s += time.perf_counter() - began
        self._update(index, state, gradient, progress)
        progress.remaining.pop(0)
        self._look_ahead(progress)
        began = time.perf_counter()
        try:
            self.states.put(index)
        finally:
            self._bank.release()
            progress.wait_s += time.perf_counter() - began

    def _look_ahead(self, progress: Progress) -> None:
        """Begin to read what comes next if a buffer is free now; asked often, since it never waits.

        A write that has ended since the last call has freed a buffer, and the disk should not rest.
        """
        self.states.prefetch(progress.remaining[:3])
        self._bank.prefetch(progress.remaining[:2])

    def _update(
        self, index: int, state: torch.Tensor, gradient: torch.Tensor, progress: Progress
    ) -> None:
        for piece in self.layout.blocks[index].pieces:
            if piece.parameter in progress.num_updates:
                self._step_piece(piece, state, gradient, progress)

    def _step_piece(
        self, piece: Piece, state: torch.Tensor, gradient: torch.Tensor, progress: Progress
    ) -> None:
        """Step the elements of `piece` in cache-sized chunks and send each new weight at once."""
        settings = progress.settings[piece.parameter]
        count = self._update_counts[state.device]
        count.fill_(progress.num_updates[piece.parameter])
        divisor = self._divisors[state.device] if progress.gradient_divisor is not None else None
        step = STEP_ELEMENTS if state.device.type == "cpu" else piece.num_elements
        for start in range(0, piece.num_elements, step):
            chunk = slice(start, min(start + step, piece.num_elements))
            here = slice(piece.offset + chunk.start, piece.offset + chunk.stop)
            torch._fused_adamw_(
                [state[0, here]],
                [gradient[here]],
                [state[1, here]],
                [state[2, here]],
                [],
                [count],
                amsgrad=False,
                lr=settings.lr,
                beta1=settings.beta1,
                beta2=settings.beta2,
                weight_decay=settings.weight_decay,
                eps=settings.eps,
                maximize=False,
                grad_scale=divisor,
                found_inf=None,
            )
            self._weights.send(piece, state[0], chunk)

    def _require_write_allowance(self) -> None:
        limit = self.options.max_disk_write_bytes
        disk = self.states.disk
        if limit is None or disk is None:
            return
        indices = self.placement.blocks_with_state(Tier.DISK)
        coming = sum(record_bytes(self.layout.blocks[index].state_bytes) for index in indices)
        written = disk.written_bytes + self._bank.disk_written_bytes
        if written + coming > limit:
            raise StoreError(
                f"the next step would write {format_bytes(coming)} to disk; "
                f"{format_bytes(written)} of {format_bytes(limit)} are written",
                hint="raise max_disk_write_bytes, or save a state_dict and stop here",
            )

    def _commit(self, completed_steps: int) -> None:
        counts = {"completed_steps": completed_steps, "num_updates": list(self.num_updates)}
        self.states.commit({**self._meta, **counts})

    def _report(self, began: float, progress: Progress, *, skipped: bool) -> StepReport:
        disk = self.states.disk
        read = (disk.read_bytes if disk else 0) + self._bank.disk_read_bytes
        written = (disk.written_bytes if disk else 0) + self._bank.disk_written_bytes
        last_read, last_written = self._counted_bytes
        self._counted_bytes = (read, written)
        return StepReport(
            step=self.completed_steps,
            gradient_norm=progress.gradient_norm,
            gradient_divisor=progress.gradient_divisor,
            skipped=skipped,
            step_s=time.perf_counter() - began,
            wait_s=progress.wait_s,
            read_bytes=read - last_read,
            written_bytes=written - last_written,
        )

    def _on_card(self) -> AbstractContextManager[None]:
        """Let the card count what is allocated inside."""
        return self.options.card.attach() if self.options.card is not None else nullcontext()

    def _scalar(self, device: torch.device) -> torch.Tensor:
        """Return one fp32 element on `device`; on the host it does not count as the card's."""
        if device.type == "cpu":
            return self.memory.empty(1, torch.float32)[0]
        return torch.empty((), dtype=torch.float32, device=device)
