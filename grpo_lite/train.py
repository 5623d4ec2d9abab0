"""The governed GRPO loop, on one page.

Generate a group of completions per prompt, score them, take group-relative advantages, gather the
gradient micro-batch by micro-batch, step; everything that can run out of memory runs under the
governor.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_lite.cards.card import Card
from grpo_lite.cards.probe import open_card, plan_card
from grpo_lite.errors import NoPlanFits, UsageError
from grpo_lite.footprints import get_footprint
from grpo_lite.governor import Governor, PhaseRecord
from grpo_lite.grpo.data import PromptStream, Task, load_task
from grpo_lite.grpo.head import check_head
from grpo_lite.grpo.objective import Metrics, metric_means
from grpo_lite.grpo.play import Played, Prompt, add_logprobs, play, score, update_data
from grpo_lite.grpo.policy import load_model
from grpo_lite.grpo.prompts import encode_prompts
from grpo_lite.grpo.rewards import RewardSet, load_rewards
from grpo_lite.grpo.rollout import Sampling
from grpo_lite.grpo.update import Policy, UpdateData, accumulate_gradients, make_policy
from grpo_lite.interrupts import Interrupts
from grpo_lite.models import ModelSource, resolve_model
from grpo_lite.offload.adamw import OffloadedAdamW
from grpo_lite.offload.engines import Engine, OffloadedEngine
from grpo_lite.offload.resident import ResidentEngine
from grpo_lite.optimizers import optimizer_row
from grpo_lite.plan import Phase, Plan, require_runnable
from grpo_lite.recipe import Recipe, TrainingSettings
from grpo_lite.report.progress import Progress
from grpo_lite.report.runlog import Decision, RunLog, StepRecord
from grpo_lite.run_folder import RunFolder, save_whole
from grpo_lite.search import Question
from grpo_lite.units import format_bytes, parse_bytes

_EVALUATION = 0
"""Number of the update whose noise evaluations draw; updates count from 1."""


@dataclass(slots=True)
class Run:
    """Everything of one run that is open."""

    recipe: Recipe
    card: Card
    governor: Governor
    policy: Policy
    engine: Engine
    tokenizer: Any
    rewards: RewardSet
    prompts: dict[int, Prompt]
    held_out: tuple[Prompt, ...]
    sampling: Sampling
    log: RunLog
    progress: Progress
    interrupts: Interrupts = field(default_factory=Interrupts)
    last_step: int = 0
    peaks: dict[Phase, PhaseRecord] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What a run reads before anything large is loaded."""

    source: ModelSource
    """The model."""
    question: Question
    """Footprint, card and budget."""
    task: Task
    """The problems."""
    rewards: RewardSet
    """The reward functions."""
    tokenizer: Any
    """The model's tokenizer."""
    train_prompts: tuple[Prompt, ...]
    """Problems to train on, in tokens."""
    held_out: tuple[Prompt, ...]
    """Problems never trained on, in tokens."""


def read_inputs(recipe: Recipe, cache_dir: Path) -> Inputs:
    """Return what `recipe` names, checked, before a weight is loaded.

    Raises:
        UsageError: something of it is missing or cannot be meant.
        NoPlanFits: the weights alone are larger than the budget.
    """
    require_runnable(recipe.workload)
    source = resolve_model(recipe.model)
    if source.path is None:
        raise UsageError(
            f"the weights of {recipe.model} are not on this machine ({source.origin} only)",
            hint=f"hf download {recipe.model}, or put a local folder into the recipe",
        )
    if not recipe.task.name:
        raise UsageError(
            "the recipe names no task: [task] name is missing",
            hint='[task] name = "problems.jsonl" (a line each with "prompt") or '
            '"reasoning_gym:chain_sum"',
        )
    task = load_task(
        recipe.task.name,
        settings=dict(recipe.task.settings),
        held_out=recipe.task.held_out,
        seed=recipe.training.seed,
    )
    rewards = load_rewards(recipe.reward.functions, recipe.reward.weights or None)
    rewards.require_columns(task.columns)
    planned = plan_card(recipe.card, reserve_bytes=recipe.reserve_bytes)
    footprint = get_footprint(source, recipe.workload, cache_dir)
    weights_bytes = footprint.weights.parameter_bytes
    if weights_bytes > planned.budget.card_bytes:
        raise NoPlanFits(
            f"the weights alone take {format_bytes(weights_bytes)}, and the budget of "
            f"{recipe.card} is {format_bytes(planned.budget.card_bytes)}; nothing was loaded",
            hint=f"grpo-lite fit {recipe.model} --card {recipe.card} says what would fit",
        )
    tokenizer = load_tokenizer(source.path)
    limit = recipe.workload.max_prompt_length
    return Inputs(
        source=source,
        question=Question(footprint=footprint, profile=planned.profile, budget=planned.budget),
        task=task,
        rewards=rewards,
        tokenizer=tokenizer,
        train_prompts=_encoded(tokenizer, task.train, limit),
        held_out=_encoded(tokenizer, task.held_out, limit),
    )


