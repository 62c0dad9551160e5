"""EAGLE-3 against the numbers of its reference implementations (tests/golden/README.md), and its own promises."""

import functools
import itertools
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig

from conftest import tiny_config
from eagles import VOCABULARY, WIDTH, shaken, small_batch, small_ends
from models.drafter import Budget, Committed, Drafter, FeatureBatch
from models.eagle3 import Eagle3
from models.ends import Ends, layer_weights
from models.fused import default_taps
from models.layer import Rotary, layer_config, rope_of
from models.questions import Questions
from models.sampling import Voice
from models.shelf import Card, load_drafter, read_card, save_drafter
from models.source import from_random
from models.stack import Growing

GOLDEN = Path(__file__).parent / "golden"
TTT = ["eagle3_ttt", "eagle3_fcnorm_ttt"]
SPECULATORS = [*(f"eagle3_speculators_out{out}_res{res}" for out in (0, 1) for res in (0, 1)), "eagle31_speculators"]
TREES = ["eagle_tree_d2_k3_t8", "eagle_tree_d4_k5_t20", "eagle_tree_d7_k10_t60"]


class Case(NamedTuple):
    """One golden file, and a drafter with its weights."""

    told: dict[str, Any]
    tensors: dict[str, Tensor]
    drafter: Eagle3

    def expected(self, name: str) -> Tensor:
        return self.tensors[f"expected.{name}"]


@functools.cache
def case(name: str, head: str = "") -> Case:
    with safe_open(GOLDEN / f"{name}.safetensors", "pt") as file:
        told = {key: json.loads(value) for key, value in file.metadata().items()}
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
    config, flags = told["config"], told.get("flags", {})
    draft = {key.removeprefix("draft."): value for key, value in tensors.items() if key.startswith("draft.")}
    embedding = draft.pop("embed_tokens.weight")
    draft.pop("verifier_norm.weight", None), draft.pop("verifier_lm_head.weight", None)
    whole = tensors.get("target_lm_head", embedding)
    ends = Ends(embedding, whole, None, LlamaConfig(**config | {"num_hidden_layers": 9}))
    drafter = Eagle3(
        ends,
        vocabulary=len(draft["d2t"]),
        fc_norm=any(key.startswith("fc_norm") for key in draft),
        feedback="after_norm" if flags.get("norm_output") else "before_norm",
        residual="after_norm" if flags.get("norm_before_residual") else "before_norm",
    )
    ours = {key.replace("layers.0.", "midlayer."): value for key, value in draft.items()}
    ours = {f"vocabulary.{key}" if key in ("d2t", "t2d") else key: value for key, value in ours.items()}
    drafter.load_state_dict(ours)
    drafter.vocabulary.check()
    return Case(told, tensors, drafter)


def batch_of(given: Case) -> FeatureBatch:
    """The golden inputs, every position of one document."""
    ids, features, mask, last = (
        given.tensors[key].reshape(-1, 24, *given.tensors[key].shape[given.tensors["input_ids"].dim() :])
        for key in ("input_ids", "aux_hidden_states", "loss_mask", "last_hidden_state")
    )
    position = torch.arange(24).expand_as(ids)
    return FeatureBatch(ids, mask.bool(), torch.zeros_like(ids), position, features, last)


def divergence(logits: Tensor, target: Tensor) -> Tensor:
    """Sum of KL(target || draft) over rows of logits over the same tokens."""
    return (target.softmax(-1) * (target.log_softmax(-1) - logits.log_softmax(-1))).sum()


def unrolled(given: Case, steps: int) -> list[Tensor]:
    """Logits [B, T, V] of every step at every position."""
    batch = batch_of(given)
    everywhere = [torch.ones_like(batch.input_ids, dtype=torch.bool)] * steps
    states = given.drafter.unroll(batch, Questions.where(everywhere))
    return [given.drafter.logits(state).unflatten(0, batch.input_ids.shape) for state in states]


