"""The model that is trained: how its weights lie on the card and which of them learn.

The same functions prepare the real model of `train` and the fake one of a trace.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from grpo_lite.errors import UsageError
from grpo_lite.plan import Workload

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def weights_dtype(workload: Workload) -> torch.dtype:
    """Return the dtype in which the base weights are loaded.

    Full fine-tuning keeps fp32 masters: at RL learning rates bf16 weights lose 98 % of the updates.
    The frozen base of an adapter is kept in the compute dtype.
    """
    return torch.float32 if workload.method == "full" else _DTYPES[workload.dtype]


def autocast(workload: Workload, device: torch.device) -> torch.autocast:
    """Return the context in which the model computes."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=workload.dtype == "bfloat16")


def four_bit(workload: Workload) -> Any:
    """Return the transformers config that loads the base as `workload` has it; None if unpacked.

    NF4 with double quantisation; embeddings, norms and head stay in the compute dtype.
    """
    if workload.method != "qlora":
        return None
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=_DTYPES[workload.dtype],
    )


def add_adapters(model: Any, workload: Workload) -> Any:
    """Return `model` with LoRA adapters on all linear layers but the head, or as it is."""
    if workload.method == "full":
        return model
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=workload.lora_rank,
        lora_alpha=workload.lora_alpha,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config)


def prepare_policy(model: Any, workload: Workload) -> None:
    """Set which parameters learn and how the model runs: train mode, no cache by default."""
    if workload.method == "full":
        for parameter in model.parameters():
            parameter.requires_grad_()
    model.config.use_cache = False
    model.train()


def set_checkpointing(model: Any, *, enabled: bool) -> None:
    """Make backward recompute each layer's forward, or not."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if enabled:
        enable = getattr(
            inner, "activation_checkpointing_enable", inner.gradient_checkpointing_enable
        )
        enable({"use_reentrant": False})
        return
    disable = getattr(
        inner, "activation_checkpointing_disable", inner.gradient_checkpointing_disable
    )
    disable()


def load_model(folder: Path, config: Any, workload: Workload, device: torch.device) -> Any:
    """Return the model in `folder`, with adapters if the workload has them, ready to train.

    `config` is the transformers config that was planned with; nothing of the folder is executed.

    Raises:
        UsageError: weights of the model are missing in the folder.
    """
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        folder,
        config=config,
        dtype=weights_dtype(workload),
        quantization_config=four_bit(workload),
        device_map={"": device} if workload.method == "qlora" else None,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        output_loading_info=True,
    )
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise UsageError(
            f"{folder} lacks {len(missing)} weights of its model, {missing[0]} first",
            hint="download the model again, or use a folder whose config.json matches its weights",
        )
    model = add_adapters(model.to(device), workload).to(device)
    prepare_policy(model, workload)
    return model
