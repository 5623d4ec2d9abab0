"""How gradients are cut into blocks: flat element ranges in the order in which backward makes them.

A block is at most `block_bytes` of gradient (128 MiB), and drags an fp32 master, `exp_avg` and
`exp_avg_sq` of the same elements: 12 bytes an element, six times its size for bf16 gradients.
Pure: knows neither torch nor where a block lives (`placement`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from grpo_lite.errors import UsageError
from grpo_lite.units import MIB, format_bytes

BLOCK_BYTES = 128 * MIB
"""Gradient bytes in a full block."""
SPLIT_ELEMENTS = 64
"""Tensors are cut, and begin inside a block, at multiples of this: a fused AdamW treats the last
elements of a range that is not whole vectors by other instructions, so that other cuts would change
bits; 64 fp32 elements are also whole cache lines."""
ACCUMULATOR_BYTES = 4
"""Bytes of one fp32 gradient element."""
STATE_BYTES = 12
"""Bytes of one element's fp32 master, exp_avg and exp_avg_sq."""


class BlockStatus(StrEnum):
    """Where a block's optimizer state is at this moment."""

    ON_CARD = "on card"
    COPYING = "copying"
    STORED = "stored"
    FETCHING = "fetching"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterShape:
    """What the layout needs to know of one parameter."""

    name: str
    """Its name in the model."""
    num_elements: int
    """Elements of the tensor."""
    element_bytes: int
    """Bytes of one gradient element: 2 for bf16, 4 for fp32."""
    identity: int
    """The same for two names of one tensor (tied weights), different otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A range of one parameter's elements and its place in the block."""

    parameter: int
    """Index into `Layout.parameters`."""
    start: int
    """First element of the range, in the flat parameter."""
    stop: int
    """End of the range, exclusive."""
    offset: int
    """Where the range begins in the block, in elements."""

    @property
    def num_elements(self) -> int:
        """Elements of the range."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientBlock:
    """One block: what it holds and how large it is."""

    index: int
    """Position in backward order: block 0 is finished first."""
    pieces: tuple[Piece, ...]
    """Its ranges, by offset."""
    num_elements: int
    """Elements of its slabs, gaps between pieces included."""
    gradient_bytes: int
    """Bytes of its gradient as backward makes it."""

    @property
    def accumulator_bytes(self) -> int:
        """Bytes of its fp32 gradient accumulator."""
        return ACCUMULATOR_BYTES * self.num_elements

    @property
    def state_bytes(self) -> int:
        """Bytes of its fp32 master, exp_avg and exp_avg_sq."""
        return STATE_BYTES * self.num_elements


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """All blocks of a model; each element of each parameter lies in exactly one."""

    parameters: tuple[ParameterShape, ...]
    """The distinct parameters, in the order in which they were given."""
    blocks: tuple[GradientBlock, ...]
    """The blocks, in backward order."""
    block_bytes: int
    """The limit that they were cut to."""

    @property
    def largest_gradient_bytes(self) -> int:
        """Bytes of the largest gradient, which backward makes whole before it can be taken."""
        return max(shape.num_elements * shape.element_bytes for shape in self.parameters)

    def pieces_of(self, parameter: int) -> list[tuple[GradientBlock, Piece]]:
        """Return where the elements of `parameter` lie, by first element."""
        found = [
            (block, piece)
            for block in self.blocks
            for piece in block.pieces
            if piece.parameter == parameter
        ]
        return sorted(found, key=lambda pair: pair[1].start)

    def fingerprint(self) -> str:
        """Return a short hash of names, sizes and cuts: the same for the same model and blocks."""
        text = repr((self.block_bytes, [(s.name, s.num_elements) for s in self.parameters]))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def lay_out(parameters: Sequence[ParameterShape], *, block_bytes: int = BLOCK_BYTES) -> Layout:
    """Return the blocks of `parameters`, which come in forward order; tied ones count once.

    Raises:
        UsageError: nothing to train, or a block size that cannot hold the smallest cut.
    """
    distinct = _distinct(parameters)
    if not distinct:
        raise UsageError("nothing to train: no parameter has elements and requires a gradient")
    smallest = SPLIT_ELEMENTS * max(shape.element_bytes for shape in distinct)
    if block_bytes < smallest:
        raise UsageError(
            f"block_bytes is {block_bytes}; a block holds at least {SPLIT_ELEMENTS} elements, "
            f"{smallest} bytes here",
            hint=f"block_bytes={BLOCK_BYTES} ({format_bytes(BLOCK_BYTES)})",
        )
    filling = _Filling(block_bytes=block_bytes, blocks=[], pieces=[])
    for parameter in reversed(range(len(distinct))):
        filling.add(parameter, distinct[parameter])
    filling.close_block()
    return Layout(parameters=distinct, blocks=tuple(filling.blocks), block_bytes=block_bytes)


@dataclass(slots=True, kw_only=True)
class _Filling:
    """The block that is being filled, and those that are full."""

    block_bytes: int
    blocks: list[GradientBlock]
    pieces: list[Piece]
    used_elements: int = 0
    used_bytes: int = 0

    def add(self, parameter: int, shape: ParameterShape) -> None:
        start = 0
        while start < shape.num_elements:
            room = (self.block_bytes - self.used_bytes) // shape.element_bytes
            room -= room % SPLIT_ELEMENTS
            if not room:
                self.close_block()
                continue
            stop = min(shape.num_elements, start + room)
            self.pieces.append(
                Piece(parameter=parameter, start=start, stop=stop, offset=self.used_elements)
            )
            taken = -(-(stop - start) // SPLIT_ELEMENTS) * SPLIT_ELEMENTS
            self.used_elements += taken
            self.used_bytes += taken * shape.element_bytes
            start = stop

    def close_block(self) -> None:
        if self.pieces:
            self.blocks.append(
                GradientBlock(
                    index=len(self.blocks),
                    pieces=tuple(self.pieces),
                    num_elements=self.used_elements,
                    gradient_bytes=self.used_bytes,
                )
            )
        self.pieces = []
        self.used_elements = self.used_bytes = 0


def _distinct(parameters: Sequence[ParameterShape]) -> tuple[ParameterShape, ...]:
    seen: dict[int, ParameterShape] = {}
    for shape in parameters:
        if shape.num_elements:
            seen.setdefault(shape.identity, shape)
    return tuple(seen.values())
