"""Tensors whose sizes are known before a run: what an out-of-memory error can have asked for.

The model's weights, what their shapes make of known rows and tokens, and the terms of a trace.
Pure; knows no torch and no error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from grpo_lite.plan import Phase, Plan, Workload
from grpo_lite.predict.footprint import Footprint, Shape, Term, evaluate
from grpo_lite.predict.memory import micro_batch_shape, term_arithmetic
from grpo_lite.search import Question

MAX_NAMES = 3
"""Weights of one shape that are named."""
_NUMBER = re.compile(r"\d[\d,]*")
ITEM_BYTES = {2: "16-bit", 4: "float32"}
"""Element sizes in which training holds tensors of a model's shapes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightShape:
    """A weight of the model, or the same one of several layers."""

    name: str
    """Its name, numbers of layers replaced: "model.layers.*.mlp.up_proj.weight"."""
    dimensions: tuple[int, ...]
    """Its shape."""
    count: int
    """How many there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is known of the run that failed; None where it is not known."""

    weights: tuple[WeightShape, ...] = ()
    """The model's weights."""
    vocabulary: int | None = None
    """Tokens that the model knows: the width of its logits."""
    num_heads: int | None = None
    """Attention heads."""
    rows: int | None = None
    """Rows in one forward: the micro-batch."""
    prompt_tokens: int | None = None
    """Longest prompt."""
    completion_tokens: int | None = None
    """Longest completion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The recipe of a run of grpo-lite that failed."""

    question: Question
    """Footprint, card and budget."""
    workload: Workload
    """The experiment."""
    plan: Plan
    """How it was run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """A tensor whose size is known."""

    what: str
    """What it is, in words."""
    arithmetic: str
    """Its size as a product."""
    num_bytes: int
    """Its size."""
    phases: frozenset[Phase] = frozenset()
    """Phases that make it; empty where it is not known."""
    grows_with_rows: bool = False
    """Whether fewer rows make it smaller."""

    @property
    def factors(self) -> tuple[int, ...]:
        """The factors above 1 of `arithmetic`, in order: what makes two tensors alike."""
        numbers = (int(number.replace(",", "")) for number in _NUMBER.findall(self.arithmetic))
        return tuple(sorted(number for number in numbers if number > 1))


def all_suspects(setting: Setting, planned: Planned | None) -> Iterator[Suspect]:
    """Yield every tensor whose size follows from what is known of the run."""
    yield from _weights(setting.weights)
    if planned is None:
        yield from _activations(setting)
    else:  # the trace knows every tensor, and grpo-lite makes no whole logits
        yield from _traced(planned.question.footprint, planned.workload, planned.plan)


def _weights(weights: Iterable[WeightShape]) -> Iterator[Suspect]:
    """Yield a tensor of each shape and dtype of the weights: each has gradients and copies."""
    names: dict[tuple[int, ...], list[str]] = {}
    for weight in weights:
        names.setdefault(tuple(sorted(weight.dimensions, reverse=True)), []).append(weight.name)
    for dimensions, alike in names.items():
        more = f" and {len(alike) - MAX_NAMES} more" if len(alike) > MAX_NAMES else ""
        shape = " x ".join(f"{dimension:,}" for dimension in dimensions)
        for item_bytes, dtype in ITEM_BYTES.items():
            yield Suspect(
                what=f"{', '.join(alike[:MAX_NAMES])}{more} in {dtype}: the weight, or a "
                "gradient, optimizer state or copy of it",
                arithmetic=f"{shape} x {item_bytes} bytes",
                num_bytes=math.prod(dimensions) * item_bytes,
            )


def _activations(setting: Setting) -> Iterator[Suspect]:
    """Yield what the weights' widths make of the rows and tokens that are known."""
    rows, prompt, completion = setting.rows, setting.prompt_tokens, setting.completion_tokens
    if rows is None or completion is None:
        return
    tokens = completion + (prompt or 0)
    # TRL keeps the logits of the completion and of the token before it.
    lengths = sorted({tokens, completion + 1, completion})
    phases = frozenset({Phase.LOGPROB, Phase.FORWARD, Phase.BACKWARD})
    widths = {weight.dimensions[0] for weight in setting.weights if len(weight.dimensions) == 2}
    for width in sorted(widths):
        for length in lengths if width == setting.vocabulary else [tokens]:
            for item_bytes, dtype in ITEM_BYTES.items():
                word = "logits" if width == setting.vocabulary else "an activation"
                yield Suspect(
                    what=f"{word} of a whole micro-batch in {dtype}",
                    arithmetic=f"{rows:,} rows x {length:,} tokens x {width:,} x "
                    f"{item_bytes} bytes",
                    num_bytes=rows * length * width * item_bytes,
                    phases=phases,
                    grows_with_rows=True,
                )
    if setting.num_heads is not None:
        for item_bytes, dtype in ITEM_BYTES.items():
            yield Suspect(
                what=f"attention scores in {dtype} (attn_implementation eager)",
                arithmetic=f"{rows:,} rows x {setting.num_heads} heads x {tokens:,} x {tokens:,} "
                f"tokens x {item_bytes} bytes",
                num_bytes=rows * setting.num_heads * tokens**2 * item_bytes,
                phases=phases,
                grows_with_rows=True,
            )


def _traced(footprint: Footprint, workload: Workload, plan: Plan) -> Iterator[Suspect]:
    """Yield every tensor that the traced step makes, at the caps of `workload` under `plan`."""
    micro = micro_batch_shape(workload, plan)
    prefill = Shape(rows=plan.rollout_batch, tokens=workload.max_prompt_length)
    decode = Shape(
        rows=plan.rollout_batch,
        tokens=workload.max_prompt_length + max(0, workload.max_completion_length - 2),
    )
    shapes = {"prefill": (Phase.ROLLOUT, prefill), "decode": (Phase.ROLLOUT, decode)}
    placed: set[int] = set()
    for name, stage in footprint.stages.items():
        phase, shape = shapes.get(name) or (Phase(name.partition("/")[0]), micro)
        indices = {index for instant in stage.instants for index in instant.counts}
        placed |= indices
        for index in sorted(indices):
            yield _of_term(footprint.terms[index], shape, frozenset({phase}))
    for index, term in enumerate(footprint.terms):
        if index not in placed:  # never alive at a peak, so in which phase is not recorded
            for shape in (micro, prefill, decode):
                yield _of_term(term, shape, frozenset())


def _of_term(term: Term, shape: Shape, phases: frozenset[Phase]) -> Suspect:
    return Suspect(
        what=f"{term.category.replace('_', ' ')} made by {term.operation}",
        arithmetic=term_arithmetic(term, shape),
        num_bytes=round(evaluate(term.bytes, shape)),
        phases=phases,
        grows_with_rows=any(exponents[0] for exponents in term.bytes),
    )
