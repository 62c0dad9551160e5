"""Conversations from every form in which people publish them."""

import gzip
import json
import os
import resource
import signal
import tracemalloc
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from conf.schema import Data
from models.source import byte_tokenizer
from runs import composed
from train import job
from train.chat import Row, example
from train.data import write_rows
from train.sources import conversations_of, rows_of

WANTED = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
FORMS: dict[str, dict[str, Any]] = {
    "openai": {"messages": WANTED},
    "sharegpt": {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    "ultrachat": {"id": "7", "data": ["a", "b"]},
    "instruction": {"instruction": "a", "input": "", "output": "b"},
    "prompt": {"prompt": "a", "response": "b", "score": 3},
    "question": {"question": "a", "answer": "b"},
}


def lines(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("row", FORMS.values(), ids=list(FORMS))
def test_every_form_gives_the_same_messages(row: Row, tmp_path: Path) -> None:
    (found,) = conversations_of(lines(tmp_path / "rows.jsonl", row))
    assert found["messages"] == WANTED
    assert found.get("id") == row.get("id")


def test_an_instruction_has_its_input_and_prompts_alone_are_asked(tmp_path: Path) -> None:
    rows = {"instruction": "Add.", "input": "1 2", "output": "3"}, {"turns": ["a", "b"]}, {"prompt": "a"}
    found = list(conversations_of(lines(tmp_path / "rows.jsonl", *rows)))
    assert found[0]["messages"][0]["content"] == "Add.\n\n1 2"
    assert [(one["role"], one["content"]) for one in found[1]["messages"]] == [("user", "a"), ("user", "b")]
    assert [one["role"] for one in found[2]["messages"]] == ["user"]


def test_text_is_said_by_the_target_from_end_to_end(tmp_path: Path) -> None:
    (row,) = conversations_of(lines(tmp_path / "rows.jsonl", {"text": "abc"}))
    made = example(byte_tokenizer(), row, frozenset())
    assert byte_tokenizer().decode(made.input_ids) == "abc"
    assert made.loss_mask == [True] * 3


def test_columns_are_named_in_the_configuration(tmp_path: Path) -> None:
    path = lines(tmp_path / "rows.jsonl", {"chat": FORMS["sharegpt"]["conversations"], "text": "no"})
    (found,) = conversations_of(path, {"messages": "chat"})
    assert found["messages"] == WANTED
    with pytest.raises(
        ValueError, match=r"rows.jsonl line 1 has no column talk \(it has chat, text\); mend data.columns"
    ):
        list(conversations_of(path, {"messages": "talk"}))


def test_lists_parquet_and_folders_are_read_like_lines(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": f"a{number}", "response": "b"} for number in range(5)]
    asked = [f"a{number}" for number in range(5)]
    (tmp_path / "list.json").write_text(json.dumps(rows))
    (tmp_path / "zip.jsonl.gz").write_bytes(gzip.compress(lines(tmp_path / "l.jsonl", *rows).read_bytes()))
    (tmp_path / "folder").mkdir()
    for file in (tmp_path / "rows.parquet", tmp_path / "folder" / "train.parquet"):
        datasets.Dataset.from_list(rows).to_parquet(str(file))
    for name in ("list.json", "zip.jsonl.gz", "rows.parquet", "folder"):
        assert [row["messages"][0]["content"] for row in conversations_of(tmp_path / name)] == asked, name
    for query in ("", "?split=train", "?streaming"):
        found = conversations_of(f"hub://{tmp_path}/folder{query}")
        assert [row["messages"][0]["content"] for row in found] == asked, query


def test_a_share_of_another_source_is_spread_among_the_rows(tmp_path: Path) -> None:
    ours = lines(tmp_path / "ours.jsonl", *({"prompt": f"ours {at}"} for at in range(30)))
    theirs = lines(tmp_path / "theirs.jsonl", *({"prompt": f"theirs {at}"} for at in range(40)))
    rows = rows_of(Data(path=str(ours), mix={str(theirs): 0.25}))
    asked = [row["messages"][0]["content"] for row in rows]
    assert [text for text in asked if text.startswith("ours")] == [f"ours {at}" for at in range(30)]
    others = [at for at, text in enumerate(asked) if text.startswith("theirs")]
    assert len(others) == 10
    assert len({asked[at] for at in others}) == 10
    assert all(2 <= after - before <= 6 for before, after in pairwise(others))
    few = rows_of(Data(path=str(ours), mix={str(theirs): 0.9}))
    assert len(few) == 70  # there are no more of them
    with pytest.raises(ValueError, match=r"leaves 0.00 for data.path; shares are above 0 and sum to less than 1"):
        rows_of(Data(path=str(ours), mix={str(theirs): 1.0}))


def test_smol_more_is_smol_and_the_prompts_that_ship_beside_it() -> None:
    rows = rows_of(composed("data=smol_more").data)
    prompts = [row for row in rows if len(row["messages"]) == 1]
    assert len({row["id"] for row in rows}) == len(rows) > 9_500
    assert len(rows) - len(prompts) == 4029


def test_a_mix_names_files_or_what_stands_in_conf_data(tmp_path: Path) -> None:
    ours = lines(tmp_path / "ours.jsonl", *({"prompt": f"ours {at}"} for at in range(8)))
    data = composed(f"data.path={ours}", "+data.mix={tiny: 0.2}").data
    assert len(rows_of(data)) == 10
    sql = rows_of(composed("data=sql").data)
    assert len(sql) == 1135 + 675
    assert sum("spider" in str(row["source"]) for row in sql) == 675
    replayed = composed("data=sql", "+data.mix={tiny: 0.001}").data
    assert replayed.mix == {"spider": 0.373, "tiny": 0.001}


BAD: dict[str, tuple[bytes, str]] = {
    "latin-1": ('{"prompt": "caf\xe9"}\n'.encode("latin-1"), r"rows.jsonl is not in UTF-8 \(.*\); save it so"),
    "utf-16": ('{"prompt": "a"}\n'.encode("utf-16"), r"rows.jsonl is not in UTF-8 \(.*\); save it so"),
    "no role": (b'{"messages": [{"content": "a"}]}\n', "rows.jsonl line 1 has a message without a role"),
    "no columns": (b"{}\n", "rows.jsonl line 1 has no columns; a row has messages or conversations"),
    "endless": (b'{"prompt": "' + b"a" * 3_000 + b'"}\n', "rows.jsonl line 1 is longer than 0 MB; one line holds one"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_source_that_cannot_be_read_is_refused_in_one_sentence(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, sentence = BAD[kind]
    monkeypatch.setattr("decode.tables.LONGEST", 2_000)
    (tmp_path / "rows.jsonl").write_bytes(text)
    with pytest.raises(ValueError, match=sentence) as refusal:
        list(conversations_of(tmp_path / "rows.jsonl"))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_a_line_of_200_megabytes_is_refused_without_filling_the_memory(name: str, tmp_path: Path) -> None:
    path, size = tmp_path / name, 200 * 2**20
    if name.endswith("gz"):
        with gzip.open(path, "wb", compresslevel=1) as file:
            for _ in range(200):
                file.write(bytes(2**20))
    else:
        path.touch()
        os.truncate(path, size)  # takes no room on the disk
    tracemalloc.start()
    try:
        with pytest.raises(
            ValueError, match=r"line 1 is longer than 64 MB; one line holds one conversation"
        ) as refusal:
            list(conversations_of(path))
        assert tracemalloc.get_traced_memory()[1] < 0.8 * size
    finally:
        tracemalloc.stop()
    assert "\n" not in str(refusal.value)


def test_a_mark_of_the_encoding_at_the_beginning_is_no_mistake(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes('{"prompt": "a"}\n'.encode("utf-8-sig"))
    assert len(list(conversations_of(tmp_path / "rows.jsonl"))) == 1


def test_a_hub_name_that_does_not_exist_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        ValueError, match=r"the dataset hub://nobody/nothing cannot be read .*; check the network, its name"
    ) as refusal:
        list(conversations_of("hub://nobody/nothing"))
    assert "\n" not in str(refusal.value)


def test_a_disk_that_is_full_is_told_and_leaves_what_was_there(tmp_path: Path) -> None:
    """The system itself refuses to write more than 100 bytes to a file."""
    path = tmp_path / "rows.jsonl"
    write_rows(path, [{"prompt": "a"}])
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(ValueError, match=r"rows.jsonl cannot be written \(File too large\); make room"):
            write_rows(path, [{"prompt": "a" * 200}])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_text() == '{"prompt":"a"}\n'
    assert list(tmp_path.iterdir()) == [path]


def test_a_setting_that_is_no_table_is_refused(tmp_path: Path) -> None:
    path = lines(tmp_path / "rows.jsonl", FORMS["openai"])
    with pytest.raises(ValueError, match=r"data.mix=\['a'\] is no table; write it as 'data.mix=\{key: value\}'"):
        rows_of(Data(path=str(path), mix=["a"]))
    assert len(rows_of(composed(f"data.path={path}", "data.columns={messages: messages}").data)) == 1


@pytest.mark.parametrize("setting", ["data.path=gone.jsonl", "data.mix={gone.jsonl: 0.5}"])
def test_a_missing_source_is_known_before_weights_load(
    setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "open_target", None)
    with pytest.raises(ValueError, match=r"there is no data file gone\.jsonl; check data\.path"):
        job.train(composed(f"out={tmp_path}/out", setting))
