"""The words of the house: Phase, Category, Workload (the experiment) and Plan (how it is run).

The Workload is what the result depends on; the Plan is what only memory and speed depend on.
Knows nothing of models, cards or torch.
"""

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from grpo_lite.errors import UsageError

METHODS = ("full", "lora", "qlora")
LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo")
DTYPES = ("bfloat16", "float32")
OFFLOADS = ("none", "host", "disk")


class Phase(StrEnum):
    """A part of a GRPO run with its own memory peak, in the order in which they come."""

    LOAD = "load"
    ROLLOUT = "rollout"
    LOGPROB = "logprob"
    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"
    SAVE = "save"


class Category(StrEnum):
    """What a byte on the card is held for."""

    PARAMETER = "parameter"
    GRADIENT = "gradient"
    OPTIMIZER_STATE = "optimizer_state"
    ACTIVATION = "activation"
    LOGITS = "logits"
    KV_CACHE = "kv_cache"
    TEMPORARY = "temporary"
    RUNTIME = "runtime"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The experiment: everything that the trained weights depend on."""

    method: str = "full"
    """"full" (fp32 master weights), "lora", or "qlora" (adapters on a 4-bit base)."""
    dtype: str = "bfloat16"
    """Compute dtype: "bfloat16" (autocast over fp32 weights, or a bf16 base) or "float32"."""
    prompts_per_step: int = 8
    """Distinct prompts in one update."""
    num_generations: int = 8
    """Completions sampled for each prompt (TRL's word)."""
    max_prompt_length: int = 256
    """Longest prompt, in tokens."""
    max_completion_length: int = 256
    """Cap on sampled tokens for each completion."""
    num_iterations: int = 1
    """Updates made from one rollout; above 1 old log-probs are stored before the first."""
    beta: float = 0.0
    """Weight of the KL term; above 0 reference log-probs are computed."""
    loss_type: str = "dapo"
    """One of LOSS_TYPES, with TRL's meanings."""
    epsilon: float = 0.2
    """Lower clip range of the importance ratio."""
    epsilon_high: float = 0.2
    """Upper clip range of the importance ratio."""
    temperature: float = 1.0
    """Sampling temperature; log-probs are taken of logits divided by it."""
    optimizer: str = "adamw_torch_fused"
    """Name of a row of `optimizers`."""
    lora_rank: int = 16
    """Rank of each adapter (method lora)."""
    lora_alpha: int = 32
    """Scale numerator of the adapters (method lora)."""

    def __post_init__(self) -> None:
        _require_choice("method", self.method, METHODS)
        _require_choice("dtype", self.dtype, DTYPES)
        _require_choice("loss_type", self.loss_type, LOSS_TYPES)
        for name in (
            "prompts_per_step",
            "max_prompt_length",
            "max_completion_length",
            "num_iterations",
            "lora_rank",
            "lora_alpha",
        ):
            _require_positive(name, getattr(self, name))
        if self.num_generations < 2:
            raise UsageError(
                f"num_generations is {self.num_generations}; an advantage is relative to a group, "
                "so a group needs at least 2 completions",
                hint="--num-generations 8",
            )
        if not (self.beta >= 0 and self.temperature > 0):  # NaN is neither
            raise UsageError(
                f"beta must be >= 0 and temperature > 0; got beta {self.beta}, "
                f"temperature {self.temperature}"
            )
        if not (0 <= self.epsilon <= 1 and self.epsilon_high >= 0):
            raise UsageError(
                "epsilon must be from 0 to 1 and epsilon_high at least 0; got epsilon "
                f"{self.epsilon:g}, epsilon_high {self.epsilon_high:g}"
            )

    @property
    def num_rows(self) -> int:
        """Completions in one update: prompts x generations, the effective batch."""
        return self.prompts_per_step * self.num_generations

    @property
    def num_tokens(self) -> int:
        """Longest prompt plus longest completion, in tokens."""
        return self.max_prompt_length + self.max_completion_length

    @property
    def needs_logprob_phase(self) -> bool:
        """Whether log-probs are computed without gradient before the update (old or reference)."""
        return self.num_iterations > 1 or self.beta > 0


def require_runnable(workload: Workload) -> None:
    """Check that the loop can run `workload`.

    Raises:
        UsageError: it asks for something that only TRL has so far.
    """
    if workload.method == "full" and workload.beta > 0:
        raise UsageError(
            f"beta is {workload.beta:g} with full fine-tuning, which needs a second, frozen copy "
            "of the model as reference; only adapters have theirs for free",
            hint="--method lora, or --beta 0 (TRL's default)",
        )
    if workload.loss_type == "cispo" and workload.epsilon_high < 1:
        raise UsageError(
            f"epsilon_high is {workload.epsilon_high:g}, and for cispo it caps the ratio itself",
            hint="epsilon_high = 5.0",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How an update is run: nothing here changes what is learnt, only memory and time."""

    micro_batch: int
    """Rows in one forward and backward (TRL's per_device_train_batch_size)."""
    gradient_accumulation_steps: int
    """Micro-batches in one update."""
    gradient_checkpointing: bool
    """Recompute each layer in backward instead of keeping its activations."""
    logprob_chunk_tokens: int
    """Completion tokens whose logits exist at once in the head."""
    rollout_batch: int
    """Rows that are sampled at once."""
    offload: str = "none"
    """Where gradients and optimizer state live: "none" (card), "host" (RAM), "disk" (files)."""
    reasons: dict[str, str] = field(default_factory=dict, compare=False)
    """Why each field has its value, by field name."""

    def __post_init__(self) -> None:
        for name in (
            "micro_batch",
            "gradient_accumulation_steps",
            "logprob_chunk_tokens",
            "rollout_batch",
        ):
            _require_positive(name, getattr(self, name))
        _require_choice("offload", self.offload, OFFLOADS)

    @property
    def num_rows(self) -> int:
        """Rows of one update under this plan: micro-batch x accumulation."""
        return self.micro_batch * self.gradient_accumulation_steps

    def with_reasons(self, **reasons: str) -> "Plan":
        """Return this plan with `reasons` added to those it has."""
        return replace(self, reasons={**self.reasons, **reasons})

    def changes_to(self, other: "Plan") -> dict[str, tuple[Any, Any]]:
        """Return the fields in which `other` differs, as {field: (here, there)}."""
        names = (name for name in self.__slots__ if name != "reasons")
        return {
            name: (getattr(self, name), getattr(other, name))
            for name in names
            if getattr(self, name) != getattr(other, name)
        }


def _require_choice(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UsageError(f"{name} is {value!r}; it must be one of {', '.join(known)}")


def _require_positive(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{name} is {value!r}; it must be a whole number of at least 1")
