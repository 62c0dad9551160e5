"""Medusa heads: head k at t is asked about token t + 1 + k, of one turn, and about nothing else."""

import itertools
import shutil
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig

import models.losses
from conftest import tiny_config
from decode.accept import Accepted, Typical, accept
from decode.engine import generate
from models.drafter import Budget, Committed, FeatureBatch, Plain
from models.ends import Ends
from models.losses import Guess
from models.medusa import Medusa, Residual
from models.sampling import Sampling, Voice
from models.source import from_random
from models.target import Target, load_target
from models.tree import TokenTree, ordered_paths, parents_of
from reference import marked_batch

B, T, D, V, K = 3, 24, 8, 20, 3
DECAY = 0.8
# who is in which row: two documents and padding, one document, one document and padding
DOCUMENTS = ["0" * 9 + "1" * 11 + "-" * 4, "0" * 24, "0" * 17 + "-" * 7]
# where the target speaks; turns of many lengths, down to one token, up to the edge of documents and rows
SPOKEN = ["..xxxx.xxxx.xxxxxxxx....", "xxxxxx.xx..x.xxx...xxxxx", "....xx..xxxxxxxx........"]


def ends(bias: bool = False, **config: float) -> Ends:
    generator = torch.Generator().manual_seed(7)
    embedding, head = torch.randn(V, D, generator=generator), torch.randn(V, D, generator=generator)
    return Ends(embedding, head, torch.randn(V, generator=generator) if bias else None, LlamaConfig(**config))


def medusa(vocabulary: int | None = None, **knobs: object) -> Medusa:
    """A drafter that is no longer the identity."""
    torch.manual_seed(3)
    drafter = Medusa(ends(), heads=K, vocabulary=vocabulary, decay=DECAY, **knobs)
    drafter.learn_vocabulary(torch.tensor([5, 0, 9, 9, 1, 0, 7, 0, 0, 2] * 2))
    for parameter in drafter.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return drafter


def batch() -> FeatureBatch:
    return marked_batch(DOCUMENTS, SPOKEN, V, width=D, taps=0, seed=1)


class Asked(NamedTuple):
    """One question: where it is asked, what was said, and from where the target said it."""

    row: int
    at: int
    label: int
    teacher: int


def asked_by_hand(given: FeatureBatch, head: int) -> list[Asked]:
    """The questions of head 1, 2, ..., found position by position."""
    found = []
    for row in range(B):
        for at in range(T):
            ahead = range(at + 1, at + 1 + head + 1)
            if ahead[-1] >= T:
                continue
            speaks = all(given.loss_mask[row, there] for there in ahead)
            together = all(given.document[row, there] == given.document[row, at] for there in ahead)
            if speaks and together:
                found.append(Asked(row, at, int(given.input_ids[row, ahead[-1]]), ahead[-1] - 1))
    return found


def draft_by_hand(drafter: Medusa, head: int, hidden: Tensor) -> Tensor:
    """Logits over the draft vocabulary, from the formula."""
    for block in drafter.blocks[head - 1]:
        inner = block.linear.weight @ hidden + block.linear.bias
        hidden = hidden + inner * torch.sigmoid(inner)
    ids = drafter.draft_ids
    shared = drafter.ends.head if ids is None else drafter.ends.head[ids]
    return (drafter.lm_heads[head - 1].weight if len(drafter.lm_heads) else shared) @ hidden


