"""What the block engine must reach: same bits, larger models, step times, disk limit, ordeals.

    python benchmarks/bench_offload.py [--parts bits,size,host,disk,faults,kills] [--dir FOLDER]

Ratios are medians of interleaved rounds in one run, since speeds of shared machines drift.
The last line is flat JSON. `--dir` must lie on the disk that is to be measured.
"""

import argparse
import collections
import json
import logging
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT), str(ROOT / "tests" / "virtual")]

from mapped_adamw import MappedAdamW  # noqa: E402
from offload_ordeals import faulty_run, killed_run, undisturbed  # noqa: E402
from offload_rig import HOMES, Model, Twin, budgets, groups_of, loss_of, make_model  # noqa: E402

from grpo_lite.cards.virtual import VirtualCard  # noqa: E402
from grpo_lite.errors import UsageError  # noqa: E402
from grpo_lite.offload.adamw import OffloadedAdamW  # noqa: E402
from grpo_lite.offload.disk_files import BlockFile, FileIO  # noqa: E402
from grpo_lite.offload.memory import HostMemory  # noqa: E402
from grpo_lite.offload.placement import STATE_BUFFERS  # noqa: E402
from grpo_lite.units import GIB, MIB, format_bytes  # noqa: E402

PARTS = ("bits", "size", "host", "disk", "faults", "kills")


