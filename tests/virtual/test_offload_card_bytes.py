"""Bytes on the card: a budget that is enforced at every instant, and what fits under it."""

import pytest
import torch
from offload_rig import HOMES, budgets, loss_of, make_model

from grpo_lite.cards.virtual import VirtualCard
from grpo_lite.offload.adamw import OffloadedAdamW

BLOCK_BYTES = 4096


def peak_without_optimizer():
    """The peak of forward and backward alone, each gradient dropped when it is made."""
    card = VirtualCard(2**30)
    with card.attach():
        model = make_model()
        card.adopt(model.parameters())
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(drop)
        loss_of(model, 0).backward()
    return card.peak_bytes()


def drop(parameter):
    parameter.grad = None


@pytest.mark.parametrize("tier", HOMES)
def test_gradients_and_state_stay_within_card_bytes_at_every_instant(tmp_path, tier):
    """A buffer that the budget does not know is an out-of-memory on the card that was bought."""
    options = budgets(make_model(), tier, BLOCK_BYTES)
    folder = tmp_path if "disk_bytes" in options else None
    largest = 2 * 301 * 52
    card = VirtualCard(peak_without_optimizer() - largest + options["card_bytes"])
    with card.attach():
        model = make_model()
        card.adopt(model.parameters())
        resting = card.allocated_bytes()
        optimizer = OffloadedAdamW(
            model.named_parameters(),
            block_bytes=BLOCK_BYTES,
            disk_dir=folder,
            card=card,
            max_grad_norm=0.1,
            **options,
        )
        held = card.allocated_bytes() - resting
        assert held <= options["card_bytes"] - largest
        for step in range(3):
            for micro in range(2):
                loss_of(model, 10 * step + micro).backward()
            card.reset_peak()
            before = card.allocated_bytes()
            optimizer.step()
            assert card.peak_bytes() == before == resting + held
            optimizer.zero_grad()
        assert optimizer.last_step.gradient_divisor is not None
        assert card.ledger.host_bytes <= options["host_bytes"]
        state = optimizer.state_dict()
        assert len(state["state"]) > 5
        optimizer.load_state_dict(state)
        assert card.allocated_bytes() == resting + held
        optimizer.close()


def test_a_plain_optimizer_of_a_quarter_of_the_size_is_refused_by_the_same_card():
    """The claim of the project: four times the parameters under one budget."""
    large = peak_of(make_model(width=104, vocabulary=301), offloaded=True)
    small = peak_of(make_model(torch.float32, width=52, vocabulary=151), offloaded=False)
    parameters = [
        sum(p.numel() for p in make_model(width=width, vocabulary=vocabulary).parameters())
        for width, vocabulary in ((104, 301), (52, 151))
    ]
    assert parameters[0] / parameters[1] > 3.5
    assert large <= small


def peak_of(model, *, offloaded):
    card = VirtualCard(2**30)
    with card.attach():
        card.adopt(model.parameters())
        optimizer = (
            OffloadedAdamW(model.named_parameters(), block_bytes=BLOCK_BYTES, card=card)
            if offloaded
            else torch.optim.AdamW(model.parameters(), fused=True)
        )
        for step in range(2):
            tokens = torch.randint(0, 151, (1, 2), generator=torch.Generator().manual_seed(step))
            model(tokens).float().logsumexp(-1).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return card.peak_bytes()
