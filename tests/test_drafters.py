"""What every family must do, whatever it is: a new conf/drafter/*.yaml arrives tested."""

import functools
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from torch import Tensor

from conf.schema import Run
from decode.engine import generate
from decode.figures import Sample, Tally, looped, tau
from decode.opening import open_drafter, open_target
from models.drafter import Budget, Committed, Drafter, Loss, Plain
from models.sampling import Sampling, Voice
from models.shelf import Card, family_class, load_drafter, read_card, save_drafter
from models.target import Target
from models.tree import chain, ordered_paths
from runs import ROOT, composed
from train import job
from train.chat import Message, example, render
from train.data import write_rows
from train.features import Live

FAMILIES = sorted(file.stem for file in (ROOT / "conf" / "drafter").glob("*.yaml"))
FITTING = {  # what a family's defaults do not fit so small a target with, or leave to chance while it learns
    "draft_model": ["drafter.layers=1"],
    "eagle": ["drafter.noise=0"],
    "peagle": ["drafter.layers=2", "drafter.depths=4", "drafter.keep=1.0"],
}
QUESTIONS = ["How are you?", "b", "Name some colours.", "What is one and one and one?"]
LENGTH = 24  # tokens learned by heart, the first aside
EXACT = ("target.dtype=fp32", "optim.precision=fp32", "target.random.initializer_range=0.3")


def conf_of(family: str, *overrides: str) -> Run:
    """A run of `family` on the small target."""
    return composed(*EXACT, f"drafter={family}", *FITTING.get(family, []), *overrides)


KNOWN = {family: family_class(conf_of(family).drafter["_target_"], []) for family in FAMILIES}
TRAINED = [family for family in FAMILIES if KNOWN[family].needs_training]
COUNTED = {"bigram"}  # they have no weights, and what they know does not tell one answer from another
LEARNERS = [family for family in TRAINED if family not in COUNTED]
GRADED = [family for family in FAMILIES if KNOWN[family].training_loss is not Drafter.training_loss]


@functools.cache
def target() -> Target:
    return open_target(composed(*EXACT).target)


def made(family: str) -> Drafter:
    """A new drafter whose weights are shaken, so that it guesses all sorts of things."""
    torch.manual_seed(0)
    drafter: Drafter = instantiate(conf_of(family).drafter, _partial_=True)(target().ends)
    for parameter in drafter.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    target().tap(drafter.taps)
    return drafter


def asked(question: str) -> Message:
    return {"role": "user", "content": question}


def prompts() -> list[list[int]]:
    return [render(target().tokenizer, [asked(question)], speak=True) for question in QUESTIONS]


@functools.cache
def answers(limit: int) -> list[list[int]]:
    """What the target says greedily, `limit` tokens each."""
    return [one.tokens for one in generate(target(), Plain(), prompts(), limit, Budget(nodes=1)).generations]


def depths(drafter: Drafter) -> int:
    """How deep the drafter was made to guess."""
    return len(drafter.counts(torch.ones(1, 9, dtype=torch.bool), torch.zeros(1, 9, dtype=torch.long)))


def read(drafter: Drafter) -> Committed:
    """The prompts as the target reads them before the first proposal."""
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(prompt) for prompt in prompts()], batch_first=True)
    lengths = torch.tensor([len(prompt) for prompt in prompts()])
    reading = target().prefill(ids, lengths, target().cache(len(ids), 99))
    fresh = torch.ones(len(ids), dtype=torch.bool)
    return Committed(ids, lengths, reading.features, reading.hidden, reading.logits[:, 0].argmax(-1), fresh)


def proposed(drafter: Drafter, budget: Budget) -> list[Tensor]:
    tree = drafter.propose(read(drafter), drafter.begin(len(QUESTIONS), 99), budget, Voice())
    return [tree.tokens, tree.parents, tree.valid]


BUDGETS = [
    Budget(),
    Budget(tuple(chain(2)), nodes=3, depth=2),
    Budget(tuple(ordered_paths([[0], [1], [0, 0], [0, 2], [1, 0], [0, 0, 1]])), nodes=7, depth=3),
    Budget(nodes=16, depth=3, branch=5),
]
SHAPES = ["own way", "chain", "bush", "dynamic"]


