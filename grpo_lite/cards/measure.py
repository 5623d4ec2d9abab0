"""What this machine really does, measured: the numbers of a card's profile, each with its spread.

Measures the CPU as a card, and what a CUDA card shares with it; CUDA itself is `measure_cuda`.
Every rate is what it settles at: laptops are faster in their first second than ever after.
Writes one scratch file and removes it; keeps nothing.
"""

from __future__ import annotations

import mmap
import os
import platform
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from grpo_lite.cards.host import gains_from_bfloat16
from grpo_lite.cards.profile import CPU_NAME, SPEED_DTYPES, CardProfile, Figure
from grpo_lite.errors import StoreError
from grpo_lite.units import GIB, MIB, format_bytes

DISK_BLOCK_BYTES = 128 * MIB
"""Size of the engine's blocks: what offload writes and reads at once."""
MAX_DISK_BLOCKS = 8
"""Blocks of the scratch file: what a drive's cache takes is no lasting rate."""
COPY_BYTES = 256 * MIB
"""Beyond every cache of a processor."""
MIN_SAMPLES = 3
"""Fewer have no spread."""
NUM_BLOCKS = 250
"""Tiny blocks that are timed together."""
OPERATIONS_OF_A_BLOCK = 8
"""Operations that one of `_TinyBlock` starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How much time a measurement may take, and who tells the time."""

    figure_s: float
    """Seconds for each figure."""
    clock: Callable[[], float]
    """Seconds, as `time.perf_counter`."""
    tell: Callable[[str], None]
    """Called with what is measured next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFigures:
    """What the machine around a card does."""

    ram_bytes: Figure
    """All of its RAM."""
    bandwidth_bytes_per_s: Figure
    """Bytes read and written by a copy in RAM."""
    disk_write_bytes_per_s: Figure | None
    """Writing blocks; None where the disk has no room for them."""
    disk_read_bytes_per_s: Figure | None
    """Reading them back."""


def measure_cpu(folder: Path, pace: Pace) -> CardProfile:
    """Return the profile of this machine's processor as a card, its disk measured in `folder`."""
    memory = psutil.virtual_memory()
    own_bytes = psutil.Process().memory_info().rss
    flops = {dtype: measure_flops(dtype, torch.device("cpu"), pace) for dtype in SPEED_DTYPES}
    launch_s = measure_launch_s(torch.device("cpu"), pace)
    host = measure_host(folder, pace)
    held_bytes = max(0, memory.total - memory.available - own_bytes)
    return CardProfile(
        name=CPU_NAME,
        title=f"{_processor_name()}, {torch.get_num_threads()} threads",
        nvml_name=None,
        form="cpu",
        arch=platform.machine(),
        compute_capability=None,
        supports_bfloat16=gains_from_bfloat16(),
        total_bytes=host.ram_bytes,
        runtime_bytes=measured(own_bytes, "resident size of a process that has imported torch"),
        cublas_workspace_bytes=measured(0, "there is none on a processor"),
        held_by_others_bytes=measured(held_bytes, "RAM in use by others when it was measured"),
        memory_bandwidth_bytes_per_s=host.bandwidth_bytes_per_s,
        flops_per_s=flops,
        launch_s=launch_s,
        host_ram_bytes=host.ram_bytes,
        host_bandwidth_bytes_per_s=host.bandwidth_bytes_per_s,
        disk_write_bytes_per_s=host.disk_write_bytes_per_s,
        disk_read_bytes_per_s=host.disk_read_bytes_per_s,
        notes=f"torch {torch.__version__}",
    )


def measure_host(folder: Path, pace: Pace) -> HostFigures:
    """Return what RAM and the disk of `folder` do.

    Raises:
        StoreError: `folder` cannot be written.
    """
    total_bytes = psutil.virtual_memory().total
    write, read = measure_disk(folder, pace)
    return HostFigures(
        ram_bytes=measured(total_bytes, "RAM that the operating system reports"),
        bandwidth_bytes_per_s=measure_copy(torch.device("cpu"), pace),
        disk_write_bytes_per_s=write,
        disk_read_bytes_per_s=read,
    )


def measure_flops(dtype: str, device: torch.device, pace: Pace) -> Figure:
    """Return the FLOP/s of a matrix product as a transformer layer makes them."""
    pace.tell(f"matrix products in {dtype}")
    width = 1024 if device.type == "cpu" else 4096
    weight = torch.randn(width, 4 * width, device=device).to(getattr(torch, dtype))

    def multiply(tokens: int) -> Callable[[], None]:
        hidden = torch.randn(tokens, width, device=device).to(weight.dtype)
        return lambda: _do(lambda: hidden @ weight, device)

    tokens, act = 8, multiply(8)
    act()
    # Few tokens would time the reading of the weight; a slow dtype cannot wait for many.
    while tokens < 4096 and min(_seconds(act, pace) for _ in range(2)) < pace.figure_s / 4:
        tokens *= 2
        act = multiply(tokens)
    flops = 2 * tokens * width * 4 * width
    return _rate(act, flops, pace, f"[{tokens}, {width}] x [{width}, {4 * width}]")


