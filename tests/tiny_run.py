"""A whole run in miniature: a tiny model folder with a tokenizer, a task and a reward, offline."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from grpo_lite.plan import Plan, Workload
from grpo_lite.recipe import Recipe, RewardSettings, TaskSettings, TrainingSettings

LETTERS = "abcdefghijklmnopqrstuvwxyz "


def make_model_folder(folder: Path, *, num_layers: int = 3) -> Path:
    """Write a tiny llama with a letter tokenizer; random weights, the same every time."""
    import torch
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{c: i + 3 for i, c in enumerate(LETTERS)}}
    raw = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_task(folder: Path, num_problems: int = 12) -> Path:
    """Write problems whose wanted letter is in a column."""
    lines = [
        json.dumps({"prompt": f"say {LETTERS[i]}" + " a" * (i % 3), "wanted": LETTERS[i]})
        for i in range(num_problems)
    ]
    path = folder / "problems.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def make_reward(folder: Path, body: str = "sum(c.count(x) for x in (w, ' ', 'a')) / 4") -> Path:
    """Write a reward of each completion `c` and wanted letter `w`."""
    path = folder / "rewards.py"
    path.write_text(
        "def score(completions, wanted, **columns):\n"
        f"    return [float({body}) for c, w in zip(completions, wanted)]\n",
        encoding="utf-8",
    )
    return path


def make_recipe(folder: Path, *, card: str = "virtual:1GiB", **changes: object) -> Recipe:
    """Return a recipe over a tiny model, task and reward that are written to `folder`."""
    recipe = Recipe(
        model=str(make_model_folder(folder / "model")),
        card=card,
        workload=Workload(
            method="full",
            dtype="float32",
            prompts_per_step=2,
            num_generations=4,
            max_prompt_length=16,
            max_completion_length=6,
        ),
        plan=Plan(
            micro_batch=8,
            gradient_accumulation_steps=1,
            gradient_checkpointing=False,
            logprob_chunk_tokens=48,
            rollout_batch=8,
        ),
        task=TaskSettings(name=str(make_task(folder)), held_out=2),
        reward=RewardSettings(functions=[f"{make_reward(folder)}:score"]),
        training=TrainingSettings(steps=3, learning_rate=1e-3),
    )
    return replace(recipe, **changes)
