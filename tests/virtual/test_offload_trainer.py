"""The optimizer inside transformers' Trainer, whose loop TRL's trainers inherit."""

import pytest
import torch
import transformers

from grpo_lite.offload.adamw import OffloadedAdamW

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' and accelerate's own


def trained(make_optimizer, folder, **arguments):
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
    )
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, 64, (24, 8), generator=generator)
    optimizer = make_optimizer(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 10)
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(
            folder,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_steps=6,
            max_grad_norm=0,
            save_steps=3,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            logging_strategy="no",
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        optimizers=(optimizer, scheduler),
    )
    trainer.train(**arguments)
    return model.state_dict()


def offloaded(model):
    return OffloadedAdamW(model.named_parameters(), lr=1e-3, weight_decay=0.1, block_bytes=8192)


def plain(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)


def test_the_trainer_trains_the_same_weights_and_resumes_from_its_checkpoint(tmp_path):
    """Trainer accumulates, schedules, saves and loads the optimizer by its own rules."""
    expected = trained(plain, tmp_path / "plain")
    found = trained(offloaded, tmp_path / "ours")
    for name, value in expected.items():
        assert torch.equal(value, found[name]), name
    resumed = trained(
        offloaded, tmp_path / "ours", resume_from_checkpoint=str(tmp_path / "ours/checkpoint-3")
    )
    for name, value in expected.items():
        assert torch.equal(value, resumed[name]), name