def loss_by_hand(drafter: Medusa, given: FeatureBatch) -> tuple[Tensor, list[int], list[int], list[float]]:
    """Loss, positions, hits and overlap, one question after the other."""
    ids = list(range(V)) if drafter.draft_ids is None else drafter.draft_ids.tolist()
    total, seen, hits, shared = torch.zeros(()), [0] * K, [0] * K, [0.0] * K
    for head in range(1, K + 1):
        for row, at, label, teacher in asked_by_hand(given, head):
            draft = draft_by_hand(drafter, head, given.last_hidden[row, at]).softmax(0)
            target = (drafter.ends.head @ given.last_hidden[row, teacher]).softmax(0)
            reached = target[ids] / target[ids].sum()
            if drafter.objective.soft:
                total = total + DECAY ** (head - 1) * target[ids].sum() * (reached * (reached / draft).log()).sum()
            elif label in ids:
                total = total - DECAY ** (head - 1) * draft[ids.index(label)].log()
            seen[head - 1] += 1
            hits[head - 1] += ids[int(draft.argmax())] == label
            shared[head - 1] += sum(min(target[token].item(), draft[place].item()) for place, token in enumerate(ids))
    return total, seen, hits, shared


def gradients(drafter: Medusa) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in drafter.named_parameters()}


KNOBS = [
    {"head": head, "loss": loss, "vocabulary": vocabulary, "layers": layers}
    for head, layers in (("own", 1), ("shared", 2))
    for loss in ("ce", "kl")
    for vocabulary in (None, 7)
]
every_kind = pytest.mark.parametrize("knobs", KNOBS, ids=lambda knobs: "-".join(str(value) for value in knobs.values()))


def test_the_conversations_of_this_file_ask_enough_questions():
    questions = [asked_by_hand(batch(), head) for head in range(1, K + 1)]
    assert [len(one) for one in questions] == [30, 21, 15]
    assert any(not batch().loss_mask[row, at] for row, at, *_ in questions[0])  # the last token of a prompt
    assert {row for row, *_ in questions[-1]} == set(range(B))
    assert batch().loss_mask[0, 8:10].all()  # two documents meet in the middle of what is said


@every_kind
def test_the_loss_is_that_of_every_question_asked_one_by_one(knobs):
    drafter, given = medusa(**knobs).eval(), batch()
    loss = drafter.training_loss(given)
    total, seen, hits, shared = loss_by_hand(drafter, given)
    assert loss.total.item() == pytest.approx(total.item(), rel=1e-4)
    assert loss.seen.tolist() == seen
    assert loss.hits.tolist() == hits
    assert loss.overlap.tolist() == pytest.approx(shared, rel=1e-4)
    assert drafter.counts(given.loss_mask, given.document).tolist() == seen
    drafter.train()
    taught = drafter.training_loss(given)
    assert taught.total.item() == pytest.approx(total.item(), rel=1e-4)
    taught.total.backward()
    found = gradients(drafter)
    drafter.zero_grad()
    loss_by_hand(drafter, given)[0].backward()
    for name, gradient in gradients(drafter).items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-4, msg=name)


@every_kind
def test_what_is_not_asked_about_takes_no_part(knobs):
    drafter, given = medusa(**knobs), batch()
    whole = drafter.training_loss(given).total
    used = torch.zeros(B, T, dtype=torch.bool)
    for head in range(1, K + 1):
        for row, at, _, teacher in asked_by_hand(given, head):
            used[row, at] = True
            used[row, teacher] |= drafter.objective.soft
    assert 0 < used.sum() < B * T
    given.last_hidden = given.last_hidden.masked_fill(~used[..., None], torch.nan).requires_grad_()
    loss = drafter.training_loss(given).total
    loss.backward()
    assert loss.item() == whole.item()
    assert all(gradient.isfinite().all() for gradient in gradients(drafter).values())
    assert not given.last_hidden.grad[~used].any()


@pytest.mark.parametrize("row", ["-" * T, "0" * T])
def test_a_batch_without_questions_has_a_loss_of_nothing_and_finite_gradients(row):
    drafter, given = medusa(), batch()
    given.loss_mask[:] = False
    given.document[:] = -1 if row[0] == "-" else 0
    loss = drafter.training_loss(given)
    loss.total.backward()
    assert loss.total.item() == 0.0
    assert loss.seen.tolist() == [0] * K
    assert all(not gradient.any() for gradient in gradients(drafter).values())


