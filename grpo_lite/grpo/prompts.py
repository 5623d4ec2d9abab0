"""Prompts as token ids, and what happens to those that are too long.

Knows the tokenizer's chat template; knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from grpo_lite.errors import UsageError
from grpo_lite.grpo.data import Example, Message

ON_OVERLONG = ("error", "drop", "truncate_left")


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPrompts:
    """Examples that fit the limit, with their token ids."""

    examples: tuple[Example, ...]
    """Those kept, in order."""
    prompt_ids: tuple[tuple[int, ...], ...]
    """Token ids of each kept example."""
    num_overlong: int
    """Prompts above the limit: dropped or cut."""
    longest_tokens: int
    """Tokens of the longest prompt before anything was cut."""


def encode_prompts(
    tokenizer: Any,
    examples: Sequence[Example],
    max_prompt_length: int,
    *,
    on_overlong: str = "error",
) -> EncodedPrompts:
    """Return `examples` as token ids, at most `max_prompt_length` each.

    Args:
        tokenizer: a transformers tokenizer; chats go through its chat template.
        examples: of one task.
        max_prompt_length: limit in tokens.
        on_overlong: what to do with a longer prompt: "error", "drop", or "truncate_left" (keep its
            last tokens).

    Raises:
        UsageError: a prompt is too long (with "error"), all are, one has no tokens, or a chat meets
            a tokenizer without a template.
    """
    if on_overlong not in ON_OVERLONG:
        raise UsageError(
            f"on_overlong is {on_overlong!r}; it must be one of {', '.join(ON_OVERLONG)}"
        )
    encoded = [_encode(tokenizer, example) for example in examples]
    lengths = [len(ids) for ids in encoded]
    longest = max(lengths, default=0)
    num_overlong = sum(length > max_prompt_length for length in lengths)
    is_lost = on_overlong == "error" or (on_overlong == "drop" and num_overlong == len(examples))
    if num_overlong and is_lost:
        raise UsageError(
            f"{num_overlong} of {len(examples)} prompts are longer than {max_prompt_length} "
            f"tokens; the longest has {longest}",
            hint=f"--max-prompt-length {longest} covers all",
        )
    kept = [
        (example, ids[-max_prompt_length:])
        for example, ids in zip(examples, encoded, strict=True)
        if len(ids) <= max_prompt_length or on_overlong == "truncate_left"
    ]
    return EncodedPrompts(
        examples=tuple(example for example, _ in kept),
        prompt_ids=tuple(tuple(ids) for _, ids in kept),
        num_overlong=num_overlong,
        longest_tokens=longest,
    )


def _encode(tokenizer: Any, example: Example) -> list[int]:
    if isinstance(example.prompt, str):
        ids = tokenizer(example.prompt)["input_ids"]
    else:
        # The template writes the special tokens itself: a second set would be out of place.
        ids = tokenizer(
            _apply_template(tokenizer, example.prompt, example.index), add_special_tokens=False
        )["input_ids"]
    if not ids:
        raise UsageError(
            f"prompt {example.index} is empty: there is no token after which to sample"
        )
    return list(ids)


def _apply_template(tokenizer: Any, messages: tuple[Message, ...], index: int) -> str:
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        raise UsageError(
            f"prompt {index} is a chat, and the tokenizer has no chat template",
            hint="use an Instruct model, or give prompts as plain text "
            '(reasoning_gym: prompt_style = "plain")',
        )
    try:
        text: str = tokenizer.apply_chat_template(
            [asdict(message) for message in messages], tokenize=False, add_generation_prompt=True
        )
    except TemplateError as error:
        raise UsageError(f"the chat template refuses prompt {index}: {error}") from error
    return text
