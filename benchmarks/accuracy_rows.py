"""Published measurements -> the question that the predictor is asked, or why it cannot be asked.

Two formats: lists of measurements (`peak_gib`, `peak_kind`) and lists of cases (`settings`,
`observed`). What a trainer does beyond its stated settings is in LOOPS, by the row's group or
framework: it is read off the trainer's code, and no number of a row is used.
"""

import json
from dataclasses import dataclass, field

from grpo_lite.cards.profile import list_profiles, load_profile
from grpo_lite.errors import UsageError
from grpo_lite.models import resolve_model
from grpo_lite.trace.trainers import TrainerStep
from grpo_lite.units import GIB

QUANTITIES = ("allocated", "reserved", "process")
LOOPS = {
    # scripts/measure.py: a plain loop without autocast that keeps the output; NF4 is prepared.
    "fitcheck-t4": {"keeps_output": True, "widens_unquantised": True, "double_quantised": False},
    # method_comparison/MetaMathQA/run.py: a plain loop without autocast.
    "peft-metamathqa": {"keeps_output": True},
}
TRL = ("trl", "sft trainer")
"""Frameworks that run TRL's trainers under accelerate."""
TOKEN_FREE_PHASES = ("optimizer", "load")
"""Phases whose tensors do not depend on rows and tokens."""
FAMILIES = ("qwen3", "qwen2", "mistral", "llama")
"""Families whose config the stated architecture of a row fills."""
TARGETS = {
    "q,k,v,o": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "q,v": ("q_proj", "v_proj"),
    "q,v unless stated": ("q_proj", "v_proj"),
    "all linear": (),
    "all 7 linear projections": (),
}
OPTIMIZERS = (
    ("paged_adamw_8bit", "paged_adamw_8bit"),
    ("8bit", "adamw_bnb_8bit"),
    ("8-bit", "adamw_bnb_8bit"),
    ("fused", "adamw_torch_fused"),
    ("adamw", "adamw_torch"),
)


class LeftOut(Exception):
    """The row cannot be asked; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One row as a question."""

    id: str
    config: dict
    step: TrainerStep
    profile: object
    method: str
    measured_gib: dict = field(default_factory=dict)
    outcome: str = ""
    asked_gib: float | None = None
    capacity_gib: float | None = None
    has_tokens: bool = True


def read_rows(path):
    """Yield (id, question) or (id, reason in words) of each row of the file at `path`."""
    for row in json.loads(path.read_text(encoding="utf-8")):
        try:
            yield row["id"], _case(row) if "observed" in row else _measurement(row)
        except LeftOut as reason:
            yield row["id"], str(reason)


def _measurement(row):
    if not str(row.get("use_as", "")).startswith("point"):
        raise LeftOut(f"no point to compare: {str(row.get('use_as')).split(':')[0]}")
    if row["group"] not in LOOPS:
        raise LeftOut(f"another trainer's own code or kernels ({row['group']})")
    measured = {
        name: row[f"{name}_gib"] for name in QUANTITIES if row.get(f"{name}_gib") is not None
    }
    if not measured:
        kind = row["peak_kind"].split()[0]
        if kind not in QUANTITIES:
            raise LeftOut(f"the quantity is not stated ({row['peak_kind']})")
        measured = {kind: row["peak_gib"]}
    method, task = (part.strip() for part in row["method"].split(";"))
    if method not in ("full", "lora", "qlora") or task != "sft":
        raise LeftOut(f"the method is not modelled ({row['method']})")
    if "lorafa" in row["id"] or "dora" in row["id"]:
        raise LeftOut("a variant of LoRA that is not modelled")
    lora = row.get("lora") or {}
    profile = _profile(row.get("card_id"))
    step = _step(
        trainer="sft",
        method=method,
        rows=row["batch"],
        tokens=row["seq_len"],
        weights_dtype="float16" if "fp16" in row["dtype"] else "bfloat16",
        attention=row.get("attn") or "sdpa",
        checkpointing=row["grad_ckpt"] is True,
        lora_rank=lora.get("r") or _rank_of_variant(lora),
        lora_targets=_targets(lora.get("targets", "all linear")),
        optimizer=_optimizer(row["optimizer"]),
        compute_capability=profile.compute_capability,
        cublas_workspace_bytes=int(profile.cublas_workspace_bytes.value),
        **LOOPS[row["group"]],
    )
    return Question(
        id=row["id"],
        config=_config(row["model_shape_id"], None),
        step=step,
        profile=profile,
        method=f"{method} sft",
        measured_gib=measured,
    )


