"""Which conversations are asked, and what the user says next in each."""

import gzip
import json
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pytest

from conf import packaged
from conftest import bench_prompts
from decode.prompts import (
    SEVERAL,
    SHIPPED,
    Dialogue,
    choose,
    conversations,
    exchanges,
    labelled,
    most_exchanges,
)
from models.source import byte_tokenizer
from runs import ROOT
from train.sources import conversations_of

ROWS = {
    "gsm8k": 1319, "humaneval": 164, "mbpp": 500, "mt_bench": 80, "qa": 80, "math_reasoning": 80, "rag": 80,
    "summarization": 80, "translation": 56, "vicuna_bench": 80, "medical": 264, "banking": 399, "sql": 231, "spider": 358,
    "tiny": 4,
}  # fmt: skip


def bench(path: Path, *rows: object) -> str:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return str(path)


# ---- what is asked


def test_prompts_are_taken_evenly_over_those_that_fit(tmp_path):
    tokenizer = byte_tokenizer()
    texts = ["x" * (at % 7 * 20) + str(at) for at in range(40)]
    name = bench(tmp_path / "mine.jsonl", *({"turns": [text, "and then?"]} for text in texts))
    asked = {text: [*f"user:{text}".encode(), 256, *b"assistant:"] for text in texts}
    fitting = [text for text in texts if len(asked[text]) <= 100]
    assert 10 < len(fitting) < 40
    for count in (1, 3, 10, len(fitting), 99):
        few = min(count, len(fitting))
        wanted = [fitting[(index * len(fitting)) // few] for index in range(few)]
        found = bench_prompts([name], tokenizer, count, 100)["mine"]
        assert [tokenizer.decode(ids) for ids in found] == [f"user:{text}<|end|>assistant:" for text in wanted]
        assert len({tuple(ids) for ids in found}) == few
        turned = choose([name], tokenizer, count, 100, turns=2)["mine"]
        assert [dialogue.turns for dialogue in turned] == [[text, "and then?"] for text in wanted]


@pytest.mark.parametrize("name", ROWS)
def test_the_benchmarks_that_ship_have_prompts(name):
    asked = conversations(name)
    assert len(asked) == ROWS[name]
    assert len({turns[0] for turns in asked}) == len(asked)
    assert {len(turns) for turns in asked} == {2 if name == "mt_bench" else 1}


def test_one_name_may_mean_several_sets_and_none_is_asked_twice():
    assert list(labelled(["qa", "spec_bench", "tiny", "qa"])) == ["qa", "mt_bench", "math_reasoning", "rag", "tiny"]
    assert list(choose(["spec_bench"], byte_tokenizer(), 1, 10_000)) == list(SEVERAL["spec_bench"])


def test_a_report_calls_a_benchmark_by_its_last_word_unless_two_share_it():
    hub = "hub://openai/gsm8k?config=main&split=test&column=question"
    assert labelled([hub, "../my/talks.v2.jsonl.gz", "qa"]) == {
        "gsm8k": hub,
        "talks": "../my/talks.v2.jsonl.gz",
        "qa": "qa",
    }
    both = [hub, "gsm8k", hub.replace("test", "train")]
    assert labelled(both) == {name: name for name in both}


@pytest.mark.parametrize(
    ("column", "row", "turns"),
    [
        ("", {"turns": ["a", "b"], "messages": [], "x": 1}, ["a", "b"]),
        ("", {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]}, ["a"]),
        (
            "",
            {"messages": [{"role": role, "content": role[0] + str(at)} for at in "12" for role in ("user", "assistant")]},
            ["u1", "u2"],
        ),
        ("?column=q", {"turns": ["a"], "q": "what?"}, ["what?"]),
        ("?column=q", {"q": ["a", "b"]}, ["a", "b"]),
        ("?column=two%20words", {"two words": "a"}, ["a"]),
    ],
)  # fmt: skip
def test_a_row_holds_turns_messages_or_a_column_of_text(tmp_path, column, row, turns):
    assert conversations(bench(tmp_path / "mine.jsonl", row) + column) == [turns]


BAD = [
    ("", [], "the benchmark .*mine.jsonl is empty"),
    ("", [{"turns": ["a"]}, {"turns": []}], "mine.jsonl line 2 has no prompt in turns or messages; give it turns"),
    ("", [{"turns": ["a"]}, {"turns": ["  "]}], "mine.jsonl line 2 has no prompt"),
    ("", [{"turns": ["a", ""]}], "mine.jsonl line 1 has no prompt"),
    ("", [{"turns": [["a"]]}], "mine.jsonl line 1 has no prompt"),
    ("", [{"prompt": "a", "id": 3}], r"line 1 has no prompt .* \(it has prompt, id\)"),
    ("", [{"turns": None}], "mine.jsonl line 1 has no prompt"),
    ("", [{"messages": [{"role": "assistant", "content": "a"}]}], "mine.jsonl line 1 has no prompt"),
    ("", [{"messages": [{"role": "user"}]}], "mine.jsonl line 1 has no prompt"),
    ("", [["a"]], r"line 1 has no prompt .* \(it has no columns\)"),
    ("", [{"turns": ["a"]}, "oops\n"], "mine.jsonl line 2 is no JSON"),
    ("?column=q", [{"turns": ["a"]}], r"line 1 has no prompt in q; .* \(it has turns\)"),
    ("?split=test", [{"turns": ["a"]}], "mine.jsonl.split=test says 'split' behind its question mark; use column"),
]


@pytest.mark.parametrize(("column", "rows", "message"), BAD)
def test_a_bad_benchmark_is_refused_in_one_sentence(tmp_path, column, rows, message):
    with pytest.raises(ValueError, match=message) as refusal:
        conversations(bench(tmp_path / "mine.jsonl", *rows) + column)
    assert "\n" not in str(refusal.value)


def test_an_unknown_benchmark_is_told_the_known():
    with pytest.raises(ValueError, match="there is no benchmark 'nope'; use ") as refusal:
        conversations("nope")
    assert {*ROWS, *SEVERAL} <= set(re.findall(r"\w+", str(refusal.value)))


def test_a_target_without_a_template_cannot_be_asked():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        bench_prompts(["tiny"], tokenizer, 4, 400)


# ---- the Hub: a folder is read by the same call


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No network, and what is read is kept in the test's folder."""
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


SAID = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"))]


@pytest.fixture
def folder(tmp_path: Path, offline: None) -> str:
    """A dataset of two configurations: `talk` with two splits, and `one` with one."""
    made = tmp_path / "set"
    (made / "talk").mkdir(parents=True)
    for split in ("train", "test"):
        bench(made / "talk" / f"{split}.jsonl", *({"question": f"{split} {at}?", "n": at} for at in range(3)))
    bench(made / "one.jsonl", {"messages": SAID, "label": 1})
    configs = [
        {"config_name": "talk", "data_files": [{"split": split, "path": f"talk/{split}.jsonl"} for split in ("train", "test")]},
        {"config_name": "one", "data_files": [{"split": "only", "path": "one.jsonl"}]},
    ]  # fmt: skip
    (made / "README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n")
    return f"hub://{made}"


def test_a_hub_dataset_is_asked_by_config_split_and_column(folder):
    for split in ("train", "test"):
        asked = conversations(f"{folder}?config=talk&split={split}&column=question")
        assert asked == [[f"{split} {at}?"] for at in range(3)]
    assert conversations(f"{folder}?config=talk&column=question") == [[f"test {at}?"] for at in range(3)]
    assert conversations(f"{folder}?config=one") == [["a", "c"]]


def test_a_dataset_may_be_parquet_and_only_the_prompt_is_read(tmp_path, offline):
    (tmp_path / "set").mkdir()
    many = {"messages": [SAID, SAID[:1]], "picture": [b"no picture"] * 2}
    held = datasets.Dataset.from_dict(many).cast_column("picture", datasets.Image())
    held.to_parquet(tmp_path / "set" / "test.parquet")
    assert conversations(f"hub://{tmp_path}/set") == [["a", "c"], ["a"]]
    (tmp_path / "set" / "test.parquet").write_bytes(b"no parquet")
    with pytest.raises(ValueError, match=r"cannot be read .*[Pp]arquet") as refusal:
        conversations(f"hub://{tmp_path}/set")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("?config=talk", r"row 1 has no prompt in turns or messages; .* \(it has question, n\)"),
        ("?config=talk&column=answer", r"row 1 has no prompt in answer; .* \(it has question, n\)"),
        ("?config=talk&column=n", r"row 1 has no prompt in n"),
        ("?config=talk&split=dev", "cannot be read .*dev.*train.*test"),
        ("?config=none", "cannot be read .*none.*talk.*one"),
        ("", "cannot be read .*talk.*one"),
        ("?colum=question", "says 'colum' behind its question mark; use config, split, column"),
    ],
)
def test_what_a_hub_dataset_has_not_is_refused_with_what_it_has(folder, query, message):
    with pytest.raises(ValueError, match=message) as refusal:
        conversations(folder + query)
    assert "\n" not in str(refusal.value)


