"""`OffloadedAdamW`: AdamW for models whose gradients and optimizer state do not fit the card.

A `torch.optim.Optimizer` over the block engine: the same update, to the bit, as
`torch.optim.AdamW(fused=True)` over fp32 masters of the same weights.
"""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from grpo_lite.errors import UsageError
from grpo_lite.offload.blocks import BLOCK_BYTES, Layout, lay_out
from grpo_lite.offload.disk import DiskSettings
from grpo_lite.offload.disk_files import FileIO
from grpo_lite.offload.engine import BlockEngine
from grpo_lite.offload.intake import (
    disk_budget,
    host_budget,
    named_parameters,
    offload_budget,
    parameter_shapes,
    require_numbers,
    trained_parameters,
)
from grpo_lite.offload.options import EngineOptions
from grpo_lite.offload.placement import (
    STATE_BUFFERS,
    OffloadBudget,
    Placement,
    TierBytes,
    extra_buffers,
    place,
    priority_order,
    tier_bytes,
)
from grpo_lite.offload.state_dict import export_state, import_state
from grpo_lite.offload.step import AdamWSettings, StepReport
from grpo_lite.units import format_bytes

if TYPE_CHECKING:
    from grpo_lite.cards.card import Card

logger = logging.getLogger(__name__)


class OffloadedAdamW(torch.optim.Optimizer):
    """AdamW with decoupled weight decay whose gradients and state live in blocks on three tiers.

    Works in a plain loop: backward, `step`, `zero_grad`; with gradient accumulation, schedulers
    and parameter groups. What differs from `torch.optim.AdamW`:

    - Gradients are taken as backward makes them: `parameter.grad` is None afterwards, and
      `torch.nn.utils.clip_grad_norm_` sees nothing. Clip with `max_grad_norm`.
    - `step` uses gradients up: the next backward begins a new sum.
    - Masters are made of the weights at the first backward; after changing weights by hand later,
      call `refresh_masters`.
    - `step` that raised is not lost: call it again, and it goes on behind the last finished block.

    Args:
        params: parameters, named parameters, or groups of them, as torch takes them; blocks
            are cut in this order, which the model's own suits best.
        lr: learning rate.
        betas: decays of the two moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled weight decay.
        max_grad_norm: global L2 norm to clip to.
        card_bytes: for gradients and state on the card; None: as little as possible, the
            largest gradient of one parameter (on CUDA one more, in flight).
        host_bytes: RAM for blocks and buffers; None: what is available, less 2 GiB.
        disk_dir: folder on a local disk that opens the disk tier.
        disk_bytes: of that disk; None: what is free.
        block_bytes: gradient bytes of a block.
        max_disk_write_bytes: endurance budget of this run.
        resume: keep every state on disk so that a run that dies can be resumed, and go on from
            the last whole step in `disk_dir` if there is one.
        card: counts card memory and gives host memory; None: plain torch.
        file_io: system calls of the disk tier; tests hand in failing ones.

    Raises:
        UsageError: a number, a folder or a parameter that cannot be meant.
        StoreError: files could not be reserved.
    """

    def __init__(  # noqa: PLR0913 # torch's own signature and the budgets
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        max_grad_norm: float | None = None,
        card_bytes: int | None = None,
        host_bytes: int | None = None,
        disk_dir: str | Path | None = None,
        disk_bytes: int | None = None,
        block_bytes: int = BLOCK_BYTES,
        max_disk_write_bytes: int | None = None,
        resume: bool = False,
        card: Card | None = None,
        file_io: FileIO | None = None,
    ) -> None:
        """Lay out the blocks, place them, and reserve what they need; see the class."""
        require_numbers(lr, betas, eps, weight_decay, max_grad_norm)
        self._engine: BlockEngine | None = None
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )
        self._trained = trained_parameters(self.param_groups)
        self._index = {id(parameter): i for i, parameter in enumerate(self._trained)}
        folder = Path(disk_dir) if disk_dir is not None else None
        shapes = parameter_shapes(self.param_groups, self._trained)
        layout = lay_out(shapes, block_bytes=block_bytes)
        self._budget = offload_budget(
            layout,
            card_bytes=card_bytes,
            host_bytes=host_budget(host_bytes),
            disk_bytes=disk_budget(folder, disk_bytes, resume=resume),
            on_cuda=self._trained[0].device.type == "cuda",
            resume=resume,
        )
        placement = place(layout, self._budget, priority_order(layout))
        self._engine = BlockEngine(
            self._trained,
            layout,
            placement,
            EngineOptions(
                card=card,
                disk_dir=folder,
                disk_settings=_disk_settings(layout, placement, self._budget, file_io),
                in_flight_bytes=self._budget.in_flight_bytes,
                max_grad_norm=max_grad_norm,
                max_disk_write_bytes=max_disk_write_bytes,
            ),
        )
        self._hooks = _take_gradients(self, self._trained)
        self._take_up()

    # -- what every optimizer has ---------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; return what `closure` returned.

        Non-finite gradients skip the step (`last_step.skipped`).

        Raises:
            StoreError: a tier failed; nothing is lost, call `step` again to go on.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        engine = self.engine
        for parameter in self._trained:  # set by hand, or left by a hook that raised
            self._take(parameter)
        self._require_no_strays()
        settings = self._settings()
        engine.step(settings, {"groups": [_saved_group(group) for group in self.param_groups]})
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 # torch's
        """Forget all gradients."""
        super().zero_grad(set_to_none=set_to_none)
        self.engine.clear_gradients()

    def state_dict(self) -> dict[str, Any]:
        """Return state and groups as torch does, without taking RAM for them.

        Tensors are views of the blocks (on disk: mapped files) and change with later steps; a
        parameter that lies in several blocks has lists of flat tensors.
        """
        numbers, groups = self._numbered_groups()
        state = export_state(self.engine)
        return {
            "state": {numbers[id(self._trained[i])]: entry for i, entry in state.items()},
            "param_groups": groups,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what `state_dict` (or that of `torch.optim.AdamW`) returned; weights follow masters.

        Raises:
            UsageError: it is the state of another model.
        """
        numbers, groups = self._numbered_groups()
        saved = state_dict["param_groups"]
        if [len(group["params"]) for group in saved] != [len(g["params"]) for g in groups]:
            raise UsageError(
                f"the saved state has groups of {[len(group['params']) for group in saved]} "
                f"parameters, this optimizer of {[len(group['params']) for group in groups]}",
                hint="this is the state of another model, or of other parameter groups",
            )
        by_number = {number: self._index.get(key) for key, number in numbers.items()}
        states = {
            index: entry
            for number, entry in state_dict["state"].items()
            if (index := by_number.get(number)) is not None
        }
        import_state(self.engine, states)
        for group, values in zip(self.param_groups, saved, strict=True):
            group.update({k: v for k, v in values.items() if k not in ("params", "param_names")})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Take a group during construction; later the blocks are laid out."""
        if self._engine is not None:
            raise UsageError(
                "blocks are laid out once: parameters cannot be added later",
                hint="make a new OffloadedAdamW with all groups",
            )
        super().add_param_group(param_group)

    # -- what offload adds ------------------------------------------------------------------------

    @property
    def engine(self) -> BlockEngine:
        """The block engine: layout, placement, importance, status of each block."""
        assert self._engine is not None, "closed"
        return self._engine

    @property
    def last_step(self) -> StepReport | None:
        """What the last step did."""
        return self.engine.last_step

    @property
    def completed_steps(self) -> int:
        """Steps taken so far, skipped ones and those of a resumed run included."""
        return self.engine.completed_steps

    def tier_bytes(self, *, accumulation_steps: int = 1) -> TierBytes:
        """Return what each tier holds and moves in a step of `accumulation_steps` backwards."""
        return tier_bytes(
            self.engine.layout,
            self.engine.placement,
            link_bytes=self._budget.link_bytes,
            in_flight_bytes=self._budget.in_flight_bytes,
            accumulation_steps=accumulation_steps,
        )

    def set_card_bytes(self, card_bytes: int) -> list[int]:
        """Move blocks, lowest priority first, so that the card holds at most `card_bytes`.

        Returns:
            The indices of the blocks that moved.

        Raises:
            UsageError: gradients are held (call `zero_grad` first), or no tier has room.
        """
        engine = self.engine
        if engine.has_gradients or engine.is_interrupted:
            raise UsageError(
                "blocks move between updates only, and gradients are held",
                hint="call step(), or zero_grad() and repeat the update",
            )
        budget = replace(self._budget, card_bytes=card_bytes)
        order = priority_order(engine.layout, engine.importance)
        moved = engine.move(place(engine.layout, budget, order))
        before = format_bytes(self._budget.card_bytes)
        logger.info("card budget %s -> %s: moved blocks %s", before, card_bytes, moved)
        self._budget = budget
        return moved

    def refresh_masters(self) -> None:
        """Take the weights as they are now for the masters, after they were changed by hand."""
        self.engine.refresh_masters()

    def settle(self, *, durable: bool = False) -> None:
        """Wait until all blocks are in their places; `durable`: even if the power fails."""
        self.engine.settle(durable=durable)

    def close(self, *, keep_files: bool = False) -> None:
        """Give back memory and files; the optimizer is of no use afterwards.

        Call it when training is finished. A process that ends without it, of itself or not, leaves
        its files if it was made with `resume=True`; so does `keep_files`.
        """
        for hook in self._hooks:
            hook.remove()
        if self._engine is not None:
            self._engine.close(keep_files=keep_files)
        self._engine = None

    # -- inside -----------------------------------------------------------------------------------

    def _take(self, parameter: torch.Tensor) -> None:
        """Hand the gradient of `parameter` to the engine."""
        gradient = parameter.grad
        if gradient is None:
            return
        if gradient.is_sparse:
            raise UsageError(
                "a sparse gradient cannot be put into blocks",
                hint="nn.Embedding(..., sparse=False)",
            )
        self.engine.accumulate(self._index[id(parameter)], gradient)
        parameter.grad = None

    def _require_no_strays(self) -> None:
        for group in self.param_groups:
            for name, parameter in named_parameters(group):
                if parameter.grad is not None and id(parameter) not in self._index:
                    raise UsageError(
                        f"{name} has a gradient and was frozen when the blocks were laid out",
                        hint="make the OffloadedAdamW after requires_grad is set",
                    )

    def _settings(self) -> list[AdamWSettings]:
        """Return each parameter's numbers as its group has them now."""
        found: dict[int, AdamWSettings] = {}
        for group in self.param_groups:
            settings = AdamWSettings(
                lr=float(group["lr"]),
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
            )
            found.update({id(parameter): settings for parameter in group["params"]})
        return [found[id(parameter)] for parameter in self._trained]

    def _numbered_groups(self) -> tuple[dict[int, int], list[dict[str, Any]]]:
        """Return each parameter's number over all groups, and the groups with these numbers."""
        numbers: dict[int, int] = {}
        groups = []
        for group in self.param_groups:
            for parameter in group["params"]:
                numbers.setdefault(id(parameter), len(numbers))
            packed = {key: value for key, value in group.items() if key != "params"}
            packed["params"] = [numbers[id(parameter)] for parameter in group["params"]]
            groups.append(packed)
        return numbers, groups

    def _take_up(self) -> None:
        """Go on from the generation on disk if this run resumes and there is one."""
        disk = self.engine.states.disk
        if disk is None or disk.meta is None:
            return
        self.engine.take_up(disk.meta)
        for group, values in zip(self.param_groups, disk.meta.get("groups", []), strict=False):
            group.update(values | {"betas": tuple(values["betas"])})


def _disk_settings(
    layout: Layout, placement: Placement, budget: OffloadBudget, file_io: FileIO | None
) -> DiskSettings:
    """Return how the disk tier works: RAM to spare buffers states of a run that can be resumed."""
    needed = tier_bytes(layout, placement, link_bytes=budget.link_bytes)
    spare = budget.host_bytes - needed.host_bytes
    extra = extra_buffers(layout, spare) if budget.resumable else 0
    return DiskSettings(
        resume=budget.resumable,
        num_buffers=STATE_BUFFERS + extra,
        spare_bytes=0 if extra else spare,
        io=file_io or FileIO(),
    )


def _take_gradients(
    optimizer: OffloadedAdamW, parameters: list[torch.Tensor]
) -> list[torch.utils.hooks.RemovableHandle]:
    """Let backward hand each gradient over; hooks do not keep the optimizer alive."""
    reference = weakref.ref(optimizer)

    def hook(parameter: torch.Tensor) -> None:
        owner = reference()
        if owner is not None:
            owner._take(parameter)

    return [parameter.register_post_accumulate_grad_hook(hook) for parameter in parameters]


def _saved_group(group: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of `group` that a manifest can hold."""
    return {
        key: value
        for key, value in group.items()
        if key not in ("params", "param_names") and _is_json(value)
    }


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except TypeError:
        return False
    return True
