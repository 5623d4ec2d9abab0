"""The optimizer on the card: torch's own update to the bit, and never any part of it twice."""

import math

import pytest
import torch
from loop_rig import FaultyCard

from grpo_lite.offload import resident
from grpo_lite.offload.resident import ResidentEngine
from grpo_lite.optimizers import ROWS, optimizer_row

# bitsandbytes looks for a CPU kernel of another package and says so.
pytestmark = pytest.mark.filterwarnings("ignore:.*kernels.*")

SIZES = (300, 40, 5000, 64)


def make_parameters():
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(size)) for size in SIZES]


def set_gradients(parameters, step, scale=1.0):
    generator = torch.Generator().manual_seed(step)
    for parameter in parameters:
        parameter.grad = scale * torch.randn(parameter.shape, generator=generator)


def make_engine(parameters, optimizer="adamw_torch_fused", **options):
    settings = {"learning_rate": 1e-2, "weight_decay": 0.1, "max_grad_norm": 1.0} | options
    return ResidentEngine(parameters, optimizer_row(optimizer), **settings)


def flat(parameters):
    return torch.cat([parameter.detach().flatten() for parameter in parameters])


def until_done(engine):
    """Step as the governor does: again and again after an out-of-memory."""
    while True:
        try:
            return engine.step()
        except torch.OutOfMemoryError:
            continue


@pytest.mark.parametrize("block_bytes", [resident.BLOCK_BYTES, 1024, 1])
@pytest.mark.parametrize("optimizer", ["adamw_torch_fused", "adamw_torch"])
def test_blocks_update_as_one_optimizer_does_to_the_bit(optimizer, block_bytes, monkeypatch):
    """A block boundary must not show in the weights."""
    monkeypatch.setattr(resident, "BLOCK_BYTES", block_bytes)
    mine, plain = make_parameters(), make_parameters()
    engine = make_engine(mine, optimizer)
    fused = optimizer == "adamw_torch_fused"
    twin = torch.optim.AdamW(plain, lr=1e-2, weight_decay=0.1, fused=fused)
    for step in range(4):
        set_gradients(mine, step)
        set_gradients(plain, step)
        norm = engine.step().gradient_norm
        for parameter in plain:  # the engine's own coefficient: norms differ by their rounding
            parameter.grad.mul_(1.0 / (norm + 1e-6))
        twin.step()
        true_norm = math.sqrt(sum(p.double().square().sum() for p in gradients_of(step)))
        assert norm == pytest.approx(true_norm, rel=1e-6)
        engine.zero_grad()
    assert torch.equal(flat(mine), flat(plain))


def gradients_of(step):
    parameters = make_parameters()
    set_gradients(parameters, step)
    return [parameter.grad for parameter in parameters]


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("optimizer", [name for name in ROWS if name != "paged_adamw_8bit"])
def test_an_out_of_memory_at_any_allocation_of_two_steps_updates_nothing_twice(
    optimizer, times, monkeypatch
):
    """Law 2. Two rows of optimizers broke it: bitsandbytes makes the state of a tensor after it has
    updated the one before, and torch's plain AdamW needs memory after it has moved the moments."""
    monkeypatch.setattr(resident, "BLOCK_BYTES", 2048)  # the first two tensors share a block

    def two_steps(at):
        card = FaultyCard()
        parameters = make_parameters()
        with card.attach():
            card.adopt(parameters)
            engine = make_engine(parameters, optimizer)
            gradients = [gradients_of(step) for step in range(2)]
            card.arm(at, times)
            for of_step in gradients:
                for parameter, gradient in zip(parameters, of_step, strict=True):
                    parameter.grad = gradient
                until_done(engine)
                engine.zero_grad()
        return card, flat(parameters)

    undisturbed, wanted = two_steps(None)
    assert undisturbed.count > 2 * len(SIZES)
    for at in range(1, undisturbed.count + 1):
        card, found = two_steps(at)
        assert card.fired >= 1
        assert torch.equal(found, wanted), at


