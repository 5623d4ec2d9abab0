"""A pasted out-of-memory error explained: the tensor behind it, who held the rest, what helps.

Holds the sizes that an error's "Tried to allocate" can stand for against tensors whose sizes are
known: the model's weights, what their shapes make of known rows and tokens, and the trace's terms.
Says "cannot tell" where nothing or too much matches; never guesses rows or tokens.
Pure; knows no torch and no wording of an error (that is `cards.oom_text`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from grpo_lite.cards.oom_text import FailureKind, OomText
from grpo_lite.plan import Phase
from grpo_lite.predict.memory import estimate_memory
from grpo_lite.search import step_down
from grpo_lite.suspects import (
    ITEM_BYTES,
    Planned,
    Setting,
    Suspect,
    all_suspects,
)
from grpo_lite.units import format_bytes


class Certainty(StrEnum):
    """How much the size of the request says."""

    NAMED = "matches one tensor"
    LIKELY = "matches one known tensor, others cannot be excluded"
    SEVERAL = "matches several tensors"
    CANNOT_TELL = "cannot tell"


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Who held memory when it ran out."""

    who: str
    """In words."""
    num_bytes: int
    """How much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Something that would help."""

    what: str
    """What to change."""
    frees_bytes: int | None
    """How much it frees at least; None where that is not known."""
    covers: bool | None
    """Whether that is enough; None where that is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What an error means."""

    oom: OomText
    """What the text says."""
    certainty: Certainty
    """Whether the tensor is known."""
    matches: tuple[Suspect, ...]
    """Tensors of the size that was asked for, the most often seen first."""
    missing_bytes: int | None
    """What was asked for beyond what was free."""
    holders: tuple[Holder, ...]
    """Who held the card."""
    changes: tuple[Change, ...]
    """What helps: the smallest change that is enough first."""
    notes: tuple[str, ...]
    """What else to know."""


def explain(oom: OomText, setting: Setting, planned: Planned | None = None) -> Explanation:
    """Return what `oom` means for a run of which `setting`, and perhaps its plan, is known."""
    suspects = list(all_suspects(setting, planned))
    matches = _matching(oom, suspects)
    certainty = _certainty(oom, matches, setting, planned)
    changes = _changes(oom, matches, setting, planned)
    changes.sort(key=lambda change: {True: 0, None: 1, False: 2}[change.covers])
    return Explanation(
        oom=oom,
        certainty=certainty,
        matches=matches,
        missing_bytes=_missing_bytes(oom),
        holders=_holders(oom),
        changes=tuple(changes),
        notes=tuple(_notes(oom, certainty, setting)),
    )


def _matching(oom: OomText, suspects: Iterable[Suspect]) -> tuple[Suspect, ...]:
    """Return the suspects of the size asked for, in its phase; those of like factors as one."""
    if oom.tensor_bytes is None:
        return ()
    found: dict[tuple[int, ...], Suspect] = {}
    for suspect in suspects:
        if not oom.tensor_bytes.holds(suspect.num_bytes):
            continue
        if oom.phase is not None and suspect.phases and oom.phase not in suspect.phases:
            continue
        alike = found.get(suspect.factors)
        found[suspect.factors] = suspect if alike is None else _merged(alike, suspect)
    return tuple(found.values())


def _merged(one: Suspect, other: Suspect) -> Suspect:
    """Return two tensors of the same factors as one, which may be either."""
    what = one.what if other.what in one.what else f"{one.what}, or {other.what}"
    phases = one.phases | other.phases if one.phases and other.phases else frozenset()
    return replace(one, what=what, phases=phases)


def _certainty(
    oom: OomText, matches: tuple[Suspect, ...], setting: Setting, planned: Planned | None
) -> Certainty:
    if not matches or oom.kind is not FailureKind.CARD:
        return Certainty.CANNOT_TELL
    assert oom.tensor_bytes is not None
    if oom.tensor_bytes.high_bytes > 2 * oom.tensor_bytes.low_bytes:
        return Certainty.CANNOT_TELL  # a shared block of the allocator: any small tensor
    if len(matches) > 1:
        return Certainty.SEVERAL
    knows_shapes = planned is not None or (
        setting.rows is not None and setting.completion_tokens is not None
    )
    return Certainty.NAMED if knows_shapes else Certainty.LIKELY


def _missing_bytes(oom: OomText) -> int | None:
    if oom.asked_bytes is None:
        return None
    free = [] if oom.free_bytes is None else [oom.free_bytes]
    if oom.allowed_bytes is not None and oom.allocated_bytes is not None:
        free.append(oom.allowed_bytes - oom.allocated_bytes - (oom.cached_bytes or 0))
    return max(0, oom.asked_bytes - max(0, min(free))) if free else None


