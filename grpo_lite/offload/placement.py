"""Where each block lives, what that costs, and in which order a step visits the blocks.

Pure functions over a `Layout` and byte budgets, so that a search can ask before anything exists.
Exact by intent: priority says where a block lives and when it moves, never whether it is updated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from grpo_lite.errors import UsageError
from grpo_lite.offload.blocks import GradientBlock, Layout
from grpo_lite.units import MIB, format_bytes

PAGE_BYTES = 4096
"""Records on disk, and buffers that meet the disk, are whole pages (O_DIRECT)."""
STATE_BUFFERS = 3
"""State records in RAM while the disk tier works: one read, one updated, one written."""
GRADIENT_BUFFERS = 2
"""Gradient records in RAM where gradients go to disk: one accumulated, one written."""
STATE_SLOTS = 2
"""Copies of a state record on disk: a crash while one is written leaves the other whole."""
SCRATCH_BYTES = 2 * MIB
"""RAM for the small buffers of chunked casts and sums."""
PRIORITY_BANDS = 8
"""Classes of "next use": blocks of one class are ordered by importance."""


class Tier(StrEnum):
    """A place for blocks, fastest first."""

    CARD = "card"
    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadBudget:
    """Bytes that gradients and optimizer state may take, tier by tier."""

    card_bytes: int
    """On the card, the gradient that backward has just made included."""
    host_bytes: int
    """In RAM, all buffers included."""
    disk_bytes: int = 0
    """In files; 0: no disk tier."""
    link_bytes: int = 0
    """Part of `host_bytes` that a pinned ring between card and RAM takes."""
    in_flight_bytes: int = 0
    """Part of `card_bytes` for gradients that wait to be copied while the next one is made."""
    resumable: bool = False
    """Every state lives on disk, so that a killed run leaves a whole generation."""

    def __post_init__(self) -> None:
        for name in ("card_bytes", "host_bytes", "disk_bytes", "link_bytes"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name} is {getattr(self, name)}; it must not be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """The tiers of one block's gradient accumulator and of its optimizer state."""

    gradient: Tier
    """Where gradients are summed over micro-batches."""
    state: Tier
    """Where master, exp_avg and exp_avg_sq lie between steps."""


