"""Hydra heads: each reads the path above it, whether it stands in a text that teaches or in a tree that is drafted."""

import random

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from decode.engine import generate
from decode.figures import tokens_of
from models.drafter import Budget, FeatureBatch, Plain
from models.ends import Ends
from models.hydra import Hydra
from models.sampling import Voice
from models.search import best_tree, replayed
from models.shelf import Card, load_drafter, read_card, save_drafter
from models.tree import ordered_paths
from reference import hydra_by_hand, marked_batch
from test_medusa import asked_by_hand, said
from train.chat import Example
from train.features import Live, Source
from train.trees import recorded

D, V, K, DECAY = 8, 20, 3, 0.8
DOCUMENTS = ["0" * 9 + "1" * 11 + "-" * 4, "0" * 24, "0" * 17 + "-" * 7]
SPOKEN = ["..xxxx.xxxx.xxxxxxxx....", "xxxxxx.xx..x.xxx...xxxxx", "....xx..xxxxxxxx........"]
KNOBS = [
    {"head": "own", "layers": 1, "prefix": False, "vocabulary": None},
    {"head": "shared", "layers": 2, "prefix": False, "vocabulary": 7},
    {"head": "own", "layers": 2, "prefix": True, "vocabulary": 7},
    {"head": "shared", "layers": 1, "prefix": True, "vocabulary": None},
]
every_kind = pytest.mark.parametrize("knobs", KNOBS, ids=lambda knobs: "-".join(str(value) for value in knobs.values()))


def ends() -> Ends:
    generator = torch.Generator().manual_seed(7)
    embedding, head = torch.randn(V, D, generator=generator), torch.randn(V, D, generator=generator)
    config = LlamaConfig(hidden_size=D, intermediate_size=12, num_attention_heads=4, num_key_value_heads=2)
    return Ends(embedding, head, None, config)


def shaken(drafter: Hydra, by: float = 0.3) -> Hydra:
    torch.manual_seed(3)
    for parameter in drafter.parameters():
        parameter.data += by * torch.randn_like(parameter)
    return drafter


def hydra(**knobs: object) -> Hydra:
    drafter = Hydra(ends(), heads=K, decay=DECAY, **knobs)
    drafter.learn_vocabulary(torch.tensor([5, 0, 9, 9, 1, 0, 7, 0, 0, 2] * 2))
    return shaken(drafter)


def batch() -> FeatureBatch:
    return marked_batch(DOCUMENTS, SPOKEN, V, width=D, taps=0, seed=1)


def text_of(given: FeatureBatch, row: int, at: int) -> tuple[Tensor, int]:
    """The hidden states of the document that `at` is in, and where in it `at` stands."""
    inside = given.document[row] == given.document[row, at]
    return given.last_hidden[row, inside], int(inside[:at].sum())


@every_kind
def test_the_loss_and_the_ranks_are_those_of_every_question_asked_one_by_one(knobs):
    drafter, given = hydra(**knobs).eval(), batch()
    ids = list(range(V)) if drafter.draft_ids is None else drafter.draft_ids.tolist()
    total, ranks = 0.0, {}
    for head in range(1, K + 1):
        for row, at, label, _ in asked_by_hand(given, head):
            path = given.input_ids[row, at + 1 : at + 1 + head].tolist()
            logits = hydra_by_hand(drafter, *text_of(given, row, at), path)
            if label in ids:
                total -= DECAY ** (head - 1) * logits.log_softmax(0)[ids.index(label)].item()
            picks = [ids[place] for place in logits.argsort(descending=True)][:4]
            found = ranks.setdefault((row, at), [-1] * K)
            found[head - 1] = picks.index(label) if label in picks else -1
    assert drafter.training_loss(given).total.item() == pytest.approx(total, rel=1e-4)
    assert drafter.ranks(given, width=4).tolist() == [ranks[place] for place in sorted(ranks)]