def _holders(oom: OomText) -> tuple[Holder, ...]:
    rows: list[tuple[str, int | None]] = [
        ("tensors of this process", oom.allocated_bytes),
        ("reserved by torch, no tensor in it (fragmentation)", oom.cached_bytes),
    ]
    if oom.allocated_bytes is not None and oom.process_bytes is not None:
        context_bytes = oom.process_bytes - oom.allocated_bytes - (oom.cached_bytes or 0)
        rows.append(("this process outside torch: context, kernels, libraries", context_bytes))
    elif oom.allocated_bytes is None:
        rows.append(("this process", oom.process_bytes))
    rows.extend((f"process {other.pid}", other.used_bytes) for other in oom.others)
    if oom.total_bytes is not None and oom.free_bytes is not None:
        rest_bytes = oom.total_bytes - oom.free_bytes - sum(size or 0 for _, size in rows)
        who = "other processes and what the driver keeps"
        if oom.process_bytes is None:
            who = "context, other processes, driver (this message does not tell them apart)"
        rows.append((who, rest_bytes))
    rows.append(("free", oom.free_bytes))
    return tuple(Holder(who=who, num_bytes=size) for who, size in rows if size and size > 0)


def _changes(
    oom: OomText, matches: tuple[Suspect, ...], setting: Setting, planned: Planned | None
) -> list[Change]:
    if oom.kind is not FailureKind.CARD:
        return [Change(what=what, frees_bytes=None, covers=None) for what in _REMEDIES[oom.kind]]
    missing_bytes = _missing_bytes(oom)
    changes = list(_free_changes(oom, missing_bytes))
    if planned is not None:
        changes.extend(_lower_plan(oom, missing_bytes, planned))
    elif matches:
        changes.extend(_by_match(matches, missing_bytes, setting))
    if not any(change.covers for change in changes):
        changes.extend(Change(what=what, frees_bytes=None, covers=None) for what in _GENERAL)
    return changes


def _free_changes(oom: OomText, missing_bytes: int | None) -> Iterator[Change]:
    """Yield what costs nothing: gaps in the allocator's blocks, other programs."""
    if missing_bytes is None:
        return
    if oom.cached_bytes is not None and oom.cached_bytes >= missing_bytes > 0 and not oom.is_wsl:
        yield Change(
            what="set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (Linux; not on Windows): "
            "enough was reserved, in pieces that are too small",
            frees_bytes=oom.cached_bytes,
            covers=None,  # up to this much: how it is scattered is not in the message
        )
    others_bytes = sum(other.used_bytes for other in oom.others)
    if others_bytes:
        pids = ", ".join(other.pid for other in oom.others)
        yield Change(
            what=f"stop the other processes on the card ({pids})",
            frees_bytes=others_bytes,
            covers=others_bytes >= missing_bytes,
        )


def _lower_plan(oom: OomText, missing_bytes: int | None, planned: Planned) -> Iterator[Change]:
    """Yield the governor's own answer: the fastest plan that needs that much less."""
    question, workload, plan = planned.question, planned.workload, planned.plan
    phase = oom.phase or Phase.BACKWARD
    lower = step_down(question, workload, plan, phase, missing_bytes or 1)
    if lower is None:
        yield Change(
            what=f"no plan of the same experiment needs less in {phase}: shorter completions, "
            "--method lora, or a larger card",
            frees_bytes=None,
            covers=None,
        )
        return
    before = estimate_memory(question.footprint, workload, plan).of(phase)
    after = estimate_memory(question.footprint, workload, lower).of(phase)
    assert before is not None
    assert after is not None
    changed = ", ".join(
        f"{name} {old} -> {new}" for name, (old, new) in plan.changes_to(lower).items()
    )
    frees_bytes = before.allocated_bytes - after.allocated_bytes
    yield Change(
        what=f"{changed} (the same experiment; `train` does this by itself)",
        frees_bytes=frees_bytes,
        covers=None if missing_bytes is None else frees_bytes >= missing_bytes,
    )


def _by_match(
    matches: tuple[Suspect, ...], missing_bytes: int | None, setting: Setting
) -> Iterator[Change]:
    suspect = matches[0]
    covers = None if missing_bytes is None else suspect.num_bytes >= missing_bytes
    if suspect.what.startswith("logits"):
        yield Change(
            what="compute the loss in chunks, so that these logits never exist whole "
            "(TRL: use_liger_kernel=True; grpo-lite: always)",
            frees_bytes=suspect.num_bytes,
            covers=covers,
        )
    if suspect.grows_with_rows and setting.rows is not None and setting.rows > 1:
        yield _fewer_rows(suspect, missing_bytes, setting.rows)
    if not suspect.grows_with_rows:
        yield Change(
            what="in the optimizer's step: optim adamw_torch_fused, which makes no temporary "
            "copies; elsewhere: less of what is held beside it (fewer rows, checkpointing, LoRA)",
            frees_bytes=None,
            covers=None,
        )


