"""The target asks itself: what it is given, what is kept of what it writes, and that it can go on."""

from pathlib import Path

import pytest

from conftest import tiny_target
from decode.engine import generate
from models.drafter import Budget, Plain
from models.sampling import Sampling
from models.source import byte_tokenizer
from models.target import Target
from runs import composed
from templates import SHAPES
from train.data import load_examples
from train.imagined import as_rows, imagined, opening_of
from train.regenerate import answer
from train.sources import conversations_of

LIMIT = 12


@pytest.fixture(scope="module")
def target() -> Target:
    """It ends its texts often, and its tokenizer knows a template."""
    return tiny_target("llama", eos_token_id=list(range(100, 140)))


@pytest.mark.parametrize(
    ("name", "opening"),
    [
        ("chatml", "<|im_start|>user\n"),
        ("qwen2", "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\n"),
        ("llama2", "<s>[INST] "),
        ("gemma3", "<bos><start_of_turn>user\n"),
    ],
)
def test_the_target_is_given_all_that_stands_before_a_users_words(name: str, opening: str) -> None:
    tokenizer = SHAPES[name].tokenizer()
    assert tokenizer.decode(opening_of(tokenizer)) == opening


def test_a_tokenizer_that_cannot_begin_is_refused() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(ValueError, match="has nothing before the user's words"):
        opening_of(tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="neither a chat template nor a start token"):
        opening_of(tokenizer)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    assert opening_of(tokenizer) == [tokenizer.bos_token_id]


def test_questions_are_what_the_target_says_there_and_the_same_for_a_seed(target: Target, tmp_path: Path) -> None:
    sampling = Sampling(1.0, seed=3)
    found = imagined(target, 40, LIMIT, sampling, 8, 0.85, tmp_path / "a.jsonl")
    opening = opening_of(target.tokenizer)
    written = generate(target, Plain(), [opening] * 40, LIMIT, Budget(nodes=1), sampling).generations
    wanted = as_rows(target.tokenizer, opening, written)
    assert 3 < len(found) <= len(wanted) < 40  # some did not end
    assert all(row in wanted for row in found)
    assert found == imagined(target, 40, LIMIT, sampling, 3, 0.85, tmp_path / "b.jsonl")
    assert found != imagined(target, 40, LIMIT, Sampling(1.0, seed=4), 8, 0.85, tmp_path / "c.jsonl")


def test_a_resumed_run_keeps_its_questions(target: Target, tmp_path: Path) -> None:
    first = imagined(target, 20, LIMIT, Sampling(1.0, seed=3), 8, 0.85, tmp_path / "kept.jsonl")
    assert imagined(target, 99, LIMIT, Sampling(1.0, seed=9), 8, 0.85, tmp_path / "kept.jsonl") == first


def test_a_drafter_can_learn_from_what_the_target_asked_itself(tmp_path: Path) -> None:
    out = tmp_path / "self.jsonl"
    how = ["regenerate.prompts=imagined", "regenerate.count=30", "regenerate.tokens=24", f"regenerate.out={out}"]
    run = composed("target.random.eos_token_id=[10,20,30,40,50,60,70,80]", *how)
    answer(run)
    rows = list(conversations_of(out))
    assert rows
    assert [message["role"] for message in rows[0]["messages"]] == ["user", "assistant"]
    assert load_examples(rows, byte_tokenizer(), frozenset([256]), 256)
    assert [file.name for file in tmp_path.iterdir()] == ["self.jsonl"]