def test_of_several_splits_without_a_test_one_must_be_named(tmp_path, offline):
    for split in ("train", "validation"):
        bench(tmp_path / f"{split}.jsonl", {"turns": ["a"]})
    with pytest.raises(ValueError, match=r"has the splits train, validation; choose one with \?split="):
        conversations(f"hub://{tmp_path}")


@pytest.mark.parametrize("name", ["hub://no-such-owner/no-such-set", "hub:///no/such/folder", "hub://", "hub:///"])
def test_a_dataset_that_is_not_there_or_out_of_reach_is_refused_in_one_sentence(name, offline):
    with pytest.raises(ValueError, match=f"the dataset {name} (cannot be read|names none)") as refusal:
        conversations(name)
    assert "\n" not in str(refusal.value)


# ---- turn by turn


def test_the_next_prompt_is_all_that_was_said_in_the_template():
    tokenizer = byte_tokenizer()
    dialogue = Dialogue(["a", "b", "c"], tokenizer)
    text = ""
    for turn, answer, ended in (("a", "naïve", True), ("b", "cut of", False), ("c", "", True)):
        assert not dialogue.over
        text += f"user:{turn}<|end|>assistant:"
        assert tokenizer.decode(dialogue.prompt()) == text
        dialogue.hear(tokenizer.encode(answer + "<|end|>" * ended))
        text += f"{answer}<|end|>"
    assert dialogue.over


