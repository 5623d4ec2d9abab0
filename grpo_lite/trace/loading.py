"""The log of bringing a model onto the card, with the holes that it leaves in the allocator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from grpo_lite.predict.allocator import Event


def loading_events(model: torch.nn.Module, *, wide_item: int, keys: Iterator[int]) -> list[Event]:
    """Return the log of loading `model`, whose weights are loaded with `wide_item` bytes each.

    A model that is quantised on the fly is loaded straight onto the card: transformers asks for one
    block of the final size first (`caching_allocator_warmup`), then takes weights by name
    (`dot_natural_key`). Each lies there in its wide form while it is packed, and what
    `prepare_model_for_kbit_training` widens lies there twice for a moment.
    Other models are moved there module by module.

    `keys` gives a key that is not used yet.
    """
    loading = _Loading(keys=keys, wide_item=wide_item)
    modules = list(model.named_modules())
    if any(is_packed(module) for _, module in modules):
        modules.sort(key=lambda pair: _natural(pair[0]))
        loading.free(loading.allocate(_final_bytes(model, wide_item)))
    for _, module in modules:
        loading.bring(module)
    loading.widen()
    return loading.events


def is_packed(module: torch.nn.Module) -> bool:
    """Return whether `module` is a 4-bit stand-in."""
    return hasattr(module, "dequantised")


def _natural(name: str) -> list[tuple[bool, int, str]]:
    parts = name.split(".")
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]


def _final_bytes(model: torch.nn.Module, wide_item: int) -> int:
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    return sum(p.numel() * (1 if p.dtype == torch.uint8 else wide_item) for p in frozen)


@dataclass(slots=True)
class _Loading:
    """The log as it grows."""

    keys: Iterator[int]
    wide_item: int
    events: list[Event] = field(default_factory=list)
    _seen: set[int] = field(default_factory=set)
    _to_widen: list[tuple[int, int]] = field(default_factory=list)

    def allocate(self, num_bytes: int) -> int:
        key = next(self.keys)
        self.events.append(Event(key, num_bytes))
        return key

    def free(self, key: int) -> None:
        self.events.append(Event(key))

    def bring(self, module: Any) -> None:
        """Log the tensors of `module` itself."""
        packed = is_packed(module)
        wide = None
        if packed:
            wide = self.allocate(module.in_features * module.out_features * self.wide_item)
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is None or tensor.untyped_storage()._cdata in self._seen:
                continue
            self._seen.add(tensor.untyped_storage()._cdata)
            num_bytes = tensor.untyped_storage().nbytes()
            frozen = isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad
            if frozen and not packed and tensor.element_size() > self.wide_item:
                self._to_widen.append((self.allocate(tensor.numel() * self.wide_item), num_bytes))
            elif num_bytes:
                self.allocate(num_bytes)
        if wide is not None:
            self.free(wide)

    def widen(self) -> None:
        """Log what `prepare_model_for_kbit_training` does: it widens, then empties the cache."""
        for narrow, num_bytes in self._to_widen:
            self.allocate(num_bytes)
            self.free(narrow)
        if self._to_widen:
            self.events.append(Event(None))
