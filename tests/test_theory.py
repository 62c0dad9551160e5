"""The forecasts, by hand and against rounds that are simulated as each of them assumes."""

import random
from dataclasses import replace

import pytest

from decode.cost import Cost
from decode.explain import choices, explain, losses
from decode.figures import Depth, by_node, depths, steps_of
from decode.theory import (
    Facts,
    knee,
    pass_ms,
    pooled_alpha,
    predictions,
    speedup_of_alpha,
    tau_of_alpha,
    tau_of_rates,
)
from samples import drafted

FACTS = Facts(
    tau=2.0,
    speedup=1.25,
    depths=[Depth(1, 100, 0.6, 0.6, 1.0), Depth(2, 40, 0.5, 0.2, 2 / 3)],
    by_node=[50, 15, 10, 5],
    passes=100,
    round_ms={"draft": 20.0, "verify": 130.0, "accept": 5.0, "keep": 5.0},
    plain_ms={"draft": 0.0, "verify": 98.0, "accept": 1.0, "keep": 1.0},
    widths=[5, 5],
    cost=Cost([1, 4, 6], [100.0, 120.0, 140.0]),
)


def test_one_alpha_by_hand():
    assert tau_of_alpha(0.5, 2) == 1 + 0.5 + 0.25
    assert tau_of_alpha(0.0, 5) == 1.0
    assert tau_of_alpha(1.0, 5) == 6.0
    assert pooled_alpha(FACTS.depths) == pytest.approx((60 + 20) / 140)
    assert pooled_alpha([]) == 0.0


def test_hardware_one_does_not_have_by_hand():
    """70 billion parameters in two bytes each, at 3.35 TB/s and 989 TFLOP/s."""
    once = pass_ms(140e9, 3.35e12, 989e12)
    assert once == pytest.approx(41.8, abs=0.05)
    assert tau_of_alpha(0.8, 5) == pytest.approx(3.69, abs=0.005)
    assert once * (1 + 5 * 0.014) / tau_of_alpha(0.8, 5) == pytest.approx(12.1, abs=0.05)
    assert speedup_of_alpha(0.8, 5, 0.014) == pytest.approx(3.45, abs=0.005)
    assert speedup_of_alpha(0.3, 5, 0.1) == pytest.approx(0.95, abs=0.005)
    flat = knee(3.35e12, 989e12)
    assert flat == pytest.approx(295, abs=0.5)
    assert pass_ms(140e9, 3.35e12, 989e12, nodes=295) == once
    assert pass_ms(140e9, 3.35e12, 989e12, nodes=590) == pytest.approx(2 * once, rel=0.01)


def test_rates_by_hand():
    assert tau_of_rates([0.5, 0.5]) == tau_of_alpha(0.5, 2)
    assert tau_of_rates([0.6, 0.0, 0.9]) == 1.6
    assert tau_of_rates([]) == 1.0


def test_the_three_forecasts_by_hand():
    alpha, rates, costs = predictions(FACTS)
    a = 80 / 140
    assert alpha.tau == pytest.approx(1 + a + a * a)
    assert alpha.speedup == pytest.approx(alpha.tau / (20 / 98 + 1))
    assert rates.tau == costs.tau == pytest.approx(1 + 0.6 + 0.6 * (2 / 3) * 0.5)
    assert rates.speedup == pytest.approx(1.8 * 100 / 160)
    verify = 98 * 130 / 100  # five nodes: midway between four and six
    assert costs.speedup == pytest.approx(1.8 * 100 / (20 + verify + 10))
    for one in (alpha, rates, costs):
        assert one.tau_error == pytest.approx((one.tau - 2.0) / 2.0)
        assert one.speedup_error == pytest.approx((one.speedup - 1.25) / 1.25)


def simulated(rates: list[float], rounds: int, seed: int, limit: int | None = None) -> list[tuple[int, int, int]]:
    """Rounds in which depth k is accepted at `rates[k - 1]`; a text ends after `limit` tokens."""
    chance, turns, left = random.Random(seed), [], limit
    for _ in range(rounds):
        accepted = 0
        while accepted < len(rates) and chance.random() < rates[accepted]:
            accepted += 1
        offered, committed = min(accepted + 1, len(rates)), accepted + 1
        if left is not None:
            accepted, offered, committed = (min(value, left) for value in (accepted, offered, committed))
            left = left - committed or limit
        turns.append((accepted, offered, committed))
    return turns


