"""The shapes of a model's weights, from the model's own code on the meta device."""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Any

import torch

from grpo_lite.suspects import WeightShape


def list_weights(config: Any) -> tuple[WeightShape, ...]:
    """Return the weights of the model of the transformers `config`, largest first.

    Weights whose names differ in their numbers only (the same weight of each layer) are one row.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    counts = Counter(
        (re.sub(r"\.\d+\.", ".*.", name), tuple(parameter.shape))
        for name, parameter in model.named_parameters()
    )
    rows = [
        WeightShape(name=name, dimensions=dimensions, count=count)
        for (name, dimensions), count in counts.items()
    ]
    return tuple(sorted(rows, key=lambda row: -math.prod(row.dimensions)))