def _fewer_rows(suspect: Suspect, missing_bytes: int | None, rows: int) -> Change:
    """Return the largest number of rows at which this tensor alone frees what was missing."""
    smaller = [fewer for fewer in range(rows - 1, 0, -1) if rows % fewer == 0]
    frees = {fewer: suspect.num_bytes * (rows - fewer) // rows for fewer in smaller}
    enough = [f for f in smaller if missing_bytes is not None and frees[f] >= missing_bytes]
    fewer = enough[0] if enough else smaller[0 if missing_bytes is None else -1]
    return Change(
        what=f"per_device_train_batch_size {rows} -> {fewer}, gradient_accumulation_steps "
        f"x {rows // fewer} (the same effective batch)",
        frees_bytes=frees[fewer],
        covers=bool(enough) if missing_bytes is not None else None,
    )


def _notes(oom: OomText, certainty: Certainty, setting: Setting) -> Iterator[str]:
    if oom.kind is not FailureKind.CARD:
        yield _MEANINGS[oom.kind]
        if oom.is_wsl and oom.kind in (FailureKind.PINNED, FailureKind.DRIVER):
            yield "Windows' Linux subsystem caps page-locked memory far below the RAM"
        return
    assert oom.tensor_bytes is not None
    if oom.tensor_bytes.high_bytes > 2 * oom.tensor_bytes.low_bytes:
        yield (
            "torch asks for a block of this size for any small tensor; it was only the one that "
            "came when the card was full"
        )
    elif certainty is Certainty.CANNOT_TELL:
        yield from _could_be_logits(oom, setting)
    if not setting.weights:
        yield "--model MODEL names the model, so that its tensors can be matched"
    elif setting.rows is None or setting.completion_tokens is None:
        yield (
            "--micro-batch, --max-prompt-length and --max-completion-length, or --recipe, "
            "would narrow it down"
        )


def _could_be_logits(oom: OomText, setting: Setting) -> Iterator[str]:
    """Say how many tokens' logits have this size, where so many can have been there."""
    assert oom.tensor_bytes is not None
    vocabulary = setting.vocabulary
    if vocabulary is None:
        return
    for item_bytes, dtype in ITEM_BYTES.items():
        tokens = oom.tensor_bytes.high_bytes // (vocabulary * item_bytes)
        most = None
        if setting.rows is not None and setting.completion_tokens is not None:
            most = setting.rows * (setting.completion_tokens + (setting.prompt_tokens or 0))
        if tokens and (most is None or tokens <= most):
            size = format_bytes(tokens * vocabulary * item_bytes)
            yield f"{dtype} logits of {tokens:,} tokens would be of this size ({size})"


_MEANINGS = {
    FailureKind.DRIVER: (
        "the driver or cuBLAS could not get memory outside torch's allocator, so the message has "
        "no figures: the card was full for its context and workspaces, or no more host memory "
        "could be page-locked (then the card is not the problem)"
    ),
    FailureKind.PINNED: (
        "this is not about the card's memory: the driver could not page-lock host memory"
    ),
    FailureKind.HOST: "this is not about the card's memory: the host's ran out",
    FailureKind.KILLED: (
        "this is not about the card's memory: the kernel ended the process because the host's "
        "ran out (exit code 137 is signal 9)"
    ),
}
_REMEDIES = {
    FailureKind.DRIVER: (
        "keep more of the card free for it: --reserve 500MiB in fit, or fewer rows",
        "look at nvidia-smi while it runs: if much of the card is free, it was page-locked memory",
    ),
    FailureKind.PINNED: (
        "an optimizer that is not paged, offload without pinned buffers, "
        "dataloader_pin_memory=False",
        "`grpo-lite profile` measures how much can be page-locked here",
    ),
    FailureKind.HOST: (
        "less in host memory: offload less, fewer dataloader workers, load the weights once",
        "more swap keeps it alive, slowly",
    ),
    FailureKind.KILLED: (
        "less in host memory: offload less, fewer dataloader workers, load the weights once",
        "`dmesg | grep -i kill` shows how much the process held; a container has its own limit",
    ),
}
_GENERAL = (
    "fewer rows at once with more accumulation, then shorter completions, then LoRA",
    "`grpo-lite fit MODEL --card auto` computes which settings fit this card",
)
