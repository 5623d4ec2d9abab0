"""What moving gradients and optimizer state off the card would hold and move: numbers for `fit`.

Pure: lays out blocks from sizes alone and places them within budgets; imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from grpo_lite.errors import UsageError
from grpo_lite.offload.blocks import ParameterShape, lay_out
from grpo_lite.offload.placement import OffloadBudget, place, priority_order, tier_bytes
from grpo_lite.predict.speed import Tiers

GRADIENT_ELEMENT_BYTES = 4
"""Full fine-tuning makes fp32 gradients."""


def plan_tiers(
    numels: Sequence[int], *, host_bytes: int | None, disk_bytes: int | None
) -> dict[str, Tiers]:
    """Return what each offload ("host", "disk") that the budgets allow would hold and move.

    `host_bytes` None: no offload at all; `disk_bytes` None: no disk tier.
    """
    if host_bytes is None or not numels:
        return {}
    found = {}
    for offload, disk in (("host", 0), ("disk", disk_bytes or 0)):
        if offload == "disk" and not disk:
            continue
        try:
            found[offload] = tiers_of(numels, host_bytes=host_bytes, disk_bytes=disk)
        except UsageError:
            continue
    return found


def tiers_of(numels: Sequence[int], *, host_bytes: int, disk_bytes: int = 0) -> Tiers:
    """Return what gradients and states of tensors with `numels` elements hold and move.

    Raises:
        UsageError: they do not fit the budgets; the message says what each would have to be.
    """
    layout = lay_out(
        [
            ParameterShape(
                name=f"{index}",
                num_elements=numel,
                element_bytes=GRADIENT_ELEMENT_BYTES,
                identity=index,
            )
            for index, numel in enumerate(numels)
        ]
    )
    budget = OffloadBudget(
        card_bytes=layout.largest_gradient_bytes, host_bytes=host_bytes, disk_bytes=disk_bytes
    )
    placement = place(layout, budget, priority_order(layout))
    held = tier_bytes(layout, placement)
    return Tiers(
        host_bytes=held.host_bytes,
        disk_bytes=held.disk_bytes,
        link_bytes_per_micro_batch=held.link_to_host_bytes,
        link_bytes_per_step=held.link_to_card_bytes,
        num_parameters=sum(numels),
        disk_read_bytes=held.disk_read_bytes,
        disk_written_bytes=held.disk_written_bytes,
    )
