"""QLoRA from plan to weights: what the trace says the packed model holds, and its training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import bitsandbytes as bnb
import pytest
import torch
from safetensors.torch import load_file
from tiny_run import make_model_folder, make_recipe
from transformers import AutoConfig, AutoModelForCausalLM

from grpo_lite.commands.main import main
from grpo_lite.grpo.policy import load_model
from grpo_lite.plan import Workload
from grpo_lite.recipe import write_recipe
from grpo_lite.trace.build import build_fake, measure_weights

pytestmark = pytest.mark.filterwarnings("ignore")  # bitsandbytes on a CPU says much


def widen(folder: Path) -> None:
    """Make the tiny model in `folder` 64 wide: bitsandbytes' CPU path wants whole blocks."""
    config = AutoConfig.from_pretrained(folder)
    config.hidden_size, config.intermediate_size, config.head_dim = 64, 128, 16
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def test_the_trace_holds_the_bytes_of_the_loaded_model(tmp_path: Path) -> None:
    """The packed base is most of the card: a wrong count would shift every answer."""
    folder = make_model_folder(tmp_path)
    workload = Workload(method="qlora", lora_rank=4)
    model = load_model(folder, AutoConfig.from_pretrained(folder), workload, torch.device("cpu"))
    held = [*model.parameters(), *model.buffers()]
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            state = module.weight.quant_state
            held += [state.absmax, state.code, state.offset]
            held += [state.state2.absmax, state.state2.code]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in held}
    fake = build_fake(AutoConfig.from_pretrained(folder), workload)
    assert measure_weights(fake.model).parameter_bytes == sum(storages.values())


def test_a_qlora_run_trains_adapters_and_leaves_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planned is not enough: the plan's method must also run and be saved."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    recipe = make_recipe(tmp_path)
    widen(Path(recipe.model))
    recipe = replace(recipe, workload=replace(recipe.workload, method="qlora", lora_rank=4))
    write_recipe(recipe, tmp_path / "run.toml")
    assert main(["train", str(tmp_path / "run.toml"), "--output", str(tmp_path / "run")]) == 0
    (saved,) = (tmp_path / "run" / "final").glob("adapter_model.safetensors")
    tensors = load_file(saved)
    moved = [name for name, tensor in tensors.items() if "lora_B" in name and tensor.any()]
    assert len(moved) == len(tensors) // 2
