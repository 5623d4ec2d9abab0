"""A CUDA card measured: what is free of it, who holds the rest, how fast it and its link are.

Memory outside this process is asked of NVML, where there is one; nothing parses text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from grpo_lite.cards.measure import (
    Pace,
    available_for_pinning_bytes,
    measure_copy,
    measure_flops,
    measure_host,
    measure_launch_s,
    measured,
    settled,
)
from grpo_lite.cards.profile import SPEED_DTYPES, CardProfile, Figure, match_profile
from grpo_lite.units import MIB, format_bytes

LINK_BYTES = 128 * MIB
"""Size of the engine's blocks: what crosses the link at once."""
PIN_STEP_BYTES = 512 * MIB
"""Step in which page-locked memory is taken until it is refused."""
NUM_LINK_SAMPLES = 9
"""Copies for each direction and kind of memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverView:
    """What NVML says of a card before this process has touched it; None where it does not."""

    total_bytes: int | None = None
    """Capacity, as nvidia-smi shows it."""
    used_bytes: int | None = None
    """Held by anybody and by the driver."""
    power_limit_w: float | None = None
    """Enforced power limit."""
    holders: tuple[str, ...] = ()
    """Processes that hold memory, in words."""


def measure_cuda(folder: Path, pace: Pace) -> CardProfile:
    """Return the profile of CUDA device 0, its disk measured in `folder`.

    Figures that were not measured are those of the shipped profile of the same card, if there is
    one.
    """
    view = driver_view()
    device = torch.device("cuda", 0)
    properties = torch.cuda.get_device_properties(device)
    total_bytes = torch.cuda.mem_get_info(device)[1]
    capability = f"{properties.major}.{properties.minor}"
    base = match_profile(properties.name, total_bytes, capability)
    flops = {dtype: measure_flops(dtype, device, pace) for dtype in SPEED_DTYPES}
    runtime = _runtime_bytes(view, device, base)
    bandwidth = measure_copy(device, pace)
    launch_s = measure_launch_s(device, pace)
    links = _links(device, pace)
    host = measure_host(folder, pace)
    empty = CardProfile(
        name=profile_name(properties.name, total_bytes),
        title=properties.name,
        nvml_name=properties.name,
        form="desktop",
        arch="",
        compute_capability=capability,
        supports_bfloat16=properties.major >= 8,
        total_bytes=measured(total_bytes, "torch.cuda.mem_get_info"),
        runtime_bytes=runtime,
        cublas_workspace_bytes=measured(8_519_680, "torch's default for a cuBLAS handle"),
        held_by_others_bytes=_held_by_others(view),
        memory_bandwidth_bytes_per_s=bandwidth,
        flops_per_s=flops,
    )
    return replace(
        base or empty,
        total_bytes=empty.total_bytes,
        runtime_bytes=runtime,
        held_by_others_bytes=empty.held_by_others_bytes,
        memory_bandwidth_bytes_per_s=bandwidth,
        flops_per_s=flops,
        launch_s=launch_s,
        host_ram_bytes=host.ram_bytes,
        host_bandwidth_bytes_per_s=host.bandwidth_bytes_per_s,
        disk_write_bytes_per_s=host.disk_write_bytes_per_s,
        disk_read_bytes_per_s=host.disk_read_bytes_per_s,
        pinnable_bytes=_pinnable_bytes(pace),
        tdp_w=_power(view) or (base.tdp_w if base else None),
        driver_total_bytes=_driver_total(view) or (base.driver_total_bytes if base else None),
        **links,
    )


def profile_name(device_name: str, total_bytes: int) -> str:
    """Return a file name for a card without a shipped profile: "rtx-9000-32gb"."""
    plain = re.sub(r"(?i)nvidia|geforce", "", device_name)
    words = re.findall(r"[a-z0-9]+", plain.casefold())
    return "-".join([*words, f"{round(total_bytes / 2**30)}gb"])


def driver_view(nvml: Any = None) -> DriverView:
    """Return what NVML (the module pynvml, or `nvml` in its place) says of card 0."""
    if nvml is None:
        import pynvml

        nvml = pynvml
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByIndex(0)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        processes = [
            *nvml.nvmlDeviceGetComputeRunningProcesses(handle),
            *nvml.nvmlDeviceGetGraphicsRunningProcesses(handle),
        ]
        power_w = nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000
    except nvml.NVMLError:  # no driver, or one that does not tell (WSL, containers)
        return DriverView()
    return DriverView(
        total_bytes=memory.total,
        used_bytes=memory.used,
        power_limit_w=power_w,
        holders=tuple(
            f"process {process.pid} {format_bytes(process.usedGpuMemory)}"
            for process in processes
            if process.usedGpuMemory
        ),
    )


def _held_by_others(view: DriverView) -> Figure:
    if view.used_bytes is None:
        return Figure(value=0, source="assumed", note="NVML does not tell")
    holders = ", ".join(view.holders) or "no process named"
    return measured(view.used_bytes, f"in use before this process touched the card: {holders}")


def _runtime_bytes(view: DriverView, device: torch.device, base: CardProfile | None) -> Figure:
    """Return what this process holds outside torch's allocator, now that kernels are loaded."""
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    if view.used_bytes is None:
        if base is not None:
            return base.runtime_bytes
        return Figure(value=400 * MIB, source="assumed", note="NVML does not tell")
    reserved_bytes = torch.cuda.memory_reserved(device)
    context_bytes = total_bytes - free_bytes - reserved_bytes - view.used_bytes
    return measured(max(0, context_bytes), "context and kernels of matrix products in three dtypes")


