"""Rows of text, wherever they are: JSONL, JSON and Parquet files, folders of them, and datasets of the Hub.

Every row comes with the words that say where it stands, so that a complaint about it can be found.
"""

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

HUB = "hub://"
LONGEST = 64 * 2**20  # bytes of a line: more is no conversation, and would fill the memory

Rows = Iterator[tuple[str, Any]]


def parsed(name: str, known: Sequence[str]) -> tuple[str, dict[str, str]]:
    """The place that `name` means and the options behind its question mark. Raises ValueError for one that is not `known`."""
    place, _, query = name.partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    if unknown := [key for key in options if key not in known]:
        raise ValueError(f"{name} says {unknown[0]!r} behind its question mark; use {', '.join(known)}")
    return place, options


def file_rows(file: Path) -> Rows:
    """The rows of a JSON Lines file, plain or gzipped, a JSON list, a Parquet file, or a folder of them."""
    if file.is_dir():
        return _read_by_datasets(str(file), str(file))
    if file.suffix == ".parquet":
        return _read_by_datasets(str(file), "parquet", data_files=str(file))
    return _json_rows(file) if file.suffix == ".json" else _json_lines(file)


def _json_lines(file: Path) -> Rows:
    with gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb") as lines:
        for number, line in enumerate(iter(lambda: lines.readline(LONGEST + 1), b""), start=1):
            if len(line) > LONGEST:
                raise ValueError(
                    f"{file} line {number} is longer than {LONGEST / 2**20:.0f} MB; one line holds one conversation"
                )
            yield (
                f"{file} line {number}",
                _loaded(line, f"{file} line {number} is no JSON; every line of a .jsonl file is one object", file),
            )


def _json_rows(file: Path) -> Rows:
    whole = _loaded(file.read_bytes(), f"{file} is no JSON; a .json file holds one list of rows", file)
    if not isinstance(whole, list):
        raise ValueError(f"{file} holds no list of rows; give a list, or one object a line in a .jsonl file")
    for number, row in enumerate(whole, start=1):
        yield f"{file} row {number}", row


def _loaded(text: bytes, complaint: str, file: Path) -> Any:
    try:
        return json.loads(text.decode("utf-8-sig"))  # some editors begin a file with a mark
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{file} is not in UTF-8 ({error.reason} at {text[error.start : error.start + 8]!r}); save it so"
        ) from None
    except json.JSONDecodeError:
        raise ValueError(complaint) from None


def hub_rows(place: str, options: Mapping[str, str], wanted: Sequence[str] = (), likely: str = "test") -> Rows:
    """The rows of the Hub dataset, or folder that could be one, `place`; of several splits the `likely` one, where none is named.

    Where it has columns that are `wanted`, only those are read.
    """
    dataset = place.removeprefix(HUB)
    if not dataset.strip("/"):
        raise ValueError(f"the dataset {place} names none; write {HUB}<owner>/<name>")
    how = {"name": options.get("config"), "split": options.get("split"), "revision": options.get("revision")}
    return _read_by_datasets(place, dataset, wanted, likely, streaming="streaming" in options, **how)


def _read_by_datasets(place: str, dataset: str, wanted: Sequence[str] = (), likely: str = "train", **how: Any) -> Rows:
    import datasets  # takes seconds, and only such a source needs it

    try:
        found: Any = datasets.load_dataset(dataset, **how)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        told = error.__cause__ if isinstance(error, datasets.exceptions.DatasetGenerationError) else error
        reason = " ".join(str(told).split())[:300].rstrip(".")
        raise ValueError(
            f"the dataset {place} cannot be read ({reason}); check the network, its name, and config= and split= behind a question mark"
        ) from None
    if isinstance(found, Mapping):  # no split was named
        if len(found) > 1 and likely not in found:
            raise ValueError(f"the dataset {place} has the splits {', '.join(found)}; choose one with ?split=")
        found = found[likely if likely in found else next(iter(found))]
    if few := [
        name for name in wanted if name in (found.column_names or ())
    ]:  # the others may be pictures, dear to read
        found = found.select_columns(few)
    for number, row in enumerate(found, start=1):
        yield f"{place} row {number}", row
