"""Why a drafter pays or does not, in words: which term of the balance loses, and what would have to change."""

from collections import Counter
from dataclasses import dataclass

from decode.theory import Facts


@dataclass(frozen=True)
class Choice:
    """A tree cut down to its first nodes, as the curve and the acceptance of this run judge it."""

    nodes: int  # root included
    tau: float
    speedup: float


def explain(facts: Facts) -> list[str]:
    """Sentences on the balance of a round: what it yields, what it costs, which term loses, what would pay."""
    return [balance(facts), *terms(facts), verdict(facts), better_tree(facts)]


def balance(facts: Facts) -> str:
    """Tau against the price of a round."""
    price = facts.round / facts.plain
    outcome = "it pays" if facts.tau > price else "it does not pay"
    return f"A round yields {facts.tau:.2f} tokens and takes the time of {price:.2f} plain passes: {outcome}, and the break-even tau is {price:.2f}."


def terms(facts: Facts) -> list[str]:
    """Draft, verification and the rest, one sentence each."""
    width = max(facts.widths)
    grown = facts.cost.at(width) / facts.cost.at(1)
    first = facts.depths[0].joint if facts.depths else 0.0
    return [
        f"Drafting takes {facts.round_ms['draft'] / facts.round:.0%} of a round, {facts.round_ms['draft'] / facts.plain:.2f} plain passes.",
        f"Reading {width} nodes costs {grown:.2f} times reading one on this machine; parallel verification would cost 1.00.",
        f"The first guess is right in {first:.0%} of rounds, and a round gets {sum(facts.by_node) / facts.passes:.2f} guesses accepted.",
    ]


def losses(facts: Facts) -> dict[str, float]:
    """Milliseconds by which each term makes a round longer than a plain one."""
    return {
        "the drafter is too slow": facts.round_ms["draft"],
        "verification is not parallel": facts.round_ms["verify"] - facts.plain_ms["verify"],
        "accepting and keeping take too long": facts.other - facts.plain_ms["accept"] - facts.plain_ms["keep"],
    }


def verdict(facts: Facts) -> str:
    """The losing term: the largest cost if the drafter would pay without it, otherwise acceptance."""
    name, loss = max(losses(facts).items(), key=lambda item: item[1])
    without = facts.tau * facts.plain / (facts.round - loss)
    told = f"{name} ({loss / facts.plain:.2f} plain passes a round; without them the speed-up would be {without:.2f})"
    if facts.tau * facts.plain >= facts.round:
        return f"What costs most: {told}."
    if without > 1:
        return f"It is slow because {told}."
    return f"It is slow because acceptance is too low: at a tau of {facts.tau:.2f} not even the largest cost alone decides, which is that {told}."


def choices(facts: Facts) -> list[Choice]:
    """What the first n nodes of the tree would have yielded, and by the curve cost; drafting is taken to cost the same.

    A parent comes before its children, so the first nodes are a tree, and what it accepts is the part of each accepted
    path that lies in it. A round that proposed less reads no more than it did.
    """
    found, tau = [], 1.0
    widths = Counter(facts.widths)
    for node, hits in enumerate(facts.by_node, start=1):
        tau += hits / facts.passes
        verify = sum(count * facts.verify(min(width, node + 1)) for width, count in widths.items()) / widths.total()
        price = facts.round_ms["draft"] + verify + facts.other
        found.append(Choice(node + 1, tau, tau * facts.plain / price))
    return found


def better_tree(facts: Facts) -> str:
    """The tree size that would do best by the curve, and whether it would pay."""
    tried = choices(facts)
    if not tried:
        return "The drafter proposed nothing, so no tree size can be judged."
    best = max(tried, key=lambda choice: choice.speedup)
    if best.speedup > 1:
        return f"By the curve a tree of its first {best.nodes} nodes of {tried[-1].nodes} does best: tau {best.tau:.2f}, speed-up {best.speedup:.2f}."
    price = best.tau / best.speedup
    return f"By the curve no tree of up to {tried[-1].nodes} nodes pays: the first {best.nodes} do best with tau {best.tau:.2f} and speed-up {best.speedup:.2f}, and would pay from a tau of {price:.2f} on."