@every_kind
def test_loss_in_chunks_is_the_loss_in_one(knobs, monkeypatch):
    made = []
    for few in (4096, 4):
        monkeypatch.setattr(models.losses, "CACHED", 0)
        monkeypatch.setattr(models.losses, "FEWEST", few)
        drafter = medusa(**knobs)
        loss = drafter.training_loss(batch())
        loss.total.backward()
        made.append([loss.total.detach(), loss.hits, *gradients(drafter).values()])
    for whole, parts in zip(*made, strict=True):
        torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-5)


def test_in_chunks_few_logits_exist_at_a_time(monkeypatch):
    monkeypatch.setattr(models.losses, "CACHED", 0)
    monkeypatch.setattr(models.losses, "FEWEST", 2)
    rows = []
    made = Guess.__init__
    monkeypatch.setattr(
        Guess, "__init__", lambda self, logits, *rest: rows.append(len(logits)) or made(self, logits, *rest)
    )
    medusa().training_loss(batch()).total.backward()
    assert max(rows) == 2


def test_a_new_block_is_the_identity():
    hidden = torch.randn(5, D)
    assert torch.equal(Residual(D)(hidden), hidden)


@pytest.mark.parametrize("head", ["own", "shared"])
@pytest.mark.parametrize("vocabulary", [None, 7])
def test_a_new_drafter_says_what_the_target_says(head, vocabulary):
    target = ends(final_logit_softcapping=3.0, logit_scale=0.5)
    drafter = Medusa(target, heads=K, head=head, vocabulary=vocabulary)
    drafter.learn_vocabulary(torch.arange(V).flip(0))
    hidden = torch.randn(5, D)
    for k in range(K):
        said = drafter.head_logits(k, drafter.blocks[k](hidden))
        torch.testing.assert_close(said, target.logits(hidden, drafter.draft_ids))
    if head == "own":
        assert torch.equal(drafter.lm_heads[0].weight, target.head if vocabulary is None else target.head[:7])


def test_every_head_and_layer_has_weights_of_its_own():
    drafter = Medusa(ends(), heads=3, layers=2)
    assert len(list(drafter.parameters())) == 3 * (2 * 2 + 1)
    drafter.blocks[1][0].linear.bias.data += 1
    drafter.lm_heads[1].weight.data += 1
    hidden = torch.randn(5, D)
    said = [drafter.head_logits(k, drafter.blocks[k](hidden)) for k in range(3)]
    assert torch.equal(said[0], said[2])
    assert not torch.allclose(said[0], said[1])


@pytest.mark.parametrize("vocabulary", [None, 7])
def test_a_shared_head_is_neither_trained_nor_saved(vocabulary):
    shared = ends()
    shared.head = torch.nn.Parameter(shared.head)  # as a target has it
    drafter = Medusa(shared, heads=2, head="shared", vocabulary=vocabulary)
    names = [f"blocks.{k}.0.linear.{part}" for k in range(2) for part in ("weight", "bias")]
    drafter.training_loss(batch()).total.backward()
    assert [name for name, _ in drafter.named_parameters()] == names
    assert set(drafter.state_dict()) == {*names, *(["vocabulary.d2t", "vocabulary.t2d"] if vocabulary else [])}
    assert shared.head.grad is None


def test_a_drafter_that_has_decoded_can_be_taught():
    drafter = medusa(head="shared", vocabulary=7)
    drafter.propose(said(torch.randn(1, 1, D), [1], [0]), None, Budget(), Voice())
    drafter.training_loss(batch()).total.backward()
    assert all(gradient.any() for gradient in gradients(drafter).values())


def test_the_draft_vocabulary_is_what_the_target_says_most():
    counts = torch.tensor([5, 0, 9, 9, 1, 0, 7, 0, 0, 2] * 2)
    drafter = Medusa(ends(), heads=1, vocabulary=7)
    drafter.learn_vocabulary(counts)
    wanted = sorted(sorted(range(V), key=lambda token: (-int(counts[token]), token))[:7])
    ids = [place + int(offset) for place, offset in enumerate(drafter.state_dict()["vocabulary.d2t"])]
    assert ids == wanted == drafter.draft_ids.tolist()
    assert ids == sorted(set(ids))
    assert torch.equal(drafter.lm_heads[0].weight, drafter.ends.head[ids])


