"""The target answers prompts: a drafter's data is the target's own text, however it was got and whatever happened on the way."""

import json
import os
import random
import resource
import runpy
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from conf.schema import Run
from conftest import family_of
from decode.engine import generate
from models.drafter import Budget, Plain
from models.ngram import Ngram
from models.sampling import Sampling
from models.target import Target
from runs import ROOT, changed, composed, forked
from train.asking import Inside
from train.chat import Row, example, render
from train.data import write_rows
from train.regenerate import Talk, Terms, answer, questions, regenerate, with_ids
from train.sources import conversations_of

LIMIT = 12
TERMS = Terms("small", LIMIT, longest=180)
TALKS = {
    "one": ["Hello there?"],
    "three": ["a", "What else?", "☃ and so on"],
    "two": ["Name a rather long list of things", "More"],
    "long": ["x" * 180],
    "late": ["c", "y" * 180],
    "mute": [],
}


def asked(talks: dict[str, list[str]]) -> list[Row]:
    """Rows whose answers, where there are any, are to be replaced."""
    rows = []
    for name, lines in talks.items():
        messages = [{"role": "user", "content": line} for line in lines] or [{"role": "system", "content": "s"}]
        rows.append(
            {"id": name, "source": "here", "other": 1, "messages": [*messages, {"role": "assistant", "content": "old"}]}
        )
    return rows


def answered(
    target: Target, talks: dict[str, list[str]], out: Path, seats: int = 3, warmth: float = 0.0, terms: Terms = TERMS
) -> int:
    speaker = Inside(target, Plain(), Budget(nodes=1), LIMIT, Sampling(warmth, seed=7), seats)
    return regenerate(speaker, target.tokenizer, asked(talks), out, replace(terms, temperature=warmth))


def journal(rows: Iterable[Row]) -> list[str]:
    """What a run leaves of `rows` until it is done: its terms, then a line for each answer."""
    lines = [{"target": "small", "tokens": LIMIT, "longest": 180, "temperature": 0.0, "seed": 0}]
    for row in rows:
        key = Talk(row, questions(row)).key
        lines += [{"key": key, "turn": turn, "message": said} for turn, said in enumerate(row["messages"][1::2])]
    return [json.dumps(line, ensure_ascii=False) + "\n" for line in lines]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, small: Target) -> Path:
    """What a run that nothing disturbed writes."""
    out = tmp_path_factory.mktemp("whole") / "said.jsonl"
    assert answered(small, TALKS, out) == 3
    assert [file.name for file in out.parent.iterdir()] == ["said.jsonl"]
    return out


@pytest.fixture(scope="module")
def small() -> Target:
    target = family_of("llama").target
    target.tap(())
    return target


def test_answers_are_the_targets_greedy_text_turn_by_turn(whole, small):
    rows = list(conversations_of(whole))
    assert [row["id"] for row in rows] == [
        "one",
        "three",
        "two",
    ]  # those with a question, none too long, in their order
    for row in rows:
        assert set(row) == {"id", "source", "messages"}
        assert [message["content"] for message in row["messages"][::2]] == TALKS[row["id"]]
        for turn in range(1, len(row["messages"]), 2):
            message = row["messages"][turn]
            prompt = render(small.tokenizer, row["messages"][:turn], speak=True)
            alone = generate(small, Plain(), [prompt], LIMIT, Budget(nodes=1)).generations[0].tokens
            assert message["ids"] == alone
            assert message["content"] == small.tokenizer.decode(alone, skip_special_tokens=True)
            assert message["role"] == "assistant"
        made = example(small.tokenizer, row, small.end_tokens)
        first = row["messages"][1]["ids"]
        assert [token for token, spoken in zip(made.input_ids, made.loss_mask, strict=True) if spoken][
            : len(first)
        ] == first


def test_neighbours_change_nothing(whole, small, tmp_path):
    answered(small, TALKS, tmp_path / "said.jsonl", seats=1)
    assert (tmp_path / "said.jsonl").read_bytes() == whole.read_bytes()


CUTS = {
    "before it": lambda line: 0,
    "inside a letter": lambda line: line.index("☃".encode()) + 1,
    "inside an answer": lambda line: -30,
    "before its end": lambda line: -1,
}