def one_by_one(talks: list[list[str]], answers: dict[str, str], longest: int) -> Iterator[str]:
    """Every prompt of every conversation in turn, by hand."""
    for turns in talks:
        text = ""
        for turn in turns:
            text += f"user:{turn}<|end|>assistant:"
            if len(text.replace("<|end|>", "|")) > longest:
                break
            yield text
            text += f"{answers[turn]}<|end|>"


@pytest.mark.parametrize("rows", [1, 2, 3, 9])
@pytest.mark.parametrize("longest", [10_000, 70])
def test_exchanges_are_every_turn_once_until_a_dialogue_is_over_or_too_long(rows, longest):
    tokenizer = byte_tokenizer()
    talks = {
        "a": [["a1", "a2", "a3"], ["b1"], ["c1", "c2"], ["d1", "d2", "d3"], ["e1", "e2"]],
        "b": [["f1"], ["g1", "g2"]],
    }
    answers = {
        turn: turn * (12 if turn[0] == "d" else 3) for every in talks.values() for turns in every for turn in turns
    }
    chosen = {name: [Dialogue(turns, tokenizer) for turns in every] for name, every in talks.items()}
    most = most_exchanges(chosen, rows)
    asked: dict[str, list[str]] = {name: [] for name in talks}
    count = 0
    for name, dialogues in exchanges(chosen, rows, longest):
        assert 1 <= len(dialogues) <= rows
        count += 1
        for dialogue in dialogues:
            asked[name].append(tokenizer.decode(dialogue.prompt()))
            dialogue.hear(tokenizer.encode(answers[dialogue.turns[len(dialogue.answers)]]))
    for name, every in talks.items():
        assert sorted(asked[name]) == sorted(one_by_one(every, answers, longest))
    if longest > 1000:
        assert count == most
        assert sum(map(len, asked.values())) == sum(len(turns) for every in talks.values() for turns in every)
    else:
        assert sum(map(len, asked.values())) < sum(len(turns) for every in talks.values() for turns in every)


