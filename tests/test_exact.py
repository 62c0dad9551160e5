"""Decoding is lossless: the distribution of what it writes, counted out over small vocabularies, is the target's own."""

import math

import pytest

import faults
from conftest import Notes
from decode.accept import Typical, accept
from laws import (
    BUSH,
    CHAIN,
    DEEP,
    FORK,
    ONE,
    TREE,
    TWICE,
    WIDE,
    Decoder,
    Grown,
    Law,
    Propose,
    Rule,
    World,
    doubled,
    drawn,
    drawn_ragged,
    drawn_where_parents_please,
    dynamic,
    echoed,
    exhausted,
    likely,
    own_law,
    ragged,
    top_picks,
)
from models.sampling import Sampling
from models.tree import Path

pytestmark = pytest.mark.exact

BOUND = 1e-9  # of total variation, in fp64
SAMPLINGS = [Sampling(1.0), Sampling(1.3, top_k=3), Sampling(1.0, top_p=0.7), Sampling(0.6, top_k=4, top_p=0.9)]
SHAPES = {"chain": CHAIN, "wide": WIDE, "deep": DEEP, "tree": TREE}


def lawful(decoder: Decoder, length: int) -> bool:
    """What every rule and proposal must pass, and every planted fault must not."""
    return decoder.error(length) < BOUND


def check(notes: Notes, kind: str, decoder: Decoder, length: int = 3) -> None:
    assert notes.error(kind, decoder.error(length)) < BOUND
    assert decoder.longest > 1  # something was accepted


@pytest.mark.parametrize("sampling", [Sampling(), *SAMPLINGS], ids=str)
@pytest.mark.parametrize("propose", [top_picks, doubled, echoed, ragged, dynamic, likely])
def test_certain_proposals_leave_the_law_of_the_text_alone(notes: Notes, propose: Propose, sampling: Sampling) -> None:
    decoder = Decoder(propose, [TREE, TREE, FORK], sampling)
    assert notes.error("top picks", decoder.error(3)) < BOUND
    assert decoder.longest > 1 or (propose is ragged and not sampling.temperature)  # there no used node is right


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0), Sampling(0.8, top_k=3, top_p=0.9)], ids=str)
@pytest.mark.parametrize("size", [3, 4, 6])
def test_certain_proposals_of_every_shape_over_every_vocabulary(
    notes: Notes, size: int, sampling: Sampling, shape: str
) -> None:
    length = 2 if size == 6 else 3
    check(notes, "top picks", Decoder(top_picks, [SHAPES[shape], SHAPES[shape], FORK], sampling, World(size)), length)


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.9, top_k=3)], ids=str)
def test_a_chain_of_certain_proposals_leaves_the_law_of_four_tokens_alone(notes: Notes, sampling: Sampling) -> None:
    decoder = Decoder(top_picks, [CHAIN, CHAIN, CHAIN, ONE], sampling)
    check(notes, "top picks", decoder, 4)
    assert decoder.longest == 3


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize(
    ("propose", "shape"),
    [(drawn, CHAIN), (drawn, BUSH), (drawn_ragged, BUSH), (drawn_where_parents_please, BUSH)],
    ids=["chain", "bush", "ragged bush", "bush that its parents prune"],
)
def test_drawn_proposals_leave_the_law_of_the_text_alone(
    notes: Notes, propose: Propose, shape: list[Path], sampling: Sampling
) -> None:
    check(notes, "drawn", Decoder(propose, [shape, FORK, ONE], sampling))


@pytest.mark.parametrize(
    ("size", "shape", "length"),
    [(3, CHAIN, 3), (3, DEEP, 3), (3, BUSH, 3), (4, WIDE, 3), (4, DEEP, 3), (6, CHAIN, 2), (6, FORK, 2)],
    ids=str,
)
@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.7, top_p=0.9)], ids=str)
def test_drawn_proposals_of_every_shape_over_every_vocabulary(
    notes: Notes, size: int, shape: list[Path], length: int, sampling: Sampling
) -> None:
    check(notes, "drawn", Decoder(drawn, [shape, FORK, ONE], sampling, World(size)), length)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("shape", [CHAIN, BUSH, TWICE], ids=["chain", "bush", "two parents"])
