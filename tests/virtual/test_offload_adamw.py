"""The offloaded optimizer against its twin, bit by bit, on every tier and for many cuts."""

import logging
import math

import pytest
import torch
from offload_rig import HOMES, Twin, budgets, groups_of, loss_of, make_model, schedule

from grpo_lite.errors import UsageError
from grpo_lite.offload.adamw import OffloadedAdamW
from grpo_lite.offload.placement import Tier

LR = 3e-3


def make(model, tier, folder, block_bytes=16_384, **options):
    found = budgets(model, tier, block_bytes)
    if found is None:
        pytest.skip("three tiers need three blocks")
    if "disk_bytes" in found:
        found["disk_dir"] = folder
    return OffloadedAdamW(groups_of(model), lr=LR, block_bytes=block_bytes, **{**found, **options})


def update(model, optimizer, step, accumulation=4):
    for micro in range(accumulation):
        (loss_of(model, 100 * step + micro) / accumulation).backward()
    optimizer.step()
    optimizer.zero_grad()


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(left, right):
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


@pytest.mark.parametrize(
    ("dtype", "block_bytes"),
    [
        (torch.bfloat16, 2048),
        (torch.bfloat16, 16_384),
        (torch.bfloat16, 2**27),
        (torch.float32, 8192),
    ],
)
@pytest.mark.parametrize("tier", HOMES)
def test_twenty_steps_give_the_same_bits_as_torch_on_fp32_masters(
    tmp_path, tier, block_bytes, dtype
):
    """Offload may change where numbers lie, never the numbers."""
    model, twin = make_model(dtype), Twin(make_model(dtype), LR)
    optimizer = make(model, tier, tmp_path, block_bytes, max_grad_norm=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    clipped = 0
    for step in range(20):
        for micro in range(4):
            (loss_of(model, 100 * step + micro) / 4).backward()
            (loss_of(twin.model, 100 * step + micro) / 4).backward()
            twin.accumulate()
        norm = twin.norm64()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        report = optimizer.last_step
        assert report.gradient_norm == pytest.approx(norm, rel=1e-6)
        expected = max(1.0, (norm + 1e-6) / 1.0)
        assert (report.gradient_divisor or 1.0) == pytest.approx(expected, rel=1e-6)
        clipped += report.gradient_divisor is not None
        twin.step(report.gradient_divisor)
        assert_same(model.state_dict(), twin.model.state_dict())
    assert clipped > 0
    assert optimizer.completed_steps == 20
    optimizer.close()


def test_every_tier_of_these_tests_is_really_used(tmp_path):
    """A tier test that runs on another tier would prove nothing."""
    expected = {
        "card": {(Tier.CARD, Tier.CARD)},
        "ram": {(Tier.HOST, Tier.HOST)},
        "disk": {(Tier.HOST, Tier.DISK)},
        "gradients on disk too": {(Tier.DISK, Tier.DISK)},
        "all three": {(Tier.CARD, Tier.CARD), (Tier.HOST, Tier.HOST), (Tier.HOST, Tier.DISK)},
    }
    for tier, homes in expected.items():
        optimizer = make(make_model(), tier, tmp_path, block_bytes=4096)
        found = {(home.gradient, home.state) for home in optimizer.engine.placement.homes}
        assert homes == found, tier
        optimizer.close()


def test_host_memory_stays_within_the_budget(tmp_path):
    for tier in HOMES:
        model = make_model()
        budget = budgets(model, tier, 16_384)["host_bytes"]
        optimizer = make(model, tier, tmp_path)
        update(model, optimizer, 0)
        assert optimizer.tier_bytes().host_bytes <= budget
        assert optimizer.engine.memory.allocated_bytes <= budget
        optimizer.close()


def test_gradients_do_not_stay_on_the_parameters():
    model = make_model()
    optimizer = make(model, "ram", None)
    loss_of(model, 0).backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    optimizer.zero_grad()
    before = weights(model)
    optimizer.step()
    assert_same(before, weights(model))


def test_a_gradient_set_by_hand_is_used():
    model, other = make_model(torch.float32), make_model(torch.float32)
    optimizer = make(model, "ram", None)
    loss_of(model, 0).backward()
    optimizer.step()
    second = make(other, "ram", None)
    gradients = torch.autograd.grad(loss_of(other, 0), list(other.parameters()), allow_unused=True)
    for parameter, gradient in zip(other.parameters(), gradients, strict=True):
        parameter.grad = gradient
    second.step()
    assert_same(weights(model), weights(other))


@pytest.mark.parametrize("poison", [math.inf, math.nan])
@pytest.mark.parametrize("tier", ["ram", "disk", "card"])
def test_gradients_that_are_not_finite_change_nothing(tmp_path, tier, poison, caplog):
    """One bad batch must not turn the weights into NaN."""
    model = make_model()
    optimizer = make(model, tier, tmp_path)
    update(model, optimizer, 0)
    before = weights(model)
    saved = optimizer.engine.num_updates[:]
    with caplog.at_level(logging.WARNING):
        (loss_of(model, 5) * poison).backward()
        optimizer.step()
    assert optimizer.last_step.skipped
    assert "step skipped" in caplog.text
    assert_same(before, weights(model))
    assert optimizer.engine.num_updates == saved
    update(model, optimizer, 1)
    assert not optimizer.last_step.skipped
    optimizer.close()


def test_an_unused_parameter_is_left_alone_and_counts_no_updates():
    model = make_model()
    optimizer = make(model, "ram", None)
    update(model, optimizer, 0)
    index = [shape.name for shape in optimizer.engine.layout.parameters].index("unused")
    assert optimizer.engine.num_updates[index] == 0
    assert (model.unused == 0).all()


@pytest.mark.parametrize("tier", HOMES)
@pytest.mark.parametrize("other_tier", ["ram", "disk"])
def test_state_survives_saving_and_loading_into_another_tier_and_cut(tmp_path, tier, other_tier):
    model = make_model()
    optimizer = make(model, tier, tmp_path)
    for step in range(3):
        update(model, optimizer, step)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    saved = weights(model)
    update(model, optimizer, 3)
    expected = weights(model)
    optimizer.close()
    fresh = make_model(seed=9)
    fresh.load_state_dict(saved)
    again = make(fresh, other_tier, tmp_path, block_bytes=6400)
    again.load_state_dict(torch.load(tmp_path / "state.pt", mmap=True))
    assert_same(saved, weights(fresh))
    update(fresh, again, 3)
    assert_same(expected, weights(fresh))
    again.close()


def test_state_of_torch_adamw_is_taken():
    model, twin = make_model(torch.float32), Twin(make_model(torch.float32), LR)
    for _ in range(3):
        loss_of(twin.model, 0).backward()
        twin.accumulate()
        twin.step(None)
    model.load_state_dict(twin.model.state_dict())
    optimizer = make(model, "ram", None)
    optimizer.load_state_dict(twin.optimizer.state_dict())
    loss_of(model, 1).backward()
    optimizer.step()
    loss_of(twin.model, 1).backward()
    twin.accumulate()
    twin.step(None)
    assert_same(model.state_dict(), twin.model.state_dict())


def test_state_of_another_model_is_refused_before_anything_changes():
    optimizer = make(make_model(width=36), "ram", None)
    loss_of(make_model(), 0)
    model = make_model()
    other = make(model, "ram", None)
    update(model, other, 0)
    with pytest.raises(UsageError, match="elements"):
        optimizer.load_state_dict(other.state_dict())
    with pytest.raises(UsageError, match="groups of"):
        optimizer.load_state_dict(torch.optim.AdamW([torch.zeros(3)]).state_dict())


def test_a_new_optimizer_has_no_state_like_torchs():
    """Accelerate moves a new optimizer's state to the card: there must be nothing to move."""
    assert make(make_model(), "ram", None).state_dict()["state"] == {}


def test_weights_loaded_after_construction_are_the_masters():
    model, other = make_model(seed=1), make_model(seed=2)
    optimizer = make(model, "ram", None)
    model.load_state_dict(other.state_dict())
    second = make(other, "ram", None)
    update(model, optimizer, 0)
    update(other, second, 0)
    assert_same(weights(model), weights(other))
    with torch.no_grad():
        model.layers[0].up.weight.add_(1)
        other.layers[0].up.weight.add_(1)
    optimizer.refresh_masters()
    second.refresh_masters()
    before = weights(model)
    update(model, optimizer, 1)
    assert (model.layers[0].up.weight - before["layers.0.up.weight"]).abs().max() < 0.1


def test_a_closure_is_called_and_its_loss_returned():
    model = make_model()
    optimizer = make(model, "ram", None)

    def closure():
        loss = loss_of(model, 0)
        loss.backward()
        return loss

    expected = loss_of(model, 0).item()
    assert optimizer.step(closure).item() == expected
    assert optimizer.completed_steps == 1