def test_a_loaded_drafter_speaks_the_vocabulary_that_was_saved():
    drafter = medusa(vocabulary=7, head="shared")
    drafter.learn_vocabulary(torch.arange(V))
    fresh = Medusa(ends(), heads=K, vocabulary=7, head="shared")
    fresh.load_state_dict(drafter.state_dict())
    hidden = torch.randn(2, D)
    assert torch.equal(fresh.head_logits(0, fresh.blocks[0](hidden)), drafter.head_logits(0, drafter.blocks[0](hidden)))
    assert fresh.draft_ids.tolist() == list(range(13, 20))


def said(hidden: Tensor, length: list[int], bonus: list[int], fresh: bool = False) -> Committed:
    rows, width = hidden.shape[:2]
    return Committed(
        torch.zeros(rows, width, dtype=torch.long),
        torch.tensor(length),
        torch.empty(rows, width, 0),
        hidden,
        torch.tensor(bonus),
        torch.full((rows,), fresh),
    )


@every_kind
def test_a_proposal_holds_the_ranks_of_its_paths(knobs):
    drafter = medusa(**knobs).eval()
    paths = ordered_paths([[0], [2], [0, 1], [2, 0], [0, 1, 3], [0, 1, 0]])
    hidden = torch.randn(2, 4, D)
    tree = drafter.propose(said(hidden, [3, 1], [11, 12]), None, Budget(tuple(paths), nodes=7), Voice())
    assert isinstance(tree, TokenTree)
    assert tree.valid.all()
    assert tree.child_probs is None
    assert tree.parents.tolist() == [parents_of(paths)] * 2
    ids = list(range(V)) if drafter.draft_ids is None else drafter.draft_ids.tolist()
    for row, last in enumerate((2, 0)):
        wanted = [11 + row]
        for path in paths:
            logits = draft_by_hand(drafter, len(path), hidden[row, last])
            wanted.append(ids[int(logits.argsort(descending=True)[path[-1]])])
        assert tree.tokens[row].tolist() == wanted


def test_without_a_tree_the_proposal_is_a_dynamic_one_of_the_heads_probabilities():
    drafter = medusa().eval()
    hidden = torch.randn(1, 1, D)
    tree = drafter.propose(said(hidden, [1], [4]), None, Budget(nodes=6, depth=9, branch=4), Voice())
    likely = [draft_by_hand(drafter, head, hidden[0, 0]).log_softmax(-1) for head in range(1, K + 1)]
    worth = {}
    for depth in range(1, K + 1):
        for path in itertools.product(range(4), repeat=depth):
            places = [int(likely[k].argsort(descending=True)[rank]) for k, rank in enumerate(path)]
            worth[tuple(places)] = sum(likely[k][place].item() for k, place in enumerate(places))
    best = sorted(worth, key=lambda path: -worth[path])[:5]
    found = set()
    for node in range(1, 6):
        path, above = [], node
        while above > 0:
            path, above = [int(tree.tokens[0, above]), *path], int(tree.parents[0, above])
        found.add(tuple(path))
    assert found == set(best)


def test_a_tree_deeper_than_the_heads_is_refused():
    with pytest.raises(ValueError, match=f"the tree is {K + 1} deep and this drafter has {K} heads"):
        medusa().propose(
            said(torch.randn(1, 1, D), [1], [4]),
            None,
            Budget(tuple(ordered_paths([[0] * k for k in range(1, K + 2)]))),
            Voice(),
        )


