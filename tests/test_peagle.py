"""P-EAGLE: one pass over all elements against every element on its own, and what is drawn to teach."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from eagles import VOCABULARY, WIDTH, shaken, small_batch, small_ends
from models.drafter import Budget, Committed, FeatureBatch, asked
from models.layer import PlainLayer, layer_config
from models.peagle import PEagle
from models.sampling import Voice
from models.tree import chain

DEPTHS = 3


def small(**knobs: Any) -> PEagle:
    """A drafter of random weights for a target of 8 layers."""
    return shaken(PEagle(small_ends(), **{"depths": DEPTHS, "vocabulary": 8, "layers": 2} | knobs))


def logits_by_hand(drafter: PEagle, given: FeatureBatch, row: int, at: int, depth: int) -> Tensor:
    """[V] of one element: the pairs of its document up to its anchor, then `depth` masks, one causal text."""
    places = ((given.document[row] == given.document[row, at]) & (torch.arange(22) <= at)).nonzero()[:, 0]
    tokens = torch.cat([given.input_ids[row, places + 1], torch.full((depth,), drafter.mask_token)])
    taps = torch.cat([given.features[row, places], drafter.mask_hidden[0].expand(depth, -1)])
    position = torch.arange(len(tokens))[None]
    seen = torch.ones(1, len(tokens), len(tokens), dtype=torch.bool).tril()
    if drafter.window is not None:
        pairs = torch.arange(len(tokens)) < len(places)
        seen &= ~pairs | (position[0][:, None] - position[0] < drafter.window)
    state = drafter._through(tokens[None], drafter.fused(taps)[None], position, seen)
    return drafter.says(state[0, -1])


@pytest.mark.parametrize("knobs", [{}, {"residual": "after_norm", "layers": 1}, {"embedding": "trained", "window": 4}])
def test_the_loss_is_that_of_every_element_read_alone(knobs):
    drafter, given = small(**knobs).eval(), small_batch(taps=3)
    ids = drafter.vocabulary.ids.tolist()
    total, seen, hits, shared = torch.zeros(()), [0] * DEPTHS, [0] * DEPTHS, [0.0] * DEPTHS
    for row, at, depth in itertools.product(range(2), range(22), range(DEPTHS)):
        ahead = range(at + 1, at + 3 + depth)
        if ahead[-1] >= 22 or len({given.document[row, there].item() for there in (at, *ahead)}) > 1:
            continue
        if not all(given.loss_mask[row, there] for there in ahead):
            continue
        logits = logits_by_hand(drafter, given, row, at, depth)
        target = drafter.ends.head @ given.last_hidden[row, ahead[-2]]
        seen[depth] += 1
        hits[depth] += ids[int(logits.argmax())] == int(given.input_ids[row, ahead[-1]])
        shared[depth] += torch.minimum(target.softmax(-1)[ids], logits.softmax(-1)).sum().item()
        said, drafted = target.softmax(-1)[ids], logits.softmax(-1)
        total = total + (said * (said / (said.sum() * drafted)).log()).sum()
    assert min(seen) > 3
    loss = drafter.training_loss(given)
    assert loss.total.item() == pytest.approx(total.item(), rel=1e-4)
    assert loss.seen.tolist() == seen == drafter.counts(given.loss_mask, given.document).tolist()
    assert loss.hits.tolist() == hits
    assert loss.overlap.tolist() == pytest.approx(shared, rel=1e-4)
    total.backward()
    wanted = {name: parameter.grad for name, parameter in drafter.named_parameters()}
    drafter.zero_grad()
    drafter.training_loss(given).total.backward()
    for name, parameter in drafter.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-3, atol=1e-4, msg=name)


def everywhere() -> list[Tensor]:
    """Where a long text in four rows is asked."""
    mask = torch.rand(4, 200, generator=torch.Generator().manual_seed(1)) < 0.9
    return list(asked(mask, torch.zeros(4, 200, dtype=torch.long), 6))


def test_every_draw_holds_the_deeper_ones_and_is_as_large_as_the_shares_say():
    drafter, where = small(depths=6, keep=0.7, least=0.2), everywhere()
    drawn = drafter.drawn(where)
    assert torch.equal(drawn[0], where[0])
    for depth, (mask, every) in enumerate(zip(drawn, where, strict=True)):
        share = max(0.7**depth, 0.2)
        assert share <= mask.sum() / every.sum() < share + 1 / every.sum()
        assert not (mask & ~every).any()
        assert depth == 0 or not (mask & ~drawn[depth - 1]).any()


def test_what_is_drawn_comes_from_the_generator_that_a_checkpoint_keeps_and_all_places_have_their_turn():
    drafter, where = small(depths=6), everywhere()
    kept = torch.get_rng_state()
    first = drafter.drawn(where)
    torch.set_rng_state(kept)
    assert all(torch.equal(one, other) for one, other in zip(first, drafter.drawn(where), strict=True))
    assert not torch.equal(drafter.drawn(where)[3], first[3])
    times = sum(drafter.drawn(where)[3].long() for _ in range(60))[where[3]]
    assert times.min() > 0
    assert abs(times.float().mean().item() / 60 - 0.7**3) < 0.01


def test_while_it_learns_it_counts_what_it_draws_and_grades_no_more():
    drafter, given = small(), small_batch(taps=3)
    loss = drafter.training_loss(given)
    assert loss.seen.tolist() == drafter.counts(given.loss_mask, given.document).tolist()
    assert (loss.seen <= drafter.eval().counts(given.loss_mask, given.document)).all()
    assert loss.seen[-1] < drafter.counts(given.loss_mask, given.document)[-1]


@pytest.mark.parametrize("knobs", [{}, {"window": 4}, {"stretch": 2.0}])
def test_decoding_computes_what_training_taught(knobs):
    """Two rows that commit unequal numbers of tokens, round after round, guess what the text's elements say."""
    drafter, given = small(**knobs).eval(), small_batch(taps=3)
    given.document[:], given.position[:] = 0, torch.arange(22)
    where = [torch.ones(2, 22, dtype=torch.bool)] * DEPTHS
    taught = [drafter.logits(states).unflatten(0, (2, 22)) for states in drafter.states(given, where)]
    state, start, rows = drafter.begin(2, 9), torch.zeros(2, dtype=torch.long), torch.arange(2)
    for taken in ([7, 4], [1, 3], [4, 2], [0, 5]):
        count = torch.tensor(taken)
        index = (start[:, None] + torch.arange(max(taken))).clamp(max=21)
        bonus = given.input_ids[rows, start + count]
        said = Committed(
            given.input_ids[rows[:, None], index], count, given.features[rows[:, None], index], torch.empty(0), bonus, start == 0
        )  # fmt: skip
        found = drafter.guesses(said, state, DEPTHS)
        at = start + count - 1
        for row in rows[count > 0]:
            for depth in range(DEPTHS):
                wanted = taught[depth][row, at[row]]
                torch.testing.assert_close(found[row, depth], wanted, atol=1e-4, rtol=1e-4)
        start = start + count


