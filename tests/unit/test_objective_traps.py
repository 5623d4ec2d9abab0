"""The traps of GRPO losses that others fell into, each with its story.

Splits and normalisers are in test_objective_split, advantages in test_advantages.
"""

import math

import pytest
import torch

from grpo_lite.errors import UsageError
from grpo_lite.grpo.objective import (
    LossInputs,
    Normalizers,
    ObjectiveSettings,
    add_metrics,
    loss_mask,
    metric_means,
    objective,
    rows_with_gradient,
)
from grpo_lite.plan import LOSS_TYPES, Workload

NAN = float("nan")


def settings_for(loss_type="dapo", **fields):
    if loss_type == "cispo":
        fields.setdefault("epsilon_high", 5.0)
    return ObjectiveSettings(loss_type=loss_type, **fields)


def inputs_of(new, *, old=None, ref=None, advantages, mask=None, entropies=None):
    new = torch.tensor(new, dtype=torch.float32)
    mask = torch.ones_like(new) if mask is None else torch.tensor(mask)

    def tensor(values):
        return None if values is None else torch.tensor(values, dtype=torch.float32)

    return LossInputs(
        logprobs_BT=new.requires_grad_(),
        old_logprobs_BT=tensor(old),
        ref_logprobs_BT=tensor(ref),
        advantages_B=tensor(advantages),
        mask_BT=mask,
        entropies_BT=tensor(entropies),
    )


def run(inputs, loss, normalizers=None):
    """Return the share and d loss / d logprobs."""
    share = objective(inputs, loss, normalizers or Normalizers.of(inputs.mask_BT))
    share.loss.backward()
    return share, inputs.logprobs_BT.grad


def test_dr_grpo_divides_by_the_experiment_s_length_not_by_the_batch_s():
    """A tuner that pads to 2 instead of 256 would silently learn 128 times faster."""
    short = inputs_of([[-1.0, -1.0]], advantages=[1.0])
    long = inputs_of([[-1.0, -1.0, 0.0]], advantages=[1.0], mask=[[1, 1, 0]])
    loss = settings_for("dr_grpo", max_completion_length=256)
    assert run(short, loss)[0].loss.item() == pytest.approx(-2 / 256)
    assert run(long, loss)[0].loss.item() == pytest.approx(-2 / 256)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_garbage_at_masked_places_is_never_read(loss_type, level):
    """exp(garbage) times 0 is NaN: the mask must come before the exp, on both sides."""
    loss = settings_for(loss_type, beta=0.1, entropy_coef=0.1, importance_sampling_level=level)
    clean = {"advantages": [1.0, -2.0], "mask": [[1, 1, 0], [1, 0, 0]]}
    grads, losses = [], []
    for bad in (0.0, NAN, math.inf, -math.inf, 1e30):
        inputs = inputs_of(
            [[-1.0, -2.0, bad], [-0.5, bad, bad]],
            old=[[-1.1, -2.2, -bad], [-0.7, bad, bad]],
            ref=[[-1.3, -2.1, bad], [-0.6, -bad, bad]],
            entropies=[[1.0, 2.0, bad], [0.5, bad, bad]],
            **clean,
        )
        share, grad = run(inputs, loss)
        losses.append(share.loss.item())
        grads.append(grad)
        assert all(math.isfinite(mean) for mean in metric_means(share.metrics).values())
    assert losses == [losses[0]] * len(losses)
    for grad in grads:
        torch.testing.assert_close(grad, grads[0], rtol=0, atol=0)
        assert not grad[0, 2].any()
        assert not grad[1, 1:].any()


