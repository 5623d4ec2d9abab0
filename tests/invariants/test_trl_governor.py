"""TRL's trainer under the governor: rescued or cut, it ends with TRL's own weights."""

import math
import random

import pytest
import torch
from loop_rig import FaultyCard

from grpo_lite.cards.virtual import VirtualCard
from grpo_lite.errors import BudgetExceeded, UsageError
from grpo_lite.plan import Phase
from grpo_lite.predict.measured import MeasuredRows
from grpo_lite.units import GIB

pytest.importorskip("trl", reason="the trl extra is not installed")
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # theirs
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # theirs
    pytest.mark.filterwarnings("ignore::UserWarning"),  # theirs
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # theirs
]
trl_rig = pytest.importorskip("trl_rig")
LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")


def plain(folder, **options):
    """Return the weights that TRL ends with, how far it came, and its log."""
    trainer = trl_rig.make_trainer(folder, **options)
    start = trl_rig.weights(trainer)
    trainer.train()
    end = trl_rig.weights(trainer)
    moved = float((end - start).norm())
    assert moved > 1e-3, "nothing was learnt, so nothing is tested"
    return end, moved, trainer.state.log_history


def governed(folder, card=None, **options):
    return trl_rig.make_trainer(
        folder, trl_rig.GovernedGRPOTrainer, card=card or FaultyCard(), **options
    )


class AtMost(MeasuredRows):
    """Never works on more rows than it is told."""

    __slots__ = ("most",)

    def rows(self, num_rows, row_size, free_bytes):
        return min(num_rows, self.most)


def cut(trainer, phase, most):
    """Let every part of `phase` be at most `most` rows."""
    measured = AtMost()
    measured.most = most
    trainer.governor.measured[phase] = measured


def same(trainer, end, moved):
    return float((trl_rig.weights(trainer) - end).norm()) <= 1e-4 * moved


def test_undisturbed_it_is_trl_to_the_bit_and_logs_the_same(tmp_path):
    """Who wraps a trainer must not change a run in which nothing happens."""
    end, _, log = plain(tmp_path)
    trainer = governed(tmp_path)
    trainer.train()
    assert torch.equal(trl_rig.weights(trainer), end)
    assert trainer.governor.decisions == []
    for theirs, ours in zip(log[:-1], trainer.state.log_history[:-1], strict=True):
        for name in set(theirs) - {"step_time"}:
            assert ours[name] == theirs[name], name
        assert ours["governor/rescues"] == 0


@pytest.mark.parametrize("most", [1, 3])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_parts_of_a_micro_batch_add_up_to_it_for_every_loss(tmp_path, loss_type, most):
    """Each loss is normalised in its own way; a wrong weight is a silently other learning rate.

    Two iterations, so that ratios differ from 1, and completions of many lengths.
    """
    options = {"loss_type": loss_type, "num_iterations": 2, "max_steps": 4, "temperature": 0.7}
    end, moved, log = plain(tmp_path, **options)
    trainer = governed(tmp_path, **options)
    cut(trainer, Phase.BACKWARD, most)
    trainer.train()
    assert trainer.governor.records["backward"].num_rows <= most
    assert same(trainer, end, moved)
    for theirs, ours in zip(log[:-1], trainer.state.log_history[:-1], strict=True):
        for name in ("entropy", "loss", "clip_ratio/region_mean", "clip_ratio/high_max"):
            if name in theirs:
                assert ours[name] == pytest.approx(theirs[name], abs=2e-4), name


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_the_entropy_bonus_is_cut_by_tokens_whatever_the_loss(tmp_path, loss_type):
    options = {"loss_type": loss_type, "entropy_coef": 0.05}
    end, moved, log = plain(tmp_path, **options)
    trainer = governed(tmp_path, **options)
    cut(trainer, Phase.BACKWARD, 1)
    trainer.train()
    assert same(trainer, end, moved)
    assert trainer.state.log_history[0]["entropy_coef"] == log[0]["entropy_coef"]


@pytest.mark.parametrize("most", [1, 3])
def test_a_sliced_rollout_draws_what_trl_would_have_drawn(tmp_path, most):
    """Sampling goes on from a shared random state: slices alone would draw something else."""
    end, moved, log = plain(tmp_path)
    trainer = governed(tmp_path)
    cut(trainer, Phase.ROLLOUT, most)
    trainer.train()
    assert trainer.governor.records["rollout"].num_rows <= most
    assert same(trainer, end, moved)
    assert trainer.state.log_history[0]["reward"] == log[0]["reward"]


CASES = {
    "plain": {},
    "lora with a reference": {"lora": True, "beta": 0.1, "max_steps": 3},
    "checkpointing and stored log-probs": {
        "gradient_checkpointing": True,
        "num_iterations": 2,
        "max_steps": 3,
    },
    "foreach optimizer": {"optim": "adamw_torch"},
}


