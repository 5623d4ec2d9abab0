"""TRL's rollout and scoring under the governor: in slices that draw the same, and never twice.

Mixed in by `integrations.trl`, which knows the versions for which this holds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from grpo_lite.integrations.trl_parts import Memo, Part, RowNoise, copy_logs
from grpo_lite.parts import Job, PartRunner
from grpo_lite.plan import Phase
from grpo_lite.recovery import RandomState, random_state, restore_random_state

_ROLLOUT_STATE = ("_metrics", "_logs", "_pending_extra_logs", "_pending_metrics")
"""What TRL's rollout changes in the trainer."""


class GovernedRollout:
    """What replaces the rollout of a `GRPOTrainer`; mixed in before it."""

    governor: PartRunner
    """Decisions, records and what was measured."""
    _part: Part | None = None
    _memo: Memo | None = None

    def _prepare_inputs(self: Any, generation_batch: Any) -> Any:
        """Return the inputs of a micro-batch; after an out-of-memory what is finished is kept."""
        if self._part is not None:
            return self._part.inputs
        parent = super()._prepare_inputs  # type: ignore[misc]  # the trainer's
        kept = {name: copy_logs(getattr(self, name)) for name in _ROLLOUT_STATE}
        num_tokens_seen = self.state.num_input_tokens_seen
        self._memo = memo = Memo(device=self.governor.card.device)

        def run() -> Any:
            memo.cursor = 0
            with self._modes_kept():
                return parent(generation_batch)

        def undo() -> None:
            self.state.num_input_tokens_seen = num_tokens_seen
            for name, value in kept.items():
                setattr(self, name, copy_logs(value))

        try:
            return self.governor.again(run, undo)
        finally:
            self._memo = None

    def _generate_single_turn(
        self: Any, prompt_ids: Any, images: Any, fields: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Sample all rows at once, or in slices that draw what all at once would have drawn."""
        parent = super()._generate_single_turn  # type: ignore[misc]  # the trainer's
        sliced = not (
            images or fields or self.use_vllm or self.use_transformers_continuous_batching
        )

        def generate(rows: range) -> Any:
            ids = prompt_ids[rows.start : rows.stop]
            with self._modes_kept():
                return parent(ids, images, fields, *args, **kwargs)

        def all_rows() -> Any:
            if sliced:
                return self._generate_sliced(prompt_ids, generate), None
            return self.governor.again(lambda: generate(range(len(prompt_ids))))

        return all_rows() if self._memo is None else self._memo.call(all_rows, self)

    def _generate_sliced(self: Any, prompt_ids: Any, generate: Any) -> list[list[int]]:
        device = self.governor.card.device
        num_rows = len(prompt_ids)
        start = random_state(device)
        ends: list[tuple[int, RandomState]] = []

        def run(rows: range) -> Any:
            restore_random_state(device, start)
            if len(rows) == num_rows:
                return generate(rows)[0]
            noise = RowNoise(rows, num_rows)
            with noise:
                completions = generate(rows)[0]
            ends.append((noise.num_draws, random_state(device)))
            return completions

        job = Job(
            phase=Phase.ROLLOUT,
            num_rows=num_rows,
            row_size=max(len(ids) for ids in prompt_ids) + self.max_completion_length,
            run=run,
        )
        slices = self.governor.run(job)
        if ends:  # the longest slice has drawn as often as all rows at once would have
            restore_random_state(device, max(ends, key=lambda end: end[0])[1])
        return [completion for part in slices for completion in part]

    def _calculate_rewards(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the rewards; they are asked for once, however often the rollout is rescued."""
        parent = super()._calculate_rewards  # type: ignore[misc]  # the trainer's
        if self._memo is None:
            return parent(*args, **kwargs)
        return self._memo.call(lambda: parent(*args, **kwargs), self)

    def _get_per_token_logps_and_entropies(
        self: Any,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Score rows; without gradient, in parts that fit."""
        parent = super()._get_per_token_logps_and_entropies  # type: ignore[misc]  # the trainer's
        if torch.is_grad_enabled() or any(
            value is not None for name, value in kwargs.items() if not name.startswith("compute_")
        ):
            return parent(
                model, input_ids, attention_mask, logits_to_keep, batch_size=batch_size, **kwargs
            )

        def run(rows: range) -> Any:
            cut = slice(rows.start, rows.stop)
            return parent(model, input_ids[cut], attention_mask[cut], logits_to_keep, **kwargs)

        # bf16 log-probs depend on the rows of a forward: as many as the training pass takes.
        backward = self.governor.records.get("backward")
        limits = [len(input_ids), batch_size, None if backward is None else backward.num_rows]
        job = Job(
            phase=Phase.LOGPROB,
            num_rows=len(input_ids),
            row_size=input_ids.shape[1],
            run=run,
            max_rows=min(limit for limit in limits if limit),
        )
        parts = self.governor.run(job)
        if len(parts) == 1:
            return parts[0]
        columns = zip(*parts, strict=True)
        return tuple(self.governor.again(lambda: [_joined(list(column)) for column in columns]))

    def prediction_step(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate one batch; its rollout is not repeated by a rescue."""
        parent = super().prediction_step  # type: ignore[misc]  # the trainer's
        prepared = self._prepare_inputs(inputs)
        metrics = copy_logs(self._metrics)
        self._part = Part(
            inputs=prepared, loss_weight=1.0, token_fraction=1.0, row_fraction=1.0, is_last=True
        )
        try:
            return self.governor.again(
                lambda: parent(model, inputs, *args, **kwargs),
                lambda: setattr(self, "_metrics", copy_logs(metrics)),
            )
        finally:
            self._part = None

    def _save_checkpoint(self: Any, *args: Any, **kwargs: Any) -> None:
        parent = super()._save_checkpoint  # type: ignore[misc]  # the trainer's
        self.governor.again(lambda: parent(*args, **kwargs))

    @contextlib.contextmanager
    def _modes_kept(self: Any) -> Iterator[None]:
        """Put the model's modes back: TRL leaves checkpointing off where generation fails."""
        model = self.accelerator.unwrap_model(self.model)
        training, checkpointing = self.model.training, model.is_gradient_checkpointing
        finished = False
        try:
            yield
            finished = True
        finally:
            if not finished:
                self.model.train(training)
                if checkpointing and not model.is_gradient_checkpointing:
                    model.gradient_checkpointing_enable(self.args.gradient_checkpointing_kwargs)


def _joined(values: list[Any]) -> Any:
    return None if values[0] is None else torch.cat(values)