def test_as_many_turns_are_asked_as_there_are_up_to_the_number(tmp_path):
    name = bench(tmp_path / "mine.jsonl", *({"turns": list("abcde"[:many])} for many in (1, 2, 3, 5)))
    for turns in (1, 2, 4, 5):
        chosen = choose([name, "tiny"], byte_tokenizer(), 9, 400, turns)
        assert [len(dialogue.turns) for dialogue in chosen["mine"]] == [min(turns, many) for many in (1, 2, 3, 5)]
    message = "decode.turns=6, and the longest conversation chosen from mine, tiny has 5; ask for fewer"
    with pytest.raises(ValueError, match=message):
        choose([name, "tiny"], byte_tokenizer(), 9, 400, 6)


# ---- what ships


def grams(text: str) -> set[tuple[str, ...]]:
    """Every thirteen words in a row."""
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[at : at + 13]) for at in range(len(words) - 12)}


def test_no_training_prompt_shares_thirteen_words_in_a_row_with_a_benchmark():
    corpus = chain.from_iterable(conversations_of(f"pkg://train/corpus/{name}.jsonl.gz") for name in ("smol", "more"))
    asked = [message["content"] for row in corpus for message in row["messages"] if message["role"] == "user"]
    taught = set().union(*map(grams, asked))
    assert len(set(asked)) == len(asked) > 9_600
    assert len(taught) > 100_000
    assert sum(bool(grams(turn) & taught) for name in ROWS for turns in conversations(name) for turn in turns) == 0


@pytest.mark.parametrize("name", ["medical", "banking", "sql", "spider"])
def test_no_training_prompt_of_a_domain_is_asked_in_its_benchmark(name):
    taught = [row["messages"] for row in conversations_of(packaged(f"pkg://train/domain/{name}.jsonl.gz"))]
    assert {tuple(one["role"] for one in talk) for talk in taught} == {("user",)}
    asked = {words(turns[0]) for turns in conversations(name)}
    assert len(asked) == ROWS[name]
    assert not asked & {words(talk[0]["content"]) for talk in taught}


def words(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))


def shipped_rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in gzip.decompress(file.read_bytes()).splitlines()]


def test_every_shipped_set_is_in_the_notice_with_a_licence_text_that_ships():
    notice = (ROOT / "NOTICE").read_text()
    section = notice[notice.index("2. Benchmark prompts") : notice.index("3. Drafter")]
    files = sorted(SHIPPED.glob("*.jsonl.gz"))
    assert {file.name.split(".")[0] for file in files} == {*ROWS} - {"tiny"}
    assert [file.name for file in files if file.name not in section] == []
    texts = {file.name for file in (SHIPPED / "licenses").iterdir()}
    assert set(re.findall(r"[\w.-]+\.txt", section)) == texts
    domains = notice[notice.index("5. Domain prompts") :]
    assert {file.name for file in (ROOT / "train/domain").glob("*.jsonl.gz")} == set(
        re.findall(r"[\w.-]+\.jsonl\.gz", domains)
    )
    texts = {file.name for file in (ROOT / "train/domain/licenses").iterdir()}
    assert set(re.findall(r"[\w.-]+\.txt", domains)) == texts


def test_shipped_sets_hold_prompts_alone_and_no_time_of_day():
    for file in SHIPPED.glob("*.jsonl.gz"):
        assert file.read_bytes()[4:8] == b"\0\0\0\0"  # gzip's clock: the same rows are the same bytes
        assert {key for row in shipped_rows(file) for key in row} <= {"id", "category", "source", "turns"}


def test_share_alike_text_stands_in_files_of_its_own():
    for file in SHIPPED.glob("*.jsonl.gz"):
        alike = {
            row["category"] in ("qa", "rag") or row.get("source", "").startswith("taoyds") for row in shipped_rows(file)
        }
        assert alike == {file.name in ("qa.jsonl.gz", "rag.jsonl.gz", "spider.jsonl.gz")}