@pytest.mark.parametrize("name", TTT)
def test_the_logits_of_all_steps_are_specforges(name):
    for step, logits in enumerate(unrolled(case(name), 7)):
        torch.testing.assert_close(logits, case(name).expected(f"logits.{step}"), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", TTT)
def test_losses_and_gradients_are_specforges_under_its_weighting(name):
    given = case(name)
    batch, drafter = batch_of(given), given.drafter
    drafter.zero_grad()
    ids, rows, time = drafter.vocabulary.ids, *batch.input_ids.shape
    room = torch.zeros(rows, 7)
    heard = torch.cat([batch.last_hidden[:, 1:], torch.zeros(rows, 8, batch.last_hidden.shape[2])], dim=1)
    target = heard @ given.tensors["target_lm_head"].T
    weight = torch.cat([batch.loss_mask, room], dim=1) * drafter.vocabulary.t2d[target.argmax(-1)]
    losses = []
    for step, logits in enumerate(unrolled(given, 7)):
        here = slice(step, step + time)
        cross = -(target[:, here][..., ids].softmax(-1) * logits.log_softmax(-1)).sum(-1)
        losses.append((weight[:, here] * cross).sum() / (rows * time))
    torch.testing.assert_close(torch.stack(losses), given.expected("loss_per_step"), atol=1e-5, rtol=1e-5)
    sum(0.8**step * loss for step, loss in enumerate(losses)).backward()
    for key, parameter in drafter.named_parameters():
        torch.testing.assert_close(parameter.grad, given.expected(f"grad.{key}"), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", SPECULATORS)
def test_the_logits_of_both_kinds_of_feedback_and_residual_are_speculators(name):
    for step, logits in enumerate(unrolled(case(name), 4)):
        wanted = case(name).expected(f"logits.{step}")
        torch.testing.assert_close(logits[0, : len(wanted)], wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", SPECULATORS)
def test_the_loss_of_their_own_weighting_is_speculators(name):
    """All steps weigh the same, and each is the mean KL divergence over the marked positions it still has."""
    given = case(name)
    ids, mask = given.drafter.vocabulary.ids, given.tensors["loss_mask"].bool()
    heard = torch.nn.functional.rms_norm(
        given.tensors["last_hidden_state"], (64,), given.tensors["draft.verifier_norm.weight"], 1e-5
    )
    target = (heard @ given.tensors["draft.verifier_lm_head.weight"].T)[1:]
    assert len(ids) == target.shape[1]
    total = torch.zeros(())
    for step, logits in enumerate(unrolled(given, 4)):
        taught, marked = logits[0, : 23 - step], mask[1 + step :]
        total += divergence(taught[marked], target[step:][marked]) / (marked.sum() + 1e-5)
    torch.testing.assert_close(total, given.expected("loss")[0], atol=1e-5, rtol=1e-5)


def branches(tokens: list[int], parents: list[int]) -> list[list[int]]:
    """What every node spells from the root on: they list nodes as they were made, we list the likeliest first."""
    spelled: list[list[int]] = []
    for token, parent in zip(tokens, parents, strict=True):
        spelled.append([*(spelled[parent] if parent >= 0 else []), token])
    return sorted(spelled)


@pytest.mark.parametrize("name", TREES)
def test_two_rounds_of_dynamic_trees_are_eagles(name):
    given = case(name)
    how = given.told["tree"]
    # their depth counts levels after the first
    budget = Budget(nodes=how["total_token"], depth=how["depth"] + 1, branch=how["top_k"])
    state = given.drafter.begin(1, 64)
    ids, bonus = given.tensors["round1.context_ids"], given.tensors["round1.bonus"][0]
    path = given.tensors["round2.accepted_tokens"][None]
    rounds = [(ids, given.tensors["round1.features"], bonus, True)]
    rounds += [(path, given.tensors["round2.features"], given.tensors["round2.bonus"][0], False)]
    for number, (tokens, features, root, fresh) in enumerate(rounds, start=1):
        length = torch.tensor([tokens.shape[1]])
        said = Committed(tokens, length, features, torch.empty(0), root, torch.tensor([fresh]))
        tree = given.drafter.propose(said, state, budget, Voice())
        theirs = [given.expected(f"round{number}.{part}").tolist() for part in ("tokens", "parents")]
        assert branches(tree.tokens[0].tolist(), tree.parents[0].tolist()) == branches(*theirs), number
        assert sorted(tree.depth[0].tolist()) == sorted(given.expected(f"round{number}.depth").tolist())


STEPS = 3
KNOBS: list[dict[str, Any]] = [
    {},
    {"fc_norm": True, "feedback": "after_norm"},
    {"residual": "after_norm", "embedding": "trained", "head": "frozen"},
    {"layers": 3, "window": 5, "stretch": 2.0},
    {"width": 8, "head": "random", "embedding": "trained"},
    {"taps": (0, 3, 8), "layers": 2},
]


def small(**knobs: Any) -> Eagle3:
    """A drafter of random weights for a target of 8 layers."""
    return shaken(Eagle3(small_ends(), steps=STEPS, vocabulary=8, **knobs))


def state_by_hand(drafter: Eagle3, given: FeatureBatch, row: int, at: int, steps: int) -> Tensor:
    """The state after `steps` steps from one position: its document up to there is read alone, and the steps go on as
    a chain, all of it again for every step."""
    places = ((given.document[row] == given.document[row, at]) & (torch.arange(22) <= at)).nonzero()[:, 0]
    tokens, features = given.input_ids[row, places + 1], drafter.fused(given.features[row, places])
    state = torch.empty(0)
    for step in range(steps):
        if step:
            fed = drafter.norm(state) if drafter.feedback == "after_norm" else state
            tokens = torch.cat([tokens, given.input_ids[row, at + 1 + step].view(1)])
            features = torch.cat([features, fed[None]])
        state = last_of(drafter, tokens, features, len(places))
    return drafter.norm(state)


def last_of(drafter: Eagle3, tokens: Tensor, features: Tensor, known: int) -> Tensor:
    """The state above the last of the elements, of which the first `known` are the target's; a window hides only those."""
    count = len(tokens)
    position = torch.arange(count)[None]
    seen = torch.ones(1, count, count, dtype=torch.bool).tril()
    if drafter.window is not None:
        seen &= (position[0][:, None] - position[0] < drafter.window) | (position[0] >= known)
    (pair, base), state = drafter.inputs(tokens[None], features[None]), torch.empty(0)
    for layer in drafter.stack:
        if layer is not drafter.midlayer:
            pair, base = layer.inputs(state)
        state = layer.through((pair, base), position, seen)
    return state[0, -1]


@pytest.mark.parametrize("knobs", KNOBS, ids=str)
def test_the_loss_is_that_of_every_guess_made_one_by_one(knobs):
    drafter, given = small(**knobs).eval(), small_batch(taps=3)
    ids = drafter.vocabulary.ids.tolist()
    total, seen, hits, shared = torch.zeros(()), [0] * STEPS, [0] * STEPS, [0.0] * STEPS
    for row, at, step in itertools.product(range(2), range(22), range(STEPS)):
        ahead = range(at + 1, at + 3 + step)
        if ahead[-1] >= 22 or len({given.document[row, there].item() for there in (at, *ahead)}) > 1:
            continue
        if not all(given.loss_mask[row, there] for there in ahead):
            continue
        logits = drafter.logits(state_by_hand(drafter, given, row, at, step + 1))
        target = drafter.ends.head @ given.last_hidden[row, ahead[-2]]
        seen[step] += 1
        hits[step] += ids[int(logits.argmax())] == int(given.input_ids[row, ahead[-1]])
        shared[step] += torch.minimum(target.softmax(-1)[ids], logits.softmax(-1)).sum().item()
        total = total + 0.8**step * target.softmax(-1)[ids].sum() * divergence(logits, target[ids])
    assert min(seen) > 3
    loss = drafter.training_loss(given)
    assert loss.total.item() == pytest.approx(total.item(), rel=1e-4)
    assert loss.seen.tolist() == seen == drafter.counts(given.loss_mask, given.document).tolist()
    assert loss.hits.tolist() == hits
    assert loss.overlap.tolist() == pytest.approx(shared, rel=1e-4)
    total.backward()
    wanted = {name: parameter.grad for name, parameter in drafter.named_parameters()}
    drafter.zero_grad()
    taught = drafter.train().training_loss(given)
    assert taught.total.item() == pytest.approx(total.item(), rel=1e-4)
    taught.total.backward()
    for name, parameter in drafter.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-3, atol=1e-4, msg=name)


def test_positions_that_are_not_asked_only_lend_their_first_keys():
    drafter, given = small(), small_batch(taps=3)
    rows = []
    drafter.midlayer.mlp.register_forward_hook(lambda _, args, __: rows.append(len(args[0])))
    drafter.training_loss(given)
    assert rows == drafter.counts(given.loss_mask, given.document).tolist()
    assert rows[0] < given.input_ids.numel()


def test_the_card_says_what_the_switches_mean():
    plain, switched = small().meaning(), small(fc_norm=True, feedback="after_norm", residual="after_norm").meaning()
    assert "reads the state before the final norm" in plain["feedback"]
    assert "reads the state after the final norm" in switched["feedback"]
    assert "RMSNorm of its own" in switched["fc_norm"]
    assert all(plain[knob] != switched[knob] for knob in ("fc_norm", "feedback", "residual"))


@pytest.mark.parametrize("knobs", KNOBS, ids=str)
def test_decoding_computes_what_training_taught(knobs):
    """Fed with the text itself, the drafter's steps behind any prefix say what the unrolled ones said there."""
    drafter, given = small(**knobs).eval(), small_batch(taps=3)
    length = 22
    everywhere = [torch.ones_like(given.input_ids, dtype=torch.bool)] * STEPS
    given.document[:] = 0
    given.position[:] = torch.arange(length)
    taught = [
        drafter.logits(state).unflatten(0, (2, length)) for state in drafter.unroll(given, Questions.where(everywhere))
    ]
    state, start = drafter.begin(2, 40), torch.zeros(2, dtype=torch.long)
    for taken in ([7, 4], [1, 3], [4, 2], [2, 5]):  # tokens committed by each row in each round
        count = torch.tensor(taken)
        index = (start[:, None] + torch.arange(max(taken))).clamp(max=length - 1)
        rows = torch.arange(2)[:, None]
        bonus = given.input_ids[torch.arange(2), start + count]
        said = Committed(
            given.input_ids[rows, index], count, given.features[rows, index], torch.empty(0), bonus, start == 0
        )
        growing = Growing(drafter, said, state)
        at = start + count - 1
        for step in range(STEPS):
            token = given.input_ids[torch.arange(2), at + 1 + step][:, None]
            found = growing(token, torch.zeros_like(token))[:, 0]
            torch.testing.assert_close(found, taught[step][torch.arange(2), at], atol=1e-4, rtol=1e-4)
        start = start + count


def test_a_reseated_row_forgets_who_sat_there_and_an_empty_one_learns_nothing():
    drafter, given = small().eval(), small_batch(taps=3)
    rows = torch.arange(2)

    def said(count: list[int], fresh: list[bool]) -> Committed:
        length = torch.tensor(count)
        return Committed(
            given.input_ids[:, :6], length, given.features[:, :6], torch.empty(0), given.input_ids[rows, 6], torch.tensor(fresh)
        )  # fmt: skip

    budget = Budget(nodes=9, depth=3, branch=3)
    new = drafter.propose(said([6, 6], [True, True]), drafter.begin(2, 40), budget, Voice())
    state = drafter.begin(2, 40)
    drafter.propose(said([5, 3], [True, True]), state, budget, Voice())
    drafter.propose(said([0, 2], [False, False]), state, budget, Voice())
    assert state.length == [5, 5]
    again = drafter.propose(said([6, 6], [True, True]), state, budget, Voice())
    assert torch.equal(again.tokens, new.tokens)
    assert torch.equal(again.parents, new.parents)


def test_room_for_pairs_grows_and_keeps_what_it_held():
    drafter, given = small().eval(), small_batch(taps=3)
    said = Committed(
        given.input_ids, torch.tensor([20, 18]), given.features, torch.empty(0), given.input_ids[:, 0], torch.ones(2).bool()
    )  # fmt: skip
    trees = []
    for capacity in (1, 400):
        state = drafter.begin(2, capacity)
        for fresh in (True, False):
            said = replace(said, fresh=torch.tensor([fresh] * 2))
            trees.append(drafter.propose(said, state, Budget(nodes=30, depth=5, branch=5), Voice()).tokens)
    assert torch.equal(trees[0], trees[2])
    assert torch.equal(trees[1], trees[3])


def test_by_default_a_low_a_middle_and_a_high_layer_are_tapped():
    assert default_taps(32) == (2, 16, 29)
    assert default_taps(30) == (2, 15, 27)
    assert [default_taps(depth) for depth in (2, 3, 7)] == [(0, 1, 2), (1, 2, 3), (5, 6, 7)]


def test_the_output_matrix_starts_as_the_targets_rows():
    drafter = small()
    fresh = Eagle3(drafter.ends, vocabulary=8)
    fresh.learn_vocabulary(torch.arange(VOCABULARY) % 7)
    assert torch.equal(fresh.lm_head.weight, drafter.ends.head[fresh.vocabulary.ids])


def test_a_head_is_the_targets_rows_and_learns_or_does_not_or_starts_anew():
    ends = small().ends
    heads = {head: Eagle3(ends, vocabulary=8, head=head).lm_head.weight for head in ("rows", "frozen", "random")}
    assert torch.equal(heads["rows"], ends.head[:8])
    assert torch.equal(heads["frozen"], ends.head[:8])
    assert not torch.equal(heads["random"], ends.head[:8])
    assert [weight.requires_grad for weight in heads.values()] == [True, False, True]


def test_an_embedding_of_its_own_starts_as_the_targets_scale_included_and_learns():
    ends = small().ends
    ends.embedding_scale = 4.0
    drafter = Eagle3(ends, vocabulary=8, embedding="trained")
    tokens = torch.tensor([3, 1])
    torch.testing.assert_close(drafter.embedded(tokens), ends.embed(tokens))
    assert drafter.embed_tokens.weight.requires_grad
    assert not [name for name in Eagle3(ends, vocabulary=8).state_dict() if "embed" in name]


def test_the_rotary_settings_are_the_targets_in_either_spelling():
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 64}
    today = LlamaConfig(rope_parameters={"rope_theta": 500000.0, **scaling})
    before = SimpleNamespace(rope_theta=500000.0, rope_scaling={**scaling, "type": "llama3"})
    assert rope_of(before) == rope_of(today) == {"rope_theta": 500000.0, **scaling}
    assert rope_of(SimpleNamespace(rope_theta=1e6)) == {"rope_theta": 1e6, "rope_type": "default"}
    assert rope_of(SimpleNamespace()) is None
    read = LlamaConfig.from_dict({"model_type": "llama", "rope_theta": 500000.0, "rope_scaling": scaling})
    assert rope_of(read) == rope_of(today)
    kinds = {
        "sliding_attention": {"rope_theta": 1.0},
        "full_attention": {"rope_theta": 2.0, "partial_rotary_factor": 0.5},
    }
    assert rope_of(SimpleNamespace(rope_parameters=kinds)) == {"rope_theta": 2.0}


def test_a_stretch_divides_positions():
    config = layer_config(small().ends.config, WIDTH)
    heads, position = torch.randn(1, 4, 3, 4), torch.tensor([[8, 20, 400]])
    torch.testing.assert_close(Rotary(config, 4.0)(heads, position), Rotary(config, 1.0)(heads, position // 4))


def test_it_can_start_as_the_targets_layer_above_the_last_tap():
    folder = from_random(tiny_config("llama", num_hidden_layers=9))
    theirs = load_file(folder / "model.safetensors")
    drafter = Eagle3(Ends.load(folder), start="target")
    drafter.inherit(partial(layer_weights, folder))
    features = torch.randn(2, 3 * 32)
    assert torch.equal(drafter.fused(features), features[:, -32:])
    pair, _ = drafter.midlayer.inputs(features[:, :32], features[:, 32:64])
    part = {name.removeprefix("model.layers.6."): value for name, value in theirs.items()}
    normed = [
        torch.nn.functional.rms_norm(half, (32,), part["input_layernorm.weight"], 1e-6)
        for half in features[:, :64].split(32, dim=1)
    ]
    keys = drafter.midlayer.self_attn.k_proj(pair)
    torch.testing.assert_close(keys, sum(half @ part["self_attn.k_proj.weight"].T for half in normed))
    assert torch.equal(drafter.midlayer.mlp.down_proj.weight, part["mlp.down_proj.weight"])
    assert torch.equal(drafter.norm.weight, part["model.norm.weight"])


def test_a_target_whose_layers_are_no_llama_layers_is_no_start():
    folder = from_random(tiny_config("phi3", num_hidden_layers=9))
    with pytest.raises(ValueError, match=r"start=target: layer 6 of this target has no self_attn.q_proj.weight"):
        Eagle3(Ends.load(folder), start="target").inherit(partial(layer_weights, folder))


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"start": "here"}, "start=here"),
        ({"feedback": "raw"}, "feedback=raw"),
        ({"residual": "none"}, "residual=none"),
        ({"vocabulary": VOCABULARY + 1}, f"vocabulary of {VOCABULARY + 1}"),
        ({"head": "tied"}, "head=tied"),
        ({"embedding": "own"}, "embedding=own"),
        ({"layers": 0}, "layers=0"),
        ({"width": 8}, "width=8 is not the target's 16, whose head and embedding do not fit; set head=random"),
        ({"width": 10, "head": "random", "embedding": "trained"}, "width=10 is no multiple of the target's heads"),
        ({"window": 7}, "window=7 would hide the drafter's own 7 guesses"),
        ({"stretch": 0.0}, "stretch=0.0"),
        ({"taps": [2, 5, 9]}, r"taps \[2, 5, 9\]: this target has hidden states 0 to 8"),
    ],
)
def test_a_knob_that_means_nothing_is_refused(knobs, message):
    with pytest.raises(ValueError, match=message):
        Eagle3(small().ends, **knobs)


