"""One suite for every card: what the contract in `cards/card.py` promises."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from grpo_lite.cards.card import Card
from grpo_lite.cards.cuda import CudaCard
from grpo_lite.cards.virtual import VirtualCard

MIB = 2**20
BUDGET = 64 * MIB


@pytest.fixture(params=["virtual", pytest.param("cuda", marks=pytest.mark.gpu)])
def card(request: pytest.FixtureRequest) -> Card:
    if request.param == "virtual":
        return VirtualCard(BUDGET)
    if not torch.cuda.is_available():
        pytest.skip("no CUDA card")
    return CudaCard(budget_bytes=BUDGET)


def ones(card: Card, num_bytes: int) -> torch.Tensor:
    return torch.ones(num_bytes // 4, dtype=torch.float32, device=card.device)


def test_a_tensor_counts_from_its_birth_to_its_last_reference(card: Card) -> None:
    """A count that lags behind would let the next allocation fail for no reason."""
    with card.attach():
        before = card.allocated_bytes()
        tensor = ones(card, MIB)
        assert card.allocated_bytes() - before == MIB
        view = tensor.view(2, -1)[0]
        del tensor
        assert card.allocated_bytes() - before == MIB, "the view keeps the storage"
        del view
        assert card.allocated_bytes() == before


def test_views_and_in_place_operations_count_nothing(card: Card) -> None:
    with card.attach():
        tensor = ones(card, MIB)
        held = card.allocated_bytes()
        tensor.add_(1).view(-1)[:10].mul_(2)
        assert card.allocated_bytes() == held


def test_the_peak_is_the_largest_sum_alive_together_and_can_start_anew(card: Card) -> None:
    with card.attach():
        card.reset_peak()
        start = card.allocated_bytes()
        first = ones(card, 2 * MIB)
        del first
        second = ones(card, MIB)
        assert card.peak_bytes() - start == 2 * MIB, "never a sum of tensors that did not meet"
        card.reset_peak()
        assert card.peak_bytes() == card.allocated_bytes()
        del second


def test_beyond_the_budget_the_genuine_error_is_raised_and_nothing_is_counted(card: Card) -> None:
    """Recovery code catches torch's own error; a lookalike would sail past it."""
    with card.attach():
        held = ones(card, 40 * MIB)
        before = card.allocated_bytes()
        with pytest.raises(torch.OutOfMemoryError) as caught:
            ones(card, 40 * MIB)
        oom = card.read_oom(caught.value)
        assert oom is not None
        assert oom.shortfall_bytes >= 1
        assert card.allocated_bytes() == before
        assert card.peak_bytes() <= card.budget_bytes
        del held


def test_other_errors_are_not_taken_for_out_of_memory(card: Card) -> None:
    assert card.read_oom(ValueError("Tried to allocate 2.00 GiB")) is None
    assert card.read_oom(RuntimeError("shape mismatch")) is None


@pytest.mark.parametrize("phase", ["forward", "backward", "step"])
def test_memory_runs_out_in_forward_backward_and_step_alike(phase: str) -> None:
    """A budget that only watched the forward would miss where most runs die."""
    card = VirtualCard(BUDGET)
    layers = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(2)))
    card.adopt(layers.parameters())
    optimizer = torch.optim.AdamW(layers.parameters(), fused=True)

    def leave_little() -> None:
        card.ledger.budget_bytes = card.allocated_bytes() + 1000

    with card.attach():
        if phase == "forward":
            leave_little()
            with pytest.raises(torch.OutOfMemoryError):
                layers(torch.ones(1, 512))
            return
        loss = layers(torch.ones(64, 512)).sum()
        if phase == "backward":
            leave_little()
            with pytest.raises(torch.OutOfMemoryError):
                loss.backward()
            return
        loss.backward()
        leave_little()
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.step()


def test_host_memory_is_the_hosts(card: Card) -> None:
    """On a CPU machine card and host are one RAM: what left the card must not count twice."""
    with card.attach():
        before = card.allocated_bytes()
        host = card.empty_host(MIB // 4, torch.float32)
        host.zero_().add_(1)
        assert host.device.type == "cpu"
        assert card.allocated_bytes() == before


def test_attaching_twice_counts_once(card: Card) -> None:
    with card.attach(), card.attach():
        before = card.allocated_bytes()
        tensor = ones(card, MIB)
        assert card.allocated_bytes() - before == MIB
    del tensor


def test_a_worker_thread_counts_inside_attach() -> None:
    """Dispatch modes belong to a thread: a worker that does not attach goes unseen."""
    card = VirtualCard(BUDGET)
    kept: list[torch.Tensor] = []

    def work(attached: bool) -> None:
        if attached:
            with card.attach():
                kept.append(torch.ones(MIB // 4))
        else:
            kept.append(torch.ones(MIB // 4))

    for attached, expected in ((False, 0), (True, MIB)):
        thread = threading.Thread(target=work, args=(attached,))
        thread.start()
        thread.join()
        assert card.allocated_bytes() == expected


def test_adopted_weights_count_once_with_ties_and_break_the_budget_if_too_large() -> None:
    card = VirtualCard(4 * MIB)
    weight = torch.nn.Parameter(torch.ones(MIB // 4))
    card.adopt([weight, weight, weight.detach()])
    assert card.allocated_bytes() == MIB
    with pytest.raises(torch.OutOfMemoryError):
        card.adopt([torch.ones(MIB)])
    assert card.allocated_bytes() == MIB


def test_the_ledger_works_on_fake_tensors_and_returns_to_zero() -> None:
    """The trace counts fake tensors with the code that counts a run's real ones."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    card = VirtualCard(2**40)
    with FakeTensorMode(), card.attach():
        x = torch.empty(1 << 20, 256, requires_grad=True)
        y = (x * 2).sum()
        y.backward()
        assert card.peak_bytes() >= 2 * 2**30
        del x, y
    gc.collect()
    assert card.allocated_bytes() == 0


def test_a_storage_that_is_resized_is_counted_at_its_new_size() -> None:
    card = VirtualCard(BUDGET)
    with card.attach():
        out = torch.empty(0)
        torch.cat([torch.ones(1000), torch.ones(1000)], out=out)
        assert card.allocated_bytes() >= 8000
