"""Finding a model's shape: the order of the places, aliases, and what is refused by name."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_lite.errors import UsageError
from grpo_lite.models import check_config, resolve_model, shipped_models

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture(autouse=True)
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test an empty hub cache, and a working folder without models."""
    cache = tmp_path / "hub"
    cache.mkdir()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.chdir(tmp_path)
    return cache


def write_model(folder: Path, config: dict[str, Any], *, weights: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if weights:
        (folder / "model.safetensors").write_bytes(b"")
    return folder


def write_cached(cache: Path, model: str, config: dict[str, Any], *, weights: bool = False) -> Path:
    """Lay out `model` as the hub's client does: refs/main names a snapshot."""
    repo = cache / f"models--{model.replace('/', '--')}"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("abc123")
    return write_model(repo / "snapshots" / "abc123", config, weights=weights)


def test_an_instruct_name_is_an_alias_of_its_base_shape() -> None:
    base, tuned = (
        resolve_model("Qwen/Qwen2.5-1.5B"),
        resolve_model("Qwen/Qwen2.5-1.5B-Instruct"),
    )
    assert tuned.base_id == "Qwen/Qwen2.5-1.5B"
    assert base.base_id is None
    assert tuned.origin == base.origin == "shipped shape"
    assert tuned.published_params == base.published_params == 1_543_714_304
    assert tuned.path is None
    # the tuned variant's own limit, not the base's: lengths are checked against it
    assert base.config["max_position_embeddings"] == 131072
    assert tuned.config["max_position_embeddings"] == 32768
    assert {**tuned.config, "max_position_embeddings": 131072} == base.config
    assert json.loads(tuned.config_text) == tuned.config


def test_51_shapes_and_their_aliases_are_known_offline_and_no_name_twice() -> None:
    names = shipped_models()
    assert len(names) == len(set(names)) == 122
    assert "HuggingFaceTB/SmolLM2-135M-Instruct" in names


@pytest.mark.parametrize("name", ["Qwen/Qwen-1_8B", "Qwen/Qwen-7B-Chat", "Qwen/Qwen-14B"])
def test_the_first_qwen_generation_is_refused_by_name(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} cannot be used: .*model_type 'qwen'"):
        resolve_model(name)


def test_a_local_folder_comes_before_the_shape_of_the_same_name(tmp_path: Path) -> None:
    write_model(tmp_path / "gpt2", LLAMA, weights=True)
    source = resolve_model("gpt2")
    assert source.origin == "folder"
    assert source.config == LLAMA
    assert source.path == Path("gpt2")


def test_a_local_folder_without_config_does_not_hide_the_shape_of_the_same_name(
    tmp_path: Path,
) -> None:
    (tmp_path / "gpt2").mkdir()
    assert resolve_model("gpt2").origin == "shipped shape"


def test_a_config_file_gives_a_shape_without_weights(tmp_path: Path) -> None:
    file = tmp_path / "tiny.json"
    file.write_text(json.dumps(LLAMA))
    source = resolve_model("tiny.json")
    assert (source.origin, source.path, source.config) == ("config file", None, LLAMA)
    assert source.config_text == json.dumps(LLAMA)


def test_an_id_in_the_hub_cache_is_found_with_its_weights(hub_cache: Path) -> None:
    snapshot = write_cached(hub_cache, "someone/tiny", LLAMA, weights=True)
    source = resolve_model("someone/tiny")
    assert (source.origin, source.config, source.path) == ("hub cache", LLAMA, snapshot)


def test_a_shipped_id_in_the_hub_cache_keeps_the_shape_and_gains_the_weights(
    hub_cache: Path,
) -> None:
    snapshot = write_cached(hub_cache, "Qwen/Qwen2.5-0.5B-Instruct", LLAMA, weights=True)
    source = resolve_model("Qwen/Qwen2.5-0.5B-Instruct")
    assert source.origin == "shipped shape"
    assert source.config["model_type"] == "qwen2"
    assert source.path == snapshot


def test_half_downloaded_shards_are_no_weights(tmp_path: Path) -> None:
    """Training from an incomplete folder would start from random tensors in the missing places."""
    folder = write_model(tmp_path / "half", LLAMA)
    shards = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    (folder / "model-1.safetensors").write_bytes(b"")
    assert resolve_model(str(folder)).path is None
    (folder / "model-2.safetensors").write_bytes(b"")
    assert resolve_model(str(folder)).path == folder


def test_pickled_weights_are_no_weights(tmp_path: Path) -> None:
    """Unpickling runs code from the model's folder."""
    folder = write_model(tmp_path / "pickled", LLAMA)
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert resolve_model(str(folder)).path is None


def test_an_unknown_id_names_the_nearest_and_the_way_to_the_hub() -> None:
    with pytest.raises(UsageError, match=r"nearest known: Qwen/Qwen2\.5-1\.5B-Instruct") as caught:
        resolve_model("Qwen/Qwen2.5-1.5B-Instrct")
    assert "--allow-network" in str(caught.value)
    assert caught.value.exit_code == 2


def test_an_unreachable_hub_is_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object) -> str:
        raise ConnectionError("no route to the hub\nand a long story")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", unreachable)
    with pytest.raises(UsageError, match=r"could not be had from the hub: no route to the hub\n"):
        resolve_model("nobody/nothing", allow_network=True)


