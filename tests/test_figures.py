"""Every figure, against rounds counted by hand."""

import random
import statistics

import pytest

from decode.figures import (
    Sample,
    Tally,
    bootstrap,
    by_node,
    counters,
    depths,
    looped,
    round_ms,
    speedup,
    speedup_per_prompt,
    speedup_with_prompts,
    steps_of,
    tau,
    tau_per_prompt,
)
from samples import SAMPLES, TURNS, drafted, plain

STEPS = steps_of([sample.drafted for sample in SAMPLES])


def test_tau_is_tokens_per_pass_whatever_was_cut():
    assert tau(Tally.of(SAMPLES[:1])) == 6 / 3
    assert tau(Tally.of(SAMPLES[1:2])) == 6 / 2
    assert tau(Tally.of(SAMPLES)) == (6 + 6 + 1 + 6) / (3 + 2 + 1 + 3)
    assert tau(Tally.of([Sample("a", plain([7], 1.0), plain([7], 1.0))])) == 1.0


def test_tau_per_prompt_is_the_mean_of_the_prompts_that_had_rounds():
    assert tau_per_prompt(Tally.of(SAMPLES)).item() == pytest.approx(statistics.mean([6 / 3, 6 / 2, 1 / 1, 6 / 3]))


def test_speed_up_is_tokens_per_second_over_plain_decoding():
    assert speedup(Tally.of(SAMPLES[:2])).item() == pytest.approx((12 / 3.0) / (12 / 7.0))
    assert speedup(Tally.of(SAMPLES)).item() == pytest.approx((19 / 7.0) / (19 / 12.0))
    assert speedup_with_prompts(Tally.of(SAMPLES)).item() == pytest.approx((24 / 9.0) / (24 / 13.0))


def test_speed_up_per_prompt_is_the_mean_of_the_prompts_ratios():
    """Two prompts of the third sample were decoded side by side and share its ratio; the fourth had no rounds."""
    ratios = [3.0 / 2.0, 4.0 / 1.0, 5.0 / 4.0, 5.0 / 4.0]
    assert speedup_per_prompt(Tally.of(SAMPLES)).item() == pytest.approx(statistics.mean(ratios))


def test_alpha_is_of_those_tried_at_a_depth_the_share_accepted():
    found = depths(STEPS)
    assert [depth.depth for depth in found] == [1, 2, 3, 4]
    for depth in found:
        tried = [turn for turn in TURNS if turn[1] >= depth.depth]
        hits = sum(turn[0] >= depth.depth for turn in TURNS)
        assert depth.tried == len(tried)
        assert depth.alpha == hits / len(tried)
        assert depth.joint == hits / len(TURNS)
    assert depths(steps_of([plain([5], 1.0)])) == []


def test_reach_is_how_often_a_round_that_could_go_on_had_a_guess():
    first, second, third, fourth = (depth.reach for depth in depths(STEPS))
    assert first == 9 / 9
    assert second == 5 / 5  # the round (1, 1, 1) ended the text: nobody knows
    assert third == 3 / 3  # so did both of (2, 2, 2)
    assert fourth == 1 / 1
    stuck = steps_of([drafted([[(1, 1, 2), (1, 1, 2), (1, 2, 2), (2, 2, 3)]], 1.0)])
    assert [depth.reach for depth in depths(stuck)] == [1.0, 2 / 4]


def test_rates_times_reach_give_the_share_of_rounds_that_got_so_deep_where_no_text_ends():
    rng = random.Random(1)
    endless = []
    for _ in range(200):
        accepted = rng.randrange(4)
        endless.append((accepted, min(3, accepted + rng.randrange(2)), accepted + 1))
    arrived = 1.0
    for depth in depths(steps_of([drafted([endless], 1.0)])):
        arrived *= depth.alpha * depth.reach
        assert arrived == pytest.approx(depth.joint)