def test_a_layer_above_the_first_is_transformers_own():
    config = layer_config(small().ends.config, WIDTH)
    config._attn_implementation = "eager"
    ours, theirs = PlainLayer(config), LlamaDecoderLayer(config, 0)
    for parameter in ours.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    theirs.load_state_dict(ours.state_dict())
    states, position = torch.randn(2, 7, WIDTH), torch.arange(7).expand(2, -1)
    mask = torch.full((2, 1, 7, 7), -torch.inf).triu(1)
    turns = LlamaRotaryEmbedding(config)(states, position)
    wanted = theirs(states, attention_mask=mask, position_ids=position, position_embeddings=turns)
    seen = torch.ones(2, 7, 7, dtype=torch.bool).tril()
    torch.testing.assert_close(ours.through(ours.inputs(states), position, seen), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"depths": 0}, "depths=0"),
        ({"keep": 0.0}, r"keep=0\.0"),
        ({"least": 2.0}, r"least=2\.0"),
        ({"mask_token": VOCABULARY}, "mask_token=20 is no token of the target's 20"),
        ({"window": 3}, "window=3 would hide the drafter's own 3 guesses"),
        ({"layers": 0}, "layers=0"),
    ],
)
def test_a_knob_that_means_nothing_is_refused(knobs, message):
    with pytest.raises(ValueError, match=message):
        small(**knobs)


def test_a_tree_deeper_than_its_guesses_is_refused():
    drafter, given = small().eval(), small_batch(taps=3)
    said = Committed(
        given.input_ids[:, :5], torch.tensor([5, 5]), given.features[:, :5], torch.empty(0), given.input_ids[:, 5], torch.ones(2).bool()
    )  # fmt: skip
    with pytest.raises(ValueError, match="the tree is 4 deep and this drafter guesses 3 tokens"):
        drafter.propose(said, drafter.begin(2, 30), Budget(tuple(chain(4)), 5, 4), Voice())
