"""The choice of tree: what a smaller one would have yielded, what it costs, which pays most."""

import math

import pytest

from decode.choice import (
    CHAIN,
    DYNAMIC,
    FLOORS,
    PLAINLY,
    STATIC,
    Choice,
    Option,
    Point,
    Trial,
    chain_lengths,
    choose_at,
    keep,
    options,
    place_of,
    recall,
    sentence,
    trial,
)
from decode.cost import Cost
from decode.engine import Step

STEPS = [Step(5, (1, 3), 3, 3), Step(5, (), 1, 1), Step(5, (2,), 2, 2), Step(5, (1, 4, 5), 3, 4)]
CURVE = Cost([1, 2, 4, 8], [100.0, 104.0, 120.0, 200.0])
DRAFT = {CHAIN: [5.0, 10.0, 15.0], STATIC: [6.0, 12.0, 18.0]}
HERE = {"processor": "one", "threads": 2}


def test_a_smaller_tree_accepts_the_part_of_each_path_that_lies_in_it():
    assert trial(STEPS, Option(STATIC, 6, 3)).tau == 1 + (2 + 0 + 1 + 3) / 4
    assert trial(STEPS, Option(STATIC, 4, 3)).tau == 1 + (2 + 0 + 1 + 1) / 4  # nodes 4 and 5 are not in it
    assert trial(STEPS, Option(STATIC, 2, 3)).tau == 1 + (1 + 0 + 0 + 1) / 4
    assert trial(STEPS, Option(STATIC, 6, 1)).tau == 1 + (1 + 0 + 1 + 1) / 4
    assert trial(STEPS, Option(STATIC, 6, 3)).shapes == [(3, 6)] * 4
    assert trial([], PLAINLY) == trial(STEPS, PLAINLY) == Trial(1.0, [(0, 1)])


def test_chains_are_as_long_as_pays_most_at_each_batch_size():
    rates, draft, wide = [0.8, 0.7, 0.6], {CHAIN: [5.0, 10.0, 15.0]}, Cost([1, 4], [100.0, 900.0])
    costs = {1: [100.0, 103.0], 2: [100.0, 104.0], 8: [100.0, 175.0], 16: [100.0, 600.0]}
    points = [Point(rows, 512, Cost([1, 4], ms), draft, 2.0) for rows, ms in costs.items()]
    points += [Point(rows, context, wide, draft, 2.0) for rows in costs for context in (64, 4096)]

    def best(batch: int) -> int:
        first, last = costs[max(rows for rows in costs if rows <= batch)]
        tau, paid = 1.0, [1 / (first + 2)]
        for depth in range(1, len(rates) + 1):
            tau += math.prod(rates[:depth])
            paid.append(tau / (first + depth * (last - first) / 3 + 5 * depth + 2))
        return paid.index(max(paid))

    runs = chain_lengths(points, rates)
    assert [length for first, last, length in runs for _ in range(first, last + 1)] == [best(n) for n in range(1, 17)]
    assert [length for *_, length in runs] == [3, 2, 0]
    assert runs[0][0] == 1


def odds(*guesses: tuple[int, float]) -> tuple[tuple[int, float], ...]:
    return tuple((depth, math.log(chance)) for depth, chance in guesses)


def test_what_a_drafter_believed_says_how_many_guesses_a_floor_would_have_left():
    sure = Step(4, (1, 2, 4), 4, 4, odds((1, 0.8), (2, 0.6), (2, 0.1), (3, 0.5)))
    unsure = Step(4, (2,), 2, 2, odds((1, 0.3), (1, 0.25), (2, 0.05), (2, 0.01)))
    for least, tau, shapes in (
        (0.0, 1 + (3 + 1) / 2, [(3, 5), (3, 5)]),
        (0.2, 1 + (3 + 1) / 2, [(3, 4), (2, 3)]),  # the second round drafts a level to see that nothing is likely there
        (0.4, 1 + (3 + 0) / 2, [(3, 4), (1, 1)]),
        (0.7, 1 + (1 + 0) / 2, [(2, 2), (1, 1)]),
    ):
        assert trial([sure, unsure], Option(DYNAMIC, 5, 3, least)) == Trial(tau, shapes)
    # two guesses: the second round has them at depth 1, and what follows is less likely than both
    assert trial([sure, unsure], Option(DYNAMIC, 3, 3)) == Trial(1 + (2 + 1) / 2, [(2, 3), (2, 3)])
    assert trial([sure, unsure], Option(DYNAMIC, 5, 1)).shapes == [(1, 2), (1, 3)]


