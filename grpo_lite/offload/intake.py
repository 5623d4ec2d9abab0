"""What an offloaded optimizer is given, checked: parameters, numbers and budgets."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from grpo_lite.errors import UsageError
from grpo_lite.offload.blocks import Layout, ParameterShape
from grpo_lite.offload.host_limit import RESERVE_BYTES, available_host_bytes
from grpo_lite.offload.link import IN_FLIGHT_BYTES, LINK_BYTES
from grpo_lite.offload.placement import OffloadBudget
from grpo_lite.units import format_bytes

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def named_parameters(group: dict[str, Any]) -> Iterable[tuple[str, torch.Tensor]]:
    """Return the parameters of `group` with their names, or numbers where it has none."""
    names = group.get("param_names") or [f"parameter {i}" for i in range(len(group["params"]))]
    return zip(names, group["params"], strict=True)


def trained_parameters(groups: list[dict[str, Any]]) -> list[torch.Tensor]:
    """Return the parameters that require a gradient and have elements, once each.

    Raises:
        UsageError: one of them cannot be cut into blocks, or they lie on several devices.
    """
    found: dict[int, torch.Tensor] = {}
    for group in groups:
        for name, parameter in named_parameters(group):
            if not parameter.requires_grad or not parameter.numel():
                continue
            if not parameter.is_contiguous():
                raise UsageError(
                    f"{name} is not contiguous, and blocks are flat ranges",
                    hint="parameter.data = parameter.data.contiguous()",
                )
            if parameter.dtype not in _DTYPES:
                raise UsageError(
                    f"{name} is {parameter.dtype}; blocks hold fp32, bf16 and fp16 weights"
                )
            found[id(parameter)] = parameter
    devices = {str(parameter.device) for parameter in found.values()}
    if len(devices) > 1:
        raise UsageError(f"parameters lie on {', '.join(sorted(devices))}; one card is served")
    return list(found.values())


def parameter_shapes(
    groups: list[dict[str, Any]], trained: list[torch.Tensor]
) -> list[ParameterShape]:
    """Return what the layout needs to know of `trained`."""
    names = {id(parameter): name for group in groups for name, parameter in named_parameters(group)}
    return [
        ParameterShape(
            name=names[id(parameter)],
            num_elements=parameter.numel(),
            element_bytes=parameter.element_size(),
            identity=id(parameter),
        )
        for parameter in trained
    ]


def require_numbers(
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    max_grad_norm: float | None,
) -> None:
    """Refuse numbers that AdamW cannot work with, by `UsageError`."""
    for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
        if not value >= 0:
            raise UsageError(f"{name} is {value}; it must not be negative")
    if not all(0 <= beta < 1 for beta in betas):
        raise UsageError(f"betas are {betas}; each must be at least 0 and below 1")
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise UsageError(
            f"max_grad_norm is {max_grad_norm}; it must be above 0", hint="None does not clip"
        )


def host_budget(host_bytes: int | None) -> int:
    """Return the RAM that may be used: `host_bytes`, or what is available less a reserve.

    Raises:
        UsageError: more is asked for than can be had.
    """
    available = available_host_bytes()
    if host_bytes is None:
        return max(available - RESERVE_BYTES, 0)
    if host_bytes > available:
        raise UsageError(
            f"host_bytes is {format_bytes(host_bytes)}; {format_bytes(available)} of RAM is "
            "available (free memory and cgroup limits)",
            hint=f"host_bytes={max(available - RESERVE_BYTES, 0)}, or disk_dir=FOLDER",
        )
    return host_bytes


def disk_budget(folder: Path | None, disk_bytes: int | None, *, resume: bool) -> int:
    """Return the bytes of `folder`'s disk that may be used; 0 without a folder.

    Raises:
        UsageError: the folder is missing.
    """
    if folder is None:
        if resume:
            raise UsageError("resume=True needs a disk_dir to resume from", hint="disk_dir=FOLDER")
        return 0
    if not folder.is_dir():
        raise UsageError(f"disk_dir {folder} is not a folder", hint=f"mkdir -p {folder}")
    held = sum(file.stat().st_blocks * 512 for file in folder.glob("grpo-lite-*/*.bin"))
    free = shutil.disk_usage(folder).free + held
    return free if disk_bytes is None else min(disk_bytes, free)


def offload_budget(  # the constructor's own numbers, checked
    layout: Layout,
    *,
    card_bytes: int | None,
    host_bytes: int,
    disk_bytes: int,
    on_cuda: bool,
    resume: bool,
) -> OffloadBudget:
    """Return the budgets; the card's is the least that works unless it is given."""
    largest = layout.largest_gradient_bytes
    in_flight = max(largest, IN_FLIGHT_BYTES) if on_cuda else 0
    return OffloadBudget(
        card_bytes=largest + in_flight if card_bytes is None else card_bytes,
        host_bytes=host_bytes,
        disk_bytes=disk_bytes,
        link_bytes=LINK_BYTES if on_cuda else 0,
        in_flight_bytes=in_flight,
        resumable=resume,
    )