def main():
    """Run the parts that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--million-parameters", type=int, default=64)
    parser.add_argument("--block-mib", type=int, default=16)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--kills", type=int, default=50)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, load {os.getloadavg()}")
    found = {}
    for part in options.parts.split(","):
        began = time.perf_counter()
        with tempfile.TemporaryDirectory(dir=options.dir) as folder:
            found.update(globals()[f"measure_{part}"](Path(folder), options))
        print(f"[{part}: {time.perf_counter() - began:.0f} s]\n", flush=True)
    print(json.dumps(found))


# -- the same bits ------------------------------------------------------------------------------


def measure_bits(folder, options):
    """Twenty steps against torch.optim.AdamW(fused=True), by tier, dtype and block size."""
    equal, cells, worst = 0, 0, 0.0
    for tier in HOMES:
        for dtype in (torch.bfloat16, torch.float32):
            for block_bytes in (512, 2048, 16_384, 2**27):
                if budgets(make_model(dtype), tier, block_bytes) is None:
                    continue  # three tiers need three blocks
                same, error = twenty_steps(folder, tier, dtype, block_bytes)
                cells += 1
                equal += same
                worst = max(worst, error)
    print(f"bits equal in {equal} of {cells} cells; clip norm off by {worst:.1e} from fp64")
    return {"bits_equal": equal == cells, "bits_cells": cells, "clip_norm_error": worst}


def twenty_steps(folder, tier, dtype, block_bytes):
    """Return whether all bits are equal, and the largest relative error of the clip norm."""
    model, twin = make_model(dtype), Twin(make_model(dtype), 3e-3)
    settings = budgets(model, tier, block_bytes)
    optimizer = OffloadedAdamW(
        groups_of(model),
        lr=3e-3,
        max_grad_norm=1.0,
        block_bytes=block_bytes,
        disk_dir=folder if "disk_bytes" in settings else None,
        **settings,
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: twin.scheduler.lr_lambdas[0](step)
    )
    worst = 0.0
    for step in range(20):
        for micro in range(4):
            (loss_of(model, 100 * step + micro) / 4).backward()
            (loss_of(twin.model, 100 * step + micro) / 4).backward()
            twin.accumulate()
        norm = twin.norm64()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        worst = max(worst, abs(optimizer.last_step.gradient_norm / norm - 1))
        twin.step(optimizer.last_step.gradient_divisor)
    optimizer.close()
    pairs = zip(model.state_dict().values(), twin.model.state_dict().values(), strict=True)
    return all(torch.equal(left, right) for left, right in pairs), worst


# -- larger models under one budget -------------------------------------------------------------


def measure_size(folder, options):
    """Deepest model that trains under one card budget, each tried by training two steps."""
    budget = 48 * MIB
    plain = deepest(budget, torch.float32, offloaded=False)
    bfloat16 = deepest(budget, torch.bfloat16, offloaded=False)
    ours = deepest(budget, torch.bfloat16, offloaded=True)
    print(f"card budget {format_bytes(budget)}; largest model trained (parameters, ours over it):")
    for name, count in (("plain fp32", plain), ("plain bf16", bfloat16), ("offloaded", ours)):
        print(f"  {name:12} {count:12,}  {ours / count:.2f}x")
    return {"size_ratio": ours / plain, "size_ratio_to_bfloat16": ours / bfloat16}


def deepest(budget, dtype, *, offloaded):
    """Return the parameters of the deepest model that trains under `budget`."""
    low, high = 1, 2
    while trains(high, budget, dtype, offloaded=offloaded):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if trains(middle, budget, dtype, offloaded=offloaded):
            low = middle
        else:
            high = middle
    return sum(p.numel() for p in Model(256, 512, low).parameters())


def trains(num_layers, budget, dtype, *, offloaded):
    """Return whether a model of that depth trains two steps under `budget`."""
    card = VirtualCard(budget)
    model = Model(256, 512, num_layers).to(dtype)
    try:
        with card.attach():
            card.adopt(model.parameters())
            optimizer = (
                OffloadedAdamW(model.named_parameters(), block_bytes=MIB, card=card)
                if offloaded
                else torch.optim.AdamW(model.parameters(), fused=True)
            )
            for number in range(2):
                loss_of(model, number).backward()
                optimizer.step()
                optimizer.zero_grad()
    except torch.OutOfMemoryError:
        return False
    return True


# -- the host tier ------------------------------------------------------------------------------


def measure_host(folder, options):  # all parts are called alike
    """Step time in RAM against plain fused AdamW on the same fp32 state."""
    times = collections.defaultdict(list)
    runs = {}
    for clip in (None, 1.0):
        weights = make_weights(options)
        optimizer = OffloadedAdamW(
            list(weights), max_grad_norm=clip, block_bytes=options.block_mib * MIB
        )
        runs["offloaded, clipped" if clip else "offloaded"] = (optimizer, weights)
    masters = [torch.nn.Parameter(p.detach().float()) for p in weights]
    plain = torch.optim.AdamW(masters, fused=True)
    for master in masters:
        master.grad = torch.full_like(master, 1e-3)
    plains = {
        "plain": plain.step,
        "plain, copied to weights": lambda: copied(plain, masters, weights),
        "plain, clipped, copied": lambda: clipped_and_copied(plain, masters, weights),
    }
    for number in range(options.rounds + 1):
        for name, (optimizer, own) in runs.items():
            give_gradients(optimizer, own)
            seconds = timed(optimizer.step)
            if number:  # the first round touches memory for the first time
                times[name].append(seconds)
        for name, run in plains.items():
            seconds = timed(run)
            if number:
                times[name].append(seconds)
    table(times, f"host tier, {sum(p.numel() for p in weights):,} bf16 parameters")
    for optimizer, _ in runs.values():
        optimizer.close()
    return {
        "host_time_ratio": ratio(times, "offloaded", "plain"),
        "host_time_ratio_same_work": ratio(times, "offloaded", "plain, copied to weights"),
        "host_time_ratio_clipped": ratio(times, "offloaded, clipped", "plain, clipped, copied"),
    }


def ratio(times, ours, theirs):
    """Return the median of the ratios of each round."""
    return statistics.median(a / b for a, b in zip(times[ours], times[theirs], strict=True))


def give_gradients(optimizer, weights):
    """Hand every parameter a gradient, as backward would."""
    for p in weights:
        p.grad = torch.full_like(p, 1e-3)
        optimizer._take(p)


def make_weights(options):
    """Return bf16 parameters, 4 Mi elements each."""
    count = options.million_parameters * 2**20
    return [torch.nn.Parameter(torch.randn(2**22).bfloat16()) for _ in range(count // 2**22)]


def copied(optimizer, masters, weights):
    """Step and make bf16 weights of the masters."""
    optimizer.step()
    for master, weight in zip(masters, weights, strict=True):
        weight.data.copy_(master.data)


def clipped_and_copied(optimizer, masters, weights):
    """Clip as torch does, step and copy."""
    torch.nn.utils.clip_grad_norm_(masters, 1.0)
    copied(optimizer, masters, weights)


# -- the disk tier ------------------------------------------------------------------------------


def measure_disk(folder, options):
    """Step time on disk against the disk's limit, and against AdamW over mapped files."""
    weights = make_weights(options)
    block_bytes = options.block_mib * MIB
    needed = 4 * sum(p.numel() for p in weights) + 3 * 6 * block_bytes + 4 * MIB
    optimizer = OffloadedAdamW(
        list(weights), block_bytes=block_bytes, host_bytes=needed, disk_dir=folder
    )
    record = 6 * block_bytes
    limit = DiskLimit(folder, record, num_records=len(optimizer.engine.layout.blocks))
    mapped = MappedAdamW(folder, weights)
    times = collections.defaultdict(list)
    counts = [
        len(optimizer.engine.layout.blocks) - STATE_BUFFERS,
        len(optimizer.engine.layout.blocks),
    ]
    runs = [
        ("offloaded", lambda: (optimizer.step(), optimizer.settle())),
        ("limit", lambda: limit.run(*counts)),
        ("AdamW over mapped files", mapped.step),
    ]
    for number in range(options.rounds + 2):
        give_gradients(optimizer, weights)
        for turn in range(len(runs)):  # each goes first, second and third: the disk has moods
            name, run = runs[(turn + number) % len(runs)]
            seconds = timed(run)
            if number > 1:  # files are new, and buffers hold nothing yet
                times[name].append(seconds)
        counts[0] = optimizer.last_step.read_bytes // record
    report = optimizer.last_step
    table(times, f"disk tier, {sum(p.numel() for p in weights):,} parameters")
    print(
        f"  {counts[0]} records read, {counts[1]} written, {sum(counts) * record / GIB:.2f} GiB; "
        f"waited {report.wait_s:.2f} s of {report.step_s:.2f} s for the disk"
    )
    optimizer.close()
    return {
        "disk_fraction_of_limit": ratio(times, "limit", "offloaded"),
        "over_mmap": ratio(times, "AdamW over mapped files", "offloaded"),
    }


