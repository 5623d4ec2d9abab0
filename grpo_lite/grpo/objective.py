"""The GRPO loss of one micro-batch, as its exact share of the loss of the whole update.

Normalisers belong to the update, so the sum over any split into micro-batches, equal or not, has
the same value and gradient; how an update is split is a matter of memory only.
Pure tensor arithmetic; knows nothing of models, prompts or memory.

Shape suffixes: B rows of a micro-batch, T completion tokens (padded).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from grpo_lite.errors import UsageError
from grpo_lite.plan import LOSS_TYPES, Workload

IMPORTANCE_SAMPLING_LEVELS = ("token", "sequence")

Metrics = dict[str, torch.Tensor]
"""By name, a tensor [2]: sum and count, so that micro-batches add."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveSettings:
    """What the loss is; names and meanings are TRL's."""

    loss_type: str = "dapo"
    """One of LOSS_TYPES; it decides the normaliser (see `objective`) and, for cispo, the term."""
    importance_sampling_level: str = "token"
    """"token": a ratio for each token (GRPO). "sequence": one for each row (GSPO)."""
    epsilon: float = 0.2
    """Lower clip range: ratios below 1 - epsilon."""
    epsilon_high: float = 0.2
    """Upper clip range: ratios above 1 + epsilon_high. For cispo: the cap on the ratio itself."""
    delta: float | None = None
    """Cap on the ratio in the term that is not clipped; None: no cap."""
    beta: float = 0.0
    """Weight of the KL term against the reference model."""
    use_bias_correction_kl: bool = True
    """Whether the KL term is multiplied by the ratio, as TRL 1.16 does by default."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus: the mean entropy of the update's loss tokens."""
    max_completion_length: int = 256
    """The experiment's cap on tokens, dr_grpo's normaliser: never a length tuned at run time."""
    mask_truncated_completions: bool = False
    """Whether rows that the length cap cut are left out of the loss (see `loss_mask`)."""

    def __post_init__(self) -> None:
        _require_choice("loss_type", self.loss_type, LOSS_TYPES)
        _require_choice(
            "importance_sampling_level", self.importance_sampling_level, IMPORTANCE_SAMPLING_LEVELS
        )
        if not (0 <= self.epsilon <= 1 and self.epsilon_high >= 0):
            raise UsageError(
                f"epsilon must be from 0 to 1 and epsilon_high at least 0; got epsilon "
                f"{self.epsilon:g}, epsilon_high {self.epsilon_high:g}",
                hint="--epsilon 0.2 --epsilon-high 0.28",
            )
        if self.loss_type == "cispo" and self.epsilon_high < 1:
            raise UsageError(
                f"epsilon_high is {self.epsilon_high:g}, and for cispo it is the cap on the ratio "
                "itself: below 1 it would scale down every token",
                hint="--epsilon-high 5",
            )
        if self.delta is not None and self.delta <= 1 + self.epsilon_high:
            raise UsageError(
                f"delta is {self.delta:g}; a cap on the ratio at or below 1 + epsilon_high = "
                f"{1 + self.epsilon_high:g} would replace the clip",
                hint="--delta 4",
            )
        if self.beta < 0 or self.max_completion_length < 1:
            raise UsageError(
                f"beta must be at least 0 and max_completion_length at least 1; got beta "
                f"{self.beta:g}, max_completion_length {self.max_completion_length}"
            )

    @classmethod
    def of(cls, workload: Workload) -> "ObjectiveSettings":
        """Return the loss that `workload` names."""
        return cls(
            loss_type=workload.loss_type,
            epsilon=workload.epsilon,
            epsilon_high=workload.epsilon_high,
            beta=workload.beta,
            max_completion_length=workload.max_completion_length,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Normalizers:
    """The denominators of one update, counted over all its rows, skipped ones too."""

    num_rows: int
    """Completions in the update."""
    num_loss_tokens: int
    """Tokens that the loss mask of the whole update keeps."""

    @classmethod
    def of(cls, mask_BT: torch.Tensor) -> "Normalizers":
        """Return those of an update whose loss mask is `mask_BT`; reads the device once."""
        return cls(num_rows=mask_BT.shape[0], num_loss_tokens=int((mask_BT != 0).sum()))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossInputs:
    """What the loss needs of a micro-batch."""

    logprobs_BT: torch.Tensor
    """Of the sampled tokens under the model in training; carries the gradient."""
    advantages_B: torch.Tensor
    """One for each row."""
    mask_BT: torch.Tensor
    """Nonzero where a token counts; elsewhere nothing is read, not even NaN."""
    old_logprobs_BT: torch.Tensor | None = None
    """Under the model that sampled; None: the model has not moved since (ratio 1)."""
    ref_logprobs_BT: torch.Tensor | None = None
    """Under the reference model; needed if beta > 0."""
    entropies_BT: torch.Tensor | None = None
    """Of the model in training, with its gradient; needed if entropy_coef is not 0."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossShare:
    """A micro-batch's part of the update."""

    loss: torch.Tensor
    """Scalar to call `backward` on; the sum over micro-batches is the update's loss."""
    metrics: Metrics = field(default_factory=dict)
    """Detached sums and counts."""


def objective(
    batch: LossInputs, settings: ObjectiveSettings, normalizers: Normalizers
) -> LossShare:
    """Return the micro-batch's share of the loss, and its metrics.

    With r the ratio exp(new - old), A the advantage, k the KL estimate exp(d) - d - 1 with
    d = ref - new (times r with bias correction), the term of a token is
        -min(min(r, delta) A, clip(r, 1 - epsilon, 1 + epsilon_high) A) + beta k
    and for cispo (weight detached) -min(r, epsilon_high) A new + beta k.
    At sequence level r is exp(mean of new - old over the row's tokens).

    The loss of the update, with R rows and N loss tokens in all of it:
        grpo        1/R sum over rows of (sum of terms / tokens of the row)
        dr_grpo     sum of terms / (R max_completion_length)
        dapo, cispo sum of terms / N
        bnpo        sum of terms / N
    minus entropy_coef (sum of entropies) / N.

    Where this meets TRL 1.16: with micro-batches of equal rows, and an update that is the whole
    generation batch, TRL's grpo, dr_grpo, dapo and cispo are these.
    TRL's bnpo divides by the tokens of each micro-batch, so it changes with the split; taken over
    the whole update, as here, it is dapo.
    TRL takes the mean entropy of each micro-batch; here each token of the update weighs the same.

    Raises:
        UsageError: beta or entropy_coef asks for a tensor that the batch lacks.
    """
    mask_BT = batch.mask_BT != 0
    logprobs_BT = _kept(batch.logprobs_BT, mask_BT)
    old_BT = (
        logprobs_BT.detach()
        if batch.old_logprobs_BT is None
        else _kept(batch.old_logprobs_BT, mask_BT).detach()
    )
    ratio = _ratio(logprobs_BT - old_BT, mask_BT, settings)
    advantages_B1 = batch.advantages_B[:, None].to(logprobs_BT.dtype)
    terms_BT = _policy_terms(ratio, advantages_B1, logprobs_BT, settings)
    metrics = _ratio_metrics(ratio.detach(), advantages_B1, mask_BT, settings)
    if settings.beta > 0:
        kl_BT = _kl(batch.ref_logprobs_BT, logprobs_BT, mask_BT)
        if settings.use_bias_correction_kl:
            kl_BT = kl_BT * ratio
        terms_BT = terms_BT + settings.beta * kl_BT
        metrics["kl"] = _mean(kl_BT.detach(), mask_BT)
    loss = _normalised(_kept(terms_BT, mask_BT), mask_BT, settings, normalizers)
    if batch.entropies_BT is not None:
        metrics["entropy"] = _mean(batch.entropies_BT.detach(), mask_BT)
    if settings.entropy_coef != 0:
        if batch.entropies_BT is None:
            raise UsageError(
                f"entropy_coef is {settings.entropy_coef:g}, and the batch has no entropies"
            )
        entropy = _kept(batch.entropies_BT, mask_BT).sum() / max(normalizers.num_loss_tokens, 1)
        loss = loss - settings.entropy_coef * entropy
    return LossShare(loss=loss, metrics=metrics)


def rows_with_gradient(
    advantages_B: torch.Tensor,
    settings: ObjectiveSettings,
    mask_BT: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return bool [B]: rows that the update needs; the others' gradient is exactly 0.

    Leave the others out before the forward, but count them in `Normalizers`.
    A KL term or an entropy bonus needs every row that has a loss token.
    If no row is left, skip the optimizer's step too: momentum would move the weights on nothing.
    """
    if settings.beta > 0 or settings.entropy_coef != 0:
        needed_B = torch.ones_like(advantages_B, dtype=torch.bool)
    else:
        needed_B = advantages_B != 0
    return needed_B if mask_BT is None else needed_B & (mask_BT != 0).any(1)


def loss_mask(
    completion_mask_BT: torch.Tensor, truncated_B: torch.Tensor, settings: ObjectiveSettings
) -> torch.Tensor:
    """Return bool [B, T]: the tokens that the loss counts.

    A row that is left out still counts as a row in `Normalizers`, its tokens do not, as in TRL.
    """
    mask_BT = completion_mask_BT != 0
    if not settings.mask_truncated_completions:
        return mask_BT
    return mask_BT & ~truncated_B[:, None]


def add_metrics(parts: Iterable[Metrics]) -> Metrics:
    """Return the sums and counts of all `parts`."""
    total: Metrics = {}
    for part in parts:
        for name, sum_and_count in part.items():
            total[name] = total[name] + sum_and_count if name in total else sum_and_count
    return total


def metric_means(metrics: Metrics) -> dict[str, float]:
    """Return each metric's mean, NaN where nothing was counted; reads the device."""
    return {
        name: total / count if count else float("nan")
        for name, (total, count) in ((name, pair.tolist()) for name, pair in metrics.items())
    }


def _ratio(
    log_ratio_BT: torch.Tensor, mask_BT: torch.Tensor, settings: ObjectiveSettings
) -> torch.Tensor:
    """Return the importance ratio: [B, T] by token, [B, 1] by sequence."""
    if settings.importance_sampling_level == "token":
        return log_ratio_BT.exp()
    tokens_B1 = mask_BT.sum(1, keepdim=True).clamp(min=1)
    return (log_ratio_BT.sum(1, keepdim=True) / tokens_B1).exp()


def _policy_terms(
    ratio: torch.Tensor,
    advantages_B1: torch.Tensor,
    logprobs_BT: torch.Tensor,
    settings: ObjectiveSettings,
) -> torch.Tensor:
    if settings.loss_type == "cispo":
        weight = ratio.detach().clamp(max=settings.epsilon_high)
        return -weight * advantages_B1 * logprobs_BT
    clipped = ratio.clamp(1 - settings.epsilon, 1 + settings.epsilon_high)
    if settings.delta is not None:
        ratio = ratio.clamp(max=settings.delta)
    return -torch.min(ratio * advantages_B1, clipped * advantages_B1).expand_as(logprobs_BT)


def _kl(
    ref_logprobs_BT: torch.Tensor | None, logprobs_BT: torch.Tensor, mask_BT: torch.Tensor
) -> torch.Tensor:
    """Return the k3 estimate of the KL divergence to the reference, never below 0."""
    if ref_logprobs_BT is None:
        raise UsageError("beta is above 0, and the batch has no reference log-probabilities")
    difference_BT = _kept(ref_logprobs_BT, mask_BT).detach() - logprobs_BT
    return difference_BT.exp() - difference_BT - 1


def _normalised(
    terms_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    settings: ObjectiveSettings,
    normalizers: Normalizers,
) -> torch.Tensor:
    if settings.loss_type == "grpo":
        tokens_B = mask_BT.sum(1).clamp(min=1)
        return (terms_BT.sum(1) / tokens_B).sum() / max(normalizers.num_rows, 1)
    if settings.loss_type == "dr_grpo":
        return terms_BT.sum() / (max(normalizers.num_rows, 1) * settings.max_completion_length)
    return terms_BT.sum() / max(normalizers.num_loss_tokens, 1)


def _ratio_metrics(
    ratio: torch.Tensor,
    advantages_B1: torch.Tensor,
    mask_BT: torch.Tensor,
    settings: ObjectiveSettings,
) -> Metrics:
    """Return the means of the ratio and of the terms that the clip changes, by token or by row."""
    # By sequence a row counts once, if it has a token at all.
    counted = mask_BT if ratio.shape == mask_BT.shape else mask_BT.any(1, keepdim=True)
    if settings.loss_type == "cispo":
        low = torch.zeros_like(counted)
        high = (ratio > settings.epsilon_high) & (advantages_B1 > 0)
    else:
        low = (ratio < 1 - settings.epsilon) & (advantages_B1 < 0)
        high = (ratio > 1 + settings.epsilon_high) & (advantages_B1 > 0)
    return {
        "ratio": _mean(ratio, counted),
        "clip_low": _mean(low, counted),
        "clip_high": _mean(high, counted),
    }


def _mean(values: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """Return the sum over and the number of what is counted, as one fp32 tensor [2]."""
    total = torch.where(counted, values.float(), 0.0).sum()
    return torch.stack([total, counted.sum().float()])


def _kept(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Return `values_BT` in at least fp32, with exact zeros (gradients too) where the mask drops.

    Before any exp: times 0 afterwards, garbage that overflows would be NaN.
    """
    wide_dtype = torch.promote_types(values_BT.dtype, torch.float32)
    return torch.where(mask_BT, values_BT.to(wide_dtype), 0.0)


def _require_choice(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UsageError(f"{name} is {value!r}; it must be one of {', '.join(known)}")
