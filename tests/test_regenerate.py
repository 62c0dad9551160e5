"""The target answers prompts: a drafter's data is the target's own greedy text, whatever happened on the way."""

import json
from pathlib import Path

import pytest

from conftest import family_of
from decode.engine import generate
from models.drafter import Budget, Plain
from models.sampling import Sampling
from models.target import Target
from runs import composed
from train.chat import example, render
from train.data import write_rows
from train.regenerate import answer, regenerate, with_ids
from train.sources import conversations_of

LIMIT = 12
TALKS = {
    "one": ["Hello there?"],
    "three": ["a", "What else?", "☃ and so on"],
    "two": ["Name a rather long list of things", "More"],
    "long": ["x" * 180],
    "late": ["c", "y" * 180],
    "mute": [],
}


def asked(talks: dict[str, list[str]]) -> list[dict]:
    """Rows whose answers, where there are any, are to be replaced."""
    rows = []
    for name, questions in talks.items():
        messages = [{"role": "user", "content": question} for question in questions] or [
            {"role": "system", "content": "s"}
        ]
        rows.append(
            {"id": name, "source": "here", "other": 1, "messages": [*messages, {"role": "assistant", "content": "old"}]}
        )
    return rows


def answered(target: Target, talks: dict[str, list[str]], out: Path, seats: int = 3) -> int:
    return regenerate(target, asked(talks), out, LIMIT, Sampling(), seats, longest=180)


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
    """What a kill leaves: some conversations in the order in which they finished, the last one cut anywhere."""
    rows = {row["id"]: row for row in conversations_of(whole)}
    finished = (json.dumps(rows["two"], ensure_ascii=False) + "\n").encode()
    cut_off = (json.dumps(rows["three"], ensure_ascii=False) + "\n").encode()
    (tmp_path / ".said.jsonl.answers").write_bytes(finished + cut_off[: cut(cut_off)])
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


def test_a_run_killed_before_its_last_step_only_writes(whole, small, tmp_path):
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in conversations_of(whole)]
    lines[0] = lines[0].replace("Hello", "He\u2028\x85llo")  # line ends that JSON leaves as they are
    (tmp_path / ".said.jsonl.answers").write_text("".join(reversed(lines)), encoding="utf-8")
    assert answered(small, {name: TALKS[name] for name in ("one", "three", "two")}, tmp_path / "said.jsonl") == 3
    assert [row["id"] for row in conversations_of(tmp_path / "said.jsonl")] == ["one", "three", "two"]


def test_prompts_that_are_all_too_long_are_refused(small, tmp_path):
    with pytest.raises(ValueError, match="none of the 2 prompts is within 180 tokens"):
        answered(small, {"a": ["x" * 180], "b": ["y" * 180]}, tmp_path / "said.jsonl")
    assert not (tmp_path / "said.jsonl").exists()


def test_two_conversations_of_one_name_are_refused(small, tmp_path):
    rows = with_ids([{"messages": []}, {"id": 0, "messages": []}])
    with pytest.raises(ValueError, match="two conversations have the id 0"):
        regenerate(small, rows, tmp_path / "said.jsonl", LIMIT, Sampling(), 3, 100)


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


@pytest.mark.parametrize("given", [[], ["regenerate.prompts=a.jsonl"], ["regenerate.out=b.jsonl"]])
def test_the_command_says_what_it_needs(given):
    with pytest.raises(ValueError, match=r"give regenerate.prompts=.* and regenerate.out="):
        answer(composed(*given))


def test_the_command_names_a_missing_file(tmp_path):
    with pytest.raises(ValueError, match=r"no data file .*gone.jsonl"):
        answer(composed(f"regenerate.prompts={tmp_path}/gone.jsonl", f"regenerate.out={tmp_path}/said.jsonl"))
