"""How many rows fit, learnt from what rows have taken."""

from hypothesis import given
from hypothesis import strategies as st

from grpo_lite.predict.measured import QUIET_UPDATES, MeasuredRows

SIZES = st.integers(1, 4096)


@given(
    fixed=st.integers(0, 10**6),
    slope=st.integers(1, 100),
    sizes=st.lists(SIZES, min_size=1),
    num_rows=st.integers(1, 64),
    row_size=st.integers(1, 64),
    free=st.integers(0, 10**7),
)
def test_what_is_chosen_fits_where_a_smaller_part_has_been_measured(
    fixed, slope, sizes, num_rows, row_size, free
):
    """A choice that does not fit costs a whole replayed update."""
    measured = MeasuredRows()
    for size in sizes:
        measured.worked(size, fixed + slope * size)
    rows = measured.rows(num_rows, row_size, free)
    assert 1 <= rows <= num_rows
    if rows > 1 and (rows * row_size).bit_length() > min(sizes).bit_length():
        assert fixed + slope * rows * row_size <= free


def test_nothing_known_means_all_rows():
    assert MeasuredRows().rows(8, 100, 0) == 8


def test_a_failed_size_is_kept_away_from_until_enough_quiet_updates_or_more_memory():
    """Without it the same update would fail every time; with it for ever, the night is slow."""
    measured = MeasuredRows()
    assert measured.failed(8, 10, 1000) == 4
    assert measured.rows(8, 10, 1000) == 7
    assert measured.rows(8, 10, 2000) == 8
    assert [measured.updated() for _ in range(QUIET_UPDATES)][-1]
    assert measured.rows(8, 10, 1000) == 8


def test_each_further_failure_doubles_the_wait():
    """Flapping between two sizes costs a replay each time."""
    measured = MeasuredRows()
    waits = []
    for _ in range(3):
        measured.failed(8, 10, 1000)
        waits.append(next(n for n in range(1, 1000) if measured.updated()))
    assert waits == [QUIET_UPDATES, 2 * QUIET_UPDATES, 4 * QUIET_UPDATES]


def test_one_row_has_nothing_below():
    assert MeasuredRows().failed(1, 10, 5) is None