def test_the_hub_is_asked_last_and_only_for_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def download(model: str, filename: str) -> str:
        asked.append((model, filename))
        return str(write_model(tmp_path / "down", LLAMA) / "config.json")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert resolve_model("Qwen/Qwen2.5-0.5B", allow_network=True).origin == "shipped shape"
    assert resolve_model("nobody/nothing", allow_network=True).origin == "hub"
    assert asked == [("nobody/nothing", "config.json")]


@pytest.mark.parametrize("name", ["./nope", "/no/where/at-all", "~/nope", "nope.json", "a/b/c", ""])
def test_a_path_that_is_not_there_is_not_taken_for_an_id(name: str) -> None:
    with pytest.raises(UsageError, match=r"there is no file or folder|has no config\.json"):
        resolve_model(name)


def test_a_folder_without_config_says_so_and_names_an_adapters_base(tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    with pytest.raises(UsageError, match=r"adapter has no config\.json"):
        resolve_model(str(folder))
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "Qwen/Qwen3-0.6B"}')
    with pytest.raises(UsageError, match=r"adapters of Qwen/Qwen3-0\.6B"):
        resolve_model(str(folder))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{\n "model_type": "llama",\n}', "config.json:3: not valid JSON"),
        ("[1, 2]", "holds a JSON list"),
        ("", "config.json:1: not valid JSON"),
    ],
)
def test_a_broken_config_names_file_and_line(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UsageError, match=told):
        resolve_model(str(tmp_path))


def test_a_config_that_is_no_text_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(UsageError, match=r"config\.json cannot be read"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model_type": None}, "model_type is missing"),
        ({"model_type": 7}, "model_type is 7"),
        ({"vocab_size": 0}, "vocab_size is 0; it must be a whole number of at least 1"),
        ({"vocab_size": "32000"}, "vocab_size is '32000'"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"num_hidden_layers": -2}, "num_hidden_layers is -2"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"hidden_size": 64.5}, "hidden_size is 64.5"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_key_value_heads": [2, 0]}, r"num_key_value_heads is \[2, 0\]"),
        ({"num_attention_heads": 6}, "hidden_size 64 is not a multiple of num_attention_heads 6"),
        (
            {"num_key_value_heads": 3},
            "num_attention_heads 4 is not a multiple of num_key_value_heads 3",
        ),
        ({"head_dim": 0}, "head_dim is 0"),
    ],
)
def test_a_contradictory_config_names_field_and_rule(changes: dict[str, Any], told: str) -> None:
    """transformers fills missing fields with a 7B model's: the answer would be of another model."""
    with pytest.raises(UsageError, match=f"here/config.json: {told}"):
        check_config({**LLAMA, **changes}, "here/config.json")


def test_a_width_that_heads_do_not_divide_is_right_where_head_dim_is_given() -> None:
    check_config({**LLAMA, "num_attention_heads": 6, "head_dim": 16}, "here")


def test_other_families_words_for_the_same_fields_are_read() -> None:
    gpt2 = {"model_type": "gpt2", "vocab_size": 9, "n_embd": 64, "n_layer": 2, "n_head": 4}
    check_config(gpt2, "here")
    with pytest.raises(UsageError, match="n_embd 64 is not a multiple of n_head 5"):
        check_config({**gpt2, "n_head": 5}, "here")


def test_code_in_a_models_folder_is_refused_and_never_run(tmp_path: Path) -> None:
    code = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\n"
    config = {**LLAMA, "model_type": "home_made", "auto_map": {"AutoConfig": "code.C"}}
    folder = write_model(tmp_path / "remote", config)
    (folder / "code.py").write_text(code)
    with pytest.raises(UsageError, match="'home_made' is built by code in the model's own folder"):
        resolve_model(str(folder))
    assert not (folder / "ran").exists()


def test_auto_map_is_ignored_where_the_family_is_built_in(tmp_path: Path) -> None:
    """Phi models keep the auto_map from before their family came into transformers."""
    config = {**LLAMA, "model_type": "phi3", "auto_map": {"AutoConfig": "code.C"}}
    assert resolve_model(str(write_model(tmp_path / "phi", config))).config == config


def test_a_multimodal_config_gives_its_language_model_and_says_so(tmp_path: Path) -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 64, "num_hidden_layers": 2}
    config = {
        "model_type": "gemma3",
        "text_config": text,
        "vision_config": {"hidden_size": 32},
        "torch_dtype": "bfloat16",
    }
    source = resolve_model(str(write_model(tmp_path / "gemma", config)))
    assert source.config == {**text, "torch_dtype": "bfloat16"}
    assert source.note == "the language model of gemma3, without its other parts"


def test_a_multimodal_config_whose_language_model_has_no_name_is_refused(tmp_path: Path) -> None:
    config = {"model_type": "llava", "text_config": {"hidden_size": 64}}
    with pytest.raises(UsageError, match="'llava' is multimodal and its text_config names no"):
        resolve_model(str(write_model(tmp_path / "llava", config)))


def test_resolving_a_shipped_name_imports_neither_torch_nor_transformers() -> None:
    """A warm answer takes a second; importing torch alone takes two."""
    code = (
        "import sys; from grpo_lite.models import resolve_model; "
        "from grpo_lite.cards.profile import load_profile; "
        "resolve_model('Qwen/Qwen2.5-1.5B-Instruct'); load_profile('rtx-4060-8gb'); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