def _links(device: torch.device, pace: Pace) -> dict[str, Any]:
    """Return the rates of the link by the profile's field."""
    pace.tell("link between host and card")
    card = torch.empty(LINK_BYTES, dtype=torch.uint8, device=device)
    pageable = torch.zeros(LINK_BYTES, dtype=torch.uint8)
    figures = {"pageable_link_bytes_per_s": _link(card, pageable, device, pace)}
    try:
        pinned = torch.zeros(LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:  # page-locked memory is capped on WSL2 and in containers
        return figures
    figures["link_bytes_per_s"] = _link(card, pinned, device, pace)
    figures["link_to_host_bytes_per_s"] = _link(pinned, card, device, pace)
    return figures


def _link(target: torch.Tensor, source: torch.Tensor, device: torch.device, pace: Pace) -> Figure:
    def copy() -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)

    copy()
    rates = [LINK_BYTES / _seconds(copy, pace) for _ in range(NUM_LINK_SAMPLES)]
    return settled(rates, f"copies of {format_bytes(LINK_BYTES)}")


def _seconds(act: Callable[[], None], pace: Pace) -> float:
    started_s = pace.clock()
    act()
    return pace.clock() - started_s


def _pinnable_bytes(pace: Pace) -> Figure:
    """Return how much memory could be page-locked, up to a harmless amount."""
    pace.tell("how much memory can be page-locked")
    limit_bytes = available_for_pinning_bytes()
    held: list[torch.Tensor] = []
    note = f"not tried beyond {format_bytes(limit_bytes)}"
    while (len(held) + 1) * PIN_STEP_BYTES <= limit_bytes:
        try:
            held.append(torch.empty(PIN_STEP_BYTES, dtype=torch.uint8, pin_memory=True))
        except RuntimeError:
            note = "refused beyond it"
            break
    return measured(len(held) * PIN_STEP_BYTES, note)


def _power(view: DriverView) -> Figure | None:
    if view.power_limit_w is None:
        return None
    return measured(view.power_limit_w, "enforced power limit (NVML)")


def _driver_total(view: DriverView) -> Figure | None:
    return None if view.total_bytes is None else measured(view.total_bytes, "NVML")
