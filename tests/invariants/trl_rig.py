"""TRL's GRPOTrainer on a model of a few thousand weights, offline; and its undisturbed twin.

Shared by tests of the integration and by benchmarks/bench_faults.py.
"""

import warnings

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # theirs, at import
    from trl import GRPOConfig, GRPOTrainer

    from grpo_lite.integrations.trl import GovernedGRPOTrainer, govern

__all__ = ["GRPOTrainer", "GovernedGRPOTrainer", "govern", "make_trainer", "weights"]

VOCABULARY = 40


def tokenizer():
    words = {f"w{number}": number for number in range(VOCABULARY)}
    words |= {"<pad>": VOCABULARY, "<eos>": VOCABULARY + 1, "<unk>": VOCABULARY + 2}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def model(seed=0):
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY + 3,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=VOCABULARY,
        eos_token_id=VOCABULARY + 1,
        bos_token_id=None,
    )
    made = Qwen2ForCausalLM(config)
    made.generation_config.eos_token_id = VOCABULARY + 1
    made.generation_config.pad_token_id = VOCABULARY
    return made


def reward(completions, **columns):
    """Prefer even words, so that groups disagree."""
    return [
        sum(int(word[1:]) % 2 == 0 for word in text.split() if word[1:].isdigit()) / 4
        for text in completions
    ]


def make_trainer(folder, kind=GRPOTrainer, *, lora=False, card=None, rewards=reward, **options):
    """Return a trainer of two groups of four, always the same."""
    prompts = [
        " ".join(f"w{(7 * row + i) % VOCABULARY}" for i in range(3 + row % 3)) for row in range(16)
    ]
    settings = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_completion_length": 6,
        "max_steps": 2,
        "learning_rate": 1e-2,
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "seed": 1,
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "optim": "adamw_torch_fused",
    } | options
    arguments = {} if card is None else {"card": card}
    if lora:
        from peft import LoraConfig

        arguments["peft_config"] = LoraConfig(
            r=2, lora_alpha=4, target_modules="all-linear", task_type="CAUSAL_LM"
        )
    return kind(
        model=model(),
        reward_funcs=rewards,
        args=GRPOConfig(output_dir=str(folder), **settings),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer(),
        **arguments,
    )


def weights(trainer):
    """Return all weights as one fp64 vector."""
    return torch.cat([p.detach().double().flatten() for p in trainer.model.parameters()])
