"""The layout of gradient blocks: every element once, cuts where bits do not change."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_lite.errors import UsageError
from grpo_lite.offload.blocks import SPLIT_ELEMENTS, ParameterShape, lay_out


def shapes(sizes, element_bytes=2):
    return [
        ParameterShape(name=f"p{i}", num_elements=n, element_bytes=element_bytes, identity=i)
        for i, n in enumerate(sizes)
    ]


@given(
    sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=20),
    widths=st.lists(st.sampled_from([2, 4]), min_size=20, max_size=20),
    block_bytes=st.integers(256, 20_000),
)
def test_blocks_cover_each_element_once_within_the_limit_and_cut_at_whole_vectors(
    sizes, widths, block_bytes
):
    """An element that lies in no block is never trained; one in two blocks is updated twice."""
    parameters = [
        ParameterShape(name=f"p{i}", num_elements=n, element_bytes=widths[i], identity=i)
        for i, n in enumerate(sizes)
    ]
    layout = lay_out(parameters, block_bytes=block_bytes)
    for parameter, size in enumerate(sizes):
        ranges = [(piece.start, piece.stop) for _, piece in layout.pieces_of(parameter)]
        assert ranges[0][0] == 0
        assert ranges[-1][1] == size
        assert all(left[1] == right[0] for left, right in itertools.pairwise(ranges))
    for block in layout.blocks:
        assert block.gradient_bytes <= block_bytes
        end = 0
        for piece in block.pieces:
            assert piece.start % SPLIT_ELEMENTS == 0
            assert piece.offset % SPLIT_ELEMENTS == 0
            assert piece.offset >= end
            end = piece.offset + piece.num_elements
        assert end <= block.num_elements
        assert block.state_bytes == 12 * block.num_elements


def test_blocks_come_in_backward_order_and_are_filled_to_the_brim():
    """Blocks are finished one after the other only if they hold what backward makes together."""
    layout = lay_out(shapes([64, 1000, 640]), block_bytes=2 * 1024)
    assert [piece.parameter for block in layout.blocks for piece in block.pieces] == [2, 1, 1, 0]
    assert layout.blocks[0].num_elements == 1024


def test_small_tensors_share_a_block_and_a_large_one_is_split():
    layout = lay_out(shapes([65, 65, 65, 100_000]), block_bytes=2 * 40_000)
    assert [len(block.pieces) for block in layout.blocks] == [1, 1, 4]
    last = layout.blocks[-1]
    assert [piece.offset % SPLIT_ELEMENTS for piece in last.pieces] == [0, 0, 0, 0]


def test_tied_weights_are_laid_out_once():
    """A tied embedding counted twice would be stepped twice."""
    embedding = ParameterShape(name="embed", num_elements=640, element_bytes=2, identity=7)
    head = ParameterShape(name="head", num_elements=640, element_bytes=2, identity=7)
    layout = lay_out([embedding, head])
    assert [shape.name for shape in layout.parameters] == ["embed"]
    assert layout.blocks[0].num_elements == 640


@pytest.mark.parametrize("block_bytes", [0, -1, 127])
def test_a_block_size_that_holds_no_cut_is_refused(block_bytes):
    with pytest.raises(UsageError, match="block_bytes"):
        lay_out(shapes([10]), block_bytes=block_bytes)


def test_a_model_with_nothing_to_train_is_refused():
    with pytest.raises(UsageError, match="nothing to train"):
        lay_out([])


def test_the_fingerprint_tells_models_and_cuts_apart():
    """A manifest of another model must not be taken for ours."""
    one = lay_out(shapes([100, 200])).fingerprint()
    assert one == lay_out(shapes([100, 200])).fingerprint()
    assert one != lay_out(shapes([200, 100])).fingerprint()
    assert one != lay_out(shapes([100, 200]), block_bytes=1024).fingerprint()
