"""Shipped shapes: the installed transformers builds from each exactly the parameters it should."""

import json
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from grpo_lite.models import check_config, resolve_model, shipped_models
from grpo_lite.shipped import profiles_root

SHAPES: dict[str, dict[str, Any]] = {
    shape["id"]: shape
    for file in (profiles_root() / "models").iterdir()
    for shape in [json.loads(file.read_text(encoding="utf-8"))]
}
USABLE = sorted(name for name, shape in SHAPES.items() if "refused" not in shape)
LARGER_AS_PUBLISHED = {"google/gemma-3-4b-it"}
"""Their published count includes parts that are no language model."""


def count(config: dict[str, Any]) -> int:
    """Return the parameters that transformers makes of `config`, tied ones once."""
    built = CONFIG_MAPPING[config["model_type"]].from_dict(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(built)
    assert type(model).__name__ == config["architectures"][0]
    return sum(parameter.numel() for parameter in model.parameters())


def test_there_are_51_shapes_of_which_48_are_usable() -> None:
    assert len(SHAPES) == 51
    assert len(USABLE) == 48


@pytest.mark.parametrize("name", USABLE)
def test_transformers_builds_exactly_the_published_parameters(name: str) -> None:
    """A field with another name or default (a bias, an untied head) moves every answer of `fit`."""
    source = resolve_model(name)
    num_parameters = count(source.config)
    assert num_parameters == SHAPES[name]["transformers_params"]
    if source.published_params is None:
        assert SHAPES[name]["published_params_source"]
    elif name in LARGER_AS_PUBLISHED:
        assert source.published_params > num_parameters
    else:
        assert source.published_params == num_parameters


def test_an_alias_changes_limits_and_never_the_shape() -> None:
    """An alias is shown as its base shape, so nothing that takes memory may differ."""
    free = {"max_position_embeddings", "rope_theta", "rope_scaling", "torch_dtype"}
    changed = {
        name: set(changes) - free
        for shape in SHAPES.values()
        for name, changes in shape["aliases"].items()
        if set(changes) - free
    }
    # sliding attention off: the one change of kind, and it adds no parameter
    assert changed == {"mistralai/Mistral-7B-Instruct-v0.2": {"sliding_window"}}


def test_the_rotary_base_of_each_shape_reaches_the_model() -> None:
    """transformers 5 keeps it under another name than the files of the hub do."""
    for name in USABLE:
        config = SHAPES[name]["config"]
        if "rope_theta" in config:
            built = CONFIG_MAPPING[config["model_type"]].from_dict(config).rope_parameters
            full = built.get("full_attention", built)
            assert full["rope_theta"] == config["rope_theta"], name
            scaling = config.get("rope_scaling") or {}
            assert scaling.items() <= full.items(), name


def test_every_shipped_name_is_resolved_or_refused_by_its_own_file() -> None:
    for name in shipped_models():
        owners = [s for s in SHAPES.values() if name == s["id"] or name in s["aliases"]]
        assert len(owners) == 1, name
        if "refused" not in owners[0]:
            assert resolve_model(name).base_id in (None, owners[0]["id"])


UNUSUAL = {
    "blt",
    "gemma4_assistant",
    "glm4_moe",
    "musicgen",
    "musicgen_melody",
    "prophetnet",
    "xlm",
}
"""Families whose class defaults build no plain language model, or contradict themselves."""


@pytest.mark.parametrize("family", sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - UNUSUAL))
def test_no_family_that_transformers_knows_is_refused_for_its_field_names(family: str) -> None:
    """A check that knows only Llama's words would refuse families that trace perfectly well."""
    config = CONFIG_MAPPING[family]().to_dict()
    text = config.get("text_config")
    check_config(text or config, family, complete=text is None)
