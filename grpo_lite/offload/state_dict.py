"""State of a block engine as torch's optimizers show it, and back, one block at a time.

A parameter that lies in several blocks shows each of its tensors as a list of flat pieces.
Nothing is gathered: tensors are views of the blocks, on disk they are read when touched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from grpo_lite.errors import UsageError
from grpo_lite.offload.engine import BlockEngine

ROWS = ("master", "exp_avg", "exp_avg_sq")
"""The rows of a block's state, by the names that torch uses."""


def export_state(engine: BlockEngine) -> dict[int, dict[str, Any]]:
    """Return the state of every updated parameter, by its number in the layout."""
    engine.settle()
    pieces: dict[int, dict[str, list[tuple[int, torch.Tensor]]]] = {}
    for block in engine.layout.blocks:
        if not any(engine.num_updates[piece.parameter] for piece in block.pieces):
            continue
        state = engine.states.mapped(block.index)
        for piece in block.pieces:
            found = pieces.setdefault(piece.parameter, {row: [] for row in ROWS})
            for row, values in zip(ROWS, state, strict=True):
                part = values[piece.offset : piece.offset + piece.num_elements]
                found[row].append((piece.start, part))
    return {
        parameter: {
            "step": engine.num_updates[parameter],
            **{row: [part for _, part in sorted(parts, key=_start)] for row, parts in rows.items()},
        }
        for parameter, rows in pieces.items()
        if engine.num_updates[parameter]
    }


@torch.no_grad()
def import_state(engine: BlockEngine, states: Mapping[int, Mapping[str, Any]]) -> None:
    """Take `states`, by number in the layout; parameters that are not in it begin anew.

    A state without masters (torch's AdamW) takes the weights as they are now.

    Raises:
        UsageError: a state is not that of a parameter of this size; nothing is changed then.
    """
    sources = {
        parameter: _Source(engine.layout.parameters[parameter].name, state)
        for parameter, state in states.items()
    }
    for parameter, source in sources.items():
        source.require_size(engine.layout.parameters[parameter].num_elements)
    engine.require_masters()
    if not all(source.has_master for source in sources.values()):
        engine.refresh_masters()
    for block in engine.layout.blocks:
        with engine.states.lent(block.index) as state:
            for piece in block.pieces:
                into = state[:, piece.offset : piece.offset + piece.num_elements]
                if piece.parameter in sources:
                    sources[piece.parameter].copy(piece.start, into)
                else:
                    into[1:].zero_()
    engine.restart_from({parameter: source.num_updates for parameter, source in sources.items()})


class _Source:
    """One parameter's state, whole or in pieces of any cut."""

    def __init__(self, name: str, state: Mapping[str, Any]) -> None:
        self.name = name
        self.num_updates = int(state["step"])
        self._rows = {row: _flat_pieces(state[row]) for row in ROWS if row in state}

    @property
    def has_master(self) -> bool:
        return "master" in self._rows

    def require_size(self, num_elements: int) -> None:
        for row in ROWS:
            if row not in self._rows and row != "master":
                raise UsageError(
                    f"the state of {self.name} has no {row}",
                    hint="load what state_dict() of OffloadedAdamW or AdamW returned",
                )
            found = sum(part.numel() for part in self._rows.get(row, []))
            if row in self._rows and found != num_elements:
                raise UsageError(
                    f"{row} of {self.name} has {found} elements, the parameter {num_elements}",
                    hint="this is the state of another model",
                )

    def copy(self, start: int, into: torch.Tensor) -> None:
        """Fill `into`, [3, n], from element `start` on; rows that are missing stay."""
        for row, target in zip(ROWS, into, strict=True):
            position = 0
            for part in self._rows.get(row, []):
                first = max(start, position)
                last = min(start + target.numel(), position + part.numel())
                if first < last:
                    target[first - start : last - start].copy_(
                        part[first - position : last - position]
                    )
                position += part.numel()


def _flat_pieces(value: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
    parts = [value] if isinstance(value, torch.Tensor) else list(value)
    return [part.reshape(-1) for part in parts]


def _start(pair: tuple[int, torch.Tensor]) -> int:
    return pair[0]
