"""What every rendering says in the same words: categories, and what fills the peak."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_lite.plan import Category, Workload
from grpo_lite.report.document import Document

CATEGORY_WORDS = {
    Category.PARAMETER: "weights",
    Category.GRADIENT: "gradients",
    Category.OPTIMIZER_STATE: "optimizer states",
    Category.ACTIVATION: "activations",
    Category.LOGITS: "logits",
    Category.KV_CACHE: "KV cache",
    Category.TEMPORARY: "temporary",
    Category.RUNTIME: "runtime",
}
"""The word for what a byte is held for, in the order in which bars show them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LargeTensor:
    """A kind of tensor at the peak, in words."""

    num_bytes: int
    """All of that kind together."""
    arithmetic: str
    """The size as a product."""
    what: str
    """What it is held for, and the operation that makes it."""


def largest_at_peak(document: Document) -> list[LargeTensor]:
    """Return what the peak is made of, largest first: traced tensors and what is always there."""
    peak = document.chosen.memory.peak
    tensors = [
        LargeTensor(
            num_bytes=group.num_bytes,
            arithmetic=group.arithmetic,
            what=", ".join(
                part for part in (CATEGORY_WORDS[group.category], group.operation) if part
            ),
        )
        for group in peak.largest
    ]
    for category, num_parameters in (
        (Category.PARAMETER, document.num_parameters),
        (Category.GRADIENT, document.num_trainable),
        (Category.OPTIMIZER_STATE, document.num_trainable),
    ):
        listed = sum(group.num_bytes for group in peak.largest if group.category is category)
        num_bytes = peak.by_category.get(category, 0) - listed
        if num_bytes > 0:
            arithmetic = f"{num_parameters:,} parameters x {num_bytes / num_parameters:.3g} bytes"
            tensors.append(
                LargeTensor(
                    num_bytes=num_bytes, arithmetic=arithmetic, what=CATEGORY_WORDS[category]
                )
            )
    return sorted(tensors, key=lambda tensor: -tensor.num_bytes)


def method_in_words(workload: Workload) -> str:
    """Return "full fine-tuning", "LoRA rank 16" or "QLoRA rank 16"."""
    names = {"lora": "LoRA", "qlora": "QLoRA"}
    if workload.method == "full":
        return "full fine-tuning"
    return f"{names[workload.method]} rank {workload.lora_rank}"
