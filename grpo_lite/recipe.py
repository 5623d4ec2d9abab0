"""The TOML file that `fit` writes and `train` reads: one run, whole.

Knows the file's form; what the fields mean is said where they are used.
"""

from __future__ import annotations

import dataclasses
import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import tomli_w

from grpo_lite.errors import UsageError, unknown_name
from grpo_lite.plan import Plan, Workload
from grpo_lite.units import parse_bytes

SCHEMA = 1
SCHEDULERS = ("constant", "cosine")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSettings:
    """What is trained on."""

    name: str = ""
    """A JSONL file with a `prompt` column, or "reasoning_gym:NAME"."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of a reasoning_gym task."""
    held_out: int = 0
    """Problems that are never trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSettings:
    """How completions are scored."""

    functions: list[str] = field(default_factory=list)
    """"module:function", "file.py:function" or the name of a builtin."""
    weights: list[float] = field(default_factory=list)
    """One for each function; empty: 1 each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings:
    """How long and how fast."""

    steps: int = 100
    """Updates in all."""
    learning_rate: float = 1e-6
    """Peak learning rate (TRL's default for GRPO)."""
    lr_scheduler_type: str = "constant"
    """"constant" or "cosine"."""
    warmup_steps: int = 0
    """Steps of linear warm-up."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm."""
    seed: int = 0
    """Seed of sampling and data order."""
    eval_samples: int = 4
    """Completions for each held-out problem, before the first and after the last update."""
    save_steps: int = 0
    """A checkpoint every so many steps; 0: only at the end and when interrupted."""

    def __post_init__(self) -> None:
        if self.lr_scheduler_type not in SCHEDULERS:
            known = ", ".join(SCHEDULERS)
            raise UsageError(f"lr_scheduler_type is {self.lr_scheduler_type!r}; known: {known}")
        for name in ("steps", "learning_rate", "max_grad_norm"):
            if getattr(self, name) <= 0:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be above 0")
        for name in ("warmup_steps", "weight_decay", "eval_samples", "save_steps"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be at least 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadSettings:
    """What gradient blocks and optimizer state may take off the card."""

    host_budget: str = ""
    """RAM, as in "16GiB"; empty: what is available, less 2 GiB."""
    disk_dir: str = ""
    """Folder on a local disk for block files; empty: no disk tier."""
    disk_budget: str = ""
    """Bytes of that disk, as in "100GiB"; empty: what is free."""

    def __post_init__(self) -> None:
        for name in ("host_budget", "disk_budget"):
            if getattr(self, name):
                _require_size(name, getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One run."""

    model: str
    """Folder, config file or id of the model."""
    card: str
    """"virtual:SIZE", "auto" or a profile's name."""
    reserve: str = "0"
    """Kept free on the card, as in "500MiB"."""
    workload: Workload = field(default_factory=Workload)
    """The experiment."""
    plan: Plan
    """How it is run."""
    offload: OffloadSettings = field(default_factory=OffloadSettings)
    """Where blocks may go, if the plan offloads."""
    task: TaskSettings = field(default_factory=TaskSettings)
    """What is trained on."""
    reward: RewardSettings = field(default_factory=RewardSettings)
    """How completions are scored."""
    training: TrainingSettings = field(default_factory=TrainingSettings)
    """How long and how fast."""

    def __post_init__(self) -> None:
        if self.plan.num_rows != self.workload.num_rows:
            raise UsageError(
                f"plan.micro_batch {self.plan.micro_batch} x gradient_accumulation_steps "
                f"{self.plan.gradient_accumulation_steps} is {self.plan.num_rows} rows, and the "
                f"workload has {self.workload.prompts_per_step} prompts x "
                f"{self.workload.num_generations} generations = {self.workload.num_rows}"
            )
        _require_size("reserve", self.reserve)

    @property
    def reserve_bytes(self) -> int:
        """Bytes kept free on the card."""
        return parse_bytes(self.reserve)


def _require_size(name: str, text: str) -> None:
    try:
        parse_bytes(text)
    except ValueError as error:
        raise UsageError(f"{name}: {error}") from error


def read_recipe(path: Path) -> Recipe:
    """Return the recipe in the TOML file `path`.

    Raises:
        UsageError: the file is missing, is no TOML, or a key is unknown or has a wrong value; the
            message names file, key and what was expected.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise UsageError(
            f"{path} does not exist", hint="grpo-lite fit MODEL --recipe FILE writes one"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also numbers and nesting beyond all sense
        raise UsageError(f"{path} is no valid TOML: {error}") from error
    if not data:
        raise UsageError(f"{path} is empty", hint="grpo-lite fit MODEL --recipe FILE writes one")
    schema = data.pop("schema", SCHEMA)
    if schema != SCHEMA:
        raise UsageError(f"{path}: schema is {schema!r}; this grpo-lite reads schema {SCHEMA}")
    recipe: Recipe = _build(Recipe, data, f"{path}")
    return recipe


def recipe_to_toml(recipe: Recipe) -> str:
    """Return `recipe` as TOML text, with the reasons of the plan as comments."""
    data = dataclasses.asdict(recipe)
    reasons = data["plan"].pop("reasons")
    text = tomli_w.dumps({"schema": SCHEMA, **data})
    lines: list[str] = []
    for line in text.removesuffix("\n").split("\n"):  # other separators may stand in strings
        name = line.split(" = ")[0]
        if name in reasons and not line.startswith(" "):
            lines.extend(f"# {line}" for line in reasons[name].splitlines())
        lines.append(line)
    return "\n".join(lines) + "\n"


def write_recipe(recipe: Recipe, path: Path) -> None:
    """Write `recipe` to `path`, whole or not at all.

    Raises:
        UsageError: the folder does not exist or cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(recipe_to_toml(recipe), encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error


def _build(kind: Any, data: Any, where: str) -> Any:
    """Return a dataclass of `kind` from the TOML table `data`; errors name the key."""
    if not isinstance(data, dict):
        raise UsageError(f"{where} is {data!r}; a table was expected")
    hints = get_type_hints(kind)
    fields = {f.name: f for f in dataclasses.fields(kind) if f.name != "reasons"}
    for key in data:
        if key not in fields:
            raise unknown_name(f"key in {where}:", key, fields)
    values: dict[str, Any] = {}
    for name, spec in fields.items():
        if name in data:
            values[name] = _value(hints[name], data[name], f"{where}: {name}")
        elif spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING:
            raise UsageError(f"{where}: {name} is missing")
    try:
        return kind(**values)
    except UsageError as error:
        raise UsageError(f"{where}: {error.message}", hint=error.hint) from error


def _value(hint: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return _build(hint, value, where)
    wanted = _plain_types(hint)
    if float in wanted and isinstance(value, int | float) and not isinstance(value, bool):
        return _finite(value, where)
    is_stray_bool = isinstance(value, bool) and bool not in wanted
    if is_stray_bool or not isinstance(value, wanted):
        names = " or ".join(kind.__name__ for kind in wanted)
        raise UsageError(f"{where} is {value!r}; {names} was expected")
    inner = get_args(hint)
    if isinstance(value, list) and inner:
        return [_value(inner[0], part, where) for part in value]
    return value


def _finite(value: int | float, where: str) -> float:
    """Return `value` as a float; NaN would pass every check of a range and end in the weights."""
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise UsageError(f"{where} is {number}; a finite number was expected")
    return number


def _plain_types(hint: Any) -> tuple[type, ...]:
    if isinstance(hint, UnionType):
        return tuple(kind for part in get_args(hint) for kind in _plain_types(part))
    origin = get_origin(hint) or hint
    if origin is Mapping or (isinstance(origin, type) and issubclass(origin, Mapping)):
        return (dict,)
    return (origin,) if isinstance(origin, type) else (NoneType,)