def test_without_old_logprobs_the_ratio_is_one_and_the_gradient_alive():
    """On-policy the loss is about 0 and users report it as a bug; the gradient is what counts.

    Detaching too much gives the same loss, and a model that never moves.
    """
    inputs = inputs_of([[-1.0, -3.0], [-2.0, -1.0]], advantages=[1.0, -1.0])
    share, grad = run(inputs, settings_for())
    assert share.loss.item() == pytest.approx(0.0, abs=1e-7)
    torch.testing.assert_close(grad, torch.tensor([[-0.25, -0.25], [0.25, 0.25]]))
    assert metric_means(share.metrics)["ratio"] == 1.0


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_stored_old_logprobs_that_have_not_moved_change_nothing(level):
    """Storing them (num_iterations above 1) must not change the first iteration."""
    new = [[-1.0, -3.0], [-2.0, -1.0]]
    loss = settings_for(importance_sampling_level=level)
    pairs = [run(inputs_of(new, old=old, advantages=[1.0, -0.5]), loss) for old in (None, new)]
    torch.testing.assert_close(pairs[0][1], pairs[1][1], rtol=0, atol=0)
    assert pairs[0][0].loss.item() == pairs[1][0].loss.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "pushes"),
    [
        (1.5, 1.0, False),  # already likelier than allowed: stop
        (1.5, -1.0, True),  # likelier, and bad: the clip must not stop it
        (0.5, -1.0, False),  # already less likely than allowed: stop
        (0.5, 1.0, True),
        (1.25, 1.0, True),  # inside the upper range of 0.28, outside the lower's 0.2
        (0.75, -1.0, False),  # outside the lower range of 0.2
    ],
)
def test_the_clip_stops_only_what_already_went_far_the_right_way(ratio, advantage, pushes):
    """max for min, or one range for both, still trains - to another policy."""
    loss = settings_for(epsilon=0.2, epsilon_high=0.28)
    inputs = inputs_of([[0.0]], old=[[-math.log(ratio)]], advantages=[advantage])
    share, grad = run(inputs, loss)
    assert (grad.item() != 0) == pushes
    if pushes:
        assert grad.item() == pytest.approx(-ratio * advantage, rel=1e-6)
    means = metric_means(share.metrics)
    assert means["clip_low"] == float(ratio < 0.8 and advantage < 0)
    assert means["clip_high"] == float(ratio > 1.28 and advantage > 0)


def test_delta_caps_only_the_term_that_is_not_clipped():
    """A ratio of 20 with a bad row gives a gradient 20 times too large; delta is there for that."""
    inputs = {"old": [[-3.0]], "advantages": [-1.0]}
    free, grad = run(inputs_of([[0.0]], **inputs), settings_for())
    capped, capped_grad = run(inputs_of([[0.0]], **inputs), settings_for(delta=4.0))
    assert free.loss.item() == pytest.approx(math.exp(3), rel=1e-6)
    assert grad.item() == pytest.approx(math.exp(3), rel=1e-6)
    assert capped.loss.item() == pytest.approx(4.0)
    assert capped_grad.item() == 0.0


def test_cispo_weighs_the_log_probability_and_keeps_clipped_tokens_alive():
    """Its weight is detached: a gradient through it would multiply the term by 1 + logprob."""
    inputs = inputs_of([[-1.0, -2.0]], old=[[-1.5, -9.0]], advantages=[2.0])
    share, grad = run(inputs, settings_for("cispo", epsilon_high=3.0))
    weights = [math.exp(0.5), 3.0]
    assert grad[0].tolist() == pytest.approx([-w * 2.0 / 2 for w in weights], rel=1e-6)
    wanted = -(weights[0] * 2 * -1.0 + weights[1] * 2 * -2.0) / 2
    assert share.loss.item() == pytest.approx(wanted, rel=1e-6)
    assert metric_means(share.metrics)["clip_high"] == 0.5


def test_the_sequence_ratio_is_the_mean_over_the_row_s_own_tokens():
    """A mean over padding would pull the ratio of short rows to 1."""
    inputs = inputs_of(
        [[-1.0, -2.0, NAN, NAN]],
        old=[[-1.1, -2.05, NAN, NAN]],
        advantages=[1.0],
        mask=[[1, 1, 0, 0]],
    )
    share, _ = run(inputs, settings_for(importance_sampling_level="sequence"))
    assert metric_means(share.metrics)["ratio"] == pytest.approx(math.exp(0.075), rel=1e-5)
    assert share.loss.item() == pytest.approx(-math.exp(0.075), rel=1e-5)


