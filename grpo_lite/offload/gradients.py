"""Gradients summed over micro-batches in fp32, block by block, wherever their block lives.

Takes each gradient as backward makes it, so that no parameter holds one until the step.
Sums of squares are taken while a chunk is in the cache: the global norm costs no pass of its own.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence

import torch

from grpo_lite.errors import StoreError
from grpo_lite.offload.blocks import GradientBlock, Layout, Piece
from grpo_lite.offload.disk import DiskStore
from grpo_lite.offload.link import CHUNK_ELEMENTS, Link
from grpo_lite.offload.memory import HostMemory
from grpo_lite.offload.placement import Home, Placement, Tier
from grpo_lite.offload.states import BlockStates


class GradientBank:
    """The fp32 gradient accumulator of every block.

    One thread adds at a time (the link's worker, or the caller where there is none); all else is
    called after `Link.drain`.
    """

    def __init__(
        self,
        layout: Layout,
        placement: Placement,
        states: BlockStates,
        link: Link,
        memory: HostMemory,
        open_disk: Callable[[dict[int, int]], DiskStore],
    ) -> None:
        """`open_disk` makes a store for gradient records of these sizes, by block."""
        self._layout = layout
        self._states = states
        self._link = link
        self._memory = memory
        self._pieces = [layout.pieces_of(index) for index in range(len(layout.parameters))]
        self._homes = [home.gradient for home in placement.homes]
        self._in_ram = {
            index: memory.empty(layout.blocks[index].num_elements, torch.float32)
            for index in placement.blocks_with_gradient(Tier.HOST)
        }
        self._open_disk = open_disk
        self._disk: DiskStore | None = None
        spilled = placement.blocks_with_gradient(Tier.DISK)
        if spilled:
            self._disk = open_disk({i: layout.blocks[i].accumulator_bytes for i in spilled})
        self._scratch = memory.empty(CHUNK_ELEMENTS, torch.float32)
        self._dot = memory.empty(1, torch.float32)[0]
        self._filled: set[int] = set()
        self._touched: set[int] = set()
        self._squares: dict[tuple[int, int], float] = {}
        self._failure: BaseException | None = None
        self._lent: int | None = None
        self._lent_record: torch.Tensor | None = None

    @property
    def filled(self) -> frozenset[int]:
        """The parameters that have a gradient."""
        return frozenset(self._filled)

    @property
    def disk_written_bytes(self) -> int:
        """Bytes of gradients written to disk so far."""
        return self._disk.written_bytes if self._disk is not None else 0

    @property
    def disk_read_bytes(self) -> int:
        """Bytes of gradients read from disk so far."""
        return self._disk.read_bytes if self._disk is not None else 0

    def add(self, parameter: int, gradient: torch.Tensor) -> None:
        """Add `gradient` (any float dtype, shape of the parameter) to what was added before."""
        first = parameter not in self._filled
        flat = gradient.detach().reshape(-1)
        for block, piece in self._pieces[parameter]:
            part = flat[piece.start : piece.stop]
            if self._homes[block.index] is Tier.CARD:
                slab = self._states.card_accumulator(block.index)
                assert slab is not None, "a gradient on the card has its state there"
                into = slab[piece.offset : piece.offset + piece.num_elements]
                into.copy_(part) if first else into.add_(part)
            else:
                self._link.to_host(part, self._adder(block, piece, first=first))
        self._filled.add(parameter)

    def clear(self) -> None:
        """Forget all gradients."""
        self._filled.clear()
        self._touched.clear()
        self._squares.clear()
        with contextlib.suppress(Exception):  # what failed is forgotten too
            self._link.drain()
        self._failure = None
        if self._disk is not None:
            self._disk.discard()
        self._release_lent(changed=False)

    def sums_of_squares(self) -> list[float]:
        """Return the sum of squares of each block's gradient, as fp32 chunk sums added in fp64.

        Raises:
            StoreError: a gradient was lost when a tier failed; only `clear` helps.
        """
        self._link.drain()
        if self._failure is not None:
            raise StoreError(
                f"gradients are incomplete: {self._failure}",
                hint="call zero_grad() and repeat the backward passes of this update",
            ) from self._failure
        self._release_lent()
        chunks: list[list[float]] = [[] for _ in self._layout.blocks]
        for (index, _), square in self._squares.items():
            chunks[index].append(square)
        for index, tier in enumerate(self._homes):
            if tier is Tier.CARD:
                chunks[index] = self._card_squares(self._layout.blocks[index])
        return [math.fsum(found) for found in chunks]

    def fetch(self, index: int) -> torch.Tensor:
        """Lend the gradient of block `index`, fp32 [n]; parts without a gradient are undefined."""
        if self._homes[index] is Tier.CARD:
            slab = self._states.card_accumulator(index)
            assert slab is not None
            return slab
        return self._on_host(index)

    def prefetch(self, indices: Sequence[int]) -> None:
        """Begin to read those gradients of `indices` that are on disk, in this order."""
        if self._disk is not None:
            self._disk.prefetch([index for index in indices if index in self._touched])

    def release(self) -> None:
        """Take back what `fetch` lent; a step has used it up."""
        self._release_lent(changed=False)

    def settle(self) -> None:
        """Wait until gradients on disk are there."""
        if self._disk is not None:
            self._release_lent()
            self._disk.settle()

    def move(self, index: int, home: Home) -> None:
        """Use `home` for block `index` from the next gradient on; nothing may be summed now."""
        assert not self._filled, "gradients are not moved"
        if self._homes[index] is home.gradient:
            return
        num_elements = self._layout.blocks[index].num_elements
        if home.gradient is Tier.HOST:
            self._in_ram[index] = self._memory.empty(num_elements, torch.float32)
        elif home.gradient is Tier.DISK:
            if self._disk is None:
                self._disk = self._open_disk({})
            self._disk.add(index, self._layout.blocks[index].accumulator_bytes)
        if self._homes[index] is Tier.HOST:
            del self._in_ram[index]
        if self._homes[index] is Tier.DISK and self._disk is not None:
            self._disk.remove(index)
        self._homes[index] = home.gradient

    def close(self) -> None:
        """Free memory and files."""
        if self._disk is not None:
            self._disk.close()
        self._in_ram = {}

    def _adder(
        self, block: GradientBlock, piece: Piece, *, first: bool
    ) -> Callable[[torch.Tensor, int], None]:
        def consume(source: torch.Tensor, start: int) -> None:
            try:
                self._add_chunks(block.index, piece.offset + start, source, first=first)
            except BaseException as error:
                self._failure = error
                raise

        return consume

    def _add_chunks(self, index: int, offset: int, source: torch.Tensor, *, first: bool) -> None:
        """Add host tensor `source` at `offset` of block `index`, keeping its sum of squares."""
        accumulator = self._on_host(index)
        for start in range(0, source.numel(), CHUNK_ELEMENTS):
            part = source[start : start + CHUNK_ELEMENTS]
            into = accumulator[offset + start : offset + start + part.numel()]
            if first:
                into.copy_(part)
            elif part.dtype == torch.float32:
                into.add_(part)
            else:  # three times as fast as adding across dtypes
                upcast = self._scratch[: part.numel()]
                upcast.copy_(part)
                into.add_(upcast)
            torch.dot(into, into, out=self._dot)
            self._squares[index, offset + start] = self._dot.item()

    def _card_squares(self, block: GradientBlock) -> list[float]:
        slab = self._states.card_accumulator(block.index)
        assert slab is not None
        squares = []
        for piece in block.pieces:
            if piece.parameter not in self._filled:
                continue
            part = slab[piece.offset : piece.offset + piece.num_elements]
            if slab.device.type == "cpu":
                for start in range(0, piece.num_elements, CHUNK_ELEMENTS):
                    chunk = part[start : start + CHUNK_ELEMENTS]
                    torch.dot(chunk, chunk, out=self._dot)
                    squares.append(self._dot.item())
            else:
                squares.append(float(torch.linalg.vector_norm(part)) ** 2)
        return squares

    def _on_host(self, index: int) -> torch.Tensor:
        """Return the accumulator of block `index` in RAM, lent by the disk where it lives there."""
        if index in self._in_ram:
            return self._in_ram[index]
        assert self._disk is not None, "the disk of gradients is not open"
        if self._lent_record is None or self._lent != index:
            self._release_lent()
            self._lent_record = self._disk.fetch(index, fresh=index not in self._touched)
            self._lent = index
            self._touched.add(index)
            self.prefetch([index + 1])
        num_bytes = self._layout.blocks[index].accumulator_bytes
        return self._lent_record[:num_bytes].view(torch.float32)

    def _release_lent(self, *, changed: bool = True) -> None:
        if self._lent is not None and self._disk is not None:
            lent, self._lent, self._lent_record = self._lent, None, None
            self._disk.put(lent, changed=changed)
