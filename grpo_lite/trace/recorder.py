"""Writes down, in order, every storage that a step makes and frees, and what each part computes.

One `Recorder` follows one run of a step on fake tensors; `mark` cuts the run into segments, and
`watch_layers` marks each decoder layer in forward, in recomputation and in backward.
Knows nothing of prediction: it only records.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from grpo_lite.cards.ledger import LedgerMode, StorageLedger, tensors_in
from grpo_lite.predict.footprint import Gradients

IN_PLACE = 0
"""Event: the storage has become the gradient of a parameter, or exists to be added to."""
ARRIVED = 2
"""Event: the gradient of a parameter is complete for this micro-batch."""


@dataclass(slots=True)
class Birth:
    """One storage at its birth."""

    operation: str
    shape: tuple[int, ...]
    item_bytes: int
    num_bytes: int


@dataclass(slots=True)
class Segment:
    """What happened between two marks: events are (birth index, +1 | -1 | IN_PLACE | ARRIVED)."""

    stage: str
    part: str
    layer: int | None
    events: list[tuple[int, int]] = field(default_factory=list)
    work: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)


@dataclass(slots=True)
class Recording:
    """One run: its storages, its segments, and which storages were what at chosen moments."""

    births: list[Birth] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    gradients: set[int] = field(default_factory=set)
    kv_cache: set[int] = field(default_factory=set)
    alive_after_forward: set[int] = field(default_factory=set)
    weight_shapes: set[tuple[int, ...]] = field(default_factory=set)


class Recorder:
    """Follows one thread's operations while inside `record()`."""

    def __init__(self, *, counts_work: bool = True) -> None:
        self.recording = Recording()
        self._counts_work = counts_work
        self._index_of_key: dict[int, int] = {}
        self._alive: set[int] = set()
        self.ledger = StorageLedger(observer=self._observe)

    @contextmanager
    def record(self, known: Sequence[torch.Tensor]) -> Iterator[None]:
        """Record what is made inside; `known` tensors were there before and are no births.

        Garbage collection is held back: a storage must die when its last reference goes, as it
        does in a run, and not when the collector happens to pass.
        What only the collector can free (the checkpoint's frames) dies in a segment of its own.
        """
        for tensor in known:
            self.ledger.admit_host(tensor)
            self.recording.weight_shapes.add(tuple(tensor.shape))
        was_enabled = gc.isenabled()
        gc.disable()
        gc.freeze()  # what exists already need not be looked through at the end
        try:
            with _RecorderMode(self):
                yield
            self.mark("end", "garbage")
            gc.collect()
        finally:
            gc.unfreeze()
            if was_enabled:
                gc.enable()

    def mark(self, stage: str, part: str, layer: int | None = None) -> None:
        """Begin a new segment."""
        self.recording.segments.append(Segment(stage=stage, part=part, layer=layer))

    @property
    def stage(self) -> str:
        """The stage of the current segment."""
        return self.recording.segments[-1].stage

    def index_of(self, tensor: torch.Tensor) -> int | None:
        """Return the birth index of the storage of `tensor`; None if it was known before."""
        key = self.ledger.key_of(tensor)
        return None if key is None else self._index_of_key[key]

    def note_gradient(self, parameter: torch.Tensor, event: int = ARRIVED) -> None:
        """Record that the gradient of `parameter` is in its place and, by default, complete."""
        assert parameter.grad is not None
        index = self.index_of(parameter.grad)
        if index is None:
            return
        events = self.recording.segments[-1].events
        if index not in self.recording.gradients:
            self.recording.gradients.add(index)
            events.append((index, IN_PLACE))
        if event == ARRIVED:
            events.append((index, ARRIVED))

    def note_forward_end(self) -> None:
        """Record what is alive now as kept for backward."""
        self.recording.alive_after_forward = set(self._alive)

    def note_kv_cache(self, tensors: Sequence[torch.Tensor]) -> None:
        """Record `tensors` as parts of the KV cache."""
        indices = (self.index_of(tensor) for tensor in tensors)
        self.recording.kv_cache |= {index for index in indices if index is not None}

    def count_work(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Add the floating point operations and each tensor's moved bytes of one operation."""
        if not self._counts_work or not self.recording.segments:
            return
        if func.is_view or func.namespace == "prim" or _name(func) in _NO_KERNELS:
            return
        flops = _flops(func, args, kwargs, out)
        moved_bytes = tuple(
            tensor.numel() * tensor.element_size()
            for tensor in (*tensors_in(args), *tensors_in(tuple(kwargs.values())), *tensors_in(out))
        )
        self.recording.segments[-1].work.append((flops, moved_bytes))

    def _observe(
        self, key: int, delta_bytes: int, tensor: torch.Tensor | None, operation: Any
    ) -> None:
        if tensor is None:
            index = self._index_of_key[key]
            self._alive.discard(index)
            self.recording.segments[-1].events.append((index, -1))
            return
        index = len(self.recording.births)
        self._index_of_key[key] = index
        self._alive.add(index)
        self.recording.births.append(
            Birth(
                operation=str(operation.overloadpacket).removeprefix("aten."),
                shape=tuple(tensor.shape),
                item_bytes=tensor.element_size(),
                num_bytes=delta_bytes,
            )
        )
        self.recording.segments[-1].events.append((index, +1))


def change_of(event: int, gradients: Gradients) -> int:
    """Return by how much `event` changes the number alive, with what becomes of gradients."""
    if event == IN_PLACE:
        return -1 if gradients is Gradients.ACCUMULATING else 0
    if event == ARRIVED:
        return -1 if gradients is Gradients.LEAVING else 0
    return event


def running_peaks(recording: Recording, gradients: Gradients = Gradients.KEPT) -> dict[str, int]:
    """Return the largest sum of what is alive in each stage of one recording, in bytes."""
    alive_bytes = 0
    gone: set[int] = set()
    peaks: dict[str, int] = {}
    for segment in recording.segments:
        peaks.setdefault(segment.stage, alive_bytes)
        for birth, event in segment.events:
            change = change_of(event, gradients)
            if birth in gone:
                continue
            if change < 0:
                gone.add(birth)
            alive_bytes += change * recording.births[birth].num_bytes
            peaks[segment.stage] = max(peaks[segment.stage], alive_bytes)
    return peaks


_NO_KERNELS = frozenset(
    {
        "_unsafe_view",
        "detach",
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "promote_types",
    }
)
"""Operations that only make or ask for a tensor; like those of "prim" they move no byte."""


def _name(func: Any) -> str:
    return str(func._overloadpacket.__name__)


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Return the floating point operations of one matrix product or attention, else 0."""
    name = _name(func)
    if name in _CPU_ATTENTION_PRODUCTS:
        # query and key are [rows, heads, tokens, head size]; each product is 2 operations a pair.
        query, key = args[0].shape, args[1].shape
        if name.endswith("backward"):
            query, key = args[1].shape, args[2].shape
        pairs = query[0] * query[1] * query[2] * key[2]
        return int(2 * _CPU_ATTENTION_PRODUCTS[name] * pairs * query[3])
    formula = flop_registry.get(func._overloadpacket)
    return int(formula(*args, **kwargs, out_val=out)) if formula else 0


_CPU_ATTENTION_PRODUCTS = {
    "_scaled_dot_product_flash_attention_for_cpu": 2,
    "_scaled_dot_product_flash_attention_for_cpu_backward": 5,
}
"""Matrix products in the CPU's attention kernels, which torch's own FLOP formulas leave out."""


class _RecorderMode(LedgerMode):
    """A ledger's mode that also counts work."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder.ledger)
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`, admit what it returns, and count its work."""
        kwargs = kwargs or {}
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self._recorder.count_work(func, args, kwargs, out)
        return out


@contextmanager
def watch_layers(
    recorder: Recorder, layers: Sequence[torch.nn.Module], parameters: Sequence[torch.nn.Parameter]
) -> Iterator[None]:
    """Mark each of `layers` in every pass, and note each gradient of `parameters` as it arrives."""
    handles: list[Any] = []
    for index, layer in enumerate(layers):
        watch = _LayerWatch(recorder, index, is_last=index == len(layers) - 1)
        handles.append(layer.register_forward_pre_hook(watch.before))
        handles.append(layer.register_forward_hook(watch.after))
    handles.extend(
        parameter.register_post_accumulate_grad_hook(recorder.note_gradient)
        for parameter in parameters
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _LayerWatch:
    """The marks of one decoder layer: forward, backward, and recomputation inside backward."""

    def __init__(self, recorder: Recorder, layer: int, *, is_last: bool) -> None:
        self._recorder = recorder
        self._layer = layer
        self._is_last = is_last
        self._in_backward = False

    def before(self, module: torch.nn.Module, args: Any) -> None:
        stage = self._recorder.stage
        part = "recompute" if stage.startswith("backward") else "layer"
        self._recorder.mark(stage, part, self._layer)

    def after(self, module: torch.nn.Module, args: Any, out: Any) -> None:
        if self._recorder.stage.startswith("backward"):
            return
        hidden = out[0] if isinstance(out, tuple) else out
        if hidden.requires_grad:
            hidden.register_hook(self._enter_backward)
        if self._is_last:
            self._recorder.mark(self._recorder.stage, "head")

    def _enter_backward(self, gradient: torch.Tensor) -> None:
        if not self._in_backward:
            self._in_backward = True
            self._recorder.mark(self._recorder.stage, "layer", self._layer)
