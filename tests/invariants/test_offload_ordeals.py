"""Disturbed runs end with the weights of undisturbed ones, or with a clear error."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "virtual"))

import pytest
from offload_ordeals import FAULTS, faulty_run, killed_run, undisturbed


@pytest.fixture(scope="module")
def expected():
    return undisturbed(4)


@pytest.mark.parametrize("seed", range(2 * len(FAULTS)))
def test_a_fault_of_the_disk_is_recovered_or_a_clear_error(tmp_path, expected, seed):
    """Never a wrong number: the benchmark strikes 200 times, this is a sample of each kind."""
    kind, outcome = faulty_run(tmp_path, seed, expected)
    assert outcome in ("unharmed", "recovered", "refused")
    if kind == "missing file":
        assert outcome == "refused"
    if kind == "short write":
        assert outcome != "refused"


@pytest.mark.parametrize("tier", ["disk", "gradients on disk too"])
def test_a_run_that_is_killed_goes_on_with_the_same_weights(tmp_path, tier):
    """Kill -9 at any instant leaves one whole generation: the benchmark kills 50 times."""
    kills, recovered, steps = killed_run(tmp_path, tier, num_kills=3, num_steps=60)
    assert kills == recovered == 3
    assert len(set(steps)) > 1, "no update was made between the kills: they prove nothing"