class DiskLimit:
    """One thread reads and one writes, nothing else: what the disk can do at best.

    What is read was written one round before, the last first, as by the engine: caches below the
    operating system favour both alike.
    """

    def __init__(self, folder, record_bytes, num_records):
        self._read, self._write = (
            [
                BlockFile(folder / f"limit-{s}-{n}", record_bytes, FileIO())
                for n in range(num_records)
            ]
            for s in range(2)
        )
        memory = HostMemory()
        self._in, self._out = (memory.record(record_bytes).numpy().data for _ in range(2))
        for file in (*self._read, *self._write):
            file.write(self._out, 0)

    def run(self, num_reads, num_writes):
        """Read and write that many records at once."""

        def read():
            for file in self._read[::-1][-num_reads:]:
                file.read(self._in, 0)

        reader = threading.Thread(target=read)
        reader.start()
        for file in self._write[:num_writes]:
            file.write(self._out, 0)
        reader.join()
        self._read, self._write = self._write, self._read


# -- ordeals ------------------------------------------------------------------------------------


def measure_faults(folder, options):
    """Injected faults: each is recovered from or a clear StoreError."""
    expected = undisturbed(4)
    outcomes = collections.Counter()
    for seed in range(options.faults):
        with tempfile.TemporaryDirectory(dir=folder) as run:
            try:
                outcomes[faulty_run(Path(run), seed, expected)] += 1
            except (AssertionError, OSError, UsageError, RuntimeError) as error:
                outcomes["seed", f"{seed}: {error!r}"] += 1
    for (kind, outcome), count in sorted(outcomes.items()):
        print(f"  {kind:14} {outcome:10} {count}")
    handled = sum(count for (kind, _), count in outcomes.items() if kind != "seed")
    return {"faults": options.faults, "faults_handled": handled}


def measure_kills(folder, options):
    """Kill -9 at random instants; each next start holds the weights of an undisturbed run."""
    kills = recovered = 0
    for tier in ("disk", "gradients on disk too"):
        count = (options.kills + (tier == "disk")) // 2
        done = killed_run(folder, tier, num_kills=count, num_steps=60, seed=count)
        kills, recovered = kills + done[0], recovered + done[1]
        print(f"  {tier}: {done[0]} kills, {done[1]} recovered, taken up at {sorted(done[2])}")
    return {"kills": kills, "kills_recovered": recovered}


def timed(run):
    """Return the seconds of `run`."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def table(times, title):
    """Print medians and ranges."""
    print(title)
    for name, found in times.items():
        print(
            f"  {name:40} median {statistics.median(found):7.3f} s"
            f"  range {min(found):.3f}-{max(found):.3f}  ({len(found)} rounds)"
        )


if __name__ == "__main__":
    main()