@pytest.mark.parametrize("family", GRADED)
def test_the_loss_is_finite_and_reaches_only_the_drafters_weights(family):
    drafter = made(family)
    rows = [
        {"messages": [asked("a"), {"role": "assistant", "content": text}]}
        for text in ("Quite a long answer.", "Shorter")
    ]
    taught = [example(target().tokenizer, row, target().end_tokens) for row in rows]
    ids, mask = (
        torch.nn.utils.rnn.pad_sequence([torch.tensor(getattr(one, part)) for one in taught], batch_first=True)
        for part in ("input_ids", "loss_mask")
    )
    batch = target().features(ids, mask, torch.tensor([len(one.input_ids) for one in taught]))
    batch = type(batch)(*(value.clone() for value in vars(batch).values()))
    loss = drafter.training_loss(batch)
    assert loss.total.isfinite()
    assert loss.seen.tolist() == drafter.counts(mask, batch.document).tolist()
    assert loss.seen[0] > 0
    if any(True for _ in drafter.parameters()):
        loss.total.backward()
        assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in drafter.parameters())
        assert any(weight.grad.any() for weight in drafter.parameters())
    assert all(parameter.grad is None for parameter in target().model.parameters())
    held = {value.untyped_storage().data_ptr() for value in target().model.state_dict().values()}
    assert not held & {value.untyped_storage().data_ptr() for value in drafter.state_dict().values()}


ANSWERS = ["Quite a long answer.", "Short", "x", "Neither long nor short", "The last of them all."]


def taught(drafter: Drafter, rows: list[list[int]]) -> tuple[Loss, list[Tensor]]:
    """The loss of conversations that share rows, and its gradients."""
    made = [
        example(
            target().tokenizer,
            {"messages": [asked("ab" * at), {"role": "assistant", "content": text}]},
            frozenset([256]),
        )
        for at, text in enumerate(ANSWERS)
    ]
    batch = Live(target()).read([[made[at] for at in row] for row in rows])
    drafter.zero_grad()
    loss = drafter.training_loss(batch)
    if loss.total.requires_grad:
        loss.total.backward()
    return loss, [weight.grad.clone() for weight in drafter.parameters() if weight.grad is not None]


@pytest.mark.parametrize("family", GRADED)
def test_packed_conversations_teach_what_they_teach_apart(family):
    drafter = made(family)
    for learner in (drafter.train(), drafter.eval()):
        apart, slopes = taught(learner, [[0], [1], [2], [3], [4]])
        assert apart.seen[0] > 0
        for rows in ([[4, 2, 0, 3, 1]], [[0, 3], [2, 4, 1]]):
            packed, others = taught(learner, rows)
            for ours, theirs in zip([*packed, *others], [*apart, *slopes], strict=True):
                torch.testing.assert_close(
                    ours, theirs, rtol=1e-5, atol=1e-5 * max(1.0, float(theirs.detach().abs().max()))
                )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("budget", BUDGETS, ids=SHAPES)
def test_a_proposal_is_a_tree_below_the_bonus_token(family, budget):
    drafter = made(family).eval()
    tokens, parents, valid = proposed(drafter, budget)
    rows, nodes = tokens.shape
    assert rows == len(QUESTIONS)
    assert (1 if family == "ngram" else 2) <= nodes <= max(budget.nodes, len(budget.paths) + 1)
    assert tokens.shape == parents.shape == valid.shape
    assert torch.equal(tokens[:, 0], read(drafter).bonus)
    assert (parents[:, 0] == -1).all()
    assert ((parents[:, 1:] >= 0) & (parents[:, 1:] < torch.arange(1, nodes))).all()
    assert ((tokens >= 0) & (tokens < target().identity.vocabulary)).all()
    assert valid.dtype == torch.bool
    assert valid[:, 0].all()
    for row in range(rows):
        siblings = [(int(parents[row, node]), int(tokens[row, node])) for node in range(nodes) if valid[row, node]]
        assert len(set(siblings)) == len(siblings)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("budget", "rows"), zip(BUDGETS, (1, 2, 3, 2), strict=True), ids=SHAPES)
def test_greedy_text_is_the_targets_own(family, budget, rows):
    drafted = generate(target(), made(family).eval(), prompts(), 12, budget, rows=rows)
    assert [one.tokens for one in drafted.generations] == answers(12)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_row_accepts_does_not_depend_on_its_neighbours(family, folder):
    """Rows end at different times and others take their seats: what a drafter remembers must go with them."""
    drafter = pupil(family, folder).drafter if family in TRAINED else made(family).eval()
    budget = Budget(nodes=12, depth=3, branch=3)
    given = [*prompts(), *(prompt[:-3] for prompt in prompts())]  # half of them it never saw
    alone = generate(target(), drafter, given, 15, budget)
    assert len({tuple(one.accepted) for one in alone.generations}) > 2 or family not in TRAINED
    for rows in (2, 3):
        together = generate(target(), drafter, given, 15, budget, rows=rows)
        assert [one.accepted for one in together.generations] == [one.accepted for one in alone.generations]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("budget", BUDGETS, ids=SHAPES)