def kept(drafter: Eagle3, folder: Path, taps: list[int] | None = None, knob: list[int] | None = None) -> Path:
    """`drafter` on the shelf, under a card that may list other taps and have them among its knobs."""
    told = {"steps": STEPS, "vocabulary": 8, "taps": knob}
    target = {"name": "x", "fingerprint": "x", "width": WIDTH, "vocabulary": VOCABULARY}
    save_drafter(drafter, Card("models.eagle3.Eagle3", told, target, taps or list(drafter.taps)), folder)
    return folder


def loaded(folder: Path) -> Drafter:
    return load_drafter(folder, read_card(folder), small().ends, torch.float32)


def spoil(drafter: Eagle3, how: str) -> None:
    vocabulary = drafter.vocabulary
    ids = vocabulary.ids
    if how == "ids":
        vocabulary.d2t.copy_(ids)
    elif how == "order":
        vocabulary.d2t.copy_(ids.flip(0) - torch.arange(8))
    elif how == "range":
        vocabulary.d2t[-1] += VOCABULARY
    elif how == "count":
        vocabulary.t2d[:] = True
    else:
        spare = int((~vocabulary.t2d).nonzero()[0])
        vocabulary.t2d[ids[0]], vocabulary.t2d[spare] = False, True


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("ids", "d2t holds the target's token ids instead of offsets"),
        ("order", "d2t is not sorted"),
        ("range", "d2t leads out of range"),
        ("count", f"t2d marks {VOCABULARY} tokens and d2t lists 8"),
        ("other", "t2d does not mark token"),
    ],
)
def test_a_draft_vocabulary_that_is_none_is_refused(how, message, tmp_path):
    drafter = small()
    kept(drafter, tmp_path)
    assert torch.equal(loaded(tmp_path).vocabulary.ids, drafter.vocabulary.ids)
    spoil(drafter, how)
    with pytest.raises(ValueError, match=f"model.safetensors: {message}"):
        loaded(kept(drafter, tmp_path))


def test_a_fusion_of_other_taps_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"fc.weight has shape \[16, 48\] instead of \[16, 32\]"):
        loaded(kept(small(), tmp_path / "a", taps=[2, 4], knob=[2, 4]))
    with pytest.raises(ValueError, match=r"lists taps \[4, 2, 5\] and its knobs mean \[2, 4, 5\]"):
        loaded(kept(small(), tmp_path / "b", taps=[4, 2, 5]))
    with pytest.raises(ValueError, match=r"taps \[4, 2, 5\] must be named once each, in ascending order"):
        loaded(kept(small(), tmp_path / "c", taps=[4, 2, 5], knob=[4, 2, 5]))