@pytest.fixture(scope="module")
def zero_likely(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """A target that says token 0 more than any other: where a tree's padding is token 0, it would be accepted."""
    folder = tmp_path_factory.mktemp("zero") / "target"
    shutil.copytree(from_random(tiny_config("llama")), folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][0] *= 4
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return load_target(folder, "zero", dtype="fp32", device="cpu")


def padded(tree: TokenTree, logits: Tensor, voice: Voice, typical: Typical | None = None) -> Accepted:
    """A fault: where the path ends at a leaf and the target says 0 next, the last node is taken for what stands there."""
    right = accept(tree, logits, voice, typical)
    nodes = tree.tokens.shape[1]
    if len(right.paths) > 1 or right.bonus[0] != 0 or nodes - 1 in right.paths[0] or nodes - 1 in tree.parents:
        return right
    return Accepted([[*right.paths[0], nodes - 1]], logits[:, -1].argmax(-1).tolist())


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_padding_is_not_accepted_where_token_0_is_likely(zero_likely, temperature, monkeypatch):
    """Paths of unequal length, in one row and in several: every accepted guess is a node below the one before it."""
    torch.manual_seed(5)
    drafter = Medusa(zero_likely.ends, heads=3)
    trees: list[TokenTree] = []
    propose = drafter.propose
    drafter.propose = lambda *given: trees.append(propose(*given)) or trees[-1]
    prompts = [[5, 6, 7], [9] * 6, [40, 3]]
    budget = Budget(tuple(ordered_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]])), nodes=8)
    sampling, typical = Sampling(temperature, seed=3), Typical() if temperature else None
    run = generate(zero_likely, drafter, prompts, 18, budget, sampling, 1, typical)
    steps = iter(trees)
    for one in run.generations:
        at = 1
        for step in one.steps:
            tree, above = next(steps), 0
            for token, node in zip(one.tokens[at : at + len(step.path)], step.path, strict=True):
                assert (int(tree.tokens[0, node]), int(tree.parents[0, node])) == (token, above)
                above = node
            at += step.committed
    written = [token for one in run.generations for token in one.tokens]
    assert written.count(0) > len(written) / 5
    assert any(one.accepted and max(one.accepted) > 0 for one in run.generations)
    if not temperature:
        plain = [one.tokens for one in generate(zero_likely, Plain(), prompts, 18, Budget(nodes=1)).generations]
        together = generate(zero_likely, drafter, prompts, 18, budget, rows=3)
        assert [one.tokens for one in together.generations] == [one.tokens for one in run.generations] == plain
        monkeypatch.setattr("decode.engine.accept", padded)  # and the check would see it
        faulty = generate(zero_likely, drafter, prompts, 18, budget)
        assert [one.tokens for one in faulty.generations] != plain


def test_ranks_say_which_pick_the_target_spoke():
    drafter, given = medusa(vocabulary=7), batch()
    ids = drafter.draft_ids.tolist()
    wanted: dict[tuple[int, int], list[int]] = {}
    for head in range(1, K + 1):
        for question in asked_by_hand(given, head):
            row, at, *_ = question
            scores = draft_by_hand(drafter, head, given.last_hidden[row, at])
            picks = [ids[place] for place in scores.argsort(descending=True)][:4]
            ranks = wanted.setdefault((row, at), [-1] * K)
            ranks[head - 1] = picks.index(question.label) if question.label in picks else -1
    assert drafter.ranks(given, width=4).tolist() == [wanted[place] for place in sorted(wanted)]


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"head": "both"}, "head=both"),
        ({"loss": "luck"}, "loss=luck: use one of ce, kl"),
        ({"vocabulary": 0}, "vocabulary of 0"),
        ({"heads": 0}, "heads=0 layers=1: there is at least one head"),
        ({"layers": 0}, "heads=4 layers=0: there is at least one head"),
        ({"vocabulary": V + 1}, f"vocabulary of {V + 1}"),
    ],
)
def test_a_knob_that_means_nothing_is_refused(knobs, message):
    with pytest.raises(ValueError, match=message):
        Medusa(ends(), **knobs)
