"""The choice of tree: what a smaller one would have yielded, what it costs, which pays most."""

import pytest

from decode.choice import (
    CHAIN,
    PLAIN,
    TREE,
    Choice,
    Option,
    Point,
    choose_at,
    keep,
    options,
    place_of,
    recall,
    sentence,
    tau_within,
)
from decode.cost import Cost
from decode.engine import Step

PLAINLY = Option(PLAIN, 1, 0)
STEPS = [Step(5, (1, 3), 3, 3), Step(5, (), 1, 1), Step(5, (2,), 2, 2), Step(5, (1, 4, 5), 3, 4)]
CURVE = Cost([1, 2, 4, 8], [100.0, 104.0, 120.0, 200.0])
DRAFT = {CHAIN: [5.0, 10.0, 15.0], TREE: [6.0, 12.0, 18.0]}
HERE = {"processor": "one", "threads": 2}


def test_a_smaller_tree_accepts_the_part_of_each_path_that_lies_in_it():
    assert tau_within(STEPS, Option(TREE, 6, 3)) == 1 + (2 + 0 + 1 + 3) / 4
    assert tau_within(STEPS, Option(TREE, 4, 3)) == 1 + (2 + 0 + 1 + 1) / 4  # nodes 4 and 5 are not in it
    assert tau_within(STEPS, Option(TREE, 2, 3)) == 1 + (1 + 0 + 0 + 1) / 4
    assert tau_within(STEPS, Option(TREE, 6, 1)) == 1 + (1 + 0 + 1 + 1) / 4
    assert tau_within(STEPS, PLAINLY) == tau_within([], PLAINLY) == 1.0


def test_every_chain_and_every_tree_that_has_room_for_its_depth_is_tried():
    assert options({CHAIN: 2, TREE: 2}, [2, 4]) == [
        PLAINLY, Option(CHAIN, 2, 1), Option(CHAIN, 3, 2), Option(TREE, 2, 1), Option(TREE, 4, 1), Option(TREE, 4, 2),
    ]  # fmt: skip


def test_the_choice_by_hand():
    taus = {PLAINLY: 1.0, Option(CHAIN, 2, 1): 1.3, Option(TREE, 4, 2): 1.7, Option(TREE, 8, 3): 2.1}
    point = Point(2, 128, CURVE, DRAFT, other=1.0)
    chosen = choose_at(point, taus)
    # 1.3 * 101 / 110 = 1.19; 1.7 * 101 / 133 = 1.29; 2.1 * 101 / 219 = 0.97
    assert chosen.option == Option(TREE, 4, 2)
    assert chosen.speedup == pytest.approx(1.7 * 101 / 133)
    assert chosen.tokens_per_second == pytest.approx(2 * 1.7 / 0.133)
    assert sentence(chosen) == "batch 2, context 128: a tree of 4 nodes, 2 deep: tau 1.70, speed-up 1.29, 25.6 tokens/s"


def test_where_nothing_pays_it_is_plain_decoding_and_says_so():
    taus = {PLAINLY: 1.0, Option(CHAIN, 2, 1): 1.05, Option(TREE, 8, 3): 1.9}
    chosen = choose_at(Point(8, 512, CURVE, DRAFT, other=1.0), taus)
    assert (chosen.option, chosen.speedup) == (PLAINLY, 1.0)
    assert sentence(chosen) == "batch 8, context 512: nothing pays, decode plainly (79.2 tokens/s)"


def test_a_choice_is_kept_and_recalled_for_the_nearest_batch_and_context():
    made = [Choice(rows, context, Option(TREE, rows + 1, 1), 1.5, 1.2, 9.0) for rows in (1, 4) for context in (64, 512)]
    keep("some", HERE, [Point(1, 64, CURVE, DRAFT, 1.0)], made)
    for rows, context, nearest in ((1, 64, 0), (1, 200, 1), (3, 64, 2), (32, 4096, 3)):
        assert recall("some", HERE, rows, context) == made[nearest]


def test_a_curve_of_other_hardware_of_another_version_or_none_decides_nothing():
    keep("other", HERE, [], [Choice(1, 64, PLAINLY, 1.0, 1.0, 9.0)])
    with pytest.raises(
        ValueError, match="was measured with processor one, and here it is two: a curve of other hardware"
    ):
        recall("other", HERE | {"processor": "two"}, 1, 64)
    with pytest.raises(
        ValueError, match=r"nothing was tuned for nobody on this machine; run python -m decode.tune conf=nobody"
    ):
        recall("nobody", HERE, 1, 64)
    for damage in ("{", "[]", '{"version": 1}'):
        place_of("other").write_text(damage)
        with pytest.raises(ValueError, match=r"is no curve of decode.tune; run python -m decode.tune conf=other"):
            recall("other", HERE, 1, 64)
