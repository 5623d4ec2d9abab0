"""The offloaded optimizer in the life of a run: interruption, moving house, resuming, refusals."""

import signal

import pytest
import torch
from offload_rig import FaultyIO, budgets, groups_of, loss_of, make_model

from grpo_lite.errors import StoreError, UsageError
from grpo_lite.offload.adamw import OffloadedAdamW
from grpo_lite.offload.blocks import BlockStatus
from grpo_lite.offload.placement import Tier

LR = 3e-3


def make(model, tier, folder, block_bytes=16_384, **options):
    found = budgets(model, tier, block_bytes)
    if found is None:
        pytest.skip("three tiers need three blocks")
    if "disk_bytes" in found:
        found["disk_dir"] = folder
    return OffloadedAdamW(groups_of(model), lr=LR, block_bytes=block_bytes, **{**found, **options})


def update(model, optimizer, step, accumulation=4):
    for micro in range(accumulation):
        (loss_of(model, 100 * step + micro) / accumulation).backward()
    optimizer.step()
    optimizer.zero_grad()


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(left, right):
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


def prepared(folder):
    folder.mkdir()
    return {}


def test_ctrl_c_waits_for_the_end_of_the_block():
    model, other = make_model(), make_model()
    optimizer, second = make(model, "ram", None), make(other, "ram", None)
    loss_of(model, 0).backward()
    loss_of(other, 0).backward()
    second.step()
    update_block = optimizer.engine._update

    def interrupted(index, *rest):
        if index == 3:
            signal.raise_signal(signal.SIGINT)
        update_block(index, *rest)

    optimizer.engine._update = interrupted
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert 3 not in optimizer.engine._progress.remaining
    assert optimizer.engine._progress.remaining
    optimizer.step()
    assert_same(weights(model), weights(other))


def test_blocks_leave_the_card_lowest_priority_first_and_numbers_stay(tmp_path):
    model, other = make_model(), make_model()
    optimizer = make(
        model, "card", tmp_path, card_bytes=2**30, host_bytes=2_900_000, disk_dir=tmp_path
    )
    second = make(other, "ram", tmp_path)
    for step in range(6):
        update(model, optimizer, step)
        update(other, second, step)
        on_card = set(optimizer.engine.placement.blocks_with_state(Tier.CARD))
        if step in (1, 2, 3):
            needed = optimizer.tier_bytes().card_bytes
            largest = optimizer.engine.layout.largest_gradient_bytes
            target = largest if step == 3 else (needed + largest) // 2
            moved = optimizer.set_card_bytes(target)
            assert moved
            assert optimizer.tier_bytes().card_bytes <= target
            assert set(optimizer.engine.placement.blocks_with_state(Tier.CARD)) < on_card
        if step == 4:
            assert optimizer.set_card_bytes(2**30)
    assert_same(weights(model), weights(other))
    optimizer.close()


def test_blocks_move_to_disk_with_their_gradients_where_ram_is_short(tmp_path):
    model, other = make_model(), make_model()
    host_bytes = budgets(model, "gradients on disk too", 4096)["host_bytes"]
    optimizer = OffloadedAdamW(
        model.named_parameters(),
        block_bytes=4096,
        card_bytes=2**30,
        host_bytes=host_bytes,
        disk_dir=tmp_path,
    )
    second = OffloadedAdamW(other.named_parameters())
    largest = optimizer.engine.layout.largest_gradient_bytes
    for step in range(6):
        update(model, optimizer, step)
        update(other, second, step)
        if step == 1:
            assert optimizer.set_card_bytes(largest)
            assert optimizer.engine.placement.blocks_with_gradient(Tier.DISK)
            assert optimizer.tier_bytes().host_bytes <= host_bytes
        if step == 3:
            assert optimizer.set_card_bytes(2**30)
            assert not optimizer.engine.placement.blocks_with_state(Tier.DISK)
    assert_same(weights(model), weights(other))
    optimizer.close()