def load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer in `folder`, with a padding token.

    Raises:
        UsageError: there is none.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise UsageError(f"{folder} has no tokenizer that can be loaded: {error}") from error
    if tokenizer.eos_token_id is None:
        raise UsageError(f"the tokenizer in {folder} has no end-of-sequence token")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token_id = tokenizer.eos_token_id
    return tokenizer


@contextmanager
def open_run(recipe: Recipe, inputs: Inputs, log: RunLog, progress: Progress) -> Iterator[Run]:
    """Load the model onto the recipe's card and hold the run open, counted by the card."""
    from grpo_lite.trace.build import build_config

    card = open_card(recipe.card, reserve_bytes=recipe.reserve_bytes)
    assert inputs.source.path is not None
    with card.attach():
        model = load_model(
            inputs.source.path, build_config(inputs.source.config), recipe.workload, card.device
        )
        card.adopt([*model.parameters(), *model.buffers()])
        check_head(model)
        policy = make_policy(model, recipe.workload, pad_id=inputs.tokenizer.pad_token_id)
        engine = make_engine(recipe, model, card)

        def tell(decision: Decision) -> None:
            log.decision(decision)
            progress.decision(decision)

        run = Run(
            recipe=recipe,
            card=card,
            governor=Governor(
                card=card,
                question=inputs.question,
                workload=recipe.workload,
                plan=recipe.plan,
                report=tell,
            ),
            policy=policy,
            engine=engine,
            tokenizer=inputs.tokenizer,
            rewards=inputs.rewards,
            prompts={prompt.example.index: prompt for prompt in inputs.train_prompts},
            held_out=inputs.held_out,
            sampling=Sampling(
                workload=recipe.workload,
                eos_ids=_end_tokens(model, inputs.tokenizer),
                pad_id=inputs.tokenizer.pad_token_id,
            ),
            log=log,
            progress=progress,
        )
        try:
            yield run
        finally:
            engine.close()


def make_engine(recipe: Recipe, model: Any, card: Card) -> Engine:
    """Return the optimizer of `recipe`, with gradients and states where its plan wants them."""
    training, offload = recipe.training, recipe.offload
    if recipe.plan.offload == "none":
        return ResidentEngine(
            model.parameters(),
            optimizer_row(recipe.workload.optimizer),
            learning_rate=training.learning_rate,
            weight_decay=training.weight_decay,
            max_grad_norm=training.max_grad_norm,
        )
    on_disk = recipe.plan.offload == "disk"
    optimizer = OffloadedAdamW(
        [(name, p) for name, p in model.named_parameters() if p.requires_grad],
        lr=training.learning_rate,
        weight_decay=training.weight_decay,
        max_grad_norm=training.max_grad_norm,
        host_bytes=parse_bytes(offload.host_budget) if offload.host_budget else None,
        disk_dir=Path(offload.disk_dir) if on_disk else None,
        disk_bytes=parse_bytes(offload.disk_budget) if on_disk and offload.disk_budget else None,
        card=card,
    )
    return OffloadedEngine(optimizer)


def train_steps(run: Run, folder: RunFolder) -> None:
    """Make the updates that are left; `run.last_step` is the last whole one at any time."""
    training = run.recipe.training
    stream = PromptStream(
        examples=[prompt.example for prompt in run.prompts.values()], seed=training.seed
    )
    while run.last_step < training.steps:
        step = run.last_step + 1
        record = one_update(run, stream, step)
        run.last_step = step
        run.interrupts.shielded = False
        run.log.step(record)
        run.progress.step(record)
        run.interrupts.raise_if_requested()
        if training.save_steps and step % training.save_steps == 0 and step < training.steps:
            save_weights(run, folder.checkpoint(step))


def one_update(run: Run, stream: PromptStream, step: int) -> StepRecord:
    """Make update number `step`: rollout, rewards, advantages, gradients, optimizer step."""
    recipe, governor, policy = run.recipe, run.governor, run.policy
    workload = recipe.workload
    governor.begin_update(step)
    examples = stream.next_prompts(step - 1, workload.prompts_per_step)
    rows = [
        run.prompts[example.index] for example in examples for _ in range(workload.num_generations)
    ]
    batch = play(policy, rows, governor, run.sampling, (recipe.training.seed, step))
    played = Played(batch=batch, scores=score(batch, rows, run.rewards, run.tokenizer))
    data, dead_fraction = governor.attempt(lambda _: update_data(policy, played))
    data = add_logprobs(policy, data, governor)
    rate = learning_rate(recipe.training, step)
    run.engine.set_learning_rate(rate)
    loss, norm = 0.0, 0.0
    metrics: Metrics = {}
    for _ in range(workload.num_iterations if data.rows else 0):
        loss, metrics = gradients(run, data)
        run.interrupts.shielded = True  # from here on the weights change
        result = governor.finish(run.engine.step)
        norm = result.gradient_norm
        run.engine.zero_grad()
    governor.leave()
    _keep_peaks(run)
    return _record(run, played, step, dead_fraction, _Learnt(loss, norm, rate, metrics))


