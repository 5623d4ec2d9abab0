"""An update's loss and gradient are those of the papers, however its rows are split."""

from itertools import pairwise

import pytest
import torch
from dense_twins import PlainRow, plain_loss
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lite.grpo.objective import (
    IMPORTANCE_SAMPLING_LEVELS,
    LossInputs,
    Normalizers,
    ObjectiveSettings,
    add_metrics,
    metric_means,
    objective,
)
from grpo_lite.plan import LOSS_TYPES

ROWS, TOKENS = 8, 6

losses = st.builds(
    lambda loss_type, cap, **rest: ObjectiveSettings(
        loss_type=loss_type,
        epsilon_high=cap if loss_type == "cispo" else 0.28,
        max_completion_length=9,
        **rest,
    ),
    loss_type=st.sampled_from(LOSS_TYPES),
    cap=st.sampled_from([1.1, 5.0]),
    importance_sampling_level=st.sampled_from(IMPORTANCE_SAMPLING_LEVELS),
    beta=st.sampled_from([0.0, 0.3]),
    use_bias_correction_kl=st.booleans(),
    entropy_coef=st.sampled_from([0.0, 0.01]),
    delta=st.just(None),
)
capped = st.sampled_from([None, 1.4])


def make_update(seed, *, on_policy=False):
    """Return the rows of an update; one row has no loss token, and padding is garbage."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, TOKENS + 1, (ROWS,), generator=generator)
    lengths[int(torch.randint(0, ROWS, (1,), generator=generator))] = 0
    mask = torch.arange(TOKENS)[None] < lengths[:, None]

    def scores(spread):
        noise = torch.randn(ROWS, TOKENS, generator=generator, dtype=torch.float64)
        return torch.where(mask, spread * noise, float("nan"))

    new = -1 + scores(0.3)
    return LossInputs(
        logprobs_BT=new.requires_grad_(),
        old_logprobs_BT=None if on_policy else new.detach() + scores(0.4),
        ref_logprobs_BT=new.detach() + scores(0.3),
        advantages_B=torch.randn(ROWS, generator=generator, dtype=torch.float64),
        mask_BT=mask,
        entropies_BT=scores(1.0).requires_grad_(),
    )


def rows_of(update, rows):
    def cut(values):
        return None if values is None else values[rows]

    names = ("logprobs_BT", "old_logprobs_BT", "ref_logprobs_BT", "entropies_BT")
    return LossInputs(
        advantages_B=update.advantages_B[rows],
        mask_BT=update.mask_BT[rows],
        **{name: cut(getattr(update, name)) for name in names},
    )


def gradients(loss, update):
    inputs = [update.logprobs_BT, update.entropies_BT]
    return torch.autograd.grad(loss, inputs, materialize_grads=True)


@settings(deadline=None, max_examples=120)
@given(
    loss=losses,
    seed=st.integers(0, 10**6),
    on_policy=st.booleans(),
    order=st.permutations(range(ROWS)),
    cuts=st.sets(st.integers(1, ROWS - 1)),
)
def test_any_split_into_micro_batches_is_the_whole_update(loss, seed, on_policy, order, cuts):
    """Frameworks were wrong here by factors of 0.5 to 4: the micro-batch leaked into the loss.

    Any order, any sizes, equal or not: value, gradient and metrics.
    """
    update = make_update(seed, on_policy=on_policy)
    normalizers = Normalizers.of(update.mask_BT)
    whole = objective(update, loss, normalizers)
    bounds = [0, *sorted(cuts), ROWS]
    shares = [
        objective(rows_of(update, list(order[start:end])), loss, normalizers)
        for start, end in pairwise(bounds)
    ]
    total = sum(share.loss for share in shares)
    torch.testing.assert_close(total, whole.loss, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(
        gradients(total, update), gradients(whole.loss, update), rtol=1e-12, atol=1e-14
    )
    got, wanted = (
        metric_means(add_metrics(share.metrics for share in parts)) for parts in (shares, [whole])
    )
    assert got == pytest.approx(wanted, rel=1e-5, abs=1e-6)


@settings(deadline=None, max_examples=120)
@given(loss=losses, cap=capped, seed=st.integers(0, 10**6))
def test_the_loss_is_the_sum_that_the_papers_write(loss, cap, seed):
    """The twin is a loop over tokens in Python floats: no mask, no broadcast to get wrong."""
    if loss.loss_type != "cispo":
        loss = ObjectiveSettings(**{**fields_of(loss), "delta": cap})
    loss = ObjectiveSettings(**{**fields_of(loss), "entropy_coef": 0.0})
    update = make_update(seed)
    rows = [
        PlainRow(
            update.advantages_B[row].item(),
            *(
                values[row][update.mask_BT[row]].tolist()
                for values in (
                    update.logprobs_BT,
                    update.old_logprobs_BT,
                    update.ref_logprobs_BT,
                )
            ),
        )
        for row in range(ROWS)
    ]
    wanted = plain_loss(
        [row for row in rows if row.new], loss, num_rows=ROWS, num_tokens=int(update.mask_BT.sum())
    )
    share = objective(update, loss, Normalizers.of(update.mask_BT))
    assert share.loss.item() == pytest.approx(wanted, rel=1e-9, abs=1e-12)


def fields_of(loss):
    return {name: getattr(loss, name) for name in loss.__slots__}


@settings(deadline=None)
@given(loss=losses, seed=st.integers(0, 10**6))
def test_the_gradient_agrees_with_finite_differences(loss, seed):
    """At a random point, away from the corners of the clip, autograd must see what the loss does.

    cispo detaches its weight on purpose: its gradient is not that of its value.
    """
    if loss.loss_type == "cispo":
        loss = ObjectiveSettings(**{**fields_of(loss), "loss_type": "dapo", "epsilon_high": 0.28})
    update = make_update(seed)
    mask = update.mask_BT
    clean = torch.where(mask, update.logprobs_BT, 0.0).detach().requires_grad_()

    def value(logprobs):
        inputs = LossInputs(
            logprobs_BT=logprobs,
            old_logprobs_BT=update.old_logprobs_BT,
            ref_logprobs_BT=update.ref_logprobs_BT,
            advantages_B=update.advantages_B,
            mask_BT=mask,
            entropies_BT=update.entropies_BT.detach(),
        )
        return objective(inputs, loss, Normalizers.of(mask)).loss

    assert torch.autograd.gradcheck(value, clean, eps=1e-7, atol=1e-5)
