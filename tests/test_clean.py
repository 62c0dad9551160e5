"""What is dropped from a set of prompts, against comparing every pair."""

import random

import pytest

from train.chat import Row
from train.clean import OVERLAP, SHINGLE, cleaned, grams, report, words


def asked(*texts: str) -> list[Row]:
    return [{"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "x"}]} for text in texts]


def told(rows: list[Row]) -> list[str]:
    return [row["messages"][0]["content"] for row in rows]


def test_the_same_words_stand_once() -> None:
    kept, dropped = cleaned(asked("What is one?", "what  is ONE", "What is two?"), 0.85, benches=[])
    assert told(kept) == ["What is one?", "What is two?"]
    assert dropped == {"the same as another": 1}


def test_thirteen_words_of_a_benchmark_are_too_many() -> None:
    question = "Janet\u2019s ducks lay 16 eggs per day. She eats three for breakfast every morning and bakes muffins"
    spoken = words(question)
    few, enough = " ".join(spoken[: OVERLAP - 1]), " ".join(spoken[:OVERLAP])
    kept, dropped = cleaned(asked(few, enough, "before " + enough + " after"), 1.0, benches=["gsm8k"])
    assert told(kept) == [few]
    assert dropped == {"in a benchmark": 2}


def jaccard(ours: str, theirs: str) -> float:
    first, second = (
        {tuple(words(text)[at : at + SHINGLE]) for at in range(len(words(text)) - 2)} for text in (ours, theirs)
    )
    return len(first & second) / len(first | second)


@pytest.mark.parametrize("near", [0.3, 0.5, 0.85])
def test_near_duplicates_are_those_of_comparing_every_pair(near: float) -> None:
    chance = random.Random(near)
    texts = []
    for _ in range(120):
        text = [chance.choice("abcdefghij") for _ in range(chance.randrange(8, 30))]
        texts.append(" ".join(text))
        for _ in range(chance.randrange(3)):  # almost the same again
            text = list(text)
            text[chance.randrange(len(text))] = chance.choice("klm")
            texts.append(" ".join(text))
    kept: list[str] = []
    for text in texts:
        if all(words(text) != words(other) and jaccard(text, other) < near for other in kept):
            kept.append(text)
    found, dropped = cleaned(asked(*texts), near, benches=[])
    assert told(found) == kept
    assert 5 < dropped.total() == len(texts) - len(kept)


def test_short_prompts_are_compared_whole() -> None:
    kept, _ = cleaned(asked("Hi", "Hi!", "Hello", "Hi there"), 0.85, benches=[])
    assert told(kept) == ["Hi", "Hello", "Hi there"]


def test_the_report_counts_and_gives_reasons() -> None:
    kept, dropped = cleaned(asked("a b", "a b", "c"), 0.85, benches=[])
    assert report("x.jsonl", len(kept), dropped) == "x.jsonl: 2 conversations kept, 1 dropped (1 the same as another)"
    assert report("x.jsonl", 2, type(dropped)()) == "x.jsonl: 2 conversations kept, 0 dropped"
    with pytest.raises(ValueError, match=r"data.near=0: how alike two prompts may be is above 0"):
        cleaned([], 0)


def test_grams_are_all_runs_of_so_many_words() -> None:
    assert list(grams(["a", "b", "c", "d"], 3)) == [("a", "b", "c"), ("b", "c", "d")]
    assert not list(grams(["a"], 3))
