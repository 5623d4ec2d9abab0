"""Our losses and advantages against TRL's own code, on random batches.

TRL's loss is one micro-batch's; the update that it belongs to is written down in `NORMALIZERS`.
"""

import inspect
import warnings
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from grpo_lite.grpo.advantages import SCALE_REWARDS, group_advantages
from grpo_lite.grpo.objective import (
    IMPORTANCE_SAMPLING_LEVELS,
    LossInputs,
    Normalizers,
    ObjectiveSettings,
    metric_means,
    objective,
)
from grpo_lite.plan import LOSS_TYPES

pytest.importorskip("trl", reason="the trl extra is not installed")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # theirs, at import
    from trl import GRPOTrainer
    from trl.trainer.utils import nanstd

ROWS, TOKENS, ACCUMULATION, ITEMS = 6, 7, 2, 50
MAX_COMPLETION_LENGTH = 11


class _Accelerator(SimpleNamespace):
    num_processes = 1
    sync_gradients = True

    @staticmethod
    def gather(tensor):
        return tensor

    @staticmethod
    def reduce(tensor, reduction):
        assert reduction == "sum"
        return tensor


def trl_trainer(settings: ObjectiveSettings):
    """Return the few attributes that TRL's loss reads, in place of a whole trainer."""
    return SimpleNamespace(
        accelerator=_Accelerator(),
        args=SimpleNamespace(
            use_bias_correction_kl=settings.use_bias_correction_kl,
            delta=settings.delta,
            steps_per_generation=ACCUMULATION,
        ),
        aux_loss_enabled=False,
        beta=settings.beta,
        current_gradient_accumulation_steps=ACCUMULATION,
        entropy_coef=settings.entropy_coef,
        epsilon_high=settings.epsilon_high,
        epsilon_low=settings.epsilon,
        importance_sampling_level=settings.importance_sampling_level,
        loss_type=settings.loss_type,
        max_completion_length=settings.max_completion_length,
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_adaptive_entropy=False,
        use_vllm=False,
        _entropy_bonus_enabled=settings.entropy_coef != 0,
        _metrics={"train": defaultdict(list)},
        model=SimpleNamespace(training=True),
    )


def trl_loss(settings, inputs: LossInputs):
    trainer = trl_trainer(settings)
    scores = (inputs.logprobs_BT, inputs.entropies_BT, None)
    trainer._get_per_token_logps_and_entropies = lambda *_args, **_kwargs: scores
    mask = inputs.mask_BT.long()
    loss = GRPOTrainer._compute_loss(
        trainer,
        None,
        {
            "prompt_ids": torch.ones(ROWS, 1, dtype=torch.int64),
            "prompt_mask": torch.ones(ROWS, 1, dtype=torch.int64),
            "completion_ids": torch.ones_like(mask),
            "completion_mask": mask,
            "advantages": inputs.advantages_B,
            "old_per_token_logps": inputs.old_logprobs_BT,
            "ref_per_token_logps": inputs.ref_logprobs_BT,
            "num_items_in_batch": torch.tensor(ITEMS),
        },
    )
    return loss, {name: values[0] for name, values in trainer._metrics["train"].items()}


def normalizers(loss_type, mask):
    """Return the update of which TRL's number is one micro-batch's share.

    TRL divides by accumulation after a mean over the micro-batch: the update has ACCUMULATION
    micro-batches of this one's rows, and for bnpo of this one's tokens.
    dapo and cispo divide by the tokens of the generation batch, here that of the update
    (steps_per_generation = accumulation).
    """
    tokens = ACCUMULATION * int(mask.sum()) if loss_type == "bnpo" else ITEMS
    return Normalizers(num_rows=ACCUMULATION * ROWS, num_loss_tokens=tokens)