@pytest.mark.parametrize("corrected", [False, True])
def test_the_kl_is_zero_at_the_reference_and_never_below(corrected):
    """At step 1 the policy is the reference: another value means a wrong reference."""
    loss = settings_for(beta=0.5, use_bias_correction_kl=corrected)
    same = inputs_of([[-1.0, -2.0]], ref=[[-1.0, -2.0]], advantages=[0.0])
    share, grad = run(same, loss)
    assert share.loss.item() == 0.0
    assert not grad.any()
    assert metric_means(share.metrics)["kl"] == 0.0
    moved, _ = run(inputs_of([[-1.0, -2.0]], ref=[[-1.5, -1.0]], advantages=[0.0]), loss)
    k3 = [math.exp(-0.5) + 0.5 - 1, math.exp(1.0) - 1 - 1]
    assert moved.loss.item() == pytest.approx(0.5 * sum(k3) / 2, rel=1e-5)
    assert metric_means(moved.metrics)["kl"] == pytest.approx(sum(k3) / 2, rel=1e-5)


def test_the_bias_correction_changes_the_gradient_even_where_the_ratio_is_one():
    """TRL 1.16 has it on by default: d(k r) = dk + k dr, and k is not 0 away from the reference."""
    grads = {}
    for corrected in (False, True):
        inputs = inputs_of([[-1.0]], ref=[[-1.5]], advantages=[0.0])
        grads[corrected] = run(inputs, settings_for(beta=1.0, use_bias_correction_kl=corrected))[1]
    assert grads[False].item() == pytest.approx(1 - math.exp(-0.5), rel=1e-5)
    assert grads[True].item() == pytest.approx(0.5, rel=1e-5)


def test_the_entropy_bonus_has_a_gradient():
    """A bonus of detached entropies shows in the loss and does nothing."""
    inputs = inputs_of([[-1.0, -2.0]], advantages=[0.0], entropies=[[1.0, 3.0]])
    inputs.entropies_BT.requires_grad_()
    share, _ = run(inputs, settings_for(entropy_coef=0.1))
    assert share.loss.item() == pytest.approx(-0.1 * 2.0)
    assert inputs.entropies_BT.grad.tolist() == [pytest.approx([-0.05, -0.05])]


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_an_update_of_which_every_token_is_masked_is_zero_and_runs_backward(loss_type, level):
    """All rows truncated: 0 / 0 would be NaN in every weight, for good."""
    loss = settings_for(loss_type, beta=0.1, entropy_coef=0.1, importance_sampling_level=level)
    scores = [[-1.0, -2.0], [-1.0, -1.0]]
    inputs = inputs_of(
        scores, old=scores, ref=scores, entropies=scores, advantages=[1.0, -1.0], mask=[[0, 0]] * 2
    )
    share, grad = run(inputs, loss)
    assert share.loss.item() == 0.0
    assert not grad.any()
    assert math.isnan(metric_means(share.metrics)["ratio"])


def test_truncated_rows_leave_the_tokens_but_not_the_rows():
    """TRL: their tokens are in no sum and no count, and the rows stay in the mean over rows."""
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    truncated = torch.tensor([False, True])
    kept = loss_mask(mask, truncated, settings_for(mask_truncated_completions=True))
    assert kept.tolist() == [[True, True, False], [False, False, False]]
    assert loss_mask(mask, truncated, settings_for()).tolist() == (mask != 0).tolist()
    assert Normalizers.of(kept) == Normalizers(num_rows=2, num_loss_tokens=2)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_rows_that_may_be_skipped_change_neither_loss_nor_gradient(loss_type, level):
    """Dead groups are 38-90 % of the rows: skipping them is free only if they stay counted."""
    loss = settings_for(loss_type, importance_sampling_level=level)
    generator = torch.Generator().manual_seed(0)
    scores, old = torch.randn(2, 6, 4, generator=generator)
    advantages = [0.0, 1.0, 0.0, -0.5, -0.0, 2.0]
    mask = torch.tensor([[1, 1, 1, 1]] * 5 + [[0, 0, 0, 0]])
    whole = inputs_of(scores.tolist(), old=old.tolist(), advantages=advantages, mask=mask.tolist())
    rows = rows_with_gradient(whole.advantages_B, loss, whole.mask_BT)
    assert rows.tolist() == [False, True, False, True, False, False]
    normalizers = Normalizers.of(whole.mask_BT)
    share, grad = run(whole, loss, normalizers)
    few = inputs_of(
        scores[rows].tolist(),
        old=old[rows].tolist(),
        advantages=whole.advantages_B[rows].tolist(),
        mask=mask[rows].tolist(),
    )
    few_share, few_grad = run(few, loss, normalizers)
    assert few_share.loss.item() == pytest.approx(share.loss.item(), rel=1e-6)
    torch.testing.assert_close(few_grad, grad[rows])
    assert not grad[~rows].any()