def test_blocks_do_not_move_while_gradients_are_held():
    model = make_model()
    optimizer = make(model, "ram", None)
    loss_of(model, 0).backward()
    with pytest.raises(UsageError, match="gradients are held"):
        optimizer.set_card_bytes(2**30)
    optimizer.zero_grad()
    assert optimizer.set_card_bytes(2**30)


def test_a_killed_run_is_taken_up_at_its_last_whole_step(tmp_path):
    model = make_model()
    optimizer = make(model, "disk", tmp_path, resume=True)
    for step in range(4):
        update(model, optimizer, step)
    optimizer.settle()
    expected = weights(model)
    optimizer.param_groups[0]["lr"] = 0.5
    loss_of(model, 77).backward()  # dies before the step
    optimizer.close(keep_files=True)
    fresh = make_model(seed=5)
    again = make(fresh, "disk", tmp_path, resume=True)
    assert again.completed_steps == 4
    assert again.param_groups[0]["lr"] == LR
    assert_same(expected, weights(fresh))
    again.close()
    assert not list(tmp_path.iterdir()), "a finished run leaves nothing on the disk"


def test_spare_ram_saves_reads_of_a_run_that_can_be_resumed(tmp_path):
    model = make_model()
    host_bytes = budgets(model, "disk", 4096)["host_bytes"] + 2**20
    optimizer = OffloadedAdamW(
        model.named_parameters(),
        block_bytes=4096,
        host_bytes=host_bytes,
        disk_dir=tmp_path,
        resume=True,
    )
    for step in range(3):
        update(model, optimizer, step)
    optimizer.settle()
    predicted = optimizer.tier_bytes()
    disk = optimizer.engine.states.disk
    assert disk.read_bytes == 0
    assert disk.written_bytes == 4 * predicted.disk_written_bytes  # masters and three steps
    assert optimizer.engine.memory.allocated_bytes <= host_bytes
    optimizer.close()


def test_status_tells_where_blocks_are(tmp_path):
    model = make_model()
    optimizer = make(model, "all three", tmp_path)
    update(model, optimizer, 0)
    optimizer.settle()
    engine = optimizer.engine
    for index, home in enumerate(engine.placement.homes):
        on_card = home.state is Tier.CARD
        assert engine.status(index) is (BlockStatus.ON_CARD if on_card else BlockStatus.STORED)
    optimizer.close()


def test_bytes_written_are_predicted_and_limited(tmp_path):
    model = make_model()
    options = budgets(model, "gradients on disk too", 4096)
    optimizer = OffloadedAdamW(
        model.named_parameters(), block_bytes=4096, disk_dir=tmp_path, **options
    )
    for step in range(3):
        update(model, optimizer, step)
        optimizer.settle()
    predicted = optimizer.tier_bytes(accumulation_steps=4)
    report = optimizer.last_step
    assert report.written_bytes == pytest.approx(predicted.disk_written_bytes, rel=0.1)
    assert report.read_bytes == pytest.approx(predicted.disk_read_bytes, rel=0.25)
    assert report.read_bytes < predicted.disk_read_bytes  # buffers still hold the last records
    optimizer.close()
    limited = make(model, "disk", tmp_path, max_disk_write_bytes=3_000_000)
    with pytest.raises(StoreError, match="next step would write"):  # noqa: PT012 # some step does
        for step in range(9):
            update(model, limited, step)
    assert 0 < limited.completed_steps < 9
    limited.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": -1}, "lr is -1"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"max_grad_norm": 0}, "max_grad_norm"),
        ({"block_bytes": 0}, "block_bytes is 0"),
        ({"block_bytes": -5}, "block_bytes is -5"),
        ({"host_bytes": 2**50}, "available"),
        ({"host_bytes": 100}, "host budget"),
        ({"card_bytes": 100}, "card_bytes"),
        ({"disk_dir": "/no/such/folder"}, "is not a folder"),
        ({"resume": True}, "needs a disk_dir"),
    ],
)
def test_bad_input_is_refused_before_training_starts(options, words):
    with pytest.raises(UsageError, match=words) as refused:
        OffloadedAdamW(make_model().named_parameters(), **options)
    assert refused.value.hint or words in ("lr is -1", "betas")