def random_inputs(seed):
    generator = torch.Generator().manual_seed(seed)

    def scores(spread):
        return spread * torch.randn(ROWS, TOKENS, generator=generator, dtype=torch.float64)

    lengths = torch.randint(1, TOKENS + 1, (ROWS,), generator=generator)
    new = -scores(1.0).abs()
    return LossInputs(
        logprobs_BT=new.requires_grad_(),
        old_logprobs_BT=new.detach() + scores(0.3) if seed % 5 else None,
        ref_logprobs_BT=new.detach() + scores(0.5),
        advantages_B=torch.randn(ROWS, generator=generator, dtype=torch.float64),
        mask_BT=torch.arange(TOKENS)[None] < lengths[:, None],
        entropies_BT=scores(1.0).abs(),
    )


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("level", IMPORTANCE_SAMPLING_LEVELS)
@pytest.mark.parametrize("seed", range(50))
def test_loss_gradient_and_metrics_are_those_of_trl(seed, level, loss_type):
    """A recipe that was tuned with TRL must mean the same here."""
    settings = ObjectiveSettings(
        loss_type=loss_type,
        importance_sampling_level=level,
        epsilon=0.2,
        epsilon_high=1.5 if loss_type == "cispo" else 0.28,
        delta=(None, 2.0)[seed % 2] if loss_type != "cispo" else None,
        beta=(0.0, 0.04, 0.5)[seed % 3],
        use_bias_correction_kl=bool(seed % 4),
        max_completion_length=MAX_COMPLETION_LENGTH,
    )
    inputs = random_inputs(seed)
    share = objective(inputs, settings, normalizers(loss_type, inputs.mask_BT))
    theirs, their_metrics = trl_loss(settings, inputs)
    torch.testing.assert_close(share.loss, theirs, rtol=1e-5, atol=1e-9)
    ours_grad, their_grad = (
        torch.autograd.grad(loss, inputs.logprobs_BT)[0] for loss in (share.loss, theirs)
    )
    torch.testing.assert_close(ours_grad, their_grad, rtol=1e-5, atol=1e-9)
    means = metric_means(share.metrics)
    names = {"entropy": "entropy"}
    if settings.beta:
        names["kl"] = "kl"
    if loss_type == "cispo":
        names["clip_high"] = "cispo_clip_ratio"
    else:
        names |= {"clip_low": "clip_ratio/low_mean", "clip_high": "clip_ratio/high_mean"}
    for ours, their in names.items():
        assert means[ours] == pytest.approx(their_metrics[their], rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("seed", range(5))
def test_the_entropy_bonus_is_trl_s_where_micro_batches_have_equal_tokens(seed):
    """TRL takes each micro-batch's mean, we the update's: the same where their tokens are equal."""
    settings = ObjectiveSettings(loss_type="bnpo", entropy_coef=0.03)
    inputs = random_inputs(seed)
    inputs.entropies_BT.requires_grad_()
    ours = objective(inputs, settings, normalizers("bnpo", inputs.mask_BT)).loss
    theirs, _ = trl_loss(settings, inputs)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(
        *(torch.autograd.grad(loss, inputs.entropies_BT)[0] for loss in (ours, theirs)),
        rtol=1e-5,
        atol=1e-9,
    )


@pytest.mark.parametrize("scale_rewards", SCALE_REWARDS)
@pytest.mark.parametrize("seed", range(10))
def test_advantages_are_those_of_trl(seed, scale_rewards):
    """TRL's lines stand inside a method of 300 lines; here they are over its own `nanstd`.

    That they still stand there is checked on its source.
    """
    source = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    for line in (
        "advantages = rewards - mean_grouped_rewards",
        "advantages = advantages / (std_rewards + 1e-4)",
        "std_rewards = nanstd(rewards.view(-1, num_generations), dim=1)",
        "std_rewards = nanstd(rewards).expand_as(rewards)",
        "advantages = torch.nan_to_num(advantages, nan=0.0)",
    ):
        assert line in source
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randint(0, 4, (24,), generator=generator).double()
    rewards[torch.rand(24, generator=generator) < 0.15] = torch.nan
    groups = rewards.view(-1, 6)
    theirs = groups - groups.nanmean(1, keepdim=True)
    if scale_rewards == "group":
        theirs = theirs / (nanstd(groups, dim=1)[:, None] + 1e-4)
    elif scale_rewards == "batch":
        theirs = theirs / (nanstd(rewards) + 1e-4)
    ours = group_advantages(rewards, num_generations=6, scale_rewards=scale_rewards).values_R
    torch.testing.assert_close(
        ours.double(), theirs.nan_to_num(0.0).flatten(), rtol=1e-5, atol=1e-6
    )