def gradients(run: Run, data: UpdateData) -> tuple[float, Metrics]:
    """Return loss and metrics of an update whose gradients are now in the parameters.

    An out-of-memory throws all of them away and replays the update from its stored rollout.
    """

    def accumulate(plan: Plan) -> tuple[float, Metrics]:
        return accumulate_gradients(run.policy, data, plan, run.governor.watch)

    return run.governor.attempt(accumulate, undo=run.engine.zero_grad)


def learning_rate(training: TrainingSettings, step: int) -> float:
    """Return the rate of update number `step` (from 1): linear warm-up, then the schedule."""
    if step <= training.warmup_steps:
        return training.learning_rate * step / training.warmup_steps
    if training.lr_scheduler_type == "constant":
        return training.learning_rate
    done = (step - 1 - training.warmup_steps) / max(1, training.steps - training.warmup_steps)
    return training.learning_rate * 0.5 * (1 + math.cos(math.pi * done))


def evaluate(run: Run) -> float | None:
    """Return the mean reward on the held-out problems, sampled as in training; None without any.

    Draws the same noise each time, so that before and after differ by the weights alone.
    """
    samples = run.recipe.training.eval_samples
    if not run.held_out or not samples:
        return None
    run.governor.begin_update(run.last_step)
    rows = [prompt for prompt in run.held_out for _ in range(samples)]
    seed = run.recipe.training.seed
    batch = play(run.policy, rows, run.governor, run.sampling, (seed, _EVALUATION))
    totals = score(batch, rows, run.rewards, run.tokenizer).totals
    known = [total for total in totals if total is not None]
    reward = sum(known) / max(1, len(known))
    run.log.append("eval", {"step": run.last_step, "reward": reward, "samples": len(rows)})
    _keep_peaks(run)
    return reward


def save_weights(run: Run, target: Path) -> None:
    """Write the model (or its adapter) and the tokenizer to `target`, whole or not at all."""

    def save(folder: Path) -> None:
        run.policy.model.save_pretrained(folder)
        run.tokenizer.save_pretrained(folder)

    save_whole(target, save)


@dataclass(frozen=True, slots=True)
class _Learnt:
    loss: float
    gradient_norm: float
    learning_rate: float
    metrics: Metrics


def _record(
    run: Run, played: Played, step: int, dead_fraction: float, learnt: _Learnt
) -> StepRecord:
    records = run.governor.records
    batch = played.batch
    totals = [total for total in played.scores.totals if total is not None]
    seconds = {phase: record.seconds for phase, record in records.items()}
    return StepRecord(
        step=step,
        loss=learnt.loss,
        reward=sum(totals) / len(totals) if totals else math.nan,
        rewards=played.scores.means,
        metrics=metric_means(learnt.metrics),
        dead_group_fraction=dead_fraction,
        gradient_norm=learnt.gradient_norm,
        learning_rate=learnt.learning_rate,
        completion_tokens=batch.num_completion_tokens,
        mean_completion_tokens=batch.num_completion_tokens / batch.num_rows,
        truncated_fraction=sum(batch.truncated) / batch.num_rows,
        seconds=seconds,
        tokens_per_s=batch.num_completion_tokens / max(1e-9, sum(seconds.values())),
        predicted_peak_bytes={p: record.predicted_bytes for p, record in records.items()},
        measured_peak_bytes={p: record.measured_bytes for p, record in records.items()},
        plan={
            name: value
            for name, value in dataclasses.asdict(run.governor.plan).items()
            if name != "reasons"
        },
        allocated_bytes=run.card.allocated_bytes(),
    )


def _keep_peaks(run: Run) -> None:
    for phase, record in run.governor.records.items():
        best = run.peaks.get(phase)
        if best is None or record.measured_bytes > best.measured_bytes:
            run.peaks[phase] = record


def _encoded(tokenizer: Any, examples: Sequence[Any], limit: int) -> tuple[Prompt, ...]:
    if not examples:
        return ()
    encoded = encode_prompts(tokenizer, examples, limit)
    pairs = zip(encoded.examples, encoded.prompt_ids, strict=True)
    return tuple(Prompt(example=example, ids=tuple(ids)) for example, ids in pairs)


def _end_tokens(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that end a completion: the tokenizer's and the generation config's."""
    config = getattr(model, "generation_config", None)
    ids = getattr(config, "eos_token_id", None)
    known = ids if isinstance(ids, list) else [] if ids is None else [ids]
    return tuple(dict.fromkeys([tokenizer.eos_token_id, *known]))
