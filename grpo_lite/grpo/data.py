"""Tasks: where prompts come from, which are held out, and in which order they are trained on.

A task is a JSONL file or a generator of reasoning_gym; both give rows with a `prompt` and columns
for the rewards.
Knows nothing of models; a tokenizer is only ever an argument.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_lite.errors import UsageError
from grpo_lite.grpo.gym import GYM_PREFIX, gym_rows

RESERVED_COLUMNS = ("prompts", "completions")
"""Names under which a reward function gets what every reward gets."""
JSONL_HINT = 'one JSON object a line, such as {"prompt": "2 + 3 =", "answer": "5"}'

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of a chat."""

    role: str
    """"system", "user" or "assistant", as far as the model's chat template knows them."""
    content: str
    """What was said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One problem of a task."""

    index: int
    """Place in the task's source, from 0: errors name it."""
    prompt: str | tuple[Message, ...]
    """Plain text, or a chat that goes through the tokenizer's chat template."""
    columns: Mapping[str, Any]
    """All other columns, handed to the rewards; the same names in each example of a task."""

    @property
    def prompt_text(self) -> str:
        """The prompt as a reward function sees it: a chat's contents, one paragraph a message."""
        if isinstance(self.prompt, str):
            return self.prompt
        return "\n\n".join(message.content for message in self.prompt)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Problems to train on and problems that are only measured."""

    name: str
    """What the recipe calls it."""
    train: tuple[Example, ...]
    """In the order of the source; `PromptStream` shuffles."""
    held_out: tuple[Example, ...]
    """Distinct prompts, none of which occurs in `train`."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns that a reward function may ask for."""
        return tuple(self.train[0].columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptStream:
    """The order in which examples are trained on: reshuffled every epoch, a function of the seed.

    It has no state: a resumed run asks for its step and gets what the first run would have got.
    """

    examples: Sequence[Example]
    """What one epoch covers, but for a remainder smaller than a step, another one each epoch."""
    seed: int
    """Chooses the order."""

    def next_prompts(self, step: int, prompts_per_step: int) -> list[Example]:
        """Return the examples of `step` (from 0), each a different one.

        Raises:
            UsageError: fewer examples than one step needs.
        """
        steps_per_epoch = len(self.examples) // prompts_per_step
        if steps_per_epoch == 0:
            raise UsageError(
                f"a step needs {prompts_per_step} different prompts, "
                f"the task has {len(self.examples)} to train on",
                hint=f"--prompts-per-step {max(len(self.examples), 1)}, or hold out fewer",
            )
        epoch, place = divmod(step, steps_per_epoch)
        order = list(range(len(self.examples)))
        random.Random(f"{self.seed}:{epoch}").shuffle(order)
        first = place * prompts_per_step
        return [self.examples[index] for index in order[first : first + prompts_per_step]]


def load_task(
    spec: str,
    *,
    settings: Mapping[str, Any] | None = None,
    held_out: int = 0,
    limit: int | None = None,
    seed: int = 0,
) -> Task:
    """Return the task that `spec` names.

    Args:
        spec: path of a JSONL file, or "reasoning_gym:NAME" such as "reasoning_gym:chain_sum".
        settings: for reasoning_gym: its own settings for NAME, and `prompt_style` (see `gym_rows`).
        held_out: distinct prompts to keep out of training.
        limit: keep at most so many training examples, after the split; None keeps all.
        seed: draws the problems of reasoning_gym and chooses the held-out ones.

    Raises:
        UsageError: a file, row, name or setting that cannot be used, or fewer prompts than asked.
    """
    if spec.startswith(GYM_PREFIX):
        rows = gym_rows(spec.removeprefix(GYM_PREFIX), settings or {}, seed=seed)
        name = spec
    else:
        if settings:
            raise UsageError(
                f"task {spec} is a file and takes no settings; got {', '.join(sorted(settings))}",
                hint=f"settings belong to {GYM_PREFIX}NAME",
            )
        rows = _read_jsonl(Path(spec))
        name = Path(spec).stem
    if not rows:
        raise UsageError(f"task {spec} holds no prompts", hint=JSONL_HINT)
    return _split(name, _as_examples(rows), held_out=held_out, limit=limit, seed=seed)


def _split(
    name: str, examples: Sequence[Example], *, held_out: int, limit: int | None, seed: int
) -> Task:
    first_of: dict[str | tuple[Message, ...], Example] = {}
    for example in examples:
        first_of.setdefault(example.prompt, example)
    if held_out < 0 or held_out >= len(first_of):
        raise UsageError(
            f"cannot hold out {held_out} of the {len(first_of)} distinct prompts of {name}: "
            "at least 1 must be left to train on",
            hint=f"held_out = {len(first_of) // 4}",
        )
    if limit is not None and limit < 1:
        raise UsageError(f"limit is {limit}; a task needs at least 1 training example")
    prompts = list(first_of)
    random.Random(f"held-out:{seed}").shuffle(prompts)
    kept_out = frozenset(prompts[:held_out])
    train = [example for example in examples if example.prompt not in kept_out]
    return Task(
        name=name,
        train=tuple(train[:limit]),
        held_out=tuple(first_of[prompt] for prompt in prompts[:held_out]),
    )


def _as_examples(rows: Sequence[Row]) -> list[Example]:
    names = dict.fromkeys(name for row in rows for name in row if name != "prompt")
    return [
        Example(
            index=index,
            prompt=_as_prompt(row["prompt"]),
            # A column that some rows lack is None there: a reward always gets the same arguments.
            columns={name: row.get(name) for name in names},
        )
        for index, row in enumerate(rows)
    ]


def _as_prompt(prompt: str | list[dict[str, str]]) -> str | tuple[Message, ...]:
    if isinstance(prompt, str):
        return prompt
    return tuple(Message(role=turn["role"], content=turn["content"]) for turn in prompt)


def _read_jsonl(path: Path) -> list[Row]:
    if not path.is_file():
        raise UsageError(
            f"task {path} is not a file",
            hint=f"a task is a JSONL file or {GYM_PREFIX}NAME, such as {GYM_PREFIX}chain_sum",
        )
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path} as UTF-8 text: {error}", hint=JSONL_HINT) from error
    rows = []
    line_of_id: dict[str, int] = {}
    # split, not splitlines: a JSON string may hold U+2028, which is no end of line.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            row = _parse_row(line, f"{path}:{number}")
            _require_new_id(row, line_of_id, path, number)
            rows.append(row)
    return rows


