"""EAGLE-1 against transformers' own layer, position by position, and its own promises."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from eagles import VOCABULARY, WIDTH, shaken, small_batch, small_ends
from models.drafter import Committed, FeatureBatch
from models.eagle import Eagle
from models.layer import layer_config
from models.questions import Questions
from models.stack import Growing
from reference import eagle_by_hand, marked_batch, smooth_l1_by_hand


def small(cap: float | None = None, **knobs: Any) -> Eagle:
    """A drafter of random weights on a target whose head has a bias and may have a soft cap."""
    return shaken(Eagle(small_ends(bias=True, cap=cap), **knobs))


def foretold_by_hand(drafter: Eagle, given: FeatureBatch, row: int, at: int) -> Tensor:
    """The state foretold from one position, whose document is read alone."""
    places = ((given.document[row] == given.document[row, at]) & (torch.arange(22) <= at)).nonzero()[:, 0]
    read = torch.cat([drafter.ends.embed(given.input_ids[row, places + 1]), given.last_hidden[row, places]], dim=-1)
    config = layer_config(drafter.ends.config, WIDTH)
    config._attn_implementation = "eager"
    return eagle_by_hand(drafter.state_dict(), config, read)[-1]


def asked_by_hand(given: FeatureBatch) -> list[tuple[int, int]]:
    """Rows and positions from which a state is foretold that says a token of the target's own."""
    found = []
    for row, at in itertools.product(range(2), range(20)):
        one = {int(given.document[row, there]) for there in (at, at + 1, at + 2)}
        if len(one) == 1 and given.loss_mask[row, at + 1] and given.loss_mask[row, at + 2]:
            found.append((row, at))
    return found


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("knobs", [{}, {"fc_bias": False}])
def test_the_loss_is_that_of_every_state_foretold_alone_by_transformers_layer(knobs, cap):
    drafter, given = small(cap, noise=0.0, **knobs), small_batch(taps=0)
    total, hits, shared = torch.zeros(()), 0, 0.0
    for row, at in asked_by_hand(given):
        state, true = foretold_by_hand(drafter, given, row, at), given.last_hidden[row, at + 1]
        raw = [drafter.ends.head @ one + drafter.ends.bias for one in (state, true)]
        ours, theirs = [(one if cap is None else cap * torch.tanh(one / cap)).log_softmax(-1) for one in raw]
        total += smooth_l1_by_hand(state.tolist(), true.tolist())
        total += 0.1 * (theirs.exp() * (theirs - ours)).sum()  # cross-entropy less the target's own entropy
        hits += int(ours.argmax()) == int(given.input_ids[row, at + 2])
        shared += torch.minimum(ours.exp(), theirs.exp()).sum().item()
    count = len(asked_by_hand(given))
    assert count > 8
    for mode in (drafter.eval(), drafter.train()):
        loss = mode.training_loss(given)
        assert loss.total.item() == pytest.approx(total.item(), rel=1e-4)
        assert loss.seen.tolist() == [count] == mode.counts(given.loss_mask, given.document).tolist()
    loss = drafter.eval().training_loss(given)
    assert loss.hits.tolist() == [hits]
    assert loss.overlap.tolist() == pytest.approx([shared], rel=1e-4)


def test_its_tensors_have_the_names_of_published_checkpoints():
    names = {f"layers.0.self_attn.{part}_proj.weight" for part in "qkvo"}
    names |= {f"layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
    names |= {"layers.0.post_attention_layernorm.weight", "fc.weight"}
    assert set(small(fc_bias=False).state_dict()) == names
    assert set(small().state_dict()) == {*names, "fc.bias"}


def test_noise_is_uniform_shrinks_with_length_and_comes_from_the_generator_that_a_checkpoint_keeps():
    drafter = small(noise=0.1)
    tokens = 256
    batch = marked_batch(["0" * 64 + "1" * 192, "0" * tokens], ["x" * tokens] * 2, VOCABULARY, 64, taps=0, seed=3)
    kept = torch.get_rng_state()
    noise = drafter._noise(batch)
    for part, length in ((noise[0, :64], 64), (noise[0, 64:], 192), (noise[1], 256)):
        most = 0.1 * 512 / length
        assert part.abs().max() <= most
        assert part.std().item() == pytest.approx(most / math.sqrt(3), rel=0.03)
        assert abs(part.mean().item()) < 0.05 * most
    torch.set_rng_state(kept)
    assert torch.equal(drafter._noise(batch), noise)


def test_noise_changes_what_is_learned_from_but_not_what_is_graded():
    drafter, given = small(), small_batch(taps=0)
    losses = [drafter.training_loss(given).total.item() for _ in range(2)]
    assert losses[0] != losses[1]
    graded = [drafter.eval().training_loss(given).total.item() for _ in range(2)]
    assert graded[0] == graded[1]


@pytest.mark.parametrize("knobs", [{}, {"window": 4}, {"stretch": 4.0}])
def test_decoding_reads_its_own_states_as_if_they_were_the_targets(knobs):
    """After each round's pairs, guess by guess: what a text of true states and then foretold ones would say next."""
    drafter, given = small(**knobs).eval(), small_batch(taps=0)
    state, start = drafter.begin(1, 40), 0
    for count in (7, 1, 3):
        index = torch.arange(start, start + count)
        said = Committed(
            given.input_ids[1:, index], torch.tensor([count]), torch.empty(1, count, 0), given.last_hidden[1:, index],
            given.input_ids[1:, start + count], torch.tensor([start == 0])
        )  # fmt: skip
        growing, start = Growing(drafter, said, state), start + count
        read = given.last_hidden[1, :start]
        for step in range(3):
            token = given.input_ids[1:, start + step]
            found = growing(token[None], torch.zeros_like(token)[None])[0, 0]
            state_now = last_state(drafter, given.input_ids[1, 1 : start + step + 1], read)
            torch.testing.assert_close(found, drafter.says(state_now), atol=1e-4, rtol=1e-4)
            read = torch.cat([read, state_now[None]])


def last_state(drafter: Eagle, tokens: Tensor, read: Tensor) -> Tensor:
    """The state above the last of a text's pairs, the foretold ones at the end in full sight of each other."""
    batch = FeatureBatch(
        torch.cat([tokens[:1], tokens, tokens[-1:]])[None],
        torch.ones(1, len(read) + 2, dtype=torch.bool),
        torch.zeros(1, len(read) + 2, dtype=torch.long),
        torch.arange(len(read) + 2)[None],
        torch.empty(1, len(read) + 2, 0),
        torch.cat([read, read.new_zeros(2, WIDTH)])[None],
    )
    where = torch.zeros(1, len(read) + 2, dtype=torch.bool)
    where[0, len(read) - 1] = True
    return drafter.foretold(batch, Questions.where([where]))[0]


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"noise": -1.0}, "noise=-1.0"),
        ({"cross": -1.0}, "cross=-1.0"),
        ({"window": 1}, "window=1 would hide"),
        ({"stretch": 0.5}, "stretch=0.5"),
        ({"vocabulary": VOCABULARY + 1}, f"vocabulary of {VOCABULARY + 1}"),
    ],
)
def test_a_knob_that_means_nothing_is_refused(knobs, message):
    with pytest.raises(ValueError, match=message):
        small(**knobs)