def test_a_drawn_proposal_says_what_its_tokens_were_drawn_from(family, budget):
    drafter, sampling = made(family).eval(), Sampling(0.9, top_k=40, seed=4)
    voice = Voice(sampling, [sampling.draw(row) for row in range(len(QUESTIONS))])
    state = drafter.begin(len(QUESTIONS), 99)
    tree = drafter.propose(read(drafter), state, replace(budget, sampled=True), voice)
    if tree.child_probs is None:
        assert family == "ngram"  # whose guesses are certain
        return
    assert tree.child_probs.shape == (*tree.tokens.shape, target().identity.vocabulary)
    believed = tree.child_probs.gather(1, tree.parents.clamp(min=0)[..., None].expand_as(tree.child_probs))
    torch.testing.assert_close(believed[:, 1:].sum(-1), torch.ones(tree.tokens[:, 1:].shape))
    assert believed.gather(2, tree.tokens[..., None])[:, 1:][tree.valid[:, 1:]].all()


@pytest.mark.parametrize("family", FAMILIES)
def test_drawn_text_does_not_depend_on_a_rows_neighbours(family):
    drafter, sampling = made(family).eval(), Sampling(1.0, seed=2)
    budget = Budget(tuple(ordered_paths([[0], [1], [0, 0], [1, 0]])), nodes=5, sampled=True)
    alone, together = (generate(target(), drafter, prompts(), 10, budget, sampling, rows) for rows in (1, 3))
    assert [one.tokens for one in together.generations] == [one.tokens for one in alone.generations]


@pytest.mark.parametrize("family", TRAINED)
def test_a_saved_and_loaded_drafter_proposes_the_same(family, tmp_path):
    drafter = made(family).eval()
    conf = conf_of(family).drafter
    knobs = {key: value for key, value in conf.items() if not key.startswith("_")}
    save_drafter(drafter, Card(conf["_target_"], knobs, vars(target().identity), list(drafter.taps)), tmp_path)
    loaded = load_drafter(tmp_path, read_card(tmp_path), target().ends, torch.float32)
    for budget in BUDGETS:
        for ours, theirs in zip(proposed(loaded, budget), proposed(drafter, budget), strict=True):
            assert torch.equal(ours, theirs)


@dataclass
class Pupil:
    """A drafter that was taught four answers of the target, and those answers."""

    drafter: Drafter
    depth: int
    limit: int


@functools.cache
def pupil(family: str, folder: Path) -> Pupil:
    depth = depths(made(family))
    limit = 1 + LENGTH // (depth + 1) * (depth + 1)
    rows = [
        {"messages": [asked(question), {"role": "assistant", "content": "", "ids": ids}]}
        for question, ids in zip([*QUESTIONS, "held out"], [*answers(limit), [1] * (depth + 2)], strict=True)
    ]
    write_rows(folder / "answers.jsonl", rows)
    how = [
        "data.heldout=1",
        "data.features=cached",
        f"optim.steps={300 if family in LEARNERS else 0}",
        "optim.lr=1e-2",
        "optim.batch=4",
        "log.evaluate_every=1000",
    ]
    job.train(
        conf_of(family, f"out={folder}/{family}", f"data.path={folder}/answers.jsonl", *how, "log.save_every=1000")
    )
    return Pupil(open_drafter(folder / family, read_card(folder / family), target()), depth, limit)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drafters")


@pytest.mark.parametrize("family", LEARNERS)
def test_what_was_learned_by_heart_is_decoded_nearly_as_fast_as_can_be(family, folder):
    taught = pupil(family, folder)
    assert {len(answer) for answer in answers(taught.limit)} == {taught.limit}  # no answer ended early,
    assert looped(answers(taught.limit)) < 0.1  # and none goes in circles, which anyone could guess
    best = taught.depth + 1
    target().tap(taught.drafter.taps)
    drafted = generate(
        target(), taught.drafter, prompts(), taught.limit, Budget(tuple(chain(taught.depth)), best, taught.depth)
    )
    assert [one.tokens for one in drafted.generations] == answers(taught.limit)
    assert 0.9 * best <= tau(Tally.of([Sample("", drafted, drafted)])) <= best
