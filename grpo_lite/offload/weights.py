"""The weights on the card and their fp32 masters in a block: each can be made of the other.

Knows the way (`link`) and the element ranges, not where blocks live.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from grpo_lite.offload.blocks import GradientBlock, Piece
from grpo_lite.offload.link import CHUNK_ELEMENTS, Consumer, Link


class Weights:
    """The parameters as flat ranges."""

    def __init__(
        self, parameters: Sequence[torch.Tensor], link: Link, scalar: torch.Tensor
    ) -> None:
        """`scalar` is a host fp32 element that sums may be written to."""
        self._parameters = parameters
        self._link = link
        self._scalar = scalar

    def read(self, block: GradientBlock, master: torch.Tensor) -> float:
        """Fill `master`, fp32 [n], from the weights of `block`; return their L2 norm."""
        for piece in block.pieces:
            source = self._flat(piece.parameter)[piece.start : piece.stop]
            into = master[piece.offset : piece.offset + piece.num_elements]
            if master.device == source.device:
                into.copy_(source)
            else:
                self._link.to_host(source, _copier(into))
        self._link.drain()
        return self._norm(block, master)

    def send(self, piece: Piece, master: torch.Tensor, chunk: slice) -> None:
        """Set the weights of `chunk` of `piece` from `master`, the block's fp32 [n]."""
        source = master[piece.offset + chunk.start : piece.offset + chunk.stop]
        target = self._flat(piece.parameter)[piece.start + chunk.start : piece.start + chunk.stop]
        if source.device == target.device:
            target.copy_(source)
        else:
            self._link.to_card(source, target)

    def send_all(self, block: GradientBlock, master: torch.Tensor) -> None:
        """Set all weights of `block` from `master`."""
        for piece in block.pieces:
            self.send(piece, master, slice(0, piece.num_elements))

    def _flat(self, parameter: int) -> torch.Tensor:
        return self._parameters[parameter].detach().view(-1)

    def _norm(self, block: GradientBlock, master: torch.Tensor) -> float:
        if master.device.type != "cpu":
            pieces = [master[p.offset : p.offset + p.num_elements] for p in block.pieces]
            return math.sqrt(math.fsum(float(torch.linalg.vector_norm(p)) ** 2 for p in pieces))
        squares = []
        for piece in block.pieces:
            for start in range(0, piece.num_elements, CHUNK_ELEMENTS):
                stop = min(start + CHUNK_ELEMENTS, piece.num_elements)
                chunk = master[piece.offset + start : piece.offset + stop]
                torch.dot(chunk, chunk, out=self._scalar)  # allocates nothing
                squares.append(self._scalar.item())
        return math.sqrt(math.fsum(squares))


def _copier(into: torch.Tensor) -> Consumer:
    def consume(source: torch.Tensor, start: int) -> None:
        into[start : start + source.numel()].copy_(source)

    return consume
