"""How near predictions come to published measurements and out-of-memory messages.

    python benchmarks/bench_accuracy.py --rows FILE... [--only TEXT]

Each row that is specified well enough is traced at full depth and replayed through the allocator.
Prints every row, the errors by quantity and method, the verdicts, and which tensors that could not
be allocated are among the predicted ones. The last line is flat JSON; errors are fractions.
"""

import argparse
import gc
import json
import logging
import statistics
import sys
import time
import warnings
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT), str(ROOT / "benchmarks")]

from accuracy_rows import QUANTITIES, read_rows  # noqa: E402

from grpo_lite.cards.oom_text import tensor_range  # noqa: E402
from grpo_lite.errors import UsageError  # noqa: E402
from grpo_lite.predict.allocator import OutOfMemory, replay  # noqa: E402
from grpo_lite.trace.build import build_config  # noqa: E402
from grpo_lite.trace.trainers import record_step  # noqa: E402
from grpo_lite.units import GIB  # noqa: E402


def main():
    """Predict every row of the files and print how far off."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=Path, nargs="+", required=True, metavar="FILE")
    parser.add_argument("--only", default="", help="rows whose id holds this text")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    answers, left_out = [], Counter()
    for path in options.rows:
        for name, question in read_rows(path):
            if options.only not in name:
                continue
            answer = question if isinstance(question, str) else _answer(question)
            if isinstance(answer, str):
                left_out[answer] += 1
                print(f"{name}: left out: {answer}", flush=True)
            else:
                answers.append(answer)
                print(_line(answer), flush=True)
    print(f"\n{sum(left_out.values())} rows left out:")
    for reason, count in left_out.most_common():
        print(f"  {count:3d}  {reason}")
    _print_errors(answers)
    print("\n" + json.dumps(_summary(answers, sum(left_out.values()))))


def _answer(question):
    began_s = time.monotonic()
    try:
        log = record_step(build_config(question.config), question.step)
    except (UsageError, NotImplementedError, RuntimeError, ValueError) as error:
        return f"cannot be traced: {str(error).splitlines()[0]}"
    finally:
        gc.collect()
    steps = [log.first, log.later]
    runtime_gib = question.profile.runtime_bytes.value / GIB
    peaks = replay(log.loading, steps)
    predicted = {"allocated": peaks.allocated_bytes / GIB, "reserved": peaks.reserved_bytes / GIB}
    predicted["process"] = predicted["reserved"] + runtime_gib
    verdict = None
    if question.outcome and question.has_tokens:
        limit_bytes = int((question.capacity_gib - runtime_gib) * GIB)
        try:
            replay(log.loading, steps, limit_bytes=limit_bytes)
            verdict = "fits"
        except OutOfMemory:
            verdict = "does not fit"
    return {
        "question": question,
        "errors": {name: predicted[name] / gib - 1 for name, gib in question.measured_gib.items()},
        "predicted": predicted,
        "verdict": verdict,
        "named": _named(question, log),
        "seconds": time.monotonic() - began_s,
    }


def _named(question, log):
    """Return the operation whose tensor could not be allocated; "" if none, None if not asked."""
    if question.asked_gib is None:
        return None
    asked = question.asked_gib
    printed = f"{asked:.2f} GiB" if asked >= 1 else f"{round(asked * 1024)}.00 MiB"
    sizes = tensor_range(printed)
    made = [*log.tensors, *(("weight", e.num_bytes) for e in log.loading if e.num_bytes)]
    return next((name for name, num_bytes in made if sizes.holds(num_bytes)), "")


def _line(answer):
    question = answer["question"]
    parts = [f"{question.id} [{question.method}]"]
    for name, gib in question.measured_gib.items():
        parts.append(
            f"{name} {answer['predicted'][name]:.3f} of {gib:.3f} GiB "
            f"{100 * answer['errors'][name]:+.1f} %"
        )
    if answer["verdict"]:
        parts.append(f"says {answer['verdict']}, was {question.outcome}")
    if answer["named"] is not None:
        parts.append(f"asked {question.asked_gib:g} GiB: {answer['named'] or 'no such tensor'}")
    return "; ".join(parts) + f" ({answer['seconds']:.0f} s)"


def _print_errors(answers):
    groups = defaultdict(list)
    for answer in answers:
        for name, error in answer["errors"].items():
            groups[name, "all"].append(error)
            groups[name, answer["question"].method].append(error)
    print("\nsigned error in %        rows  median|.|  mean  lowest  highest")
    for (name, method), errors in sorted(groups.items()):
        print(
            f"  {name:10s} {method:12s} {len(errors):4d}  "
            f"{100 * statistics.median(map(abs, errors)):8.2f}  "
            f"{100 * statistics.mean(errors):+6.2f}  "
            f"{100 * min(errors):+6.2f}  {100 * max(errors):+6.2f}"
        )
    matrix = Counter((a["question"].outcome, a["verdict"]) for a in answers if a["verdict"])
    print("\nverdicts (was, said):", dict(matrix))


def _summary(answers, num_left_out):
    by_quantity = defaultdict(list)
    for answer in answers:
        for name, error in answer["errors"].items():
            by_quantity[name].append(error)
    # A row with both counts once: process is reserved plus the context.
    process = [
        answer["errors"].get("process", answer["errors"].get("reserved")) for answer in answers
    ]
    process = [error for error in process if error is not None]
    allocated = by_quantity[QUANTITIES[0]]
    asked = [answer["named"] for answer in answers if answer["named"] is not None]

    def wrong(outcome, verdict):
        return sum(a["question"].outcome == outcome and a["verdict"] == verdict for a in answers)

    def median(errors):
        return round(statistics.median(map(abs, errors)), 5) if errors else None

    return {
        "rows_used": len(answers),
        "rows_left_out": num_left_out,
        "allocated_median": median(allocated),
        "allocated_worst": round(max(map(abs, allocated)), 5) if allocated else None,
        "process_median": median(process),
        "process_worst_under": round(max(0.0, -min(process)), 5) if process else None,
        "false_fits": wrong("oom", "fits"),
        "false_refusals": wrong("fits", "does not fit"),
        "tensors_named": sum(bool(name) for name in asked),
        "tensors_asked": len(asked),
    }


if __name__ == "__main__":
    main()
