"""A model's shape from what the user names: the content of its config.json, and its folder.

Looks in this order: a local folder, a config.json file, a shipped shape, the local hub cache, the
hub (only where the network is allowed).
Reads JSON only; never runs anything from a model's folder, and knows no torch or transformers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from grpo_lite.errors import UsageError, unknown_name
from grpo_lite.shipped import profiles_root

Origin = Literal["folder", "config file", "shipped shape", "hub cache", "hub"]

_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_WEIGHTS = "model.safetensors"
_WEIGHTS_INDEX = "model.safetensors.index.json"
_VOCABULARY = ("vocab_size", "n_vocab")
_LAYERS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "decoder_layers",
    "layers_block_type",
)
_WIDTH = ("hidden_size", "n_embd", "n_embed", "d_model", "dim")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads")
_HEAD_DIM = ("head_dim", "d_kv", "attention_head_size", "qk_head_dim", "qk_nope_head_dim")
_NEEDED: tuple[tuple[str, ...], ...] = (_VOCABULARY, _LAYERS, _WIDTH)
_OPTIONAL: tuple[tuple[str, ...], ...] = (_HEADS, _KV_HEADS, _HEAD_DIM)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model as found: its shape, and where its weights are if they are here."""

    name: str
    """As the user named it."""
    config: dict[str, Any]
    """Content of config.json for the causal language model (a multimodal model's text part)."""
    config_text: str
    """The JSON text that was read, for hashing."""
    path: Path | None
    """Local folder with complete safetensors weights; None where there is none."""
    base_id: str | None
    """The shipped shape of which `name` is a variant; None where `name` is no alias."""
    origin: Origin
    """Where the shape was found."""
    published_params: int | None
    """The publisher's parameter count; None where it is unknown."""
    note: str = ""
    """What a reader should know of the shape; empty where there is nothing."""


def shipped_models() -> list[str]:
    """Return the ids that work offline, aliases included, in order."""
    return sorted(name for shape in _shapes() for name in (shape["id"], *shape["aliases"]))


def resolve_model(model: str, *, allow_network: bool = False) -> ModelSource:
    """Return the shape of `model`: a folder, a config.json file or a hub id, in that order.

    Raises:
        UsageError: nothing is called `model`, or what was found cannot be used.
    """
    place = Path(model).expanduser()
    if place.is_file():
        return _from_file(model, place, origin="config file", path=None)
    if (place / "config.json").is_file():
        return _from_file(model, place / "config.json", origin="folder", path=place)
    shape = _shape_of(model)
    if shape is not None:
        return _from_shape(model, shape)
    if place.is_dir():
        raise _folder_without_config(place)
    if not _HUB_ID.fullmatch(model) or model.endswith(".json"):
        raise UsageError(
            f"there is no file or folder {model}",
            hint="name a folder with a config.json, a config.json file, or a model id",
        )
    cached = _cached_config(model)
    if cached is not None:
        return _from_file(model, cached, origin="hub cache", path=cached.parent)
    if not allow_network:
        raise unknown_name(
            "model", model, shipped_models(), hint=f"--allow-network looks for {model} on the hub"
        )
    return _from_file(model, _download_config(model), origin="hub", path=None)


