"""Reward functions: finding them by name, calling them, and refusing what breaks their contract.

A reward is called once a rollout, with keywords, as TRL calls it:
`reward(prompts: list[str], completions: list[str], **columns) -> list[float | None]`, where each
column of the task is a list with one value a completion, and None means "does not apply here".
It need not name arguments that it has no use for.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any

from grpo_lite.errors import RewardError, UsageError, unknown_name
from grpo_lite.grpo.data import RESERVED_COLUMNS, Example

BUILTIN_MODULE = "grpo_lite.grpo.builtin_rewards"
BUILTIN_REWARDS = ("first_integer", "reasoning_gym")
"""Functions of BUILTIN_MODULE; a recipe may name them without the module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """A reward function under the name that logs and errors give it."""

    name: str
    """The function's name, or the whole spec where two functions share a name."""
    function: Callable[..., Any]
    """Called as the module's docstring says."""
    weight: float = 1.0
    """Factor in the weighted sum."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight):
            raise UsageError(f"weight of reward {self.name} is {self.weight}; it must be finite")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """What all rewards said about some completions."""

    totals: tuple[float | None, ...]
    """Weighted sum of the rewards that apply, one a completion; None where none does."""
    by_reward: Mapping[str, tuple[float | None, ...]]
    """What each reward returned, unweighted, by its name."""

    @property
    def means(self) -> dict[str, float]:
        """Mean of each reward over the completions that it applies to; NaN where to none."""
        return {name: _mean(values) for name, values in self.by_reward.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSet:
    """All rewards of a run."""

    rewards: tuple[Reward, ...]
    """In the order of the recipe; names are distinct."""

    def require_columns(self, columns: Sequence[str]) -> None:
        """Check that a task with `columns` gives each reward what it cannot be called without.

        Raises:
            UsageError: a reward needs another column.
        """
        for reward in self.rewards:
            for name in _required_columns(reward.function):
                if name not in columns:
                    raise UsageError(
                        f"reward {reward.name} needs a column {name!r}; "
                        f"columns of the task: {', '.join(columns) or 'none'}",
                        hint=f"add {name!r} to the task, or give the argument a default",
                    )

    def score(self, examples: Sequence[Example], completions: Sequence[str]) -> Scores:
        """Return the rewards of `completions`, each an answer to the example at its place.

        Raises:
            RewardError: a reward raised, returned another number of values than completions, or a
                value that is neither a finite number nor None.
        """
        by_reward = {
            reward.name: _call_checked(reward, examples, completions) for reward in self.rewards
        }
        rows = zip(*by_reward.values(), strict=True)
        weights = [reward.weight for reward in self.rewards]
        return Scores(
            totals=tuple(_weighted_sum(row, weights) for row in rows), by_reward=by_reward
        )


def load_rewards(specs: Sequence[str], weights: Sequence[float] | None = None) -> RewardSet:
    """Return the rewards that `specs` name, importing their modules.

    Args:
        specs: "module:function", "path/to/file.py:function", or the name of one of BUILTIN_REWARDS.
        weights: one for each spec; None weighs all by 1.

    Raises:
        UsageError: no or repeated specs, a wrong number of weights, a module that does not import,
            or a function that it does not have.
    """
    if not specs:
        raise UsageError("no reward is given", hint=f'rewards = ["{BUILTIN_REWARDS[0]}"]')
    if len(set(specs)) < len(specs):
        raise UsageError(f"a reward is listed twice: {', '.join(specs)}", hint="give it a weight")
    if weights is not None and len(weights) != len(specs):
        raise UsageError(f"{len(weights)} weights for {len(specs)} rewards: {', '.join(specs)}")
    files: dict[Path, ModuleType] = {}
    functions = [_find_function(spec, files) for spec in specs]
    names = [spec.rpartition(":")[2] for spec in specs]
    return RewardSet(
        rewards=tuple(
            Reward(name=name if names.count(name) == 1 else spec, function=function, weight=weight)
            for spec, name, function, weight in zip(
                specs, names, functions, weights or [1.0] * len(specs), strict=True
            )
        )
    )


def _find_function(spec: str, files: dict[Path, ModuleType]) -> Callable[..., Any]:
    module_name, colon, function_name = spec.rpartition(":")
    if not colon:
        if spec not in BUILTIN_REWARDS:
            raise unknown_name(
                "reward",
                spec,
                BUILTIN_REWARDS,
                hint="your own is written module:function or file.py:function",
            )
        module_name = BUILTIN_MODULE
    module = (
        _import_file(Path(module_name), files)
        if module_name.endswith(".py")
        else _import_module(module_name)
    )
    function = getattr(module, function_name, None)
    if not callable(function):
        known = [
            name
            for name, value in vars(module).items()
            if inspect.isfunction(value) and not name.startswith("_")
        ]
        raise unknown_name(f"function of {module_name}", function_name, known)
    try:
        inspect.signature(function)
    except ValueError as error:
        raise UsageError(
            f"reward {spec} does not tell its arguments, so it cannot be called by name",
            hint="wrap it in a function of your own",
        ) from error
    return function  # type: ignore[no-any-return]


def _import_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:  # whatever a user's module does while it is imported
        hint = f"rewards that need no module: {', '.join(BUILTIN_REWARDS)}"
        beside = Path(name.replace(".", "/") + ".py")
        # An installed program does not look for modules in the current folder.
        if isinstance(error, ModuleNotFoundError) and beside.is_file():
            hint = f"{beside}:FUNCTION names the file"
        raise UsageError(
            f"cannot import reward module {name!r}: {type(error).__name__}: {error}", hint=hint
        ) from error


def _import_file(path: Path, files: dict[Path, ModuleType]) -> ModuleType:
    """Return the module in file `path`, executed once for all functions taken from it."""
    if not path.is_file():
        raise UsageError(
            f"reward file {path} does not exist; the current folder is {Path.cwd()}",
            hint=f"rewards that need no file: {', '.join(BUILTIN_REWARDS)}",
        )
    path = path.resolve()
    if path in files:
        return files[path]
    name = f"grpo_lite_reward_file_{len(files)}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None  # a name that ends with .py has the loader of source files
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickle look their module up by name.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever a user's file does while it is imported
        del sys.modules[name]
        raise UsageError(
            f"cannot import reward file {path}: {type(error).__name__}: {error}"
        ) from error
    files[path] = module
    return module


def _call_checked(
    reward: Reward, examples: Sequence[Example], completions: Sequence[str]
) -> tuple[float | None, ...]:
    try:
        values = _call(reward.function, examples, completions)
    except Exception as error:
        raise RewardError(
            f"reward {reward.name} raised {type(error).__name__}: {error} "
            f"({_where_raised(reward, examples, completions)})"
        ) from error
    if not isinstance(values, list | tuple):
        raise RewardError(
            f"reward {reward.name} returned {type(values).__name__} {_shown(values)} for "
            f"{_span(examples)}; it must return a list with one number or None a completion"
        )
    if len(values) != len(completions):
        raise RewardError(
            f"reward {reward.name} returned {len(values)} values for {len(completions)} "
            f"completions ({_span(examples)})"
        )
    return tuple(
        _checked_value(reward, value, example)
        for value, example in zip(values, examples, strict=True)
    )


def _checked_value(reward: Reward, value: object, example: Example) -> float | None:
    if value is None:
        return None
    number = _as_float(value)
    if number is None or not math.isfinite(number):
        raise RewardError(
            f"reward {reward.name} returned {type(value).__name__} {_shown(value)} for prompt "
            f"{example.index} ({_shown(example.prompt_text)})",
            hint="a reward is a finite number, or None where it does not apply",
        )
    return number


def _as_float(value: object) -> float | None:
    """Return a number (of numpy, too) as a float, infinite beyond its range; None for the rest."""
    if not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _call(
    function: Callable[..., Any], examples: Sequence[Example], completions: Sequence[str]
) -> Any:
    arguments: dict[str, list[Any]] = {
        "prompts": [example.prompt_text for example in examples],
        "completions": list(completions),
    }
    for name in examples[0].columns if examples else ():
        arguments[name] = [example.columns[name] for example in examples]
    parameters = inspect.signature(function).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        wanted = {parameter.name for parameter in parameters}
        arguments = {name: value for name, value in arguments.items() if name in wanted}
    return function(**arguments)


def _required_columns(function: Callable[..., Any]) -> list[str]:
    return [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        and parameter.name not in RESERVED_COLUMNS
    ]


def _where_raised(reward: Reward, examples: Sequence[Example], completions: Sequence[str]) -> str:
    """Return the prompt at which `reward` raises, found by calling it row by row."""
    for example, completion in zip(examples, completions, strict=True):
        try:
            _call(reward.function, [example], [completion])
        except Exception:  # the one that is reported came from the whole call
            return (
                f"prompt {example.index}: {_shown(example.prompt_text)}, "
                f"completion {_shown(completion)}"
            )
    return f"{_span(examples)}; on no completion alone"


def _span(examples: Sequence[Example]) -> str:
    indices = dict.fromkeys(example.index for example in examples)
    listed = ", ".join(str(index) for index in list(indices)[:8])
    return f"prompts {listed}{', ...' if len(indices) > 8 else ''}"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _weighted_sum(values: Sequence[float | None], weights: Sequence[float]) -> float | None:
    known = [
        value * weight for value, weight in zip(values, weights, strict=True) if value is not None
    ]
    return math.fsum(known) if known else None


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else math.nan