@pytest.mark.parametrize("loss", [settings_for(beta=0.1), settings_for(entropy_coef=0.1)])
def test_a_kl_or_entropy_term_needs_every_row_that_has_a_token(loss):
    """Their gradient does not pass through the advantage: skipping dead rows would lose it."""
    rows = rows_with_gradient(torch.zeros(2), loss, torch.tensor([[1, 0], [0, 0]]))
    assert rows.tolist() == [True, False]
    assert rows_with_gradient(torch.zeros(2), loss).tolist() == [True, True]


def test_half_precision_scores_are_widened_before_the_exp():
    """In bf16 a ratio of 1.003 is 1.0: the clip and the KL would see steps."""
    new = torch.tensor([[-1.0, -2.5]], dtype=torch.bfloat16).requires_grad_()
    inputs = LossInputs(
        logprobs_BT=new,
        old_logprobs_BT=torch.tensor([[-1.003, -2.5]]),
        advantages_B=torch.ones(1),
        mask_BT=torch.ones(1, 2),
    )
    share = objective(inputs, settings_for(), Normalizers.of(inputs.mask_BT))
    assert share.loss.dtype == torch.float32
    assert share.loss.item() == pytest.approx(-(math.exp(0.003) + 1) / 2, rel=1e-6)


def test_metrics_of_micro_batches_add_as_sums_and_counts():
    """A mean of means weighs a row of 1 token like one of 1000."""
    parts = [
        objective(inputs, settings_for(), Normalizers(num_rows=2, num_loss_tokens=4)).metrics
        for inputs in (
            inputs_of([[0.0]], old=[[-math.log(2)]], advantages=[1.0]),
            inputs_of([[0.0, 0.0, 0.0]], advantages=[1.0]),
        )
    ]
    means = metric_means(add_metrics(parts))
    assert means["ratio"] == pytest.approx(5 / 4)
    assert means["clip_high"] == pytest.approx(1 / 4)
    assert not any(pair.requires_grad for part in parts for pair in part.values())


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"loss_type": "ppo"}, "'ppo'"),
        ({"importance_sampling_level": "row"}, "'row'"),
        ({"epsilon": 1.5}, "epsilon 1.5"),
        ({"loss_type": "cispo", "epsilon_high": 0.2}, "cap on the ratio itself"),
        ({"delta": 1.1}, "delta is 1.1"),
        ({"beta": -0.1}, "beta -0.1"),
        ({"max_completion_length": 0}, "max_completion_length 0"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(fields, says):
    with pytest.raises(UsageError, match=says):
        ObjectiveSettings(**fields)


@pytest.mark.parametrize(
    ("fields", "says"),
    [({"beta": 0.1}, "no reference"), ({"entropy_coef": 0.1}, "no entropies")],
)
def test_a_term_without_its_tensor_is_refused(fields, says):
    """Silently left out, the run would be another experiment."""
    inputs = inputs_of([[-1.0]], advantages=[1.0])
    with pytest.raises(UsageError, match=says):
        objective(inputs, settings_for(**fields), Normalizers.of(inputs.mask_BT))


def test_the_settings_of_a_workload_are_its_own():
    """A field that is not handed over trains with a default that nobody chose."""
    workload = Workload(
        loss_type="dr_grpo", epsilon=0.1, epsilon_high=0.3, beta=0.02, max_completion_length=99
    )
    settings = ObjectiveSettings.of(workload)
    for name in ("loss_type", "epsilon", "epsilon_high", "beta", "max_completion_length"):
        assert getattr(settings, name) == getattr(workload, name)
