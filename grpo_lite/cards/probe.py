"""From what a user calls a card to a profile and a budget, and to the card itself.

`plan_card` is enough to plan and needs no GPU for a named or virtual card; `open_card` opens what
a run will use.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from grpo_lite.cards.card import Budget, Card
from grpo_lite.cards.profile import (
    CPU_NAME,
    CardProfile,
    Figure,
    list_profiles,
    load_profile,
    match_profile,
    virtual_profile,
)
from grpo_lite.errors import UsageError
from grpo_lite.units import format_bytes, parse_bytes

VIRTUAL_UNCERTAINTY_FRACTION = 0.03
"""What the prediction may be off by on a byte ledger."""
CARD_UNCERTAINTY_FRACTION = 0.1
"""Assumed allowance for the caching allocator's fragmentation on a real card, until measured."""
NUM_CUBLAS_WORKSPACES = 2
"""One for the forward's thread and one for autograd's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCard:
    """A card to plan for."""

    spec: str
    """As the user named it."""
    profile: CardProfile
    """Its figures."""
    budget: Budget
    """What of it this run may use."""
    note: str
    """Where the figures come from, in words."""


def plan_card(spec: str, *, reserve_bytes: int = 0) -> PlannedCard:
    """Return the card that `spec` names: "virtual:8GiB", "auto" or a profile's name.

    Raises:
        UsageError: no such card, no live card for "auto", or a reserve larger than the card.
    """
    if spec.startswith("virtual:"):
        planned = _plan_virtual(spec)
    elif spec == "auto":
        planned = _plan_live()
    else:
        planned = _plan_named(spec)
    budget = planned.budget
    if reserve_bytes >= budget.card_bytes:
        raise UsageError(
            f"--reserve {format_bytes(reserve_bytes)} leaves nothing of the "
            f"{format_bytes(budget.card_bytes)} that {spec} has free",
            hint="--reserve 0",
        )
    budget = replace(
        budget, card_bytes=budget.card_bytes - reserve_bytes, reserve_bytes=reserve_bytes
    )
    return replace(planned, budget=budget)


def open_card(spec: str, *, reserve_bytes: int = 0) -> Card:
    """Return the card that a run with `spec` trains on, limited to its budget.

    Raises:
        UsageError: `spec` names a card model (a run needs a live or a virtual card), or none.
    """
    if is_virtual(spec):
        from grpo_lite.cards.virtual import VirtualCard

        planned = plan_card(spec, reserve_bytes=reserve_bytes)
        return VirtualCard(planned.budget.card_bytes, name=spec)
    from grpo_lite.cards.cuda import CudaCard

    planned = _plan_live()
    wanted = spec if spec == "auto" else load_profile(spec).name
    if wanted not in ("auto", planned.profile.name):
        raise UsageError(
            f"the recipe is for {wanted}, and this machine has {planned.profile.name}",
            hint="--card auto plans for the card that is here",
        )
    planned = plan_card("auto", reserve_bytes=reserve_bytes)
    return CudaCard(budget_bytes=planned.budget.card_bytes)


def is_virtual(spec: str) -> bool:
    """Return whether `spec` names a budget on CPU tensors: virtual, or the processor as a card."""
    if spec.startswith("virtual:"):
        return True
    return spec == CPU_NAME and CPU_NAME in list_profiles()


def _plan_virtual(spec: str) -> PlannedCard:
    try:
        total_bytes = parse_bytes(spec.removeprefix("virtual:"))
    except ValueError as error:
        raise UsageError(f"--card {spec}: {error}", hint="--card virtual:8GiB") from error
    if total_bytes == 0:
        raise UsageError(f"--card {spec} has no memory", hint="--card virtual:8GiB")
    profile = virtual_profile(spec, total_bytes)
    note = "a byte budget on CPU tensors; its speeds are assumed and only rank plans"
    if CPU_NAME in list_profiles():
        cpu = load_profile(CPU_NAME)
        profile = replace(
            profile,
            supports_bfloat16=cpu.supports_bfloat16,
            memory_bandwidth_bytes_per_s=cpu.memory_bandwidth_bytes_per_s,
            flops_per_s=cpu.flops_per_s,
            launch_s=cpu.launch_s,
            host_bandwidth_bytes_per_s=cpu.memory_bandwidth_bytes_per_s,
            disk_write_bytes_per_s=cpu.disk_write_bytes_per_s,
            disk_read_bytes_per_s=cpu.disk_read_bytes_per_s,
        )
        note = "a byte budget on CPU tensors; speeds measured by `grpo-lite profile`"
    return PlannedCard(
        spec=spec,
        profile=profile,
        budget=Budget(
            card_bytes=total_bytes,
            total_bytes=total_bytes,
            uncertainty_fraction=VIRTUAL_UNCERTAINTY_FRACTION,
        ),
        note=note,
    )


def _plan_named(spec: str) -> PlannedCard:
    profile = load_profile(spec)
    runtime_bytes = _runtime_bytes(profile)
    held_bytes = int(profile.held_by_others_bytes.value)
    total_bytes = int(profile.total_bytes.value)
    is_cpu = profile.form == "cpu"
    return PlannedCard(
        spec=spec,
        profile=profile,
        budget=Budget(
            card_bytes=total_bytes - runtime_bytes - held_bytes,
            total_bytes=total_bytes,
            runtime_bytes=runtime_bytes,
            held_by_others_bytes=held_bytes,
            uncertainty_fraction=(
                VIRTUAL_UNCERTAINTY_FRACTION if is_cpu else CARD_UNCERTAINTY_FRACTION
            ),
        ),
        note=(
            f"profile figures: total {profile.total_bytes.source}, context "
            f"{profile.runtime_bytes.source}, use by others {profile.held_by_others_bytes.source}"
        ),
    )


def _plan_live() -> PlannedCard:
    """Return the CUDA card of this machine with what is free of it now."""
    import torch

    if not torch.cuda.is_available():
        raise UsageError(
            "no CUDA card found on this machine",
            hint="--card rtx-4060-laptop-8gb plans for a named card, --card virtual:8GiB for a "
            "byte budget that also runs here",
        )
    properties = torch.cuda.get_device_properties(0)
    free_bytes, total_bytes = torch.cuda.mem_get_info(0)
    capability = f"{properties.major}.{properties.minor}"
    profile = match_profile(properties.name, total_bytes, capability)
    if profile is None:
        raise UsageError(
            f"no profile is shipped for {properties.name} with {format_bytes(total_bytes)}",
            hint="--card NAME with the nearest card of `grpo-lite fit --card help`",
        )
    total = Figure(value=total_bytes, source="measured", note="torch.cuda.mem_get_info")
    # The context of this very process is already missing from what is free.
    workspace_bytes = NUM_CUBLAS_WORKSPACES * int(profile.cublas_workspace_bytes.value)
    runtime_bytes = _runtime_bytes(profile)
    return PlannedCard(
        spec="auto",
        profile=replace(profile, total_bytes=total),
        budget=Budget(
            card_bytes=free_bytes - workspace_bytes,
            total_bytes=total_bytes,
            runtime_bytes=runtime_bytes,
            held_by_others_bytes=max(0, total_bytes - free_bytes - runtime_bytes),
            uncertainty_fraction=CARD_UNCERTAINTY_FRACTION,
        ),
        note="free memory measured now; speeds from the card's profile",
    )


def _runtime_bytes(profile: CardProfile) -> int:
    workspaces_bytes = NUM_CUBLAS_WORKSPACES * int(profile.cublas_workspace_bytes.value)
    return int(profile.runtime_bytes.value) + workspaces_bytes