@pytest.mark.parametrize("failing", range(len(SIZES)))
def test_a_failure_in_the_middle_of_block_k_is_resumed_at_block_k(failing, monkeypatch):
    """Blocks before it are done and those after it are not: each must be stepped exactly once."""
    monkeypatch.setattr(resident, "BLOCK_BYTES", 1)
    parameters, plain = make_parameters(), make_parameters()
    engine, twin = make_engine(parameters), make_engine(plain)
    calls = []
    for index, optimizer in enumerate(engine._blocks):

        def step(index=index, inner=optimizer.step):
            calls.append(index)
            if index == failing and calls.count(index) == 1:
                raise torch.OutOfMemoryError("no more")
            inner()

        optimizer.step = step
    set_gradients(parameters, 0, scale=9.0)  # large: clipped, and only once
    set_gradients(plain, 0, scale=9.0)
    twin.step()
    with pytest.raises(torch.OutOfMemoryError):
        engine.step()
    assert not torch.equal(flat(parameters), flat(plain))
    engine.step()
    assert calls == [*range(failing + 1), *range(failing, len(SIZES))]
    assert torch.equal(flat(parameters), flat(plain))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_gradients_that_are_not_finite_change_nothing_and_do_not_stay(value):
    """One overflowing row must not turn the moments, and so the whole run, into NaN."""
    parameters, plain = make_parameters(), make_parameters()
    engine, twin = make_engine(parameters), make_engine(plain)
    set_gradients(parameters, 0)
    parameters[1].grad[3] = value
    before = flat(parameters)
    result = engine.step()
    assert result.skipped
    assert torch.equal(flat(parameters), before)
    engine.zero_grad()
    set_gradients(parameters, 1)
    set_gradients(plain, 1)
    assert not engine.step().skipped
    twin.step()
    assert torch.equal(flat(parameters), flat(plain))


def test_a_parameter_without_gradient_is_left_alone():
    """Adapters that a batch does not reach must not decay or move."""
    parameters = make_parameters()
    engine = make_engine(parameters)
    set_gradients(parameters, 0)
    parameters[2].grad = None
    before = parameters[2].detach().clone()
    engine.step()
    assert torch.equal(parameters[2], before)


def test_without_a_limit_gradients_are_not_scaled():
    parameters = make_parameters()
    engine = make_engine(parameters, max_grad_norm=None)
    set_gradients(parameters, 0, scale=9.0)
    kept = [parameter.grad.clone() for parameter in parameters]
    engine.step()
    assert all(torch.equal(p.grad, k) for p, k in zip(parameters, kept, strict=True))


def test_states_that_are_loaded_go_on_where_they_were_saved():
    """A resumed run that forgets its moments starts to learn anew."""
    parameters, plain = make_parameters(), make_parameters()
    engine, twin = make_engine(parameters), make_engine(plain)
    for made, owner in ((engine, parameters), (twin, plain)):
        set_gradients(owner, 0)
        made.step()
    resumed = make_engine(parameters)
    resumed.load_state_dict(engine.state_dict())
    set_gradients(parameters, 1)
    set_gradients(plain, 1)
    resumed.step()
    twin.step()
    assert torch.equal(flat(parameters), flat(plain))


def test_frozen_parameters_are_nobodys_business():
    parameters = [*make_parameters(), torch.nn.Parameter(torch.ones(3), requires_grad=False)]
    engine = make_engine(parameters)
    assert len(engine.parameters) == len(SIZES)


def test_the_copies_of_an_unfused_step_are_the_hosts_and_not_the_cards():
    """On a CPU machine both are one RAM: counted, they would break the budget that was promised."""
    peaks = []
    for optimizer in ("adamw_torch_fused", "adamw_torch"):
        card = FaultyCard()
        parameters = make_parameters()
        with card.attach():
            card.adopt(parameters)
            engine = make_engine(parameters, optimizer)
            for step in range(2):
                set_gradients(parameters, step)
                card.reset_peak()
                engine.step()
            peaks.append(card.peak_bytes())
    fused, unfused = peaks
    copies_bytes = 3 * 4 * sum(SIZES)  # of weights and both moments
    assert unfused - fused < copies_bytes  # torch's own temporaries, tensor by tensor
