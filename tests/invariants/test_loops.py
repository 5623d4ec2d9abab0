"""The governor in a plain script: any out-of-memory, anywhere, ends in the same update."""

import random
import subprocess
import sys
import threading

import pytest
import torch
from loop_rig import FaultyCard, flat, make_batch, make_loop

import grpo_lite
from grpo_lite import Governor, VirtualCard
from grpo_lite.errors import BudgetExceeded, UsageError
from grpo_lite.offload.adamw import OffloadedAdamW
from grpo_lite.plan import Phase
from grpo_lite.units import GIB

OPTIMIZERS = {
    "fused adamw": (torch.optim.AdamW, {"fused": True}),
    "foreach adamw": (torch.optim.AdamW, {"foreach": True}),
    "plain adam": (torch.optim.Adam, {"foreach": False, "amsgrad": True}),
    "sgd with momentum": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "foreach": False}),
    "adafactor": (torch.optim.Adafactor, {"foreach": False}),
}


def run(card, name="fused adamw", *, updates=3, before=lambda update: None, **options):
    """Return the weights after some updates, and the governor."""
    kind, arguments = OPTIMIZERS[name]
    net, optimizer, loss_fn = make_loop(kind, **arguments, **options)
    governor = Governor(card)
    for update in range(updates):
        before(update)
        governor.accumulate(make_batch(update), loss_fn, optimizer, max_grad_norm=1.0)
    return flat(net), governor, net


def ungoverned(name="fused adamw", *, updates=3, **options):
    kind, arguments = OPTIMIZERS[name]
    net, optimizer, loss_fn = make_loop(kind, **arguments, **options)
    for update in range(updates):
        loss_fn(make_batch(update)).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return flat(net)


def relative_to_update(weights, wanted):
    torch.manual_seed(0)
    start = flat(make_loop(torch.optim.SGD)[0])
    return float((weights - wanted).norm() / (wanted - start).norm())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_undisturbed_it_is_the_plain_loop_to_the_bit(name):
    """Governing must cost nothing in numbers, dropout's draws included."""
    weights, governor, _ = run(FaultyCard(), name)
    assert torch.equal(weights, ungoverned(name))
    assert governor.decisions == []


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_out_of_memory_at_any_allocation_ends_in_the_same_update(name, times):
    """Half a step done twice, half a gradient kept: each would be a silent wrong number."""
    wanted = ungoverned(name, dropout=0.0)
    card = FaultyCard()
    counts = []
    run(card, name, dropout=0.0, before=lambda _: counts.append(card.count))
    total = card.count
    assert total > 50
    for at in random.Random(7).sample(range(1, total + 1), 10):
        card = FaultyCard()
        card.arm(at, times)
        weights, governor, net = run(card, name, dropout=0.0)
        assert card.fired == times
        assert governor.num_rescues == times
        assert relative_to_update(weights, wanted) < 1e-4, at
        del net, governor


def test_a_replay_draws_the_same_dropout():
    """Other noise in the replay would be another experiment."""
    card = FaultyCard()
    card.arm(20)
    governor = Governor(card)
    _net, optimizer, loss_fn = make_loop(torch.optim.SGD)
    seen = []

    def watched(rows):
        seen.append(torch.get_rng_state().clone())
        return loss_fn(rows)

    governor.accumulate(make_batch(0), watched, optimizer)
    assert card.fired
    assert len(seen) > 1
    assert torch.equal(seen[0], seen[1])


def test_the_ledger_returns_to_where_it_began():
    """A rescue that leaks a tensor dies of the hundredth."""
    card = FaultyCard()
    kind, arguments = OPTIMIZERS["fused adamw"]
    _net, optimizer, loss_fn = make_loop(kind, **arguments)
    governor = Governor(card)
    governor.accumulate(make_batch(0), loss_fn, optimizer)
    rest_bytes = card.allocated_bytes()
    for update in range(1, 20):
        card.arm(update)
        governor.accumulate(make_batch(update), loss_fn, optimizer)
    assert card.fired
    assert card.allocated_bytes() == rest_bytes


def test_a_budget_too_small_for_all_rows_is_met_by_parts_and_more_memory_lifts_them():
    """A browser that closes again must not leave the run slow for the whole night."""
    kind, arguments = OPTIMIZERS["fused adamw"]
    _net, optimizer, loss_fn = make_loop(kind, **arguments)
    card = VirtualCard(GIB)
    governor = Governor(card)
    batch = make_batch(0, num_rows=256)
    governor.accumulate(batch, loss_fn, optimizer)
    assert governor.records["backward"].num_rows == 256
    ample_bytes = governor.records["backward"].measured_bytes
    card.budget_bytes = card.allocated_bytes() + (ample_bytes - card.allocated_bytes()) // 2
    governor.accumulate(batch, loss_fn, optimizer)
    assert governor.records["backward"].num_rows <= 128
    card.budget_bytes = GIB
    governor.accumulate(batch, loss_fn, optimizer)
    assert governor.records["backward"].num_rows == 256


def test_one_row_that_does_not_fit_is_a_clean_stop_with_nothing_changed():
    kind, arguments = OPTIMIZERS["fused adamw"]
    net, optimizer, loss_fn = make_loop(kind, **arguments)
    before = flat(net)
    card = VirtualCard(GIB)
    governor = Governor(card)
    with governor.governing(net.parameters()):
        card.budget_bytes = card.allocated_bytes() + 64
    with pytest.raises(BudgetExceeded, match="of 1 row needs"):
        governor.accumulate(make_batch(0), loss_fn, optimizer)
    assert torch.equal(flat(net), before)
    assert all(parameter.grad is None for parameter in net.parameters())


