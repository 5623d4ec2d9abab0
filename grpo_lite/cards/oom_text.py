"""What a pasted error says about memory: the kind of failure, its figures, the phase it names.

Knows the wordings of torch 1.13 to 2.13, of CUDA, cuBLAS and the kernel; no model and no plan.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import StrEnum

from grpo_lite.errors import UsageError
from grpo_lite.plan import Phase
from grpo_lite.units import MIB, parse_bytes

LARGE_TENSOR_BYTES = 10 * MIB
"""From this size on torch's CUDA allocator asks the driver for the tensor, in steps of 2 MiB."""
STEP_BYTES = 2 * MIB
"""What it rounds up to (c10/cuda/CUDACachingAllocator: kRoundLarge, and kSmallBuffer)."""
SMALL_TENSOR_BYTES = MIB
"""Up to this size tensors share blocks of 2 MiB (kSmallSize)."""
POOL_BYTES = 20 * MIB
"""The block that is asked for a tensor between the two sizes (kLargeBuffer)."""


class FailureKind(StrEnum):
    """Which memory ran out."""

    CARD = "the card's memory"
    DRIVER = "the card's memory or page-locked host memory"
    PINNED = "page-locked host memory"
    HOST = "host memory"
    KILLED = "host memory, by the kernel's killer"


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteRange:
    """Sizes that a printed, rounded size may stand for, both ends included."""

    low_bytes: int
    """Smallest."""
    high_bytes: int
    """Largest."""

    def holds(self, num_bytes: int) -> bool:
        """Return whether `num_bytes` is one of them."""
        return self.low_bytes <= num_bytes <= self.high_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherProcess:
    """Another process on the card, as the message names it."""

    pid: str
    """Its process id."""
    used_bytes: int
    """What it holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OomText:
    """The figures of one error; None where it does not give one."""

    kind: FailureKind
    """Which memory ran out."""
    phase: Phase | None
    """The phase that the traceback shows."""
    asked_bytes: int | None = None
    """The allocation that failed, as printed."""
    tensor_bytes: ByteRange | None = None
    """Sizes that the tensor behind it can have."""
    total_bytes: int | None = None
    """The card's capacity."""
    free_bytes: int | None = None
    """Free on the card."""
    allowed_bytes: int | None = None
    """Limit of this process, where one was set."""
    process_bytes: int | None = None
    """Held by this process, context included."""
    allocated_bytes: int | None = None
    """Tensors of this process."""
    cached_bytes: int | None = None
    """Reserved by torch without a tensor in it."""
    others: tuple[OtherProcess, ...] = ()
    """Other processes that the message lists."""
    is_wsl: bool = False
    """Whether the text shows Windows' Linux subsystem."""


def read_oom_text(text: str) -> OomText:
    """Return what the error in `text` says; the last out-of-memory in it counts.

    Raises:
        UsageError: the text is empty, binary, or no out-of-memory error.
    """
    _require_text(text)
    phase = _phase(text)
    is_wsl = re.search(r"microsoft-standard|WSL", text) is not None
    asked = list(_ASKED.finditer(text))
    if asked:
        # The figures stand behind the request: torch's message runs on to its end.
        return _from_allocator(text[asked[-1].start() :], phase, is_wsl=is_wsl)
    host = list(_HOST.finditer(text))
    if host:
        return _from_host(host[-1], phase)
    for kind, pattern in _OTHER_KINDS:
        if pattern.search(text):
            return OomText(kind=kind, phase=phase, is_wsl=is_wsl)
    raise UsageError(
        "the text holds no out-of-memory error that is known here",
        hint="paste the whole traceback with its last line, as in "
        '"CUDA out of memory. Tried to allocate 1.90 GiB. ..."',
    )


