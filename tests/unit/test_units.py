"""Sizes and durations as people write and read them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_lite.units import GIB, MIB, format_bytes, format_seconds, parse_bytes

UNITS = {
    "": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
}  # fmt: skip


@given(
    number=st.integers(0, 9999),
    hundredths=st.integers(0, 99),
    unit=st.sampled_from(sorted(UNITS)),
    space=st.sampled_from(["", " ", "  "]),
)
def test_a_size_is_its_number_times_its_unit_whatever_the_case(number, hundredths, unit, space):
    """A GB taken for a GiB is 7 % of a card: the plan fits on paper and dies on the card."""
    text = f"{space}{number}.{hundredths:02d}{space}{unit}{space}"
    wanted = (number + hundredths / 100) * UNITS[unit]
    for written in (text, text.lower(), text.upper()):
        assert parse_bytes(written) == pytest.approx(wanted, abs=0.5001, rel=1e-12)


@given(st.integers(0, 2**62))
def test_what_is_shown_reads_back_as_nearly_the_same_size(num_bytes):
    """People paste what they are shown into a flag; it must mean that size, within its digits."""
    assert parse_bytes(format_bytes(num_bytes)) == pytest.approx(num_bytes, rel=5.1e-3)


@given(st.integers(0, 2**50), st.integers(0, 2**50))
def test_a_larger_size_never_reads_as_a_smaller_one(one, other):
    small, large = sorted((one, other))
    assert parse_bytes(format_bytes(small)) <= parse_bytes(format_bytes(large))


@given(st.text(max_size=12))
def test_any_text_is_a_size_or_a_value_error(text):
    """A flag is typed by hand: nothing but a message may come of it."""
    try:
        size = parse_bytes(text)
    except ValueError:
        return
    assert isinstance(size, int)
    assert 0 <= size < 2**63


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1,5GiB", "6.GiB", "1e3", "5 Gi B", "nan"])
def test_what_is_no_size_says_what_one_looks_like(text):
    with pytest.raises(ValueError, match=r"6\.5GiB or 800MiB"):
        parse_bytes(text)


def test_more_bytes_than_can_be_counted_are_refused():
    """A float too large once ended in an OverflowError."""
    for text in ("9" * 400, "1" + "0" * 300 + "GiB", "9000000TiB"):
        with pytest.raises(ValueError, match="than any machine"):
            parse_bytes(text)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (800 * MIB, "800 MiB"),
        (round(2.414 * GIB), "2.41 GiB"),
        (round(15.73 * GIB), "15.7 GiB"),
        (1536 * GIB, "1536 GiB"),
        (-3 * MIB, "-3.00 MiB"),
    ],
)
def test_sizes_have_three_digits(num_bytes, text):
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.236, "0.24 s"),
        (12.34, "12.3 s"),
        (245, "4 min 05 s"),
        (3599.6, "1 h 00 min"),
        (7812, "2 h 10 min"),
    ],
)
def test_durations_read_as_on_a_clock(seconds, text):
    assert format_seconds(seconds) == text


@given(st.floats(0, 1e7))
def test_no_clock_shows_sixty_seconds_or_sixty_minutes(seconds):
    """Rounding at the wrong place once gave "59 min 60 s" in programs everywhere."""
    text = format_seconds(seconds)
    assert " 60 s" not in text
    assert " 60 min" not in text