def test_after_quiet_updates_a_failed_size_is_tried_again():
    """One bad minute must not slow the whole night; and failing again makes it wait longer."""
    card = FaultyCard()
    _net, optimizer, loss_fn = make_loop(torch.optim.SGD)
    governor = Governor(card)
    card.arm(5)
    governor.accumulate(make_batch(0), loss_fn, optimizer)
    assert governor.records["backward"].num_rows == 4
    for update in range(40):
        card.arm(None)
        governor.accumulate(make_batch(update), loss_fn, optimizer)
    assert governor.records["backward"].num_rows == 8
    assert [decision.kind for decision in governor.decisions] == ["out of memory", "quiet"]
    assert governor.measured[Phase.BACKWARD].failed_size is None


def test_recoverable_keeps_finished_rows_and_calls_for_the_rest():
    """Sampled rows are paid for: a rollout must not begin anew."""
    card = FaultyCard()
    governor = Governor(card)
    calls = []

    @governor.recoverable
    def sample(rows):
        calls.append(len(rows["x"]))
        return {"out": torch.rand(len(rows["x"]), 3) + rows["x"].mean(), "text": rows["names"]}

    card.arm(1)
    batch = make_batch(0)
    result = sample(batch)
    assert result["text"] == batch["names"]
    assert result["out"].shape == (8, 3)
    assert calls == [8, 4, 4]


def test_phase_measures_seconds_and_bytes():
    governor = Governor("virtual:1GiB")
    with governor.phase("reward"):
        tensor = torch.ones(1000)
    assert governor.records["reward"].measured_bytes == tensor.nbytes
    assert governor.records["reward"].seconds > 0


def changes_parameters(net):
    def loss_fn(rows):
        with torch.no_grad():
            net.up.weight.mul_(0.9)
        return net(rows["x"]).mean()

    return loss_fn


BAD_LOSSES = {
    "changed parameters": changes_parameters,
    "must be a scalar": lambda net: lambda rows: net(rows["x"]),
    "it is float": lambda net: lambda rows: 0.5,
    "does not depend on the batch": lambda net: lambda rows: net(torch.ones(2, 8)).mean(),
    "depends on no parameter": lambda net: lambda rows: net(rows["x"]).mean().detach(),
}


@pytest.mark.parametrize("message", BAD_LOSSES)
def test_a_loss_that_would_break_a_split_update_is_refused(message):
    net, optimizer, _ = make_loop(torch.optim.SGD)
    governor = Governor(VirtualCard(GIB))
    with pytest.raises(UsageError, match=message):
        governor.accumulate(make_batch(0), BAD_LOSSES[message](net), optimizer)
    assert all(parameter.grad is None for parameter in net.parameters())


def bad_call(name):
    net, optimizer, loss_fn = make_loop(torch.optim.SGD)
    governor = Governor(VirtualCard(GIB))
    batch = make_batch(0)
    if name == "disagree in their number of rows: x has 8, y has 7":
        batch["y"] = batch["y"][:7]
    elif name == "has no rows":
        batch = {"x": torch.ones(0, 8)}
    elif name == "LBFGS is no optimizer":
        optimizer = torch.optim.LBFGS(net.parameters())
    elif name == "hold gradients already":
        loss_fn(batch).backward()
    elif name == "inside another one":
        inner = Governor(VirtualCard(GIB))
        outer_loss = loss_fn

        def loss_fn(rows):
            inner.accumulate(rows, outer_loss, optimizer)
            return outer_loss(rows)

    elif name == "reduction is 'median'":
        return governor.accumulate(batch, loss_fn, optimizer, reduction="median")
    return governor.accumulate(batch, loss_fn, optimizer)


@pytest.mark.parametrize(
    "name",
    [
        "disagree in their number of rows: x has 8, y has 7",
        "has no rows",
        "LBFGS is no optimizer",
        "hold gradients already",
        "inside another one",
        "reduction is 'median'",
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_is_computed(name):
    with pytest.raises(UsageError, match=name):
        bad_call(name)


def test_a_second_thread_is_refused():
    """Counts of two threads would mix, and each would answer the other's error."""
    _net, optimizer, loss_fn = make_loop(torch.optim.SGD)
    governor = Governor(VirtualCard(GIB))
    errors = []

    def work():
        try:
            governor.accumulate(make_batch(0), loss_fn, optimizer)
        except UsageError as error:
            errors.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert "second thread" in errors[0]


def test_offloaded_adamw_is_governed_too():
    """Its gradients leave the parameters as backward makes them: a rescue must drop them too."""
    torch.manual_seed(0)
    weights = []
    for at in (None, 12):
        net, _, loss_fn = make_loop(torch.optim.SGD, dropout=0.0)
        card = FaultyCard()
        optimizer = OffloadedAdamW(net.parameters(), lr=1e-2, card=card)
        governor = Governor(card)
        card.arm(at)
        for update in range(2):
            governor.accumulate(make_batch(update), loss_fn, optimizer)
        weights.append(flat(net))
        assert bool(card.fired) == (at is not None)
        optimizer.close()
    assert relative_to_update(weights[1], weights[0]) < 1e-4


def test_the_public_names_are_few_and_cost_no_torch():
    """`import grpo_lite` stands in the first line of scripts that must start at once."""
    code = (
        "import sys, grpo_lite; assert 'torch' not in sys.modules; "
        "from grpo_lite import FitRequest, fit; assert callable(fit); "
        "assert all(getattr(grpo_lite, name) for name in grpo_lite.__all__)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert len(grpo_lite.__all__) <= 20