def test_rows_side_by_side_wait_for_the_one_that_reads_most():
    each = Trial(2.0, [(1, 2), (3, 4), (2, 7), (1, 1)])
    assert sorted(each.side_by_side(1)) == sorted(each.shapes)
    assert each.side_by_side(4) == each.side_by_side(9) == [(3, 7)]
    assert len(each.side_by_side(3)) == 2


def test_every_chain_and_every_tree_that_has_room_for_its_depth_is_tried():
    assert options({CHAIN: 2, STATIC: 2}, [2, 4], []) == [
        PLAINLY, Option(CHAIN, 2, 1), Option(CHAIN, 3, 2), Option(STATIC, 2, 1), Option(STATIC, 4, 1), Option(STATIC, 4, 2),
    ]  # fmt: skip
    assert options({CHAIN: 1, STATIC: 1}, [2], [CHAIN]) == [
        PLAINLY, *(Option(CHAIN, 2, 1, least) for least in FLOORS), Option(STATIC, 2, 1),
    ]  # fmt: skip


def steady(option: Option, tau: float) -> Trial:
    return Trial(tau, [(option.depth, option.nodes)] * 3)


def test_the_choice_by_hand():
    taus = {PLAINLY: 1.0, Option(CHAIN, 2, 1): 1.3, Option(STATIC, 4, 2): 1.7, Option(STATIC, 8, 3): 2.1}
    point = Point(2, 128, CURVE, DRAFT, other=1.0)
    chosen = choose_at(point, {option: steady(option, tau) for option, tau in taus.items()})
    # 1.3 * 101 / 110 = 1.19; 1.7 * 101 / 133 = 1.29; 2.1 * 101 / 219 = 0.97
    assert chosen.option == Option(STATIC, 4, 2)
    assert chosen.speedup == pytest.approx(1.7 * 101 / 133)
    assert chosen.tokens_per_second == pytest.approx(2 * 1.7 / 0.133)
    assert sentence(chosen) == (
        "batch 2, context 128: a static tree of 4 nodes, 2 deep: tau 1.70, speed-up 1.29, 25.6 tokens/s"
    )


def test_rounds_that_read_less_where_the_drafter_is_unsure_cost_less():
    always, likely = Option(CHAIN, 4, 3), Option(CHAIN, 4, 3, 0.2)
    trials = {
        PLAINLY: steady(PLAINLY, 1.0),
        always: steady(always, 1.5),
        likely: Trial(1.45, [(3, 4), (1, 1), (1, 2)]),
    }
    chosen = choose_at(Point(1, 128, CURVE, DRAFT, other=1.0), trials)
    assert chosen.option == likely
    assert chosen.speedup == pytest.approx(1.45 * 101 / ((135 + 105 + 109) / 3 + 1))
    assert "a chain of 4 nodes, 3 deep, of paths with at least 0.2: tau 1.45" in sentence(chosen)


def test_where_nothing_pays_it_is_plain_decoding_and_says_so():
    taus = {PLAINLY: 1.0, Option(CHAIN, 2, 1): 1.05, Option(STATIC, 8, 3): 1.9}
    trials = {option: steady(option, tau) for option, tau in taus.items()}
    chosen = choose_at(Point(8, 512, CURVE, DRAFT, other=1.0), trials)
    assert (chosen.option, chosen.speedup) == (PLAINLY, 1.0)
    assert sentence(chosen) == "batch 8, context 512: nothing pays, decode plainly (79.2 tokens/s)"


def test_a_choice_is_kept_and_recalled_for_the_nearest_batch_and_context():
    made = [
        Choice(rows, context, Option(STATIC, rows + 1, 1), 1.5, 1.2, 9.0) for rows in (1, 4) for context in (64, 512)
    ]
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
