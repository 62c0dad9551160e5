"""A request that streams: its pieces are the text, and it ends where it was told to."""

import random

import pytest

from conf.schema import Accept
from conftest import Family
from decode.engine import generate
from decode.opening import open_target
from decode.prompts import Dialogue
from decode.stream import Piece, Request, first_stop, settled, written
from decode.talk import decode
from models.drafter import Budget, Plain
from reference import Guesser
from runs import changed, composed

CHANCE = random.Random(5)
PROMPT = [CHANCE.randrange(32, 127) for _ in range(9)]
LIMIT = 20
NODES = 8


def test_the_command_answers_a_question_as_plain_decoding_would(capsys: pytest.CaptureFixture[str]) -> None:
    told = ("drafter=draft_model", "drafter.layers=1", "decode.tokens=12", "target.dtype=fp32")
    run = composed(*told, "decode.ask=Why?")
    decode(run)
    target = open_target(run.target)
    prompt = Dialogue(["Why?"], target.tokenizer).prompt()
    (said,) = generate(target, Plain(), [prompt], 12, Budget(nodes=1)).generations
    text = written(target.tokenizer, said.tokens)
    shown = capsys.readouterr().out
    assert text.strip()
    assert f"{text}\n\n{len(said.tokens)} tokens in " in shown
    assert f"after {len(prompt)} of the prompt: tau " in shown
    stop = text[-4:-2]
    decode(changed(run, "decode.stop", [stop]))
    assert f"{text[: text.index(stop)]}\n\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("setting", "value", "sentence"),
    [
        ("decode.ask", " ", "decode.ask says nothing; give a question"),
        ("decode.accept", Accept.typical, "decode.ask is answered losslessly; leave decode.accept out"),
        ("decode.stop", [""], "a stop string is empty, which stands everywhere"),
    ],
)
def test_what_cannot_be_answered_is_refused(setting: str, value: object, sentence: str) -> None:
    run = composed("drafter=draft_model", "drafter.layers=1", "decode.ask=Why?", "decode.temperature=1.0")
    with pytest.raises(ValueError, match=sentence):
        decode(changed(run, setting, value))


def request(llama: Family, **how: object) -> Request:
    """The request for what the target says, by a drafter that often knows it."""
    drafter = Guesser({tuple(PROMPT): llama.says(PROMPT, LIMIT)}, NODES)
    return Request(llama.target, drafter, PROMPT, LIMIT, Budget(nodes=NODES), **how)  # type: ignore[arg-type]


def heard(asked: Request) -> list[Piece]:
    return list(asked.pieces())


def test_the_pieces_are_the_targets_text_and_the_books_add_up(llama: Family) -> None:
    asked = request(llama)
    pieces = heard(asked)
    said = llama.says(PROMPT, LIMIT)
    assert [token for piece in pieces for token in piece.tokens] == said == asked.tokens
    assert "".join(piece.text for piece in pieces) == written(llama.target.tokenizer, said) == asked.text
    told = asked.statistics
    assert (told.prompt, told.tokens, told.reason) == (9, LIMIT, "limit")
    assert told.accepted > 0
    assert len(pieces) == told.rounds < LIMIT - 1
    assert told.tau == (LIMIT - 1) / told.rounds
    assert told.seconds > 0 < told.prefill


@pytest.mark.parametrize("place", [0, 1, 7, LIMIT - 1])
def test_an_end_token_of_the_requests_own_ends_it_there(llama: Family, place: int) -> None:
    said = llama.says(PROMPT, LIMIT)
    asked = request(llama, ends=[said[place]])
    heard(asked)
    assert asked.tokens == said[: said.index(said[place]) + 1]
    assert asked.statistics.reason == "end"


@pytest.mark.parametrize(("start", "size"), [(0, 1), (3, 4), (6, 2)])
def test_a_stop_string_ends_the_text_before_it_and_no_piece_has_told_its_beginning(
    llama: Family, start: int, size: int
) -> None:
    whole = written(llama.target.tokenizer, llama.says(PROMPT, LIMIT))
    stop = whole[start : start + size]
    assert stop
    asked = request(llama, stops=["never said", stop])
    pieces = heard(asked)
    assert asked.statistics.reason == "stop"
    assert asked.text == "".join(piece.text for piece in pieces) == whole[: whole.index(stop)]
    assert stop in written(llama.target.tokenizer, asked.tokens)
    assert stop not in written(llama.target.tokenizer, asked.tokens[:-1])


def test_a_stop_string_that_never_comes_ends_at_the_limit_with_all_of_the_text(llama: Family) -> None:
    whole = written(llama.target.tokenizer, llama.says(PROMPT, LIMIT))
    asked = request(llama, stops=[whole[-1] + "never said"])  # its beginning ends the text
    heard(asked)
    assert (asked.text, asked.statistics.reason) == (whole, "limit")


def test_a_request_may_be_left_before_it_is_over(llama: Family) -> None:
    asked = request(llama)
    first = next(asked.pieces())
    assert first.tokens == llama.says(PROMPT, LIMIT)[: len(first.tokens)]
    assert asked.statistics.reason == ""


def test_a_text_that_ends_with_its_first_token_is_one_piece(llama: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    said = llama.says(PROMPT, LIMIT)
    monkeypatch.setattr(llama.target.model.generation_config, "eos_token_id", said[0])
    asked = Request(llama.target, Plain(), PROMPT, LIMIT)
    assert [piece.tokens for piece in heard(asked)] == [said[:1]]
    assert (asked.statistics.reason, asked.statistics.rounds, asked.statistics.tau) == ("end", 0, 0.0)


def test_what_may_still_become_a_stop_string_or_a_character_is_held_back() -> None:
    assert settled("a word", []) == 6
    assert settled("a word\n", ["\n\n"]) == 6
    assert settled("a word\n#", ["\n\n", "\n##"]) == 6
    assert settled("half \ufffd", []) == 5
    assert settled("abab", ["abac"]) == 2
    assert first_stop("one two", ["two", "e t"]) == 2
    assert first_stop("one two", ["three"]) is None


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ({"stops": [""]}, "a stop string is empty, which stands everywhere"),
        ({"ends": [272]}, "end token 272 is none of the target's 272 tokens"),
    ],
)
def test_requests_that_make_no_sense_are_refused(llama: Family, how: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        request(llama, **how)
