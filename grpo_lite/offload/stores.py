"""Where blocks go when they leave the card: the contract of a store, and the store in RAM.

A store knows records of bytes by key; whether they are gradients or optimizer state it does not
know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from grpo_lite.offload.blocks import BlockStatus
from grpo_lite.offload.memory import HostMemory


class BlockStore(Protocol):
    """Records of fixed size by integer key, lent to one user at a time.

    Contract:
        `fetch` lends the record's memory (flat uint8, host) to the caller, who may change it in
        place until `put` gives it back; nobody else touches it meanwhile.
        What was put last under a key is what `fetch` lends next, byte by byte, or `StoreError`:
        never other bytes.
        `put` may return before the record has reached its place; `settle` waits for that.
        An error of a write is raised at a later call, the record stays in RAM, and the next call
        tries again: after `StoreError` the caller may free space and go on where it stopped.
        One thread at a time calls a store. `close` frees memory and files and may come twice.
    """

    read_bytes: int
    """Bytes read from the store's medium so far; 0 where it is memory."""
    written_bytes: int
    """Bytes written to the store's medium so far; 0 where it is memory."""

    def prefetch(self, keys: Sequence[int]) -> None:
        """Begin to bring `keys` near, in this order, as far as buffers are free; never waits.

        What is near already stays: no record makes room for another of `keys`.
        """
        ...

    def fetch(self, key: int, *, fresh: bool = False) -> torch.Tensor:
        """Lend record `key`; `fresh`: its old bytes are not needed and may be anything."""
        ...

    def put(self, key: int, *, changed: bool = True) -> None:
        """Take record `key` back; `changed=False`: the caller only read it."""
        ...

    def status(self, key: int) -> BlockStatus:
        """Return where record `key` is: STORED, or on its way (COPYING there, FETCHING back)."""
        ...

    def add(self, key: int, num_bytes: int) -> None:
        """Make room for a new record, not larger than the largest one, or raise `StoreError`."""
        ...

    def remove(self, key: int) -> None:
        """Give up record `key` and its room."""
        ...

    def settle(self) -> None:
        """Wait until all that was put has reached its place."""
        ...

    def close(self) -> None:
        """Free memory and files."""
        ...


class PinnedStore:
    """A `BlockStore` in RAM: records are lent where they lie, nothing is copied.

    The records are pageable; what crosses the link goes through the pinned ring of `link`, since
    pinning records of 768 MiB would take 1 GiB each.
    """

    def __init__(self, sizes: Mapping[int, int], memory: HostMemory) -> None:
        """Allocate a record of `sizes[key]` bytes for each key."""
        self.read_bytes = 0
        self.written_bytes = 0
        self._records = {key: memory.record(num_bytes) for key, num_bytes in sizes.items()}
        self._memory = memory
        self._lent: set[int] = set()

    def prefetch(self, keys: Sequence[int]) -> None:
        """Do nothing: records are near."""

    def fetch(self, key: int, *, fresh: bool = False) -> torch.Tensor:
        """Lend record `key` where it lies."""
        assert key not in self._lent, f"record {key} is lent already"
        self._lent.add(key)
        return self._records[key]

    def put(self, key: int, *, changed: bool = True) -> None:
        """Take record `key` back."""
        self._lent.remove(key)

    def status(self, key: int) -> BlockStatus:
        """Return STORED: records do not move."""
        assert key in self._records
        return BlockStatus.STORED

    def add(self, key: int, num_bytes: int) -> None:
        """Allocate record `key`."""
        self._records[key] = self._memory.record(num_bytes)

    def remove(self, key: int) -> None:
        """Free record `key`."""
        del self._records[key]

    def settle(self) -> None:
        """Return at once: records are always in their place."""

    def close(self) -> None:
        """Free the records."""
        self._records = {}