def tensor_range(printed: str) -> ByteRange:
    """Return which tensor sizes make torch's allocator ask for `printed` ("9.27 GiB").

    Two decimals are printed of a size that was rounded up to 2 MiB; tensors of 1 to 10 MiB are all
    asked for as 20 MiB, those below as 2 MiB.
    """
    value_text, unit = printed.split()
    unit_bytes = parse_bytes(f"1{unit}")
    decimals = len(value_text.partition(".")[2])
    half = unit_bytes * 10.0**-decimals / 2
    value = float(value_text) * unit_bytes
    low_step = math.ceil((value - half) / STEP_BYTES) * STEP_BYTES
    high_step = math.floor((value + half) / STEP_BYTES) * STEP_BYTES
    if low_step > high_step:  # not a whole number of steps: another allocator, nothing was rounded
        return ByteRange(low_bytes=math.ceil(value - half), high_bytes=math.floor(value + half))
    if high_step <= STEP_BYTES:
        return ByteRange(low_bytes=1, high_bytes=SMALL_TENSOR_BYTES)
    low_bytes = low_step - STEP_BYTES + 1
    if low_step <= POOL_BYTES <= high_step:
        low_bytes = SMALL_TENSOR_BYTES + 1
    elif high_step >= LARGE_TENSOR_BYTES:
        low_bytes = max(low_bytes, LARGE_TENSOR_BYTES)
    return ByteRange(low_bytes=low_bytes, high_bytes=high_step)


_SIZE = r"(\d+(?:\.\d+)?\s?(?:[KMGT]i?B|bytes|B))"
_ASKED = re.compile(rf"Tried to allocate {_SIZE}")
_HOST = re.compile(
    r"(?:DefaultCPUAllocator: (?:can't allocate memory|not enough memory)[^\n]*?"
    r"you tried to allocate (\d+) bytes|Unable to allocate (\d[\d.]* [KMGT]iB) for an array)"
)
_FIGURES = {
    "total_bytes": re.compile(
        rf"(?:total capac?i?ty of {_SIZE}|; {_SIZE} total capacity|\(GPU \d+; {_SIZE} total|"
        rf"Of {_SIZE} in all)"
    ),
    "free_bytes": re.compile(rf"(?:of which {_SIZE} is free|{_SIZE} free;|{_SIZE} is free)"),
    "allowed_bytes": re.compile(rf"{_SIZE} allowed"),
    "process_bytes": re.compile(rf"this process has {_SIZE} memory in use"),
    "allocated_bytes": re.compile(
        rf"(?:{_SIZE} is allocated by PyTorch|{_SIZE} already allocated|{_SIZE} is allocated,)"
    ),
    "cached_bytes": re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated"),
}
"""Each figure in the wordings of torch 2.x ("capacty" until 2.1), 1.13 and the virtual card."""
_RESERVED = re.compile(rf"{_SIZE} reserved in total by PyTorch")
_OTHER_PROCESS = re.compile(rf"Process (\d+) has {_SIZE} memory in use")
_EXACT = re.compile(r"\((\d+) bytes asked, (\d+) free\)")
_OTHER_KINDS = (
    (
        FailureKind.PINNED,
        re.compile(
            r"cudaHostAlloc|cudaHostRegister|cudaMallocHost|pin_memory[\s\S]*CUDA error|"
            r"CUDA error[\s\S]*pin_memory|cget_managed_ptr|get_paged|pinned_memory[\s\S]*CUDA error"
        ),
    ),
    (
        FailureKind.KILLED,
        re.compile(
            r"[Oo]ut of memory: Kill|oom-kill|oom_reaper|"
            r"exit(?:ed with)?(?: code| status)?:? ?137\b|"
            r"exitcode\s*:\s*-9|(?m:^(?:.*[\s:])?Killed\s*$)|\b\d+ Killed\b|"
            r"SIGKILL|signal 9\b|returned -9\b"
        ),
    ),
    (FailureKind.HOST, re.compile(r"\bMemoryError\b|Cannot allocate memory|std::bad_alloc")),
    (
        FailureKind.DRIVER,
        re.compile(
            r"CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|cudaErrorMemoryAllocation|"
            r"CUDA_ERROR_OUT_OF_MEMORY|CUDNN_STATUS_ALLOC_FAILED|CUDA driver error: out of memory|"
            r"(?:CUDA|HIP|XPU|MPS backend) out of memory|OutOfMemoryError"
        ),
    ),
)
"""In order: pinning failures also say "CUDA error: out of memory"."""
_PHASES = (
    (Phase.STEP, re.compile(r"optimizer\.step\(|torch/optim/|bitsandbytes/optim/")),
    (Phase.BACKWARD, re.compile(r"\.backward\(|run_backward")),
    (Phase.SAVE, re.compile(r"save_pretrained|save_model\(|merge_and_unload|torch\.save\(")),
    (Phase.FORWARD, re.compile(r"\bcompute_loss\b")),
    (Phase.LOGPROB, re.compile(r"per_token_logps|logprobs?\(|compute_logps")),
    (Phase.ROLLOUT, re.compile(r"\.generate\(|\bin generate\b|generate_and_score|vllm")),
    (Phase.LOAD, re.compile(r"from_pretrained|load_state_dict|load_checkpoint|\bmodel\.to\(")),
)
"""What a traceback of each phase shows; later rows also stand around earlier ones."""