@pytest.mark.parametrize("spoken", [(0, 1, 2, 3, 4), (0, 2, 3), (4,)], ids=["all", "3", "1"])
@pytest.mark.parametrize("same", [False, True], ids=["by branch", "by depth"])
def test_trees_that_drafters_draw_leave_the_law_of_the_text_alone(
    notes: Notes, same: bool, spoken: tuple[int, ...], shape: list[Path], sampling: Sampling
) -> None:
    propose = Grown(sampling, spoken, same)
    decoder = Decoder(propose, [shape, FORK, ONE], sampling)
    assert notes.error("drawn by drafters", decoder.error(3)) < BOUND
    assert decoder.longest > 1 or len(spoken) < 5
    assert propose.doubled or shape is not TWICE
    assert propose.short or len(spoken) > 1 or shape is CHAIN


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize(
    ("size", "shape"), [(4, BUSH), (4, TREE[:5]), (5, WIDE), (5, DEEP), (6, BUSH), (6, WIDE)], ids=str
)
def test_larger_drawn_trees_leave_the_law_of_the_text_alone(
    notes: Notes, size: int, shape: list[Path], sampling: Sampling
) -> None:
    check(notes, "drawn, larger", Decoder(drawn, [shape, BUSH, ONE], sampling, World(size)))


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("propose", [top_picks, doubled, echoed, ragged, dynamic, likely])
@pytest.mark.parametrize("size", [4, 5, 6])
def test_certain_trees_round_after_round_leave_the_law_of_four_tokens_alone(
    notes: Notes, size: int, propose: Propose, sampling: Sampling
) -> None:
    check(notes, "top picks, larger", Decoder(propose, [TREE, TREE, TREE, FORK], sampling, World(size)), 4)


def test_a_drafter_that_runs_out_of_tokens_leaves_the_law_of_the_text_alone(notes: Notes) -> None:
    check(notes, "drawn", Decoder(exhausted, [FORK], Sampling(1.0)))


@pytest.mark.parametrize("propose", [top_picks, drawn])
@pytest.mark.parametrize("fault", ["no_fault", *faults.RULES])
def test_a_fault_of_the_rule_is_caught(
    notes: Notes, fault: str, propose: Propose, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the trees and by the bound that the real rule passes above."""
    decoder = Decoder(propose, [BUSH, FORK, ONE], Sampling(1.0), World(4))
    getattr(faults, fault)(monkeypatch)
    assert lawful(decoder, 3) == (fault == "no_fault")
    if fault != "no_fault":
        notes.lines.append(f"caught by counting: {fault}, {propose.__name__}: total variation {decoder.error(3):.3f}")


@pytest.mark.parametrize("propose", [faults.one_sided, faults.peeking])
def test_a_fault_of_the_drafter_is_caught(notes: Notes, propose: Propose) -> None:
    decoder = Decoder(propose, [BUSH, FORK, ONE], Sampling(1.0), World(4))
    assert not lawful(decoder, 3)
    notes.lines.append(f"caught by counting: {propose.__name__}: total variation {decoder.error(3):.3f}")


def test_a_truncation_that_peeks_writes_085_where_the_target_says_07() -> None:
    """The drafter draws either token with 0.5 and tries only the first: 0.5 + 0.5 * 0.7, and the other half goes to nobody."""
    honest, peeking = (
        Decoder(propose, [ONE], Sampling(1.0), faults.Coin(2)).law(1) for propose in (drawn, faults.peeking)
    )
    assert honest == pytest.approx({(0,): 0.7, (1,): 0.3}, abs=1e-12)
    assert peeking == pytest.approx({(0,): 0.85, (1,): 0.15}, abs=1e-12)


def typical_rule(typical: Typical) -> Rule:
    return lambda tree, logits, voice: accept(tree, logits, voice, typical)


def divergence(ours: Law, theirs: Law) -> float:
    """KL divergence of `ours` from `theirs`, in nats."""
    return sum(chance * math.log(chance / theirs[text]) for text, chance in ours.items() if chance)


@pytest.mark.parametrize("propose", [top_picks, drawn])
def test_typical_acceptance_is_lossy_and_less_so_the_more_it_asks(notes: Notes, propose: Propose) -> None:
    sampling, world, apart = Sampling(1.0), World(4), []
    for typical in (Typical(), Typical(0.3, 0.9), Typical(0.9, 5.0)):
        decoder = Decoder(propose, [FORK, BUSH, ONE], sampling, world, typical_rule(typical))
        apart.append(divergence(decoder.law(3), own_law(3, sampling, world)))
        notes.lines.append(f"{typical}, {propose.__name__}: KL of three tokens from the target {apart[-1]:.3f} nats")
    assert apart[0] > apart[1] > apart[2] > 0
    assert apart[0] > 0.1


@pytest.mark.parametrize("propose", [top_picks, drawn])
def test_typical_acceptance_that_nothing_satisfies_is_plain_decoding(propose: Propose) -> None:
    decoder = Decoder(propose, [FORK, BUSH, ONE], Sampling(1.0), World(4), typical_rule(Typical(1.0, 5.0)))
    assert lawful(decoder, 3)
    assert decoder.longest == 1
