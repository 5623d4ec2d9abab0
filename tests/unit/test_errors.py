"""Errors for people: the code a shell sees, the hint, the nearest names; whole across processes."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_lite import errors

KINDS = [
    (errors.UsageError, 2, ValueError),
    (errors.NoPlanFits, 3, Exception),
    (errors.BudgetExceeded, 4, Exception),
    (errors.StoreError, 1, OSError),
    (errors.RewardError, 1, Exception),
]


@pytest.mark.parametrize(("kind", "code", "base"), KINDS)
def test_each_kind_has_its_exit_code_and_is_caught_as_what_it_is(kind, code, base):
    """Scripts tell "does not fit" from "wrong flag" by the code alone."""
    error = kind("9.4 GiB are needed", hint="--method lora")
    assert error.exit_code == code
    assert isinstance(error, base)
    assert isinstance(error, errors.GrpoLiteError)
    assert str(error) == "9.4 GiB are needed\nhint: --method lora"
    assert str(kind("no hint")) == "no hint"


@pytest.mark.parametrize(("kind", "code", "base"), KINDS)
def test_an_error_crosses_a_process_with_its_hint(kind, code, base):
    """Workers raise, the parent shows: what cannot be unpickled hangs or hides the cause."""
    again = pickle.loads(pickle.dumps(kind("what", hint="do this")))
    assert type(again) is kind
    assert str(again) == "what\nhint: do this"


names = st.text("abcdefgh-_.0123", min_size=1, max_size=12)


@given(name=names, known=st.sets(names, max_size=30))
def test_an_unknown_name_is_answered_with_known_ones_only(name, known):
    """A suggestion that does not exist costs a second error."""
    message = errors.unknown_name("card", name, known).message
    head, _, listed = message.partition("known: ")
    assert head.startswith(f"unknown card {name!r}; ")
    shown = [part for part in listed.split(", ") if part]
    assert set(shown) <= known
    assert len(shown) == len(set(shown)) <= 8
    assert bool(shown) == bool(known)


def test_a_name_that_is_half_typed_comes_before_those_that_look_alike():
    known = ["rtx-4060-laptop-8gb", "rtx-4060-8gb", "rtx-3060-12gb", "a100"]
    message = errors.unknown_name("card", "rtx-4060", known).message
    assert message.endswith("nearest known: rtx-4060-8gb, rtx-4060-laptop-8gb, rtx-3060-12gb")