def _require_text(text: str) -> None:
    if not text.strip():
        raise UsageError(
            "nothing was pasted", hint="grpo-lite explain error.txt, or pipe the error to it"
        )
    strange = sum(c == "\ufffd" or not (c.isprintable() or c in "\n\r\t\x1b\b") for c in text)
    if "\x00" in text or strange > len(text) / 10:
        raise UsageError(
            "the input is binary, not the text of an error",
            hint="paste the traceback's lines, as the terminal showed them",
        )


def _from_allocator(text: str, phase: Phase | None, *, is_wsl: bool) -> OomText:
    printed = _normal(_found(_ASKED, text) or "")
    figures = {name: _bytes(pattern, text) for name, pattern in _FIGURES.items()}
    reserved_bytes = _bytes(_RESERVED, text)
    if figures["cached_bytes"] is None and reserved_bytes is not None:
        figures["cached_bytes"] = max(0, reserved_bytes - (figures["allocated_bytes"] or 0))
    asked_bytes, tensor_bytes = parse_bytes(printed), tensor_range(printed)
    exact = _EXACT.search(text)
    if exact is not None:
        asked_bytes, figures["free_bytes"] = int(exact.group(1)), int(exact.group(2))
        tensor_bytes = ByteRange(low_bytes=asked_bytes, high_bytes=asked_bytes)
    return OomText(
        kind=FailureKind.CARD,
        phase=phase,
        asked_bytes=asked_bytes,
        tensor_bytes=tensor_bytes,
        others=tuple(
            OtherProcess(pid=found.group(1), used_bytes=parse_bytes(_normal(found.group(2))))
            for found in _OTHER_PROCESS.finditer(text)
        ),
        is_wsl=is_wsl,
        **figures,
    )


def _from_host(found: re.Match[str], phase: Phase | None) -> OomText:
    exact, printed = found.groups()
    num_bytes = int(exact) if exact else parse_bytes(printed)
    size = ByteRange(low_bytes=num_bytes, high_bytes=num_bytes) if exact else None
    return OomText(kind=FailureKind.HOST, phase=phase, asked_bytes=num_bytes, tensor_bytes=size)


def _phase(text: str) -> Phase | None:
    return next((phase for phase, pattern in _PHASES if pattern.search(text)), None)


def _bytes(pattern: re.Pattern[str], text: str) -> int | None:
    found = _found(pattern, text)
    return None if found is None else parse_bytes(_normal(found))


def _found(pattern: re.Pattern[str], text: str) -> str | None:
    found = pattern.search(text)
    return None if found is None else next(group for group in found.groups() if group)


def _normal(size: str) -> str:
    """Return `size` with one space before its unit: "512 bytes" becomes "512 B"."""
    number, unit = re.fullmatch(r"([\d.]+)\s?(\w+)", size).groups()  # type: ignore[union-attr]
    return f"{number} {'B' if unit == 'bytes' else unit}"