ON_CARD = Home(gradient=Tier.CARD, state=Tier.CARD)
ON_HOST = Home(gradient=Tier.HOST, state=Tier.HOST)
STATE_ON_DISK = Home(gradient=Tier.HOST, state=Tier.DISK)
ALL_ON_DISK = Home(gradient=Tier.DISK, state=Tier.DISK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The home of every block, by block index."""

    homes: tuple[Home, ...]
    """One for each block of the layout."""

    def blocks_with_state(self, tier: Tier) -> list[int]:
        """Return the indices of the blocks whose state lies on `tier`."""
        return [index for index, home in enumerate(self.homes) if home.state is tier]

    def blocks_with_gradient(self, tier: Tier) -> list[int]:
        """Return the indices of the blocks whose gradient is summed on `tier`."""
        return [index for index, home in enumerate(self.homes) if home.gradient is tier]


@dataclass(frozen=True, slots=True, kw_only=True)
class TierBytes:
    """What a placement holds on each tier and moves in one step."""

    card_bytes: int
    """Held on the card: accumulators and state, the largest gradient, and those in flight."""
    host_bytes: int
    """Held in RAM: accumulators, state and every buffer."""
    disk_bytes: int
    """Held in files."""
    link_to_host_bytes: int
    """Gradients that leave the card in one step (all micro-batches)."""
    link_to_card_bytes: int
    """Weights that come back to the card in one step."""
    disk_read_bytes: int
    """Read from files in one step, before what buffers still hold from the last one."""
    disk_written_bytes: int
    """Written to files in one step."""


def tier_bytes(
    layout: Layout,
    placement: Placement,
    *,
    link_bytes: int = 0,
    in_flight_bytes: int = 0,
    accumulation_steps: int = 1,
) -> TierBytes:
    """Return the bytes that `placement` holds and moves with `accumulation_steps` micro-batches.

    Gradients on disk are counted as written once in each micro-batch, which holds where backward
    makes them in the layout's order.
    """
    blocks = layout.blocks

    def total(indices: Sequence[int], attribute: str) -> int:
        return sum(int(getattr(blocks[index], attribute)) for index in indices)

    card = placement.blocks_with_state(Tier.CARD)
    host = placement.blocks_with_state(Tier.HOST)
    disk = placement.blocks_with_state(Tier.DISK)
    spilled = placement.blocks_with_gradient(Tier.DISK)
    summed = placement.blocks_with_gradient(Tier.HOST)
    away = [*host, *disk]
    state_written = sum(record_bytes(blocks[index].state_bytes) for index in disk)
    gradient_written = sum(record_bytes(blocks[index].accumulator_bytes) for index in spilled)
    return TierBytes(
        card_bytes=layout.largest_gradient_bytes
        + in_flight_bytes
        + total(card, "state_bytes")
        + total(card, "accumulator_bytes"),
        host_bytes=SCRATCH_BYTES
        + link_bytes
        + total(summed, "accumulator_bytes")
        + total(host, "state_bytes")
        + (STATE_BUFFERS * _buffer_bytes(blocks, "state_bytes") if disk else 0)
        + (GRADIENT_BUFFERS * _buffer_bytes(blocks, "accumulator_bytes") if spilled else 0),
        disk_bytes=STATE_SLOTS * state_written + gradient_written,
        link_to_host_bytes=accumulation_steps * total(away, "gradient_bytes"),
        link_to_card_bytes=total(away, "gradient_bytes"),
        disk_read_bytes=state_written + accumulation_steps * gradient_written,
        disk_written_bytes=state_written + accumulation_steps * gradient_written,
    )


def record_bytes(num_bytes: int) -> int:
    """Return `num_bytes` rounded up to whole pages."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def _buffer_bytes(blocks: Sequence[GradientBlock], attribute: str) -> int:
    """Return the bytes of a buffer for any block; a page more, to begin on a page."""
    return max(record_bytes(getattr(block, attribute)) for block in blocks) + PAGE_BYTES


def extra_buffers(layout: Layout, spare_bytes: int) -> int:
    """Return how many more state buffers `spare_bytes` of RAM hold, at most one for each block.

    Where every state must be on disk (to be resumed from), RAM that is left saves reads this way.
    """
    buffers = spare_bytes // _buffer_bytes(layout.blocks, "state_bytes")
    return max(0, min(buffers, len(layout.blocks) - STATE_BUFFERS))


def priority(block: GradientBlock, *, num_blocks: int, importance: float) -> tuple[float, ...]:
    """Return the sort key of `block`: smaller keys deserve the faster tier.

    First comes the next use: backward ends with the last blocks, the first layers, and the
    next forward begins there, so that nothing hides the trip of those blocks.
    Blocks whose next use is about as near are ordered by importance per byte.
    """
    steps_until_use = num_blocks - 1 - block.index
    band = steps_until_use * PRIORITY_BANDS // num_blocks
    return (band, -importance / block.gradient_bytes, steps_until_use)


def priority_order(layout: Layout, importance: Sequence[float] | None = None) -> list[int]:
    """Return the block indices, highest priority first.

    `importance` is, by block, a moving average of gradient norm x weight norm; None: all alike.
    """
    known = importance if importance is not None else [0.0] * len(layout.blocks)
    keys = [
        priority(block, num_blocks=len(layout.blocks), importance=known[block.index])
        for block in layout.blocks
    ]
    return sorted(range(len(keys)), key=keys.__getitem__)


def place(layout: Layout, budget: OffloadBudget, order: Sequence[int]) -> Placement:
    """Return the placement that uses the fastest tiers that `budget` allows, by priority `order`.

    The card is filled first, then RAM; states go to disk before gradients do.

    Raises:
        UsageError: it does not fit; the message says what each tier would need.
    """
    if budget.resumable:
        rest = list(order)
        return _checked_disk(layout, budget, rest, dict.fromkeys(rest, STATE_ON_DISK))
    rest = _after_card(layout, budget, order)
    homes = dict.fromkeys(order, ON_CARD) | dict.fromkeys(rest, ON_HOST)
    placement = _placement(homes)
    needed = tier_bytes(layout, placement, link_bytes=budget.link_bytes)
    if needed.host_bytes <= budget.host_bytes:
        return placement
    if not budget.disk_bytes:
        raise UsageError(
            f"gradients and optimizer state need {format_bytes(needed.host_bytes)} of RAM, "
            f"the host budget is {format_bytes(budget.host_bytes)}",
            hint="disk_dir=FOLDER opens the disk tier; "
            f"host_bytes={needed.host_bytes} would do without",
        )
    return _checked_disk(layout, budget, rest, homes)


def _checked_disk(
    layout: Layout, budget: OffloadBudget, rest: Sequence[int], homes: dict[int, Home]
) -> Placement:
    """Return `homes` with as much of `rest` on disk as needed; refuse what still does not fit."""
    placement = _with_disk(layout, budget, rest, homes)
    needed = tier_bytes(layout, placement, link_bytes=budget.link_bytes)
    if needed.host_bytes > budget.host_bytes:
        raise UsageError(
            f"even with gradients and optimizer state on disk, buffers take "
            f"{format_bytes(needed.host_bytes)} of RAM and the host budget is "
            f"{format_bytes(budget.host_bytes)}",
            hint=f"host_bytes={needed.host_bytes}, or smaller blocks: "
            f"block_bytes={max(layout.block_bytes // 2, PAGE_BYTES)}",
        )
    if needed.disk_bytes > budget.disk_bytes:
        raise UsageError(
            f"the disk tier needs {format_bytes(needed.disk_bytes)} "
            f"and may use {format_bytes(budget.disk_bytes)}",
            hint="give disk_dir on a disk with more free space, or more host_bytes",
        )
    return placement


def _after_card(layout: Layout, budget: OffloadBudget, order: Sequence[int]) -> list[int]:
    """Return the blocks of `order` that do not fit the card any more, highest priority first."""
    transient_bytes = layout.largest_gradient_bytes + budget.in_flight_bytes
    left = budget.card_bytes - transient_bytes
    if left < 0:
        largest = max(layout.parameters, key=lambda shape: shape.num_elements * shape.element_bytes)
        raise UsageError(
            f"card_bytes is {format_bytes(budget.card_bytes)}; backward makes the gradient of "
            f"{largest.name} whole, {format_bytes(layout.largest_gradient_bytes)}, beside "
            f"{format_bytes(budget.in_flight_bytes)} that are being copied",
            hint=f"card_bytes={transient_bytes}",
        )
    for position, index in enumerate(order):
        block = layout.blocks[index]
        left -= block.state_bytes + block.accumulator_bytes
        if left < 0:
            return list(order[position:])
    return []


def _with_disk(
    layout: Layout, budget: OffloadBudget, rest: Sequence[int], homes: dict[int, Home]
) -> Placement:
    """Return `homes` with states, and then gradients, of `rest` moved to disk as far as needed."""
    homes = homes | dict.fromkeys(rest, STATE_ON_DISK)
    left = budget.host_bytes - tier_bytes(layout, _placement(homes)).host_bytes - budget.link_bytes
    if left >= 0:
        ahead = () if budget.resumable else rest
        for index in ahead:  # RAM that is left goes to the states of the highest priority
            left -= layout.blocks[index].state_bytes
            if left < 0:
                break
            homes[index] = ON_HOST
        return _placement(homes)
    # a block of few pieces is filled in one visit; one that many layers' small tensors share is
    # come back to by each of them
    lowest_first = list(rest)[::-1]
    for index in sorted(lowest_first, key=lambda index: len(layout.blocks[index].pieces)):
        homes[index] = ALL_ON_DISK
        needed = tier_bytes(layout, _placement(homes), link_bytes=budget.link_bytes).host_bytes
        if needed <= budget.host_bytes:
            break
    return _placement(homes)


def _placement(homes: dict[int, Home]) -> Placement:
    return Placement(homes=tuple(homes[index] for index in range(len(homes))))


def sweep(placement: Placement, step: int) -> list[int]:
    """Return the order in which step number `step` visits the blocks.

    The direction alternates, so that what buffers still hold of the last step is used first.
    Blocks of the disk tier are spread evenly among the others: the disk works all the time.
    """
    disk = placement.blocks_with_state(Tier.DISK)
    others = [index for index in range(len(placement.homes)) if index not in set(disk)]
    keyed = [
        ((position + 0.5) / len(group), index)
        for group in (disk, others)
        for position, index in enumerate(group)
    ]
    order = [index for _, index in sorted(keyed)]
    return order[::-1] if step % 2 else order
