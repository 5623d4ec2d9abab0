"""TRL's GRPOTrainer under the governor: `GovernedGRPOTrainer`, or `govern(trainer)`.

The generation batch, its groups and the micro-batches stay TRL's; the governor cuts a micro-batch
into parts where it does not fit, and weighs them so that they add up to TRL's own gradient.
Private names of TRL are used, hence the pinned range of versions.

    from grpo_lite.integrations.trl import GovernedGRPOTrainer
    trainer = GovernedGRPOTrainer(model=..., reward_funcs=..., args=..., train_dataset=...)
    trainer.train()
"""

from __future__ import annotations

import time
import types
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
from transformers import Trainer, TrainerCallback
from trl import GRPOTrainer

from grpo_lite.cards.card import Card
from grpo_lite.cards.probe import open_card
from grpo_lite.errors import BudgetExceeded, UsageError
from grpo_lite.integrations.trl_parts import (
    Part,
    loss_tokens,
    loss_weight,
    make_part,
    merge_metrics,
    require_splittable,
)
from grpo_lite.integrations.trl_rollout import GovernedRollout
from grpo_lite.parts import Job, PartRunner, missing_gradient_bytes
from grpo_lite.plan import Phase
from grpo_lite.recovery import (
    RandomState,
    Rescue,
    random_state,
    restore_random_state,
    try_once,
)
from grpo_lite.stepping import can_resume

SUPPORTED_VERSIONS = ((1, 15), (1, 16))
"""First and last TRL whose step was read and tested."""
_LOSS_STATE = ("_entropy_window_stats", "entropy_coef", "_last_world_entropy")
"""What TRL's loss changes in the trainer."""


def require_supported_version(version: str) -> None:
    """Check that this version of TRL is one whose step is known.

    Raises:
        UsageError: it is older or newer.
    """
    first, last = SUPPORTED_VERSIONS
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if not first <= numbers <= last:
        raise UsageError(
            f"TRL {version} is installed; its GRPO step was checked for "
            f"{first[0]}.{first[1]} to {last[0]}.{last[1]}, and another may weigh losses otherwise",
            hint=f'pip install "trl>={first[0]}.{first[1]},<{last[0]}.{last[1] + 1}"',
        )


def require_supported(trainer: Any) -> None:
    """Check that `trainer` computes nothing that depends on the other rows of a micro-batch.

    Raises:
        UsageError: it does, or it is no GRPO trainer on one card.
    """
    if not isinstance(trainer, GRPOTrainer):
        raise UsageError(f"{type(trainer).__name__} is no GRPOTrainer")
    if trainer.accelerator.num_processes > 1 or trainer.args.n_gpu > 1:
        raise UsageError("the governor works on one card in one process")
    refused = {
        "top_entropy_quantile below 1": trainer.top_entropy_quantile < 1.0,
        "use_adaptive_entropy": getattr(trainer, "use_adaptive_entropy", False),
        "the router's auxiliary loss": getattr(trainer, "aux_loss_enabled", False),
    }
    for name, is_used in refused.items():
        if is_used:
            raise UsageError(
                f"{name} makes a row's loss depend on the other rows of its micro-batch; "
                "a smaller part would be another experiment"
            )
    kind: Any = type(trainer)
    own = kind.__bases__[-1] if issubclass(kind, GovernedSteps) else kind
    if own.training_step is not GRPOTrainer.training_step:
        raise UsageError(
            f"{own.__name__} has a training_step of its own, which the governor would replace"
        )
    loss_weight(trainer.loss_type, 1.0, 1.0)


def govern(trainer: Any, *, card: Card | str = "auto") -> Any:
    """Put an existing `GRPOTrainer` (or one derived from it) under the governor and return it.

    Raises:
        UsageError: TRL's version, the trainer's settings or the card are not supported.
    """
    require_supported_version(metadata.version("trl"))
    require_supported(trainer)
    if isinstance(trainer, GovernedSteps):
        return trainer
    kind = type(trainer)
    trainer.__class__ = type(f"Governed{kind.__name__}", (GovernedSteps, kind), {})
    trainer._install(card)
    return trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class _Micro:
    """One micro-batch of the update under way, kept so that it can be replayed."""

    inputs: dict[str, Any]
    state: RandomState
    tokens: torch.Tensor