def test_nodes_are_counted_by_how_often_each_was_accepted():
    assert by_node(STEPS) == [sum(turn[0] >= node for turn in TURNS) for node in (1, 2, 3, 4, 5)]
    assert by_node([]) == []


def test_the_counters_are_those_that_vllm_keeps():
    """As its SpecDecodingStats observes: one draft for every proposal that is not empty, and its first accepted positions."""
    drafts = tokens = accepted = 0
    per_position = [0] * 4
    for turn in TURNS:
        drafts, tokens, accepted = drafts + 1, tokens + 5, accepted + turn[0]
        for position in range(turn[0]):
            per_position[position] += 1
    assert counters([*STEPS, *steps_of([plain([9], 1.0)])]) == {
        "num_drafts": drafts,
        "num_draft_tokens": tokens,
        "num_accepted_tokens": accepted,
        "num_accepted_tokens_per_pos": per_position,
    }


def test_a_round_takes_its_mean_by_phase():
    spent = round_ms([sample.drafted for sample in SAMPLES])
    assert spent == pytest.approx(
        {"draft": 7000 / 8 / 9, "verify": 7000 / 2 / 9, "accept": 7000 / 8 / 9, "keep": 7000 / 4 / 9}
    )


def looped_by_hand(texts: list[list[int]]) -> float:
    repeated = total = 0
    for text in texts:
        for at in range(len(text) - 7):
            total += 1
            repeated += any(text[before : before + 8] == text[at : at + 8] for before in range(at))
    return repeated / total if total else 0.0


@pytest.mark.parametrize(
    "texts",
    [[[1] * 20], [list(range(30))], [[1, 2, 3] * 9, list(range(9))], [[1] * 7], [], [list(range(8)), list(range(8))]],
)
def test_the_looped_share_is_that_of_eights_that_stood_before(texts):
    assert looped(texts) == pytest.approx(looped_by_hand(texts))


def test_the_interval_holds_the_value_and_is_that_of_resampled_prompts():
    rng = random.Random(5)
    many = [
        Sample(
            "a",
            drafted([[(rng.randrange(4), 4, rng.randrange(1, 5)) for _ in range(9)]], rng.uniform(1, 2)),
            plain([30], 3.0),
        )
        for _ in range(25)
    ]
    tally = Tally.of(many)
    for measured in (tau, tau_per_prompt, speedup, speedup_per_prompt):
        figure = bootstrap(tally, measured)
        assert figure.low < figure.value == measured(tally).item() < figure.high
        drawn = [measured(Tally.of([many[rng.randrange(25)] for _ in range(25)])).item() for _ in range(1000)]
        low, *_, high = statistics.quantiles(drawn, n=40)
        width = high - low
        assert (figure.low, figure.high) == pytest.approx((low, high), abs=0.15 * width)
        assert bootstrap(tally, measured) == figure
    alone = bootstrap(Tally.of(many[:1]), tau)
    assert alone.low == alone.value == alone.high


def test_a_resample_of_prompts_without_rounds_does_not_spoil_the_interval():
    figure = bootstrap(Tally.of([SAMPLES[0], SAMPLES[3]]), tau)
    assert (figure.low, figure.value, figure.high) == (2.0, 2.0, 2.0)


def test_two_drafters_of_the_same_prompts_are_compared_prompt_by_prompt():
    """One that is a fifth better on every prompt is so certainly, however much prompts differ."""
    rng = random.Random(2)
    lengths = [rng.randrange(2, 9) for _ in range(12)]

    def tally_of(committed: int) -> Tally:
        rows = [drafted([[(committed - 1, committed - 1, committed)] * 10 * count], 1.0) for count in lengths]
        return Tally.of([Sample("one", row, plain([5], 1.0)) for row in rows])

    figure = bootstrap(tally_of(6), tau, over=tally_of(5))
    assert (figure.value, figure.low, figure.high) == pytest.approx((1.2, 1.2, 1.2))
