"""Footprints by question: from the cache on disk, else traced and kept there.

A warm answer reads one small file and imports no torch.
The key is a hash of all that changes a trace: the raw config, the versions of the packages whose
code runs, and the parts of the workload that the traced functions look at.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from grpo_lite.errors import UsageError
from grpo_lite.models import ModelSource
from grpo_lite.plan import Phase, Plan, Workload
from grpo_lite.predict.footprint import SCHEMA, Footprint, footprint_from_json, footprint_to_json
from grpo_lite.predict.memory import Rehearsal

MAX_REHEARSED_LAYERS = 80
TRACED_PACKAGES = ("torch", "transformers", "peft", "grpo-lite")

logger = logging.getLogger(__name__)


def get_footprint(source: ModelSource, workload: Workload, cache_dir: Path) -> Footprint:
    """Return the footprint of `workload` on the model `source`, traced if it is not in the cache.

    Raises:
        UsageError: transformers cannot build the model, or its step cannot be traced.
    """
    file = cache_dir / "footprints" / f"{_key(source, workload)}.json"
    try:
        return footprint_from_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        logger.warning("cached footprint %s is made anew: %s", file.name, error)
    footprint = _trace(source, workload)
    _write(file, footprint_to_json(footprint))
    return footprint


def get_rehearsal(
    source: ModelSource, workload: Workload, plan: Plan, cache_dir: Path
) -> Rehearsal | None:
    """Return the full-depth rehearsal of `plan`; None for models too deep to rehearse."""
    if int(source.config.get("num_hidden_layers") or source.config.get("n_layer") or 0) > (
        MAX_REHEARSED_LAYERS
    ):
        return None
    question = (plan, workload.num_tokens, workload.max_completion_length)
    key = _key(source, workload, extra=str(question))
    file = cache_dir / "rehearsals" / f"{key}.json"
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        peaks = {Phase(name): int(num_bytes) for name, num_bytes in data["peak_bytes"].items()}
        return Rehearsal(peak_bytes=peaks, seconds=float(data["seconds"]))
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("cached rehearsal %s is made anew: %s", file.name, error)
    from grpo_lite.trace.build import build_config
    from grpo_lite.trace.footprint import rehearse

    rehearsal = rehearse(build_config(source.config), workload, plan)
    _write(file, json.dumps({"peak_bytes": rehearsal.peak_bytes, "seconds": rehearsal.seconds}))
    return rehearsal


def _trace(source: ModelSource, workload: Workload) -> Footprint:
    from grpo_lite.trace.build import build_config
    from grpo_lite.trace.footprint import trace_footprint
    from grpo_lite.trace.unroll import CannotTrace

    config = build_config(source.config)
    try:
        return trace_footprint(source.name, config, workload)
    except CannotTrace as error:
        raise UsageError(
            f"model_type {source.config.get('model_type')!r} cannot be traced: {error}",
            hint="no estimate is given rather than a guessed one; please report the model",
        ) from error


def _key(source: ModelSource, workload: Workload, *, extra: str = "") -> str:
    """Return the hash that names a footprint."""
    traced: Mapping[str, Any] = {
        "schema": SCHEMA,
        "config": source.config_text,
        "versions": {package: metadata.version(package) for package in TRACED_PACKAGES},
        "method": workload.method,
        "dtype": workload.dtype,
        "lora_rank": None if workload.method == "full" else workload.lora_rank,
        "loss_type": workload.loss_type,
        "old": workload.num_iterations > 1,
        "reference": workload.beta > 0,
        "temperature_is_1": workload.temperature == 1,
        "is_beyond_window": is_beyond_window(source.config, workload),
        "extra": extra,
    }
    return hashlib.sha256(json.dumps(traced, sort_keys=True).encode()).hexdigest()[:32]


def is_beyond_window(config: Mapping[str, Any], workload: Workload) -> bool:
    """Return whether rows of `workload` are longer than the model's sliding window, if any."""
    window = config.get("sliding_window")
    return bool(window) and workload.num_tokens > int(window or 0)


def _write(file: Path, text: str) -> None:
    """Write `text` to `file`, whole or not at all; a cache that cannot be written is no error."""
    temporary = file.with_suffix(f".{os.getpid()}.tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(file)
    except OSError as error:
        logger.warning("the cache is not written: %s", error)