class GovernedSteps(GovernedRollout):
    """What replaces the steps of a `GRPOTrainer`; mixed in before it."""

    def _install(self: Any, card: Card | str) -> None:
        opened = open_card(card) if isinstance(card, str) else card
        self.governor = PartRunner(card=opened)
        self._micros: list[_Micro] = []
        self.add_callback(_Boundaries(self))

    # -- what the user calls ----------------------------------------------------------------------

    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Train as TRL does.

        Raises:
            BudgetExceeded: no smaller part is left; a checkpoint of the last whole update is
                written first, unless the optimizer's step had begun to change weights.
        """
        parent = super().train  # type: ignore[misc]  # the trainer's
        with self._governing():
            try:
                tried = try_once(self.governor.card, lambda: parent(*args, **kwargs))
                if not isinstance(tried, Rescue):
                    return tried
                message, hint = "out of memory between two phases, in the trainer itself", None
            except BudgetExceeded as error:
                message, hint = error.message, error.hint
            # Outside the handler: the failed step's frames and tensors are gone.
            raise BudgetExceeded(f"{message}; {self._save_after_stop()}", hint=hint)

    def evaluate(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as TRL does."""
        with self._governing():
            return super().evaluate(*args, **kwargs)  # type: ignore[misc]  # the trainer's

    def log(self: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as TRL does, with what the governor did."""
        if "loss" in logs:
            backward = self.governor.records.get("backward")
            logs["governor/rescues"] = self.governor.num_rescues
            logs["governor/rows"] = 0 if backward is None else backward.num_rows
            logs["governor/peak_bytes"] = max(
                (record.measured_bytes for record in self.governor.records.values()), default=0
            )
        super().log(logs, *args, **kwargs)  # type: ignore[misc]  # the trainer's

    # -- gradients --------------------------------------------------------------------------------

    def training_step(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Add the gradients of one micro-batch in parts that fit; return its loss."""
        began_s = time.perf_counter()
        model.train()
        prepared = self._prepare_inputs(inputs)
        require_splittable(prepared)
        tokens = self.governor.again(lambda: loss_tokens(prepared))
        state = random_state(self.governor.card.device)
        self._micros.append(_Micro(inputs=prepared, state=state, tokens=tokens))
        loss = self._add_gradients(model, len(self._micros) - 1, num_items_in_batch)
        # What GRPOTrainer.training_step does around the gradients.
        self._step += 1
        self._current_train_step_time += time.perf_counter() - began_s
        if self._step % self.current_gradient_accumulation_steps == 0:
            self._metrics["train"]["step_time"].append(self._current_train_step_time)
            self._current_train_step_time = 0.0
        return loss

    def compute_loss(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Return TRL's loss of the part at work, as its share of the micro-batch's."""
        parent = super().compute_loss  # type: ignore[misc]  # the trainer's
        part = self._part
        if part is None or part.loss_weight == 1 == part.token_fraction:
            return parent(model, inputs, *args, **kwargs)
        coefficient = getattr(self, "entropy_coef", 0.0)
        if coefficient:  # a mean over tokens, whatever the loss is normalised by
            self.entropy_coef = coefficient * part.token_fraction / part.loss_weight
        try:
            loss = parent(model, inputs, *args, **kwargs)
        finally:
            if coefficient:
                self.entropy_coef = coefficient
        logged = self._metrics["train"].get("entropy_coef")
        if logged:
            logged[-1] = coefficient
        return loss * part.loss_weight

    def _add_gradients(self: Any, model: Any, index: int, num_items: Any) -> torch.Tensor:
        """Add the gradients of micro-batch `index` of this update; return its loss.

        An out-of-memory throws away all gradients of the update and replays those before.
        """
        micro = self._micros[index]
        metrics = self._metrics["train"]
        lengths = {name: len(values) for name, values in metrics.items()}
        kept = {name: getattr(self, name) for name in _LOSS_STATE if hasattr(self, name)}
        trained = [p for p in model.parameters() if p.requires_grad]
        done: list[tuple[Part, torch.Tensor]] = []

        def run(rows: range) -> None:
            self._part = make_part(micro.inputs, rows, self.loss_type, micro.tokens)
            try:
                loss = Trainer.training_step(self, model, self._part.inputs, num_items)
                done.append((self._part, loss))
            finally:
                self._part = None

        def forget_metrics() -> None:
            for name, values in metrics.items():
                del values[lengths.get(name, 0) :]

        def undo() -> None:
            done.clear()
            self._inner_optimizer().zero_grad(set_to_none=True)
            forget_metrics()
            for earlier in range(index):
                restore_random_state(self.governor.card.device, self._micros[earlier].state)
                self._add_gradients(model, earlier, num_items)
            forget_metrics()
            for name, value in kept.items():
                setattr(self, name, value)

        tokens_per_row = (
            micro.inputs["prompt_ids"].shape[1] + micro.inputs["completion_ids"].shape[1]
        )
        job = Job(
            phase=Phase.BACKWARD,
            num_rows=len(micro.tokens),
            row_size=tokens_per_row,
            run=run,
            undo=undo,
            extra_bytes=lambda: missing_gradient_bytes(trained),
        )
        self.governor.run(job)
        merge_metrics(metrics, lengths, [part for part, _ in done])
        losses = [loss for _, loss in done]
        if len(losses) == 1:
            return losses[0]
        total: torch.Tensor = self.governor.again(lambda: torch.stack(losses).sum())
        return total

    def _clip_grad_norm(self: Any, model: Any) -> Any:
        parent = super()._clip_grad_norm  # type: ignore[misc]  # the trainer's
        return self.governor.again(lambda: parent(model))

    def _get_grad_norm(self: Any, model: Any, grad_norm: Any = None) -> Any:
        parent = super()._get_grad_norm  # type: ignore[misc]  # the trainer's
        return self.governor.again(lambda: parent(model, grad_norm=grad_norm))

    # -- inside -----------------------------------------------------------------------------------

    def _governing(self: Any) -> Any:
        models = [model for model in (self.model, self.ref_model) if model is not None]
        tensors = [t for model in models for t in (*model.parameters(), *model.buffers())]
        return self.governor.governing(tensors)

    def _inner_optimizer(self: Any) -> Any:
        return getattr(self.optimizer, "optimizer", self.optimizer)

    def _govern_optimizer(self: Any) -> None:
        """Let the optimizer's step resume; one that is not known stays as it is."""
        optimizer = self._inner_optimizer()
        if getattr(self.optimizer, "scaler", None) is not None or not can_resume(optimizer):
            return
        resumable = self.governor.resumable_step(optimizer)
        if resumable.step_once is not None:
            return
        resumable.step_once = optimizer.step
        optimizer.step = types.MethodType(lambda _, closure=None: resumable(), optimizer)

    def _save_after_stop(self: Any) -> str:
        """Write a checkpoint of the last whole update; say what was done."""
        optimizer = self._inner_optimizer()
        optimizer.zero_grad(set_to_none=True)
        if can_resume(optimizer) and self.governor.resumable_step(optimizer).is_under_way:
            return "no checkpoint was written: the optimizer's step is half done"
        restore_random_state(self.governor.card.device, self._update_state)
        self._save_checkpoint(self.model, trial=None)
        return f"update {self.state.global_step} is saved in {self.args.output_dir}"


class _Boundaries(TrainerCallback):  # type: ignore[misc]  # transformers is not typed for us
    """Tells the governed trainer where updates begin and end."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._trainer._govern_optimizer()

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._trainer._micros.clear()
        self._trainer._update_state = random_state(self._trainer.governor.card.device)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._trainer._micros.clear()
        self._trainer.governor.updated()


class GovernedGRPOTrainer(GovernedSteps, GRPOTrainer):  # type: ignore[misc]  # likewise
    """`GRPOTrainer` under the governor: the same arguments, and `card` ("auto": the live one)."""

    def __init__(self, *args: Any, card: Card | str = "auto", **kwargs: Any) -> None:
        require_supported_version(metadata.version("trl"))
        super().__init__(*args, **kwargs)
        require_supported(self)
        self._install(card)
