"""`explain` against out-of-memory errors of other people's runs: right, cannot tell, or wrong.

The file of cases is a JSON list; a case has `model`, perhaps `arch`, `settings`, what was
`observed` in GiB, and `explained`, in which the tensor is written as a product "8192*22016*4 B".
The message is put together from the case's figures in torch's wording.

    python benchmarks/bench_explain.py --cases cases.json
"""

from __future__ import annotations

import argparse
import json
import math
import re
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from grpo_lite.cards.oom_text import read_oom_text
from grpo_lite.commands.explain import with_model
from grpo_lite.errors import UsageError
from grpo_lite.explain import Certainty, Explanation, explain
from grpo_lite.suspects import Setting

_PRODUCT = re.compile(r"(\d+(?: tokens)?(?:\s?[*x]\s?\d+)+) B\b")


def main() -> None:
    """Explain every case and print the outcomes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=Path, required=True, help="JSON file of cases")
    cases = json.loads(parser.parse_args().cases.read_text(encoding="utf-8"))
    outcomes: Counter[str] = Counter()
    for case in cases:
        if case["kind"] != "oom" or not case["observed"].get("tried_to_allocate_gib"):
            continue
        explanation = explain(read_oom_text(message(case)), setting_of(case))
        outcome = judge(explanation, case["explained"])
        outcomes[outcome] += 1
        names = "; ".join(match.arithmetic for match in explanation.matches[:2])
        print(f"{case['id']}  {outcome:12} {names or explanation.certainty}")
        print(f"      the case: {case['explained'][:110]}")
    print(
        json.dumps(
            {name: outcomes[name] for name in ("right", "same_size", "cannot_tell", "wrong")}
        )
    )


def message(case: dict[str, Any]) -> str:
    """Return the error of `case` as torch would print it."""
    seen = case["observed"]
    text = f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {size(seen)}. "
    if seen.get("total_gib") and seen.get("free_gib"):
        text += (
            f"GPU 0 has a total capacity of {seen['total_gib']:.2f} GiB of which "
            f"{seen['free_gib']:.2f} GiB is free. "
        )
    if seen.get("allocated_gib"):
        text += f"Of the allocated memory {seen['allocated_gib']:.2f} GiB is allocated by PyTorch, "
        text += f"and {seen.get('reserved_unallocated_gib', 0):.2f} GiB is reserved by PyTorch "
        text += "but unallocated."
    return text


def size(seen: dict[str, Any]) -> str:
    """Return the request as printed: torch rounds up to 2 MiB and prints MiB below one GiB."""
    gib = seen["tried_to_allocate_gib"]
    return f"{gib:.2f} GiB" if gib >= 1 else f"{2 * round(gib * 512)}.00 MiB"


def setting_of(case: dict[str, Any]) -> Setting:
    """Return what the case says of its run."""
    settings = case["settings"]
    rows = settings.get("per_device_train_batch_size") or settings.get("micro_batch_size")
    completion = settings.get("max_completion_length") or settings.get("target_max_len")
    setting = Setting(
        rows=rows,
        prompt_tokens=settings.get("max_prompt_length") or settings.get("source_max_len"),
        completion_tokens=completion or settings.get("seq_len"),
    )
    try:
        return with_model(setting, case["model"])
    except UsageError:
        return _with_shape(setting, case.get("arch", {}))


def _with_shape(setting: Setting, arch: dict[str, Any]) -> Setting:
    """Return `setting` with a Llama of the case's shape; without a whole shape, as it is."""
    if not {"hidden", "layers", "heads", "kv_heads", "intermediate", "vocab"} <= set(arch):
        return setting
    config = {
        "model_type": "llama",
        "hidden_size": arch["hidden"],
        "num_hidden_layers": arch["layers"],
        "num_attention_heads": arch["heads"],
        "num_key_value_heads": arch["kv_heads"],
        "intermediate_size": arch["intermediate"],
        "vocab_size": arch["vocab"],
        "tie_word_embeddings": arch["tied"],
    }
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return with_model(setting, str(Path(folder) / "config.json"))


def judge(explanation: Explanation, explained: str) -> str:
    """Return whether a tensor of the case's own product is among those named.

    "same_size" is a tensor of the same bytes with other factors, named with a reservation.
    """
    if explanation.certainty is Certainty.CANNOT_TELL:
        return "cannot_tell"
    products = [factors(found) for found in _PRODUCT.findall(explained)]
    named = [factors(match.arithmetic) for match in explanation.matches]
    if any(each in products for each in named):
        return "right"
    sizes = {math.prod(product) for product in products}
    if explanation.certainty is not Certainty.NAMED and sizes & {math.prod(n) for n in named}:
        return "same_size"
    return "wrong"


def factors(arithmetic: str) -> list[int]:
    """Return the factors above 1 of a product in words, in order of size."""
    numbers = (int(n.replace(",", "")) for n in re.findall(r"\d[\d,]*", arithmetic))
    return sorted(number for number in numbers if number > 1)


if __name__ == "__main__":
    main()