@pytest.mark.parametrize("cut", CUTS.values(), ids=list(CUTS))
def test_a_killed_run_goes_on_to_the_same_bytes(whole, small, tmp_path, cut, monkeypatch):
    """What a kill leaves: some answers in the order in which they finished, the last one cut anywhere."""
    rows = {row["id"]: row for row in conversations_of(whole)}
    finished, last = journal([rows["two"]]), journal([rows["three"]])[-1].replace("assistant", "☃").encode()
    (tmp_path / ".said.jsonl.answers").write_bytes("".join(finished).encode() + last[: cut(last)])
    seen = []
    tell = small.prefill
    monkeypatch.setattr(
        small, "prefill", lambda ids, lengths, *rest: seen.extend(lengths.tolist()) or tell(ids, lengths, *rest)
    )
    answered(small, TALKS, tmp_path / "said.jsonl")
    assert (tmp_path / "said.jsonl").read_bytes() == whole.read_bytes()
    assert [file.name for file in tmp_path.iterdir()] == ["said.jsonl"]
    assert len(render(small.tokenizer, rows["two"]["messages"][:1], speak=True)) not in seen  # it was not asked again
    assert seen


def test_a_run_killed_before_its_last_step_only_writes(whole, small, tmp_path, monkeypatch):
    terms, *lines = journal(conversations_of(whole))
    lines[0] = lines[0].replace('"content": "', '"content": "\u2028\x85')  # line ends that JSON leaves as they are
    (tmp_path / ".said.jsonl.answers").write_text("".join([terms, *reversed(lines)]), encoding="utf-8")
    monkeypatch.setattr(small, "prefill", None)
    assert answered(small, {name: TALKS[name] for name in ("one", "three", "two")}, tmp_path / "said.jsonl") == 3
    made = list(conversations_of(tmp_path / "said.jsonl"))
    assert [row["id"] for row in made] == ["one", "three", "two"]
    assert made[0]["messages"][1]["content"].startswith("\u2028\x85")


def test_what_the_system_says_is_asked_with_the_next_question(small, tmp_path):
    system = {"role": "system", "content": "Be brief"}
    row = {"id": 1, "messages": [system, *asked({"a": ["b"]})[0]["messages"], {**system, "content": "Bye"}]}
    speaker = Inside(small, Plain(), Budget(nodes=1), LIMIT, Sampling(), 3)
    regenerate(speaker, small.tokenizer, [row], tmp_path / "said.jsonl", TERMS)
    (made,) = conversations_of(tmp_path / "said.jsonl")
    assert [message["content"] for message in made["messages"][:2]] == ["Be brief", "b"]
    prompt = render(small.tokenizer, made["messages"][:2], speak=True)
    alone = generate(small, Plain(), [prompt], LIMIT, Budget(nodes=1)).generations[0].tokens
    assert [message.get("ids") for message in made["messages"][2:]] == [alone]


def test_a_drawn_answer_depends_on_nothing_but_its_questions_and_the_seed(small, tmp_path):
    """Not on the rows beside it, on their order, nor on where a run was broken off."""
    several = {**TALKS, "again": TALKS["one"], "other": ["And another one?"]}
    turned = dict(reversed(several.items()))
    for name, talks, seats in (
        ("a", several, 3),
        ("b", several, 1),
        ("c", turned, 2),
        ("d", {"three": TALKS["three"]}, 3),
    ):
        answered(small, talks, tmp_path / name, seats, warmth=1.0)
    first, *others = ({row["id"]: row for row in conversations_of(tmp_path / name)} for name in "abcd")
    assert first["one"]["messages"][1]["ids"] != first["again"]["messages"][1]["ids"]
    for other in others:
        assert other == {name: first[name] for name in other}
    answered(small, several, tmp_path / "e", 3, warmth=1.0, terms=replace(TERMS, seed=1))
    assert {row["id"]: row for row in conversations_of(tmp_path / "e")} != first


def test_a_drafter_changes_no_word(whole, small, tmp_path):
    speaker = Inside(small, Ngram(small.ends, longest=3, shortest=1), Budget(nodes=4), LIMIT, Sampling(), 3)
    regenerate(speaker, small.tokenizer, asked(TALKS), tmp_path / "said.jsonl", TERMS)
    assert (tmp_path / "said.jsonl").read_bytes() == whole.read_bytes()


def test_a_run_of_other_terms_does_not_go_on(whole, small, tmp_path):
    (tmp_path / ".said.jsonl.answers").write_text("".join(journal(conversations_of(whole))))
    with pytest.raises(ValueError, match=r"\.answers holds .* \(tokens was 12 and is 13, seed was 0 and is 4\); go on"):
        answered(small, TALKS, tmp_path / "said.jsonl", terms=replace(TERMS, tokens=13, seed=4))
    (tmp_path / ".said.jsonl.answers").write_text("{}\n[]\n")
    with pytest.raises(ValueError, match=r"\.answers is no file of answers; delete it"):
        answered(small, TALKS, tmp_path / "said.jsonl")