@pytest.mark.parametrize("case", CASES)
def test_an_out_of_memory_anywhere_ends_in_trl_s_weights(tmp_path, case):
    """In rollout, scoring, forward, backward, clip and step: it is the same experiment."""
    options = CASES[case]
    end, moved, _ = plain(tmp_path, **options)
    card = FaultyCard()
    governed(tmp_path, card, **options).train()
    seen = set()
    for at in random.Random(3).sample(range(60, card.count + 1), 7):
        faulty = FaultyCard()
        trainer = governed(tmp_path, faulty, **options)
        faulty.arm(at, times=2)
        trainer.train()
        assert faulty.fired == trainer.governor.num_rescues == 2
        assert same(trainer, end, moved), at
        seen |= {decision.phase for decision in trainer.governor.decisions}
    assert {Phase.ROLLOUT, Phase.BACKWARD} <= seen


def test_rewards_are_asked_once_and_finished_rows_are_kept(tmp_path):
    """A reward may cost money, or count; a rescue is no reason to ask again."""
    asked = []

    def counting(completions, **columns):
        asked.append(len(completions))
        return trl_rig.reward(completions)

    card = FaultyCard()
    trainer = governed(tmp_path, card, max_steps=1, rewards=counting)
    inner = trainer._calculate_rewards
    scored_at = []

    def noting(*args, **kwargs):
        rewards = inner(*args, **kwargs)
        scored_at.append(card.count)
        return rewards

    trainer._calculate_rewards = noting
    trainer.train()
    total = len(asked)
    for at in range(scored_at[0] + 1, scored_at[0] + 70, 17):  # advantages, masks, shuffling
        asked.clear()
        faulty = FaultyCard()
        trainer = governed(tmp_path, faulty, max_steps=1, rewards=counting)
        faulty.arm(at)
        trainer.train()
        assert faulty.fired
        assert len(asked) == total


def test_a_small_budget_is_met_by_parts(tmp_path):
    """The promise itself: the script that does not fit runs, and ends where it would have."""
    end, moved, _ = plain(tmp_path)
    card = VirtualCard(GIB)
    trainer = governed(tmp_path, card)
    trainer.train()
    needed_bytes = trainer.governor.records["backward"].measured_bytes
    resting_bytes = card.allocated_bytes()
    small = VirtualCard(resting_bytes + (needed_bytes - resting_bytes) // 2)
    del trainer
    trainer = governed(tmp_path, small)
    trainer.train()
    assert trainer.governor.num_rescues
    assert same(trainer, end, moved)


def test_what_never_fits_stops_with_a_checkpoint_from_which_the_run_goes_on(tmp_path):
    """Hours of training must not be lost to the last straw."""
    end, moved, _ = plain(tmp_path / "a", max_steps=3)
    card = FaultyCard()
    trainer = governed(tmp_path / "b", card, max_steps=3)
    stop_after(trainer, 1, lambda: card.arm(1500, times=10**9))
    with pytest.raises(BudgetExceeded, match="update 1 is saved in"):
        trainer.train()
    resumed = governed(tmp_path / "b", FaultyCard(), max_steps=3)
    resumed.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-1"))
    assert resumed.state.global_step == 3
    assert same(resumed, end, moved)


def stop_after(trainer, step, action):
    """Call `action` when `step` updates are made."""
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == step:
                action()

    trainer.add_callback(Stop())


def test_evaluation_is_governed_and_measures_the_same(tmp_path):
    card = FaultyCard()
    trainer = governed(tmp_path, card)
    torch.manual_seed(5)
    card.arm(10**9)
    wanted = trainer.evaluate(eval_dataset=trainer.train_dataset)
    total = card.count
    for at in random.Random(1).sample(range(60, total), 5):
        torch.manual_seed(5)
        card.arm(at)
        found = trainer.evaluate(eval_dataset=trainer.train_dataset)
        assert card.fired
        assert found["eval_reward"] == wanted["eval_reward"]
        assert math.isclose(found["eval_loss"], wanted["eval_loss"], abs_tol=1e-5)


def test_govern_takes_over_a_trainer_that_exists(tmp_path):
    end, moved, _ = plain(tmp_path)
    trainer = trl_rig.govern(trl_rig.make_trainer(tmp_path), card=VirtualCard(GIB))
    assert isinstance(trainer, trl_rig.GRPOTrainer)
    assert trl_rig.govern(trainer) is trainer
    trainer.train()
    assert same(trainer, end, moved)


@pytest.mark.parametrize("version", ["1.14.2", "1.17.0", "2.0.0"])
def test_an_unknown_version_of_trl_is_refused(tmp_path, monkeypatch, version):
    """Half-wrapped, another version's losses would be weighed wrongly without a word."""
    from grpo_lite.integrations import trl

    monkeypatch.setattr(trl.metadata, "version", lambda name: version)
    with pytest.raises(UsageError, match=f"TRL {version} is installed"):
        governed(tmp_path)


def test_a_loss_that_sees_the_whole_micro_batch_is_refused(tmp_path):
    with pytest.raises(UsageError, match="top_entropy_quantile below 1 makes"):
        governed(tmp_path, top_entropy_quantile=0.5)
    with pytest.raises(UsageError, match="is no GRPOTrainer"):
        trl_rig.govern(torch.nn.Linear(1, 1))