def check_config(config: Mapping[str, Any], origin: str, *, complete: bool = True) -> None:
    """Refuse a config that names no model that could be built.

    Only what is wrong for every family is refused here; the rest is its own class's to say.
    A multimodal model's text part is not `complete`: it leaves out what equals its class's default.

    Raises:
        UsageError: with the file `origin`, the field, its value and the rule.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise UsageError(
            f"{origin}: model_type is {_shown(model_type)}; it must name the model's family",
            hint='a Llama-like model has "model_type": "llama"',
        )
    if "auto_map" in config and not _is_built_in(model_type):
        raise UsageError(
            f"{origin}: model_type {model_type!r} is built by code in the model's own folder "
            f"(auto_map), and grpo-lite runs no code from there",
            hint="use a model whose model_type the installed transformers has built in",
        )
    for names in _NEEDED:
        _require_count(config, names, origin, needed=complete)
    for names in _OPTIONAL:
        _require_count(config, names, origin, needed=False)
    _check_heads(config, origin)


def _check_heads(config: Mapping[str, Any], origin: str) -> None:
    (width_name, width), (heads_name, heads) = _field(config, _WIDTH), _field(config, _HEADS)
    kv_name, kv_heads = _field(config, _KV_HEADS)
    if not isinstance(heads, int):
        return
    has_head_dim = _field(config, _HEAD_DIM)[1] is not None
    if isinstance(width, int) and width % heads and not has_head_dim:
        raise UsageError(
            f"{origin}: {width_name} {width} is not a multiple of {heads_name} {heads}, "
            "and head_dim is not given"
        )
    if isinstance(kv_heads, int) and heads % kv_heads:
        raise UsageError(
            f"{origin}: {heads_name} {heads} is not a multiple of {kv_name} {kv_heads}; "
            "each key/value head serves the same number of query heads"
        )


def _require_count(
    config: Mapping[str, Any], names: tuple[str, ...], origin: str, *, needed: bool
) -> None:
    name, value = _field(config, names)
    if value is None and not needed:
        return
    if isinstance(value, list) and value:  # one entry for each layer: a count, or the layer's kind
        counts = [entry for entry in value if not isinstance(entry, str)]
    else:
        counts = [value]
    if not all(type(count) is int and count > 0 for count in counts):
        raise UsageError(
            f"{origin}: {name} is {_shown(value)}; it must be a whole number of at least 1"
        )


def _field(config: Mapping[str, Any], names: tuple[str, ...]) -> tuple[str, Any]:
    """Return the first of `names` that `config` gives, with its value; None where it has none."""
    return next(((n, config[n]) for n in names if config.get(n) is not None), (names[0], None))


def _shown(value: object) -> str:
    return "missing" if value is None else repr(value)


def _is_built_in(model_type: str) -> bool:
    """Return whether the installed transformers has a folder for `model_type`.

    It is not imported, which would import torch.
    The text part of a multimodal family shares its folder: qwen3_5_text lies in qwen3_5.
    """
    spec = find_spec("transformers")
    if spec is None or spec.origin is None:
        return False
    folder = model_type.replace("-", "_")
    families = Path(spec.origin).parent / "models"
    return any((families / name).is_dir() for name in {folder, folder.removesuffix("_text")})


def _from_file(name: str, file: Path, *, origin: Origin, path: Path | None) -> ModelSource:
    text = _read_text(file)
    config, note = _text_part(_parse_object(text, str(file)), str(file))
    check_config(config, str(file), complete=not note)
    return ModelSource(
        name=name,
        config=config,
        config_text=text,
        path=path if path is not None and _has_weights(path) else None,
        base_id=None,
        origin=origin,
        published_params=None,
        note=note,
    )


def _text_part(config: dict[str, Any], origin: str) -> tuple[dict[str, Any], str]:
    """Return the config of the language model inside `config`, and a note where it is a part.

    A multimodal config holds its language model under text_config; prompts here are text, so the
    other parts are neither sized nor trained.
    """
    text = config.get("text_config")
    if not isinstance(text, dict) or _field(config, _WIDTH)[1] is not None:
        return config, ""
    outer = config.get("model_type")
    if not isinstance(text.get("model_type"), str):
        raise UsageError(
            f"{origin}: model_type {outer!r} is multimodal and its text_config names no "
            "model_type, so its language model cannot be told apart"
        )
    shared = {
        key: config[key]
        for key in ("tie_word_embeddings", "torch_dtype", "dtype", "auto_map")
        if key in config
    }
    return {**shared, **text}, f"the language model of {outer}, without its other parts"


def _from_shape(name: str, shape: dict[str, Any]) -> ModelSource:
    if "refused" in shape:
        raise UsageError(
            f"{name} cannot be used: {shape['refused']}",
            hint="a newer generation of the family works, such as Qwen/Qwen2.5-1.5B",
        )
    config = {**shape["config"], **shape["aliases"].get(name, {})}
    cached = _cached_config(name)
    return ModelSource(
        name=name,
        config=config,
        config_text=json.dumps(config, sort_keys=True),
        path=cached.parent if cached is not None and _has_weights(cached.parent) else None,
        base_id=shape["id"] if name != shape["id"] else None,
        origin="shipped shape",
        published_params=shape["published_params"],
        note=shape["notes"],
    )


def _shape_of(model: str) -> dict[str, Any] | None:
    return next((s for s in _shapes() if model == s["id"] or model in s["aliases"]), None)


def _shapes() -> Iterator[dict[str, Any]]:
    for file in (profiles_root() / "models").iterdir():
        yield _parse_object(_read_text(file), str(file))


def _read_text(file: Traversable) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read as a JSON text: {error}") from error


def _parse_object(text: str, origin: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(
            f"{origin}:{error.lineno}: not valid JSON: {error.msg} (column {error.colno})"
        ) from error
    if not isinstance(value, dict):
        raise UsageError(f"{origin}: holds a JSON {type(value).__name__}; expected an object {{}}")
    return value


def _has_weights(folder: Path) -> bool:
    """Return whether `folder` holds all of a model's safetensors (pickled weights do not count)."""
    if (folder / _WEIGHTS).is_file():
        return True
    index = folder / _WEIGHTS_INDEX
    if not index.is_file():
        return False
    shards = _parse_object(_read_text(index), str(index)).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        return False
    return all((folder / str(name)).is_file() for name in set(shards.values()))


def _folder_without_config(folder: Path) -> UsageError:
    adapter = folder / "adapter_config.json"
    base = None
    if adapter.is_file():
        base = _parse_object(_read_text(adapter), str(adapter)).get("base_model_name_or_path")
    return UsageError(
        f"{folder} has no config.json",
        hint=f"the folder holds adapters of {base}: name that model"
        if base
        else "a model's folder holds config.json and *.safetensors",
    )


def _cached_config(model: str) -> Path | None:
    """Return the config.json of `model` in the local hub cache; None if it is not there."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(model, "config.json")
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


def _download_config(model: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model, "config.json"))
    except (OSError, ValueError) as error:  # hub errors derive from these
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(
            f"the config of {model} could not be had from the hub: {reason}",
            hint="check the id, the network, and for gated models `hf auth login`",
        ) from error
