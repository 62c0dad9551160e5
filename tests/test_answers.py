"""Prompts alone become conversations: the target answers them once."""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import pytest

from conf.schema import Run
from decode.engine import generate
from decode.opening import open_target
from models.drafter import Budget, Plain
from runs import composed
from train import answers, job
from train.answers import conversations_for
from train.asking import Ask, Inside
from train.chat import Row, render
from train.show import show

LIMIT = 5


def prompts(path: Path, *texts: str) -> str:
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return str(path)


def run_of(path: str, *overrides: str) -> Run:
    return composed(
        "target.dtype=fp32", f"data.path={path}", "data.answer=true", f"regenerate.tokens={LIMIT}", *overrides
    )


def asked(rows: list[Row]) -> list[str]:
    return [row["messages"][0]["content"] for row in rows]


def test_prompts_are_answered_by_the_target_and_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the same prompt is one question; one without a word is none."""
    texts = ["How are you?", "Name a colour.", "", "How are you?", "One and one?"]
    run = run_of(prompts(tmp_path / "log.jsonl", *texts))
    rows = conversations_for(run)
    assert asked(rows) == [text for text in texts if text]
    target = open_target(run.target)
    for row in rows:
        question, answer = row["messages"]
        prompt = render(target.tokenizer, [question], speak=True)
        (alone,) = generate(target, Plain(), [prompt], LIMIT, Budget(nodes=1)).generations
        assert answer["ids"] == alone.tokens
    monkeypatch.setattr(answers, "answer", None)
    assert conversations_for(run) == rows
    with pytest.raises(TypeError):  # with other settings it would ask again
        conversations_for(run_of(run.data.path, "regenerate.temperature=0.5"))


def test_only_what_is_needed_is_asked_and_what_was_asked_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [f"Number {at} of them" for at in range(20)]
    path = prompts(tmp_path / "log.jsonl", *texts)
    few = conversations_for(run_of(path, "data.heldout=2", "data.conversations=3"))
    assert asked(few) == [texts[0], texts[6], texts[12], *texts[-2:]]
    assert "answers 5 prompts" in capsys.readouterr().out
    every = conversations_for(run_of(path, "data.heldout=2"))
    assert asked(every) == texts
    assert "answers 15 prompts" in capsys.readouterr().out
    assert [row for row in every if row in few] == few


def test_runs_that_ask_at_once_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [run_of(prompts(tmp_path / f"{name}.jsonl", f"{name} one", f"{name} two")) for name in ("ours", "theirs")]
    with ThreadPoolExecutor() as pool:
        both = list(pool.map(conversations_for, runs))
    monkeypatch.setattr(answers, "answer", None)
    assert [conversations_for(run) for run in runs] == both


def test_what_a_killed_run_was_told_stays_whatever_is_asked_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (
        run_of(prompts(tmp_path / f"{name}.jsonl", *(f"{name} {at} of them" for at in range(4)))) for name in "ab"
    )
    say = Inside.answers

    def say_two(self: Inside, asks: Sequence[Ask]) -> Iterator[tuple[int, list[int]]]:
        yield from islice(say(self, asks), 2)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Inside, "answers", say_two)
        with pytest.raises(KeyboardInterrupt):
            conversations_for(first)
    conversations_for(second)
    assert "answers 4 prompts" in capsys.readouterr().out
    conversations_for(first)
    assert "answers 2 prompts" in capsys.readouterr().out


def test_what_has_an_answer_keeps_it(tmp_path: Path) -> None:
    mine, theirs = tmp_path / "mine.jsonl", tmp_path / "theirs.jsonl"
    theirs.write_text(
        "".join(json.dumps({"prompt": f"theirs {at}", "response": f"said {at}"}) + "\n" for at in range(4))
    )
    rows = conversations_for(run_of(prompts(mine, "ours one", "ours two"), f"data.mix={{{theirs}: 0.5}}"))
    said = {row["messages"][0]["content"]: row["messages"][1] for row in rows}
    assert {text: one["content"] for text, one in said.items() if text.startswith("theirs")} == {
        "theirs 0": "said 0",
        "theirs 2": "said 2",
    }
    assert all("ids" in one for text, one in said.items() if text.startswith("ours"))
    assert len(said) == 4


def test_a_prompt_that_is_too_long_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(prompts(tmp_path / "l.jsonl", "a b", "c " * 99, "d e"), "regenerate.longest=60")
    assert asked(conversations_for(run)) == ["a b", "d e"]
    monkeypatch.setattr(answers, "answer", None)
    assert asked(conversations_for(run)) == ["a b", "d e"]  # it is not tried again


def test_a_drafter_is_trained_on_prompts_alone(tmp_path: Path) -> None:
    texts = [f"What is {at} and {at}?" for at in range(6)]
    path = prompts(tmp_path / "log.jsonl", *texts)
    job.train(run_of(path, "data.heldout=2", "optim.steps=2", "optim.warmup=1", f"out={tmp_path}/out"))
    assert (tmp_path / "out" / "drafter.yaml").exists()


def test_without_any_data_the_target_asks_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    words = ("target.random.eos_token_id=[10,20,30,40,50,60,70,80]", "regenerate.count=30", "regenerate.tokens=24")
    run = composed("data=self", *words)
    rows = conversations_for(run)
    assert rows
    assert {tuple(one["role"] for one in row["messages"]) for row in rows} == {("user", "assistant")}
    monkeypatch.setattr(answers, "answer", None)
    show(run)  # asks no second time
    assert "imagined" in capsys.readouterr().out


@pytest.mark.parametrize("texts", [["", " "], ["hello", "you?", "..."]])
def test_a_log_that_says_nothing_is_refused(texts: list[str], tmp_path: Path) -> None:
    path = prompts(tmp_path / "log.jsonl", *texts)
    with pytest.raises(ValueError, match="are all empty or of one word, and teach nothing of a domain") as refusal:
        conversations_for(run_of(path))
    assert "\n" not in str(refusal.value)


def test_several_processes_do_not_answer_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = prompts(tmp_path / "log.jsonl", "never answered before", "and this")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"let one process do it, `python -m train\.data` with"):
        conversations_for(run_of(path))


def test_prompts_alone_are_refused_where_nobody_may_answer(tmp_path: Path) -> None:
    path = prompts(tmp_path / "log.jsonl", "a b", "c d")
    with pytest.raises(ValueError, match=r"has no assistant turn; .* With data\.answer=true the target answers first"):
        show(run_of(path, "data.answer=false"))