def _case(row):
    settings, observed = row["settings"], row["observed"]
    asked_gib = observed.get("tried_to_allocate_gib")
    framework = str(settings.get("framework", ""))
    task, _, method = row["method"].partition("-")
    _require_traced(task, method, framework, settings, asked_gib)
    rows = settings.get("per_device_train_batch_size") or settings.get("micro_batch_size")
    completion = settings.get("max_completion_length") or 0
    tokens = _tokens(settings, completion)
    has_tokens = isinstance(rows, int) and tokens is not None
    if not has_tokens and observed.get("phase") not in TOKEN_FREE_PHASES:
        raise LeftOut("rows or tokens are not stated")
    profile = _profile_of_card(row["card"], row["vram_gib"])
    is_trl = framework.startswith(TRL)
    dtype = str(settings.get("dtype") or "")
    # bitsandbytes computes in fp32 unless told otherwise.
    computes_wide = method == "qlora" and not dtype and not is_trl
    step = _step(
        trainer="trl-full-logits" if task == "grpo" and has_tokens else "sft",
        method=method,
        rows=rows if has_tokens else 1,
        tokens=tokens if has_tokens else 128,
        completion=completion,
        weights_dtype="float32" if "fp32" in dtype else "bfloat16",
        checkpointing=bool(
            settings.get("gradient_checkpointing") or settings.get("activation_checkpointing")
        ),
        lora_rank=settings.get("lora_r") or 16,
        lora_targets=_targets(settings.get("lora_targets", "all linear")),
        double_quantised="double" in str(settings.get("quant", "double")),
        optimizer=_optimizer(str(settings.get("optimizer") or "adamw")),
        compute_capability=profile.compute_capability,
        cublas_workspace_bytes=int(profile.cublas_workspace_bytes.value),
        lora_dropout=settings.get("lora_dropout") or 0.0,
        autocast_dtype="float16" if "fp16" in dtype else "bfloat16",
        quantised_compute_dtype="float32" if computes_wide else None,
        # SFTTrainer and GRPOTrainer make adapters on a quantised base bfloat16.
        adapter_dtype="bfloat16" if method == "qlora" and is_trl else "float32",
        # Of a loop that is not known the worst is assumed.
        keeps_output=not is_trl,
    )
    kind = str(observed.get("peak_metric", ""))
    measured = {}
    if observed["outcome"] != "oom":
        measured["reserved"] = observed.get("reserved_gib")
        for name in ("allocated", "reserved"):
            if name in kind.split("(")[0]:
                measured[name] = observed.get("peak_gib")
    return Question(
        id=row["id"],
        config=_config(row["model"], row.get("arch")),
        step=step,
        profile=profile,
        method=f"{method} {task}",
        measured_gib={name: gib for name, gib in measured.items() if gib is not None},
        outcome=observed["outcome"],
        asked_gib=asked_gib,
        capacity_gib=observed.get("total_gib") or profile.total_bytes.value / GIB,
        has_tokens=has_tokens,
    )


def _require_traced(task, method, framework, settings, asked_gib):
    if task not in ("grpo", "sft") or method not in ("full", "lora", "qlora"):
        raise LeftOut(f"the method is not modelled ({task}-{method})")
    if settings.get("n_gpus", 1) != 1:
        raise LeftOut("more than one card")
    if settings.get("liger") or settings.get("activation_offloading"):
        raise LeftOut("kernels that replace the model's own (liger) or offloaded activations")
    if asked_gib is None and not framework.startswith(TRL):
        raise LeftOut(f"another trainer's own code or kernels ({framework or 'not stated'})")


def _tokens(settings, completion):
    if completion:
        prompt = settings.get("max_prompt_length")
        about = settings.get("prompt_tokens_approx")
        if prompt is None and about is None:
            return None
        return completion + (prompt if prompt is not None else int(about.split("-")[-1]))
    if settings.get("source_max_len") and settings.get("target_max_len"):
        return settings["source_max_len"] + settings["target_max_len"]
    return settings.get("seq_len") or settings.get("max_length") or settings.get("max_seq_length")


def _step(**fields):
    try:
        return TrainerStep(**fields)
    except UsageError as error:
        raise LeftOut(str(error)) from error


def _config(model, arch):
    try:
        return resolve_model(model).config
    except UsageError as error:
        family = next((f for f in FAMILIES if f in model.lower()), None)
        if family and arch and all(arch.get(k) for k in ("hidden", "layers", "intermediate")):
            return _config_of(family, arch)
        raise LeftOut(f"no shape is known of {model}") from error


def _config_of(family, arch):
    return {
        "model_type": family,
        "hidden_size": arch["hidden"],
        "num_hidden_layers": arch["layers"],
        "num_attention_heads": arch["heads"],
        "num_key_value_heads": arch.get("kv_heads") or arch["heads"],
        "head_dim": arch.get("head_dim") or arch["hidden"] // arch["heads"],
        "intermediate_size": arch["intermediate"],
        "vocab_size": arch["vocab"],
        "tie_word_embeddings": bool(arch.get("tied")),
        "sliding_window": None,
    }


def _targets(name):
    if name not in TARGETS:
        raise LeftOut(f"adapted layers are not understood ({name})")
    return TARGETS[name]


def _rank_of_variant(lora):
    digits = "".join(c for c in str(lora.get("variant", "")) if c.isdigit())
    return int(digits or 16)


def _optimizer(name):
    for part, row in OPTIMIZERS:
        if part in name.lower():
            return row
    raise LeftOut(f"the optimizer is not modelled ({name})")


def _profile(card_id):
    return load_profile(card_id if card_id in list_profiles() else "a100-80gb")


def _profile_of_card(card, vram_gib):
    words = card.lower().replace("(", " ").split()
    best = None
    for name in list_profiles():
        parts = name.split("-")
        size = int(parts[-1].removesuffix("gb")) if parts[-1].endswith("gb") else 0
        if size == round(vram_gib) and set(parts[:-1]) <= set(words):
            best = name if best is None or len(name) > len(best) else best
    return load_profile(best or "a100-80gb")
