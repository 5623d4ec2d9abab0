"""What every rescue needs: one try that lets its error go, and the random state to try again with.

Knows cards and torch; decides nothing.
"""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from grpo_lite.cards.card import Card, OutOfMemory

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Rescue:
    """One out-of-memory, read off the error so that the error can be let go."""

    oom: OutOfMemory
    """What the error said."""
    allocated_bytes: int
    """Tensor bytes that were alive when it came."""


@dataclass(frozen=True, slots=True, eq=False)
class RandomState:
    """The generators that a step may draw from."""

    python: Any
    """Of the module random."""
    numpy: Any
    """Of numpy's legacy generator; None where numpy is not loaded."""
    host: torch.Tensor
    """Of torch on the host."""
    cuda: torch.Tensor | None
    """Of torch on the card; None without CUDA."""


def try_once(card: Card, function: Callable[[], Result]) -> Result | Rescue:
    """Return the result of `function`, or what an out-of-memory said; any other error passes.

    The caller acts outside of the handler: in it the traceback would keep the tensors alive.
    """
    try:
        return function()
    except Exception as error:
        oom = card.read_oom(error)
        if oom is None:
            raise
        return Rescue(oom=oom, allocated_bytes=card.allocated_bytes())


def collect(card: Card) -> None:
    """Free what only reference cycles and caches hold."""
    gc.collect()
    card.release_cached()


def random_state(device: torch.device) -> RandomState:
    """Return the state of Python's, numpy's and torch's generators."""
    numpy = sys.modules.get("numpy")
    return RandomState(
        python=random.getstate(),
        numpy=None if numpy is None else numpy.random.get_state(),
        host=torch.get_rng_state(),
        cuda=torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    )


def restore_random_state(device: torch.device, state: RandomState) -> None:
    """Let all generators go on from `state`."""
    random.setstate(state.python)
    numpy = sys.modules.get("numpy")
    if numpy is not None and state.numpy is not None:
        numpy.random.set_state(state.numpy)
    torch.set_rng_state(state.host)
    if state.cuda is not None:
        torch.cuda.set_rng_state(state.cuda, device)