def test_answers_to_other_questions_of_the_same_ids_are_not_taken(whole, small, tmp_path):
    (tmp_path / ".said.jsonl.answers").write_text("".join(journal(conversations_of(whole))))
    answered(small, {"one": ["Something else?"], "two": TALKS["two"]}, tmp_path / "said.jsonl")
    answered(small, {"one": ["Something else?"]}, tmp_path / "alone.jsonl")
    one, two = conversations_of(tmp_path / "said.jsonl")
    assert [one] == list(conversations_of(tmp_path / "alone.jsonl"))
    assert two in list(conversations_of(whole))


@contextmanager
def room_for(count: int) -> Iterator[None]:
    """The system itself refuses to write more than so many bytes to a file."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.usefixtures("capsys")  # what is shown goes to no file
@pytest.mark.parametrize("room", [50, 130, 500])
def test_a_full_disk_loses_nothing(room, whole, small, tmp_path):
    """There is no room for the terms, for one answer, or for more than a few."""
    full = r"\.answers cannot be written \(File too large\); the \d answers before stay: make room"
    with room_for(room), pytest.raises(ValueError, match=full):
        answered(small, TALKS, tmp_path / "said.jsonl")
    assert (tmp_path / ".said.jsonl.answers").stat().st_size == room
    answered(small, TALKS, tmp_path / "said.jsonl")
    assert (tmp_path / "said.jsonl").read_bytes() == whole.read_bytes()


@pytest.mark.usefixtures("capsys")
def test_a_disk_that_is_full_at_the_end_loses_nothing_either(whole, small, tmp_path):
    (tmp_path / ".said.jsonl.answers").write_text("".join(journal(conversations_of(whole))))
    talks = {name: TALKS[name] for name in ("one", "three", "two")}
    with (
        room_for(100),
        pytest.raises(ValueError, match=r"said.jsonl cannot be written .* make room, .* stay in .*\.answers"),
    ):
        answered(small, talks, tmp_path / "said.jsonl")
    assert [file.name for file in tmp_path.iterdir()] == [".said.jsonl.answers"]
    answered(small, talks, tmp_path / "said.jsonl")
    assert (tmp_path / "said.jsonl").read_bytes() == whole.read_bytes()


def test_the_benchmark_asks_both_for_the_same(small):
    script = runpy.run_path(str(ROOT / "scripts" / "bench_regenerate.py"))
    chance = random.Random(1)
    prompts = [[chance.randrange(256) for _ in range(length)] for length in (9, 4, 4, 2)]
    mine = script["ours"](small, prompts, 9, rows=2)
    assert mine == script["theirs"](family_of("llama").stock, prompts, 9, small.end_tokens)
    ends = frozenset({mine[1][3]})  # stands in the middle of a text
    cut = script["theirs"](family_of("llama").stock, prompts, 9, ends)
    assert cut[1] == mine[1][: mine[1].index(mine[1][3]) + 1]


def test_prompts_that_are_all_too_long_are_refused(small, tmp_path):
    with pytest.raises(
        ValueError, match="none of the 2 prompts can be asked: none has a user turn and is within 180 tokens"
    ):
        answered(small, {"a": ["x" * 180], "b": ["y" * 180]}, tmp_path / "said.jsonl")
    assert not (tmp_path / "said.jsonl").exists()


def test_two_conversations_of_one_name_are_refused(small, tmp_path):
    rows = with_ids([{"messages": []}, {"id": 0, "messages": []}])
    with pytest.raises(ValueError, match="two conversations have the id 0"):
        regenerate(
            Inside(small, Plain(), Budget(nodes=1), LIMIT, Sampling(), 3), small.tokenizer, rows, tmp_path / "a", TERMS
        )


def test_the_command_answers_a_file_once(tmp_path):
    write_rows(tmp_path / "prompts.jsonl.gz", [{"messages": [{"role": "user", "content": "Hello?"}]}] * 2)
    run = composed(
        f"regenerate.prompts={tmp_path}/prompts.jsonl.gz",
        f"regenerate.out={tmp_path}/made/said.jsonl",
        "regenerate.tokens=5",
    )
    answer(run)
    made = list(conversations_of(tmp_path / "made" / "said.jsonl"))
    assert [row["id"] for row in made] == [0, 1]
    assert made[0]["messages"] == made[1]["messages"]
    assert len(made[0]["messages"][1]["ids"]) == 5
    with pytest.raises(ValueError, match=r"said.jsonl exists; choose another regenerate.out, or overwrite=true"):
        answer(run)
    run.overwrite = True
    answer(run)
    assert list(conversations_of(tmp_path / "made" / "said.jsonl")) == made


def test_the_command_takes_a_drafter(tmp_path):
    rows = asked({"a": ["Hello?"], "b": ["What else?", "And?"]})
    for name, drafter in (("plain", None), ("ngram", "ngram")):
        answer(told(tmp_path, rows, tokens=9, out=f"{tmp_path}/{name}", drafter=drafter))
    assert (tmp_path / "plain").read_bytes() == (tmp_path / "ngram").read_bytes()
    with pytest.raises(ValueError, match=r"medusa_smol was trained for smol"):
        answer(told(tmp_path, rows, drafter="medusa_smol"))


def told(folder: Path, conversations: list[Row], **how: object) -> Run:
    """The run that answers `conversations`."""
    write_rows(folder / "prompts.jsonl", conversations)
    run = composed()
    for name, value in {"prompts": f"{folder}/prompts.jsonl", "out": f"{folder}/said.jsonl", **how}.items():
        changed(run, f"regenerate.{name}", value)
    return run


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"tokens": 0}, "regenerate.tokens=0 answers nothing; give at least 1"),
        ({"rows": 0}, "regenerate.rows=0 answers nothing"),
        ({"temperature": -1.0}, "regenerate.temperature=-1.0: .* at least 0"),
        ({"url": "http://localhost:1/v1", "drafter": "ngram"}, "an endpoint drafts by itself"),
        ({"url": "localhost:8000"}, "regenerate.url=localhost:8000 is no address; give one such as http"),
    ],
)
def test_the_command_refuses_what_answers_nothing(given, sentence, tmp_path):
    with pytest.raises(ValueError, match=sentence):
        answer(told(tmp_path, asked({"a": ["Hello?"]}), **given))


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([{"text": "no questions"}], "none of the 1 prompts can be asked: none has a user turn"),
        ([{"messages": [{"role": "user", "content": [1]}]}], "conversation 0 has a user turn whose content is no text"),
        ([{"what": "is this"}], r"prompts.jsonl.* has what; a row has messages or"),
    ],
)
def test_the_command_refuses_a_file_that_asks_nothing(rows, sentence, tmp_path):
    with pytest.raises(ValueError, match=sentence):
        answer(told(tmp_path, rows))


@pytest.mark.parametrize("given", [[], ["regenerate.prompts=a.jsonl"], ["regenerate.out=b.jsonl"]])
def test_the_command_says_what_it_needs(given):
    with pytest.raises(ValueError, match=r"give regenerate.prompts=.* and regenerate.out="):
        answer(composed(*given))


def test_the_command_names_a_missing_file(tmp_path):
    with pytest.raises(ValueError, match=r"no data file .*gone.jsonl"):
        answer(composed(f"regenerate.prompts={tmp_path}/gone.jsonl", f"regenerate.out={tmp_path}/said.jsonl"))


@pytest.mark.parametrize("kills", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_a_regeneration_killed_at_any_moment_goes_on_to_the_same_bytes(kills, tmp_path):
    """Each kill -9 comes at a random moment of what is left, all on one file; then it finishes."""
    chance = random.Random(kills)
    talks = {
        f"talk {n}": [f"{n} {'and ' * chance.randrange(9)}"] * chance.randrange(1, 4) for n in range(8 + 4 * kills)
    }
    write_rows(tmp_path / "prompts.jsonl", asked(talks))
    words = [f"regenerate.prompts={tmp_path}/prompts.jsonl", "regenerate.tokens=30", "regenerate.rows=3"]
    answer(composed(*words, f"regenerate.out={tmp_path}/whole.jsonl"))
    size = (tmp_path / "whole.jsonl").stat().st_size
    moments = sorted(chance.uniform(0, 0.8) * size for _ in range(kills))
    part = tmp_path / ".killed.jsonl.answers"
    for attempt, moment in enumerate([*moments, None]):
        log = tmp_path / f"{attempt}.log"
        process = forked("test_regenerate", *words, f"regenerate.out={tmp_path}/killed.jsonl", log=log)
        if moment is None:
            process.join(120)
            assert process.exitcode == 0, log.read_text()
            break
        deadline = time.time() + 120
        while not part.exists() or part.stat().st_size <= moment:
            assert process.is_alive(), log.read_text()
            assert time.time() < deadline
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.01))
        assert process.pid
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert not (tmp_path / "killed.jsonl").exists()
    assert (tmp_path / "killed.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert not part.exists()


def main() -> None:
    """`python -m test_regenerate regenerate.out=...`: scripts/regenerate.py, its configuration composed as the tests do."""
    answer(composed(*sys.argv[1:]))


if __name__ == "__main__":
    main()
