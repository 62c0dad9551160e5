"""Tables of what usually follows, against counting with a Counter."""

from collections import Counter
from pathlib import Path

import pytest
import torch

from conftest import Family
from decode.engine import generate
from decode.opening import open_target
from models.drafter import Budget
from models.sampling import Sampling
from models.shelf import load_drafter, read_card
from models.table import Table
from models.tree import chain
from reference import marked_batch
from runs import composed
from train import job
from train.chat import Example
from train.data import load_examples, spoken
from train.sources import conversations_of

V = 272
EXACT = ("target.dtype=fp32", "optim.precision=fp32")


def counted(llama: Family, order: int, width: int, seed: int = 0) -> tuple[Table, dict[int, Counter[int]]]:
    """A table, and what it should know after each token."""
    generator = torch.Generator().manual_seed(seed)
    before, said = torch.randint(0, 20, (2, 600), generator=generator).square() % 31
    table = Table(llama.target.ends, order, width)
    table.learn_successors(before, said)
    everyone = Counter(said.tolist())
    following: dict[int, Counter[int]] = {token: Counter() for token in range(V)}
    for first, second in zip(before.tolist(), said.tolist(), strict=True):
        following[first][second] += 1
    return table.eval(), {token: (order == 2 and counts) or everyone for token, counts in following.items()}


@pytest.mark.parametrize(("order", "width"), [(2, 5), (2, 30), (1, 4)])
def test_a_row_holds_the_likeliest_successors_and_their_shares(llama: Family, order: int, width: int) -> None:
    table, following = counted(llama, order, width)
    log_probs = table.log_probs(torch.arange(V))
    for token in range(V):
        best = sorted(following[token].items(), key=lambda item: (-item[1], item[0]))[:width]
        total = sum(count for _, count in best)
        expected = torch.zeros(V)
        for successor, count in best:
            expected[successor] = count / total
        torch.testing.assert_close(log_probs[token].exp(), expected)


@pytest.mark.parametrize("order", [1, 2])
def test_a_chain_takes_the_likeliest_successor_of_the_successor(llama: Family, order: int) -> None:
    table, following = counted(llama, order, 5)
    run = generate(llama.target, table, [[5, 9, 200], [17, 4]], 6, Budget(tuple(chain(3)), 4), rows=2)
    assert [one.tokens for one in run.generations] == [llama.says([5, 9, 200], 6), llama.says([17, 4], 6)]
    ask = table.log_probs(torch.tensor([[4]]))
    best = min(following[4], key=lambda token: (-following[4][token], token))
    assert int(ask.argmax()) == best


@pytest.mark.exact
def test_drawn_text_of_a_table_is_independent_of_neighbours(llama: Family) -> None:
    table, _ = counted(llama, 2, 3)
    budget, sampling = Budget(nodes=4, depth=3, sampled=True), Sampling(1.0, seed=5)
    prompts = [[5, 9, 200], [17, 4], [3], [8, 8, 8, 8]]
    alone, together = (generate(llama.target, table, prompts, 9, budget, sampling, rows) for rows in (1, 3))
    assert [one.tokens for one in together.generations] == [one.tokens for one in alone.generations]


def test_its_first_guess_is_graded_against_target_and_text(llama: Family) -> None:
    table, _ = counted(llama, 2, 6)
    batch = marked_batch(["000000--", "00001111"], ["..xxxx..", ".xxx.xxx"], 31, 32, 0, seed=3)
    loss = table.training_loss(batch)
    seen, hits, shared = 0, 0, 0.0
    for row, at in [
        (0, 2),
        (0, 3),
        (0, 4),
        (1, 1),
        (1, 2),
        (1, 5),
        (1, 6),
    ]:  # what follows a token that the target said
        draft = table.log_probs(batch.input_ids[row, at]).exp()
        target = llama.target.ends.logits(batch.last_hidden[row, at]).softmax(-1)
        seen += 1
        hits += int(draft.argmax()) == int(batch.input_ids[row, at + 1])
        shared += torch.minimum(draft, target).sum().item()
    assert loss.seen.tolist() == table.counts(batch.loss_mask, batch.document).tolist() == [seen]
    assert loss.hits.tolist() == [hits]
    assert loss.overlap.item() == pytest.approx(shared, rel=1e-4)


@pytest.mark.parametrize("order", [1, 2])
def test_a_table_is_counted_by_a_training_run_of_no_steps(tmp_path: Path, order: int) -> None:
    run = composed(
        f"out={tmp_path}/out", *EXACT, "drafter=bigram", f"drafter.order={order}", "optim.steps=0", "drafter.width=7"
    )
    job.train(run)
    card = read_card(tmp_path / "out")
    target = open_target(run.target)
    loaded = load_drafter(tmp_path / "out", card, target.ends, torch.float32)
    twin = Table(target.ends, order, 7)
    examples = load_examples(
        conversations_of("pkg://train/corpus/tiny.jsonl"), target.tokenizer, target.end_tokens, 256
    )[:-2]
    twin.learn_successors(*spoken(examples))
    assert loaded.successors.equal(twin.successors)
    torch.testing.assert_close(loaded.probs, twin.probs, rtol=1e-2, atol=1e-2)
    assert len(card.acceptance["greedy"]) == 1
    assert card.acceptance["positions"][0] > 0


def test_the_tokens_before_are_those_of_the_same_conversation() -> None:
    before, said = spoken([Example([5, 6, 7], [False, True, True]), Example([8, 9], [False, True])])
    assert (before.tolist(), said.tolist()) == ([5, 6, 8], [6, 7, 9])


@pytest.mark.parametrize(("order", "width"), [(3, 4), (0, 4), (2, 0), (1, 273)])
def test_tables_of_other_shapes_are_refused(llama: Family, order: int, width: int) -> None:
    with pytest.raises(ValueError, match=f"order={order} width={width}: order is 1 or 2, width at least 1"):
        Table(llama.target.ends, order, width)
