"""Runs that are disturbed on purpose: failing system calls, and kill -9 at any instant.

Each returns what became of the run. Tests take small samples, benchmarks/bench_offload.py the full.
"""

import hashlib
import json
import multiprocessing
import random
import time

import torch
from offload_rig import FaultyIO, budgets, loss_of, make_model

from grpo_lite.errors import StoreError
from grpo_lite.offload.adamw import OffloadedAdamW
from grpo_lite.offload.disk_files import FileIO

BLOCK_BYTES = 4096
FAULTS = (*FaultyIO.KINDS, "damaged file", "missing file")


def digest(model):
    """A hash of all weights."""
    found = hashlib.sha256()
    for _, value in sorted(model.state_dict().items()):
        found.update(value.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def open_run(model, folder, tier, **options):
    return OffloadedAdamW(
        model.named_parameters(),
        lr=3e-3,
        block_bytes=BLOCK_BYTES,
        max_grad_norm=1.0,
        disk_dir=folder,
        **budgets(model, tier, BLOCK_BYTES),
        **options,
    )


def update(model, optimizer, number):
    """One update that is tried until it is done, as a careful loop does it; return the errors."""

    def backward():
        for micro in range(2):
            loss_of(model, 10 * number + micro).backward()

    def forget():  # partial gradients are never kept
        for parameter in model.parameters():
            parameter.grad = None
        optimizer.zero_grad()

    errors = tried(backward, forget)
    errors += tried(optimizer.step)  # never repeated, gone on with
    optimizer.zero_grad()
    return errors


def tried(act, before_again=lambda: None):
    """Do `act` until it succeeds; return how often it failed, at most 20 times."""
    for errors in range(21):
        try:
            act()
            return errors
        except StoreError:
            if errors == 20:
                raise
            before_again()
    raise AssertionError


def undisturbed(num_steps):
    """The digests of the weights after 0, 1, ... `num_steps` updates, on one tier: RAM."""
    model = make_model()
    optimizer = OffloadedAdamW(
        model.named_parameters(), lr=3e-3, block_bytes=BLOCK_BYTES, max_grad_norm=1.0
    )
    found = [digest(model)]
    for number in range(num_steps):
        update(model, optimizer, number)
        found.append(digest(model))
    optimizer.close()
    return found


def faulty_run(folder, seed, expected):
    """Train under one kind of fault; return (kind, "unharmed" | "recovered" | "refused").

    Raises:
        AssertionError: the run ended with other weights than `expected`, the last digest.
    """
    dice = random.Random(seed)
    kind = FAULTS[seed % len(FAULTS)]
    tier = dice.choice(["disk", "gradients on disk too"])
    io = FaultyIO()
    model = make_model()
    optimizer = open_run(model, folder, tier, file_io=io, resume=True)
    struck = dice.randrange(1, len(expected) - 1)  # a generation exists
    errors = 0
    try:
        for number in range(len(expected) - 1):
            if number == struck and kind in FaultyIO.KINDS:
                io.arm(kind, at=dice.randrange(30), times=dice.choice([1, 1, 2, 5]))
            if number == struck and kind.endswith("file"):
                optimizer.close(keep_files=True)
                harm_file(folder, kind, dice)
                model = make_model(seed=1)
                optimizer = open_run(model, folder, tier, file_io=io, resume=True)
            errors += update(model, optimizer, optimizer.completed_steps)
        errors += tried(optimizer.settle)
    except StoreError:
        return kind, "refused"
    finally:
        io.disarm()
        optimizer.close()
    assert digest(model) == expected[-1], f"{kind} (seed {seed}) changed the weights"
    return kind, "recovered" if errors or io.fired else "unharmed"


def harm_file(folder, kind, dice):
    """Flip a byte of a block on the medium, or remove it."""
    files = sorted(folder.glob("grpo-lite-blocks/*.bin"))
    if not files:
        return
    path = dice.choice(files)
    if kind == "missing file":
        path.unlink()
        return
    data = bytearray(path.read_bytes())
    data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    path.write_bytes(data)


class SlowIO(FileIO):
    """Writes in small parts with pauses, so that a kill is likely to tear a record."""

    def pwrite(self, fd, data, offset):
        half = len(data) // 2 // 4096 * 4096
        if not half:
            return super().pwrite(fd, data, offset)
        count = super().pwrite(fd, data[:half], offset)
        time.sleep(0.0005)
        return count


def undisturbed_with_one_thread(num_steps):
    """Return what `undisturbed` does, with as many threads as a child: bits depend on them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return undisturbed(num_steps)
    finally:
        torch.set_num_threads(threads)


def child(folder, tier, num_steps, log):
    """Train to `num_steps`, taking up what an earlier child left; runs in its own process."""
    torch.set_num_threads(1)
    model = make_model(seed=3)
    fresh = make_model()
    optimizer = open_run(model, folder, tier, resume=True, file_io=SlowIO())
    if not optimizer.completed_steps and not optimizer.engine.has_masters:
        model.load_state_dict(fresh.state_dict())
    with log.open("a") as out:
        print(json.dumps(["start", optimizer.completed_steps, digest(model)]), file=out, flush=True)
        for number in range(optimizer.completed_steps, num_steps):
            update(model, optimizer, number)
        optimizer.settle()
        print(json.dumps(["end", optimizer.completed_steps, digest(model)]), file=out, flush=True)


def killed_run(folder, tier, num_kills, num_steps, seed=0):
    """Kill a run `num_kills` times at random instants; return (kills, recovered, steps).

    `steps` are those at which the killed runs were taken up.
    A kill is recovered if the next start holds the weights of an undisturbed run at its step.
    """
    expected = undisturbed_with_one_thread(num_steps)
    dice = random.Random(seed)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch._dynamo"])  # half a minute saved in 50 kills
    kills = recovered = 0
    steps = []
    log = folder / "log"
    while kills < num_kills:
        for path in folder.glob("grpo-lite-*/*"):
            path.unlink()
        log.write_text("")
        while kills < num_kills:
            process = context.Process(target=child, args=(folder, tier, num_steps, log))
            process.start()
            if dice.random() < 0.8:  # else the kill may strike while it starts or takes up
                wait_for_lines(log, len(read(log)) + 1, process)
            process.join(dice.uniform(0.01, 0.5))
            if process.exitcode is not None:
                assert process.exitcode == 0, f"a resumed run failed ({process.exitcode})"
                break
            process.kill()
            process.join()
            kills += 1
            restart = context.Process(target=child, args=(folder, tier, 0, log))
            before = len(read(log))
            restart.start()
            restart.join()
            entry = read(log)[before]
            steps.append(entry[1])
            recovered += restart.exitcode == 0 and entry[2] == expected[entry[1]]
        last = read(log)
        if last and last[-1][0] == "end" and last[-1][1] == num_steps:
            assert last[-1][2] == expected[num_steps], "the resumed run ended elsewhere"
    return kills, recovered, steps


def read(log):
    return [json.loads(line) for line in log.read_text().splitlines() if line.endswith("]")]


def wait_for_lines(log, count, process):
    while len(read(log)) < count and process.is_alive():
        time.sleep(0.005)