def measure_copy(device: torch.device, pace: Pace) -> Figure:
    """Return the bytes per second that a copy on `device` reads and writes."""
    pace.tell(f"memory bandwidth of the {device.type}")
    source = torch.ones(COPY_BYTES // 4, device=device)
    target = torch.empty_like(source)
    note = f"copy of {format_bytes(COPY_BYTES)}, read and write counted"
    return _rate(lambda: _do(lambda: target.copy_(source), device), 2 * COPY_BYTES, pace, note)


def measure_launch_s(device: torch.device, pace: Pace) -> Figure:
    """Return the seconds that starting one operation takes, with the Python around it."""
    pace.tell("cost of starting an operation")
    block = _TinyBlock().to(device)
    number = torch.ones(1, 8, device=device)

    @torch.no_grad()
    def launch() -> None:
        for _ in range(NUM_BLOCKS):
            block(number)

    samples = _samples(lambda: _do(launch, device), pace)
    num_operations = NUM_BLOCKS * OPERATIONS_OF_A_BLOCK
    each = [sample / num_operations for sample in samples]
    return settled(each, f"{num_operations} operations of norms and layers of 8 numbers")


class _TinyBlock(torch.nn.Module):
    """A norm, a layer, an activation and a sum, as transformers are made of, without the work."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
        self.activation = torch.nn.SiLU()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6)
        activated: torch.Tensor = self.activation(self.layer(hidden * scale))
        return hidden + activated


def measure_disk(folder: Path, pace: Pace) -> tuple[Figure | None, Figure | None]:
    """Return the rates of writing and reading blocks in `folder`; None where it has no room.

    Raises:
        StoreError: `folder` cannot be written.
    """
    pace.tell(f"disk of {folder}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(folder).free < 2 * MAX_DISK_BLOCKS * DISK_BLOCK_BYTES:
            return None, None
        with _scratch_file(folder) as (descriptor, how):
            return _disk_rates(descriptor, how, pace)
    except OSError as error:
        raise StoreError(
            f"the disk cannot be measured in {folder}: {error.strerror}",
            hint="--disk FOLDER names a folder that can be written",
        ) from error


def measured(value: float, note: str) -> Figure:
    """Return a figure that was read once."""
    return Figure(value=value, source="measured", note=note)


def settled(samples: list[float], note: str) -> Figure:
    """Return the figure that `samples` settle at: the median of their later half, all as spread."""
    later = samples[len(samples) // 2 :]
    return Figure(
        value=statistics.median(later),
        low=min(samples),
        high=max(samples),
        source="measured",
        note=f"{note}; {len(samples)} samples",
    )


def _rate(act: Callable[[], None], amount: float, pace: Pace, note: str) -> Figure:
    act()
    return settled([amount / seconds for seconds in _samples(act, pace)], note)


def _samples(act: Callable[[], None], pace: Pace) -> list[float]:
    """Return the seconds of each run of `act`, repeated for as long as `pace` allows."""
    samples: list[float] = []
    while len(samples) < MIN_SAMPLES or sum(samples) < pace.figure_s:
        samples.append(_seconds(act, pace))
    return samples


def _seconds(act: Callable[[], None], pace: Pace) -> float:
    started_s = pace.clock()
    act()
    return max(1e-9, pace.clock() - started_s)


def _do(act: Callable[[], object], device: torch.device) -> None:
    """Run `act` and wait for the device."""
    act()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _scratch_file(folder: Path) -> Iterator[tuple[int, str]]:
    """Yield an open scratch file past the page cache where that works, and how it was opened."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".profile-") as file:
        direct = getattr(os, "O_DIRECT", 0)
        try:
            descriptor = os.open(file.name, os.O_RDWR | direct)
            how = "O_DIRECT" if direct else "synced"
        except OSError:  # tmpfs and some network disks have no O_DIRECT
            descriptor, how = os.open(file.name, os.O_RDWR), "synced, no O_DIRECT"
        try:
            yield descriptor, how
        finally:
            os.close(descriptor)


def _disk_rates(descriptor: int, how: str, pace: Pace) -> tuple[Figure, Figure]:
    note = f"blocks of {format_bytes(DISK_BLOCK_BYTES)}, {how}"
    with mmap.mmap(-1, DISK_BLOCK_BYTES) as block:  # page-aligned, as O_DIRECT wants it
        block.write(os.urandom(MIB) * (DISK_BLOCK_BYTES // MIB))
        written = [0]

        def write() -> None:
            os.pwrite(descriptor, block, written[0] % MAX_DISK_BLOCKS * DISK_BLOCK_BYTES)
            os.fdatasync(descriptor)
            written[0] += 1

        writes = [DISK_BLOCK_BYTES / seconds for seconds in _samples(write, pace)]
        _forget(descriptor)
        num_blocks, done = min(written[0], MAX_DISK_BLOCKS), [0]

        def read() -> None:
            os.preadv(descriptor, [block], done[0] % num_blocks * DISK_BLOCK_BYTES)
            done[0] += 1

        reads = [DISK_BLOCK_BYTES / seconds for seconds in _samples(read, pace)]
    return settled(writes, note), settled(reads, note)


def _forget(descriptor: int) -> None:
    """Ask the kernel to drop the file from its cache, so that reading it reads the disk."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or "processor")


def available_for_pinning_bytes() -> int:
    """Return how much RAM may be page-locked for a test without harm to other programs."""
    return int(min(psutil.virtual_memory().available // 2, 8 * GIB))
