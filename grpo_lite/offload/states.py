"""Where the optimizer state of each block lies, and its way there and back.

One block's state is an fp32 tensor [3, n]: master, exp_avg, exp_avg_sq.
Blocks of the card tier have a fourth row, their gradient accumulator.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from grpo_lite.offload.blocks import BlockStatus, GradientBlock, Layout
from grpo_lite.offload.disk import DiskSettings, DiskStore
from grpo_lite.offload.memory import HostMemory
from grpo_lite.offload.placement import Placement, Tier
from grpo_lite.offload.stores import BlockStore, PinnedStore

NUM_ROWS = 3
"""master, exp_avg, exp_avg_sq."""


class BlockStates:
    """Lends the state of any block, from whatever tier it lies on."""

    def __init__(
        self,
        layout: Layout,
        placement: Placement,
        memory: HostMemory,
        device: torch.device,
        *,
        disk_dir: Path | None,
        disk_settings: DiskSettings,
    ) -> None:
        """Reserve the memory and files of every block."""
        self._layout = layout
        self._blocks = layout.blocks
        self._device = device
        self._memory = memory
        self._disk_dir = disk_dir
        self._disk_settings = disk_settings
        self.disk: DiskStore | None = None
        on_disk = {i: layout.blocks[i].state_bytes for i in placement.blocks_with_state(Tier.DISK)}
        if on_disk:
            self.disk = self._open_disk(on_disk)
        in_ram = {i: layout.blocks[i].state_bytes for i in placement.blocks_with_state(Tier.HOST)}
        self._ram = PinnedStore(in_ram, memory)
        self._slabs = {
            index: self._new_slab(layout.blocks[index])
            for index in placement.blocks_with_state(Tier.CARD)
        }
        self._homes = [home.state for home in placement.homes]

    def fetch(self, index: int, *, fresh: bool = False) -> torch.Tensor:
        """Lend the state of block `index`, fp32 [3, n]; `fresh`: its old values are not needed."""
        block = self._blocks[index]
        if index in self._slabs:
            return self._slabs[index][:NUM_ROWS]
        record = self._store(index).fetch(index, fresh=fresh)
        return record[: block.state_bytes].view(torch.float32).view(NUM_ROWS, block.num_elements)

    def put(self, index: int, *, changed: bool = True) -> None:
        """Take the state of block `index` back; taken even if an earlier write raises here."""
        if index not in self._slabs:
            self._store(index).put(index, changed=changed)

    @contextmanager
    def lent(
        self, index: int, *, fresh: bool = False, changed: bool = True
    ) -> Iterator[torch.Tensor]:
        """Lend the state of block `index` for the length of a `with`."""
        state = self.fetch(index, fresh=fresh)
        try:
            yield state
        finally:
            self.put(index, changed=changed)

    def prefetch(self, indices: Sequence[int]) -> None:
        """Begin to bring the states of `indices` near, in this order."""
        if self.disk is not None:
            self.disk.prefetch([i for i in indices if self._homes[i] is Tier.DISK])

    def card_accumulator(self, index: int) -> torch.Tensor | None:
        """Return the gradient accumulator of block `index` if it lies on the card, fp32 [n]."""
        slab = self._slabs.get(index)
        return None if slab is None else slab[NUM_ROWS]

    def status(self, index: int) -> BlockStatus:
        """Return where the state of block `index` is now."""
        if index in self._slabs:
            return BlockStatus.ON_CARD
        return self._store(index).status(index)

    def mapped(self, index: int) -> torch.Tensor:
        """Return the state of block `index` to look at, without taking RAM for it; fp32 [3, n].

        Shows later values after later steps, as torch's own state does.
        """
        if self.disk is None or self._homes[index] is not Tier.DISK:
            with self.lent(index, changed=False) as state:
                return state
        block = self._blocks[index]
        record = self.disk.mapped(index)[: block.state_bytes]
        return record.view(torch.float32).view(NUM_ROWS, block.num_elements)

    def move(self, index: int, tier: Tier) -> None:
        """Move the state of block `index` to `tier`; its accumulator is not moved.

        Raises:
            StoreError: the new tier is full; the block stays where it was.
        """
        block = self._blocks[index]
        old = self.fetch(index)
        if tier is Tier.CARD:
            slab = self._new_slab(block)
            slab[:NUM_ROWS].copy_(old)
        else:
            store = self._disk_or_ram(tier)
            store.add(index, block.state_bytes)
            record = store.fetch(index, fresh=True)[: block.state_bytes]
            record.view(torch.float32).view(NUM_ROWS, block.num_elements).copy_(old)
            store.put(index)
        self.put(index, changed=False)
        if index in self._slabs:
            del self._slabs[index]
        else:
            self._store(index).remove(index)
        if tier is Tier.CARD:
            self._slabs[index] = slab
        self._homes[index] = tier

    def commit(self, meta: dict[str, Any], *, durable: bool = False) -> None:
        """Make the states on disk a whole generation described by `meta`."""
        if self.disk is not None:
            self.disk.commit(meta, durable=durable)

    def settle(self) -> None:
        """Wait until every state has reached its tier."""
        if self.disk is not None:
            self.disk.settle()

    def close(self, *, keep_files: bool = False) -> None:
        """Free memory, and files unless a later run is to resume from them."""
        if self.disk is not None:
            self.disk.close(keep_files=keep_files)
        self._ram.close()
        self._slabs = {}

    def _new_slab(self, block: GradientBlock) -> torch.Tensor:
        return torch.empty(
            NUM_ROWS + 1, block.num_elements, dtype=torch.float32, device=self._device
        )

    def _store(self, index: int) -> BlockStore:
        return self._disk_or_ram(self._homes[index])

    def _disk_or_ram(self, tier: Tier) -> BlockStore:
        if tier is Tier.DISK:
            if self.disk is None:
                self.disk = self._open_disk({})
            return self.disk
        return self._ram

    def _open_disk(self, sizes: dict[int, int]) -> DiskStore:
        assert self._disk_dir is not None, "a placement on disk needs a folder"
        largest = max(block.state_bytes for block in self._blocks)
        return DiskStore(
            self._disk_dir,
            sizes,
            self._memory,
            fingerprint=self._layout.fingerprint(),
            settings=replace(self._disk_settings, largest_bytes=largest),
        )