@every_kind
def test_every_node_is_the_heads_pick_below_its_own_path(knobs):
    """Two rounds in two rows: what the second proposes hangs on the text that the first left behind."""
    drafter = hydra(**knobs).eval()
    paths = ordered_paths([[0], [2], [0, 1], [2, 0], [2, 3], [0, 1, 3], [0, 1, 0], [2, 3, 1]])
    ids = list(range(V)) if drafter.draft_ids is None else drafter.draft_ids.tolist()
    texts: list[Tensor] = [torch.empty(0, D), torch.empty(0, D)]
    state = drafter.begin(2, 20)
    for fresh, length, bonus in ((True, [4, 2], [11, 12]), (False, [1, 3], [3, 19])):
        hidden = torch.randn(2, max(length), D)
        committed = said(hidden, length, bonus, fresh)
        tree = drafter.propose(committed, state, Budget(tuple(paths), nodes=9), Voice())
        for row in range(2):
            texts[row] = torch.cat([texts[row], hidden[row, : length[row]]])
            wanted: dict[tuple[int, ...], int] = {(): bonus[row]}
            for path in paths:
                above = [wanted[path[:depth]] for depth in range(len(path))]
                logits = hydra_by_hand(drafter, texts[row], len(texts[row]) - 1, above)
                wanted[path] = ids[int(logits.argsort(descending=True)[path[-1]])]
            assert tree.tokens[row].tolist() == list(wanted.values())


@every_kind
def test_a_new_drafter_says_what_the_target_says(knobs):
    drafter = Hydra(ends(), heads=K, **knobs)
    drafter.learn_vocabulary(torch.arange(V).flip(0))
    given = batch()
    row, at = torch.tensor([0, 1]), torch.tensor([2, 5])
    for head in range(K):
        states = drafter.states(head, given, drafter.read(given), row, at)
        wanted = drafter.ends.logits(given.last_hidden[row, at], drafter.draft_ids)
        torch.testing.assert_close(drafter.head_logits(head, states), wanted)


def test_a_head_only_computes_nodes_that_have_children():
    drafter = hydra(**KNOBS[0]).eval()
    rows, graded = [], drafter.head_logits
    drafter.head_logits = lambda head, states: rows.append(states.shape[1]) or graded(head, states)
    paths = ordered_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]])
    drafter.propose(said(torch.randn(1, 1, D), [1], [4], True), None, Budget(tuple(paths), nodes=8), Voice())
    assert rows == [1, 2, 1]


def test_decoding_takes_the_passes_that_the_heads_taught_on_text_would(llama, tmp_path):
    """Replay reads whole texts at once; decoding reads them path by path, in rows that others have sat in."""
    target = llama.target
    knobs = {"heads": 3, "head": "shared", "vocabulary": 150, "prefix": True}
    made = Hydra(target.ends, **knobs)
    made.learn_vocabulary(torch.arange(target.identity.vocabulary))
    card = Card("models.hydra.Hydra", knobs, vars(target.identity), [])
    save_drafter(shaken(made, 0.05), card, tmp_path)
    drafter = load_drafter(tmp_path, read_card(tmp_path), target.ends, torch.float32)
    prompts = [random.Random(seed).choices(range(200), k=3 + seed) for seed in range(4)]
    texts = [one.tokens for one in generate(target, Plain(), prompts, 15, Budget(nodes=1)).generations]
    asked = [
        Example([*prompt, *text], [False] * len(prompt) + [True] * len(text))
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    known = recorded(drafter, Source(asked, Live(target), 4, 0))
    paths = best_tree(known, 40)
    run = generate(target, drafter, prompts, 15, Budget(tuple(ordered_paths(paths)), len(paths) + 1), rows=2)
    assert [one.tokens for one in run.generations] == texts
    tokens, passes = replayed(known, paths)
    assert (tokens, passes) == (tokens_of(run), sum(len(one.steps) for one in run.generations))
    assert passes < tokens  # some guesses were right
