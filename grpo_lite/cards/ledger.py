"""A byte ledger over tensor storages: what is alive, what the peak was, what broke the budget.

`StorageLedger` counts; `LedgerMode` feeds it from one thread by watching every operation.
Works the same on real CPU tensors and on fake ones, so that a prediction (fake) and a run (real)
are counted by the same code.
Knows nothing of phases, plans or models.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_lite.units import format_bytes

Observer = Callable[[int, int, torch.Tensor | None, Any], None]


class StorageLedger:
    """Counts each live storage once, from the operation that made it to its death.

    `observer(key, delta_bytes, tensor, operation)` sees every birth (tensor and operation given)
    and death (both None); `key` is unique for the ledger's life.
    """

    def __init__(
        self, *, budget_bytes: int | None = None, observer: Observer | None = None
    ) -> None:
        self.budget_bytes = budget_bytes
        self.allocated_bytes = 0
        self.peak_bytes = 0
        self.host_bytes = 0
        self.num_births = 0
        self._observer = observer
        self._entries: dict[int, _Entry] = {}
        self._attached = threading.local()
        self._lock = threading.RLock()

    def admit(self, tensor: torch.Tensor, operation: Any = None) -> None:
        """Count the storage of `tensor` unless it is known.

        Raises:
            torch.OutOfMemoryError: it does not fit the budget; nothing is counted then.
        """
        storage = tensor.untyped_storage()
        num_bytes = storage.nbytes()
        with self._lock:
            entry = self._entries.get(storage._cdata)
            if entry is None:
                if num_bytes:
                    self._birth(storage, num_bytes, tensor, operation)
            elif entry.on_card and entry.num_bytes != num_bytes:
                self._grow(num_bytes - entry.num_bytes)
                entry.num_bytes = num_bytes

    def admit_host(self, tensor: torch.Tensor) -> None:
        """Count the storage of `tensor` as the host's for as long as it lives."""
        storage = tensor.untyped_storage()
        with self._lock:
            if storage._cdata not in self._entries:
                self._remember(storage, storage.nbytes(), on_card=False)
                self.host_bytes += storage.nbytes()

    def key_of(self, tensor: torch.Tensor) -> int | None:
        """Return the observer's key of the storage of `tensor`; None if it is not counted."""
        entry = self._entries.get(tensor.untyped_storage()._cdata)
        return entry.key if entry is not None and entry.on_card else None

    def reset_peak(self) -> None:
        """Start a new peak from what is alive now."""
        with self._lock:
            self.peak_bytes = self.allocated_bytes

    @contextmanager
    def attach(self) -> Iterator[None]:
        """Count what this thread allocates inside; nested entries count once."""
        if getattr(self._attached, "depth", 0):
            yield
            return
        self._attached.depth = 1
        try:
            with LedgerMode(self):
                yield
        finally:
            self._attached.depth = 0

    def _birth(
        self, storage: torch.UntypedStorage, num_bytes: int, tensor: torch.Tensor, operation: Any
    ) -> None:
        self._grow(num_bytes)
        entry = self._remember(storage, num_bytes, on_card=True)
        if self._observer is not None:
            self._observer(entry.key, num_bytes, tensor, operation)

    def _grow(self, num_bytes: int) -> None:
        """Add `num_bytes` to what is alive; `_refuse` beyond the budget."""
        after = self.allocated_bytes + num_bytes
        if self.budget_bytes is not None and num_bytes > 0 and after > self.budget_bytes:
            self._refuse(num_bytes)
        self.allocated_bytes = after
        self.peak_bytes = max(self.peak_bytes, after)

    def _refuse(self, num_bytes: int) -> None:
        assert self.budget_bytes is not None
        free_bytes = self.budget_bytes - self.allocated_bytes
        error = torch.OutOfMemoryError(
            f"VirtualCard out of memory. Tried to allocate {format_bytes(num_bytes)}. "
            f"Of {format_bytes(self.budget_bytes)} in all, "
            f"{format_bytes(self.allocated_bytes)} is allocated, "
            f"{format_bytes(free_bytes)} is free ({num_bytes} bytes asked, {free_bytes} free)."
        )
        # Numbers for `VirtualCard.read_oom`, so that nobody has to read them out of the text.
        error.asked_bytes = num_bytes  # type: ignore[attr-defined]  # a Python attribute of ours
        error.free_bytes = free_bytes  # type: ignore[attr-defined]  # likewise
        raise error

    def _remember(self, storage: torch.UntypedStorage, num_bytes: int, *, on_card: bool) -> _Entry:
        self.num_births += 1
        address = storage._cdata
        entry = _Entry(key=self.num_births, num_bytes=num_bytes, on_card=on_card)
        self._entries[address] = entry
        # weakref.ref, not finalize: torch keeps the Python storage alive as long as the C++ one
        # lives, so the callback comes exactly at the storage's death.
        entry.reference = weakref.ref(storage, lambda _: self._death(address))
        return entry

    def _death(self, address: int) -> None:
        with self._lock:
            entry = self._entries.pop(address, None)
            if entry is None:
                return
            if not entry.on_card:
                self.host_bytes -= entry.num_bytes
                return
            self.allocated_bytes -= entry.num_bytes
            if self._observer is not None:
                self._observer(entry.key, -entry.num_bytes, None, None)


class _Entry:
    __slots__ = ("key", "num_bytes", "on_card", "reference")

    def __init__(self, *, key: int, num_bytes: int, on_card: bool) -> None:
        self.key = key
        self.num_bytes = num_bytes
        self.on_card = on_card
        self.reference: weakref.ref[torch.UntypedStorage] | None = None


class LedgerMode(TorchDispatchMode):
    """Feeds a ledger with the outputs of every operation of the thread that entered it."""

    def __init__(self, ledger: StorageLedger) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's stub is untyped
        self._ledger = ledger

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func` and admit the storages of what it returns."""
        out = func(*args, **(kwargs or {}))
        for tensor in tensors_in(out):
            self._ledger.admit(tensor, func)
        return out


def tensors_in(out: Any) -> Iterable[torch.Tensor]:
    """Return the tensors in an operation's arguments or results: alone or in (nested) sequences."""
    if isinstance(out, torch.Tensor):
        return (out,)
    if isinstance(out, list | tuple):
        return [tensor for part in out for tensor in tensors_in(part)]
    return ()