def test_parameters_that_cannot_be_cut_are_refused_by_name():
    model = make_model()
    model.layers[0].up.weight.data = model.layers[0].up.weight.data.t().contiguous().t()
    with pytest.raises(UsageError, match=r"layers\.0\.up\.weight is not contiguous"):
        OffloadedAdamW(model.named_parameters())
    with pytest.raises(UsageError, match="float64"):
        OffloadedAdamW(make_model(torch.float64).named_parameters())


def test_a_parameter_that_is_thawed_later_is_refused_not_ignored():
    model = make_model()
    model.layers[0].up.weight.requires_grad_(False)
    optimizer = OffloadedAdamW(model.named_parameters())
    model.layers[0].up.weight.requires_grad_(True)
    loss_of(model, 0).backward()
    with pytest.raises(UsageError, match=r"layers\.0\.up\.weight has a gradient and was frozen"):
        optimizer.step()


def test_groups_cannot_be_added_later():
    optimizer = OffloadedAdamW(make_model().parameters())
    with pytest.raises(UsageError, match="laid out once"):
        optimizer.add_param_group({"params": [torch.zeros(3, requires_grad=True)]})


@pytest.mark.parametrize("tier", ["ram", "gradients on disk too"])
def test_a_step_that_an_exception_ends_goes_on_and_repeats_no_block(tmp_path, tier):
    """A block that is updated twice is wrong by a whole step, and nobody would notice."""
    model, other = make_model(), make_model()
    optimizer = make(model, tier, tmp_path / "a", **prepared(tmp_path / "a"))
    second = make(other, tier, tmp_path / "b", **prepared(tmp_path / "b"))
    for step in range(3):
        for micro in range(2):
            loss_of(model, 10 * step + micro).backward()
            loss_of(other, 10 * step + micro).backward()
        second.step()
        fetch = optimizer.engine.states.fetch
        calls = iter(range(100))

        def failing(index, *, fresh=False, fetch=fetch, calls=calls):
            if next(calls) in (2, 3, 7):
                raise StoreError("out of order")
            return fetch(index, fresh=fresh)

        optimizer.engine.states.fetch = failing
        failures = 0
        while True:
            try:
                optimizer.step()
                break
            except StoreError:
                failures += 1
                assert optimizer.engine.is_interrupted
                with pytest.raises(UsageError, match="interrupted"):
                    loss_of(model, 99).backward()
                for parameter in model.parameters():
                    parameter.grad = None
        optimizer.engine.states.fetch = fetch
        assert failures == 3
        assert_same(weights(model), weights(other))
    optimizer.close()
    second.close()


def test_a_backward_that_lost_a_gradient_cannot_be_stepped(tmp_path):
    """Half of a gradient is a wrong number: only the whole backward again will do."""
    model, other, io = make_model(), make_model(), FaultyIO()
    optimizer = make(model, "gradients on disk too", tmp_path, file_io=io)
    second = make(other, "ram", None)
    update(model, optimizer, 0)
    update(other, second, 0)
    before = weights(model)
    loss_of(model, 100).backward()
    io.arm("EIO read", at=2, times=99)
    with pytest.raises(StoreError, match="cannot read"):
        loss_of(model, 101).backward()
    io.disarm()
    for _ in range(2):
        with pytest.raises(StoreError, match="gradients are incomplete"):
            optimizer.step()
    assert_same(before, weights(model))
    optimizer.zero_grad()
    update(model, optimizer, 1)
    update(other, second, 1)
    assert_same(weights(model), weights(other))
    optimizer.close()
