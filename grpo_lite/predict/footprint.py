"""What a trace learnt: every tensor of a step as a formula in rows and tokens, and who lives when.

A `Term` is one kind of tensor (its bytes are a polynomial in the variables below); an `Instant` is
a moment of a phase, given as how many of each term are alive.
The peak of a phase is the largest instant; nothing is fitted, the counts and sizes are the trace's.
Knows no torch, no model family and no card.

Variables: rows, tokens (prompt + completion of a row; in rollout the length of the cache),
completion, chunk (tokens whose logits exist at once) and last (tokens of the last chunk).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from grpo_lite.plan import Category

VARIABLES = ("rows", "tokens", "completion", "chunk", "last")
Monomial = tuple[int, ...]
"""Exponents of VARIABLES: (1, 1, 0, 0, 0) is rows x tokens."""
Polynomial = Mapping[Monomial, float]
"""Coefficient by monomial."""

SCHEMA = 3
"""Version of the cached form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Values for the variables at which a footprint is evaluated."""

    rows: int
    """Rows that are worked on at once."""
    tokens: int
    """Tokens of a row, or the length of the cache in rollout."""
    completion: int = 0
    """Completion tokens of a row."""
    chunk: int = 1
    """Completion tokens whose logits exist at once."""

    @property
    def last(self) -> int:
        """Completion tokens of the last chunk."""
        return (self.rows * self.completion - 1) % self.chunk + 1

    def monomial(self, exponents: Monomial) -> int:
        """Return the product of the variables to `exponents`."""
        value = 1
        for name, exponent in zip(VARIABLES, exponents, strict=True):
            value *= getattr(self, name) ** exponent
        return value


def evaluate(polynomial: Polynomial, shape: Shape) -> float:
    """Return the value of `polynomial` at `shape`, in the unit of its coefficients."""
    return sum(factor * shape.monomial(exponents) for exponents, factor in polynomial.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One kind of tensor that the step makes."""

    category: Category
    """What it is held for."""
    operation: str
    """The operation that makes it."""
    dimensions: tuple[str, ...]
    """Its shape in words, as in ("rows", "tokens", "1536")."""
    item_bytes: int
    """Bytes of one element."""
    bytes: Polynomial
    """Its storage in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instant:
    """A moment of a phase at which memory may peak."""

    where: str
    """The part of the model that is at work, as in "backward, layer 3"."""
    counts: Mapping[int, int]
    """How many tensors of each term (by index) are alive, beyond the static bytes of the phase."""
    bytes: Polynomial
    """The sum of those tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a stage computes, for a roofline."""

    flops: Polynomial
    """Floating point operations of matrix products and attention."""
    moved_bytes: Polynomial
    """Bytes read and written by all operations, as if nothing stayed in a cache."""
    num_operations: int
    """Operations launched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One traced part of the step: its memory and its work."""

    instants: tuple[Instant, ...]
    """Candidates for the peak, none dominated by another."""
    work: Work
    """What it computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Static bytes of a model under one method."""

    num_parameters: int
    """All parameters, tied ones once."""
    num_trainable: int
    """Parameters with gradient."""
    num_trainable_tensors: int
    """Tensors with gradient."""
    parameter_bytes: int
    """Weights and buffers as they lie on the card during training."""
    gradient_bytes: int
    """Gradients of one update."""
    largest_gradient_bytes: int
    """The largest single gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """All that predicting memory and speed needs to know of (model, method, step, versions)."""

    model: str
    """The model's name, for people."""
    weights: Weights
    """Static bytes."""
    terms: tuple[Term, ...]
    """Every kind of tensor, indexed by `Instant.counts`."""
    stages: Mapping[str, Stage]
    """By name: "prefill", "decode", "logprob" and the names that `stage_name` gives."""
    num_layers: int
    """Depth of the full model."""
    traced_layers: int
    """Depth of the model that was traced; the repeating layers between are counted."""
    versions: Mapping[str, str]
    """Package versions whose code was traced."""
    trainable_numels: tuple[int, ...] = ()
    """Elements of each trained tensor of the full model in order; empty for adapters."""


class Gradients(StrEnum):
    """What becomes of each gradient that backward makes."""

    KEPT = "kept"
    """It stays: the first micro-batch of an update."""
    ACCUMULATING = "accumulating"
    """It is added to the one of an earlier micro-batch and dies."""
    LEAVING = "leaving"
    """It leaves the card and dies: the block engine takes it."""


def stage_name(stage: str, *, checkpointing: bool, gradients: Gradients = Gradients.KEPT) -> str:
    """Return the key of "forward" or "backward" run in a given way."""
    name = f"{stage}/checkpointed" if checkpointing else stage
    return name if gradients is Gradients.KEPT else f"{name}/{gradients}"


def footprint_to_json(footprint: Footprint) -> str:
    """Return `footprint` as JSON text with a checksum, for the cache on disk."""
    data = asdict(footprint)
    for term in data["terms"]:
        term["bytes"] = _to_pairs(term["bytes"])
    for stage in data["stages"].values():
        for part in ("flops", "moved_bytes"):
            stage["work"][part] = _to_pairs(stage["work"][part])
        for instant in stage["instants"]:
            instant["counts"] = sorted(instant["counts"].items())
            instant["bytes"] = _to_pairs(instant["bytes"])
    body = json.dumps(data, sort_keys=True)
    return json.dumps({"schema": SCHEMA, "checksum": _checksum(body), "footprint": body})


def footprint_from_json(text: str) -> Footprint:
    """Return the footprint that `footprint_to_json` wrote.

    Raises:
        ValueError: the text is damaged or of another schema.
    """
    try:
        outer = json.loads(text)
        if outer["schema"] != SCHEMA or _checksum(outer["footprint"]) != outer["checksum"]:
            raise ValueError("the cached footprint is damaged or of another schema")
    except (KeyError, TypeError) as error:
        raise ValueError("the cached footprint is damaged") from error
    data = json.loads(outer["footprint"])
    data["weights"] = Weights(**data["weights"])
    data["trainable_numels"] = tuple(data["trainable_numels"])
    data["terms"] = tuple(_term(term) for term in data["terms"])
    data["stages"] = {name: _stage(stage) for name, stage in data["stages"].items()}
    return Footprint(**data)


def _term(data: Any) -> Term:
    return Term(
        category=Category(data["category"]),
        operation=data["operation"],
        dimensions=tuple(data["dimensions"]),
        item_bytes=data["item_bytes"],
        bytes=_from_pairs(data["bytes"]),
    )


def _stage(data: Any) -> Stage:
    return Stage(
        instants=tuple(
            Instant(
                where=instant["where"],
                counts=dict(instant["counts"]),
                bytes=_from_pairs(instant["bytes"]),
            )
            for instant in data["instants"]
        ),
        work=Work(
            flops=_from_pairs(data["work"]["flops"]),
            moved_bytes=_from_pairs(data["work"]["moved_bytes"]),
            num_operations=data["work"]["num_operations"],
        ),
    )


def _to_pairs(polynomial: Polynomial) -> list[list[Any]]:
    return [[list(exponents), factor] for exponents, factor in sorted(polynomial.items())]


def _from_pairs(pairs: Any) -> dict[Monomial, float]:
    return {tuple(exponents): factor for exponents, factor in pairs}


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