def _parse_row(line: str, where: str) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(
            f"{where}: not JSON: {error.msg} at column {error.colno}", hint=JSONL_HINT
        ) from error
    if not isinstance(row, dict):
        raise UsageError(f"{where}: a {type(row).__name__}, not an object", hint=JSONL_HINT)
    if "prompt" not in row:
        found = ", ".join(row) or "none"
        raise UsageError(f"{where}: no column 'prompt'; columns: {found}", hint=JSONL_HINT)
    if not isinstance(row["prompt"], str) and not _is_chat(row["prompt"]):
        raise UsageError(
            f"{where}: prompt is {json.dumps(row['prompt'])[:80]}; "
            "it must be a string or a list of messages",
            hint='"prompt": [{"role": "user", "content": "2 + 3 ="}]',
        )
    for name in RESERVED_COLUMNS:
        if name in row:
            raise UsageError(
                f"{where}: column {name!r} has the name of an argument that every reward gets",
                hint=f"rename the column {name!r}",
            )
    return row


def _is_chat(prompt: object) -> bool:
    return (
        isinstance(prompt, list)
        and bool(prompt)
        and all(
            isinstance(turn, dict)
            and isinstance(turn.get("role"), str)
            and isinstance(turn.get("content"), str)
            for turn in prompt
        )
    )


def _require_new_id(row: Row, line_of_id: dict[str, int], path: Path, number: int) -> None:
    if row.get("id") is None:
        return
    key = json.dumps(row["id"], sort_keys=True)
    if key in line_of_id:
        raise UsageError(
            f"{path}:{number}: id {key} was already used in line {line_of_id[key]}",
            hint="give each line an id of its own, or leave the column out",
        )
    line_of_id[key] = number
