"""Our own loop's phases on a model of a few thousand weights, without files: for attacks.

Shared by tests and by benchmarks/bench_faults.py and bench_governor.py.
"""

from dataclasses import dataclass

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from grpo_lite.cards.probe import plan_card
from grpo_lite.governor import Governor
from grpo_lite.grpo.play import Played, add_logprobs, play, update_data
from grpo_lite.grpo.policy import add_adapters, prepare_policy
from grpo_lite.grpo.rewards import Scores
from grpo_lite.grpo.rollout import Sampling
from grpo_lite.grpo.update import accumulate_gradients, make_policy
from grpo_lite.offload.resident import ResidentEngine
from grpo_lite.optimizers import optimizer_row
from grpo_lite.plan import Plan, Workload
from grpo_lite.search import Question
from grpo_lite.trace.footprint import trace_footprint

EOS = 41
_questions = {}


@dataclass(frozen=True)
class IdsPrompt:
    """A prompt that has token ids only."""

    ids: tuple[int, ...]


def tiny_config():
    return Qwen2Config(
        vocab_size=43,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=40,
        eos_token_id=EOS,
        bos_token_id=None,
    )


def tiny_workload(**changes):
    values = {
        "method": "full",
        "dtype": "float32",
        "prompts_per_step": 2,
        "num_generations": 4,
        "max_prompt_length": 5,
        "max_completion_length": 6,
        "num_iterations": 2,
    }
    return Workload(**(values | changes))


def question(workload):
    """Return footprint, profile and budget, traced once for each workload."""
    if workload not in _questions:
        planned = plan_card("virtual:1GiB")
        _questions[workload] = Question(
            footprint=trace_footprint("tiny", tiny_config(), workload),
            profile=planned.profile,
            budget=planned.budget,
        )
    return _questions[workload]


def start_plan(workload):
    return Plan(
        micro_batch=workload.num_rows // 2,
        gradient_accumulation_steps=2,
        gradient_checkpointing=False,
        logprob_chunk_tokens=24,
        rollout_batch=workload.num_rows,
    )


class OurLoop:
    """A model under the governor and what one update of it takes."""

    def __init__(self, card, *, workload=None, governed=True):
        self.workload = workload or tiny_workload()
        self.card = card
        self.decisions = []
        asked = question(self.workload)
        torch.manual_seed(0)
        with card.attach():
            model = add_adapters(Qwen2ForCausalLM(tiny_config()), self.workload)
            prepare_policy(model, self.workload)
            card.adopt([*model.parameters(), *model.buffers()])
            self.model = model
            self.policy = make_policy(model, self.workload, pad_id=40)
            self.engine = ResidentEngine(
                model.parameters(), optimizer_row("adamw_torch_fused"), learning_rate=1e-2
            )
        self.governor = Governor(
            card=card,
            question=asked,
            workload=self.workload,
            plan=start_plan(self.workload),
            report=self.decisions.append,
        )
        self.sampling = Sampling(workload=self.workload, eos_ids=(EOS,), pad_id=40)
        self.rewards = []

    def updates(self, num, first=1):
        """Make `num` updates."""
        for step in range(first, first + num):
            self.update(step)

    def update(self, step):
        """Make update number `step` as `train` does, without its files and its tokenizer."""
        self.governor.begin_update(step)
        prompts = [
            IdsPrompt(ids=tuple((3 * step + 7 * row + i) % 40 for i in range(3 + row)))
            for row in range(self.workload.prompts_per_step)
            for _ in range(self.workload.num_generations)
        ]
        batch = play(self.policy, prompts, self.governor, self.sampling, (0, step))
        totals = tuple(
            sum(token % 2 == 0 for token in ids) / len(ids) for ids in batch.completion_ids
        )
        self.rewards.append(sum(totals) / len(totals))
        scores = Scores(totals=totals, by_reward={"even": totals})
        played = Played(batch=batch, scores=scores)
        data, _ = self.governor.attempt(lambda _: update_data(self.policy, played))
        data = add_logprobs(self.policy, data, self.governor)
        for _ in range(self.workload.num_iterations if data.rows else 0):
            self.governor.attempt(
                lambda plan: accumulate_gradients(self.policy, data, plan, self.governor.watch),
                undo=self.engine.zero_grad,
            )
            self.governor.finish(self.engine.step)
            self.engine.zero_grad()
        self.governor.leave()