def test_tau_of_one_alpha_is_that_of_simulated_rounds():
    turns = simulated([0.7] * 4, 40_000, seed=1)
    assert sum(turn[2] for turn in turns) / len(turns) == pytest.approx(tau_of_alpha(0.7, 4), rel=0.01)


@pytest.mark.parametrize("limit", [None, 5])
def test_rates_foretell_endless_text_even_from_texts_that_are_cut(limit):
    rates = [0.7, 0.4, 0.8]
    found = depths(steps_of([drafted([simulated(rates, 40_000, seed=2, limit=limit)], 1.0)]))
    assert [depth.alpha for depth in found] == pytest.approx(rates, abs=0.015)
    assert tau_of_rates([depth.alpha * depth.reach for depth in found]) == pytest.approx(tau_of_rates(rates), rel=0.01)


# ---- words


def words(facts: Facts) -> str:
    return " ".join(explain(facts))


def test_a_drafter_that_pays_is_told_so_with_its_break_even():
    text = words(FACTS)
    assert "A round yields 2.00 tokens and takes the time of 1.60 plain passes: it pays" in text
    assert "the break-even tau is 1.60" in text
    assert "Drafting takes 12% of a round, 0.20 plain passes." in text
    assert "Reading 5 nodes costs 1.30 times reading one" in text
    assert "What costs most: verification is not parallel (0.32 plain passes a round" in text
    assert "slow" not in text


SLOW = {
    "It is slow because the drafter is too slow": ({"draft": 150.0, "verify": 110.0}, 2.0),
    "It is slow because verification is not parallel": ({"draft": 5.0, "verify": 240.0}, 2.0),
    "It is slow because acceptance is too low": ({"draft": 60.0, "verify": 180.0}, 1.3),
}


@pytest.mark.parametrize("sentence", SLOW)
def test_the_losing_term_is_named(sentence):
    times, tau = SLOW[sentence]
    facts = replace(FACTS, tau=tau, round_ms=FACTS.round_ms | times)
    text = words(facts)
    assert sentence in text
    assert "it does not pay" in text
    assert f"break-even tau is {facts.round / facts.plain:.2f}" in text
    assert sum(losses(facts).values()) == pytest.approx(facts.round - facts.plain)


def test_smaller_trees_are_judged_by_the_nodes_that_they_would_have_kept():
    """A tree cut down to its first nodes accepts of every path what is left of it."""
    steps = steps_of([drafted([simulated([0.7, 0.4, 0.8], 500, seed=3)], 1.0, nodes=3)])
    facts = replace(FACTS, by_node=by_node(steps), passes=len(steps))
    found = choices(facts)
    assert [choice.nodes for choice in found] == [2, 3, 4]
    for choice in found:
        kept = sum(len([node for node in step.path if node < choice.nodes]) + 1 for step in steps)
        assert choice.tau == pytest.approx(kept / len(steps))
        price = 20 + 10 + 98 * facts.cost.at(choice.nodes) / 100
        assert choice.speedup == pytest.approx(choice.tau * 100 / price)


def test_rounds_that_proposed_less_would_read_no_more_in_a_smaller_tree():
    facts = replace(FACTS, widths=[2, 2, 2, 5])
    for choice, wide in zip(choices(facts), choices(FACTS), strict=True):
        small, large = facts.verify(2), facts.verify(choice.nodes)
        assert choice.tau == wide.tau
        assert choice.tau * facts.plain / choice.speedup == pytest.approx(
            facts.round_ms["draft"] + facts.other + (3 * small + large) / 4
        )


def test_the_best_tree_is_named_or_the_tau_it_would_need():
    assert "By the curve a tree of its first 4 nodes of 5 does best: tau 1.75, speed-up 1.19" in words(FACTS)
    dear = replace(FACTS, round_ms=FACTS.round_ms | {"draft": 150.0})
    best = max(choices(dear), key=lambda choice: choice.speedup)
    price = (150 + 10 + 0.98 * dear.cost.at(best.nodes)) / 100
    assert f"By the curve no tree of up to 5 nodes pays: the first {best.nodes} do best" in words(dear)
    assert f"would pay from a tau of {price:.2f} on" in words(dear)
    assert "proposed nothing" in words(replace(FACTS, by_node=[]))
