"""The target behind a server: whatever troubles it makes, every prompt is answered once, in the target's own tokens."""

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from conf.schema import Api, Regenerate
from conftest import family_of
from decode.engine import generate
from endpoints import Reply, Served, Trouble, broken, cut, refused, send, serving, slow, too_many
from models.drafter import Budget, Plain
from models.sampling import Sampling
from models.source import byte_tokenizer
from models.target import Target
from runs import composed
from test_regenerate import LIMIT, TALKS, TERMS, asked
from train import endpoint
from train.asking import Ask, Inside
from train.chat import render
from train.data import write_rows
from train.endpoint import Endpoint
from train.regenerate import answer, regenerate
from train.sources import conversations_of

BYTES = byte_tokenizer()
END = BYTES.eos_token_id


def echo(body: dict[str, Any]) -> dict[str, Any]:
    """The prompt's last bytes in capitals, which shows what was asked."""
    text = BYTES.decode(body["prompt"][:-11]).split(":")[-1].upper()[-20:]
    return said(text, [*BYTES(text).input_ids, END], len(body["prompt"]))


def said(text: str, ids: list[int] | None, asked: int, **other: Any) -> dict[str, Any]:
    """What vLLM says, or with `ids` None a server that knows nothing of them."""
    choice = {"index": 0, "text": text, "finish_reason": "stop", **({} if ids is None else {"token_ids": ids}), **other}
    return {
        "choices": [choice],
        "usage": {"prompt_tokens": asked, "completion_tokens": len(ids or text) + (ids is None)},
    }


def open_endpoint(served: Served, tries: int = 4, **how: Any) -> Endpoint:
    return Endpoint(Regenerate(url=served.url, tokens=LIMIT, tries=tries, **how), BYTES, frozenset([END]))


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Second tries come at once, and no proxy stands before loopback."""
    monkeypatch.setattr(endpoint, "FIRST_WAIT", 0.001)
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.delenv(endpoint.KEY, raising=False)


def ask(text: str) -> Ask:
    messages = [{"role": "user", "content": text}]
    return Ask(text, messages, render(BYTES, messages, speak=True), seed=3)


def test_every_prompt_is_answered_once_whatever_troubles_there_are(tmp_path: Path) -> None:
    """200 prompts, 16 at a time; four of five first tries fail, some second ones too, each in its way."""
    prompts = [
        {"id": f"n{number}", "messages": [{"role": "user", "content": f"say {number}"}]} for number in range(200)
    ]
    write_rows(tmp_path / "prompts.jsonl", prompts)
    kinds = {1: too_many, 2: broken, 3: cut, 4: slow(1.0)}

    def trouble(body: dict[str, Any], before: int) -> Trouble | None:
        number = int(BYTES.decode(body["prompt"]).split("say ")[1].split("<")[0])
        return kinds.get((number + before) % 5) if before < 1 + (number % 7 == 0) else None

    with serving(Served(echo, trouble)) as served:
        how = [f"regenerate.prompts={tmp_path}/prompts.jsonl", f"regenerate.url={served.url}", "regenerate.rows=16"]
        answer(composed(*how, f"regenerate.out={tmp_path}/said.jsonl", "regenerate.timeout=0.5"))
    made = list(conversations_of(tmp_path / "said.jsonl"))
    assert [row["id"] for row in made] == [row["id"] for row in prompts]
    for number, row in enumerate(made):
        assert row["messages"][1]["content"] == f"SAY {number}"
        assert row["messages"][1]["ids"] == [*BYTES(f"SAY {number}").input_ids, END]
    assert len(served.tries) == 200
    assert sum(count > 1 for count in served.tries.values()) >= 160
    assert not list(tmp_path.glob(".*"))


def test_as_many_requests_are_under_way_as_may_be() -> None:
    def reply(body: dict[str, Any]) -> dict[str, Any]:
        time.sleep(0.02)
        return echo(body)

    with serving(Served(reply)) as served:
        done = list(open_endpoint(served, rows=4).answers([ask(str(number)) for number in range(24)]))
    assert sorted(number for number, _ in done) == list(range(24))
    assert served.together == 4


@pytest.fixture(scope="module")
def small() -> Target:
    target = family_of("llama").target
    target.tap(())
    return target


def speaking(target: Target) -> Reply:
    """A server that serves `target`, one request at a time, by prompts or by messages."""
    lock = threading.Lock()

    def reply(body: dict[str, Any]) -> dict[str, Any]:
        prompt = body.get("prompt") or render(target.tokenizer, body["messages"], speak=True)
        with lock:
            made = generate(target, Plain(), [prompt], body["max_tokens"], Budget(nodes=1)).generations[0]
        text = target.tokenizer.decode(made.tokens, skip_special_tokens=True)
        reason = "stop" if made.ended else "length"
        return said(text, made.tokens, len(prompt), finish_reason=reason, message={"content": text})

    return reply


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_an_endpoint_that_serves_the_target_writes_the_same_bytes(api: str, small: Target, tmp_path: Path) -> None:
    """Turn by turn, after its own answers."""
    inside = Inside(small, Plain(), Budget(nodes=1), LIMIT, Sampling(), 3)
    with serving(Served(speaking(small))) as served:
        outside = open_endpoint(served, api=Api(api))
        for speaker, name in ((inside, "in"), (outside, "out")):
            assert regenerate(speaker, small.tokenizer, asked(TALKS), tmp_path / name, TERMS) == 3
    assert (tmp_path / "in").read_bytes() == (tmp_path / "out").read_bytes()
    assert outside.notes() == []
    assert {body["path"] for body in served.asked} == {
        "/v1/completions" if api == "completions" else "/v1/chat/completions"
    }
    assert not any("ids" in message for body in served.asked for message in body.get("messages", ()))


def test_a_server_that_is_gone_ends_the_run_and_the_next_goes_on(tmp_path: Path) -> None:
    talks = {f"talk {number}": [f"one {number}", f"two {number}"] for number in range(20)}

    def run(served: Served) -> int:
        return regenerate(open_endpoint(served, tries=2, rows=3), BYTES, asked(talks), tmp_path / "said", TERMS)

    gone = threading.Event()
    with serving(Served(echo, lambda body, before: cut if gone.is_set() else None)) as served:

        def counted(body: dict[str, Any]) -> dict[str, Any]:
            if len(served.answered) > 25:
                gone.set()
            return echo(body)

        served.reply = counted
        with pytest.raises(
            ValueError, match=r"v1 gave no answer for conversation talk \d+ in 2 tries \(.*start the same"
        ):
            run(served)
    kept = [json.loads(line) for line in (tmp_path / ".said.answers").read_text().splitlines()[1:]]
    assert 25 < len(kept) < 40
    assert len({(one["key"], one["turn"]) for one in kept}) == len(kept)
    with serving(Served(echo)) as served:
        assert run(served) == 20
        assert len(served.asked) == 40 - len(kept)
    for row in conversations_of(tmp_path / "said"):
        number = row["id"].split()[1]
        assert [message["content"] for message in row["messages"][1::2]] == [f"ONE {number}", f"TWO {number}"]


def test_a_server_that_is_not_there_is_named() -> None:
    with serving(Served(echo)) as served:
        pass
    with pytest.raises(ValueError, match=r"v1 gave no answer for the list of its models in 2 tries \(.*refused"):
        open_endpoint(served, tries=2)


def test_it_waits_as_long_as_the_server_asks() -> None:
    seen: list[float] = []

    def wait(handler: Any) -> None:
        send(handler, {"error": "busy"}, 429, Retry_After="0.3")

    def trouble(body: dict[str, Any], before: int) -> Trouble | None:
        seen.append(time.monotonic())
        return wait if before == 0 else None

    with serving(Served(echo, trouble)) as served:
        assert list(open_endpoint(served).answers([ask("x")])) == [(0, [*BYTES("X").input_ids, END])]
    first, second = seen
    assert second - first >= 0.3


@pytest.mark.parametrize(
    ("model", "served", "sentence"),
    [
        (None, ("a", "b"), "serves a, b, and which one is the target; set regenerate.model= to one of them"),
        ("c", ("a", "b"), "serves a, b, not c; set regenerate.model="),
        (None, (), "serves no model"),
    ],
)
def test_a_model_that_is_not_served_is_named(model: str | None, served: tuple[str, ...], sentence: str) -> None:
    with serving(Served(echo, models=served)) as here, pytest.raises(ValueError, match=sentence):
        open_endpoint(here, model=model)


def test_the_model_is_the_one_that_is_given_or_the_only_one() -> None:
    with serving(Served(echo, models=("a", "b"))) as here:
        assert open_endpoint(here, model="b").model == "b"
    with serving(Served(echo, models=("a",))) as here:
        assert open_endpoint(here).model == "a"


@pytest.mark.parametrize(
    ("trouble", "sentence"),
    [
        (refused(404, "no such model"), r"v1/completions refuses conversation x \(HTTP 404: no such model\)$"),
        (refused(400, "too long"), r"refuses conversation x \(HTTP 400: too long\)$"),
        (refused(401, "who are you"), r"\(HTTP 401: who are you\); the key is read from \$OUTRIDER_API_KEY$"),
        (
            lambda handler: send(handler, {"choices": []}),
            r"answered conversation x without tokens or text \(\{\"choices",
        ),
        (lambda handler: send(handler, ["hello"]), "answered conversation x without tokens or text"),
        (
            lambda handler: send(handler, {"choices": [{"text": "", "token_ids": [], "finish_reason": "length"}]}),
            "without tokens or text",
        ),
        (
            lambda handler: send(handler, said("other", [1, 2, 3], 9)),
            "with tokens that do not read as its text in the target's tokenizer .* let it serve the target",
        ),
        (lambda handler: send(handler, said("other", [1, 99999], 9)), "do not read as its text"),
        (broken, r"gave no answer for conversation x in 2 tries \(HTTP 500: "),
        (cut, r"in 2 tries \(IncompleteRead"),
        (slow(0.6), r"in 2 tries \(timed out\)"),
    ],
)
def test_what_is_no_answer_ends_in_a_sentence(trouble: Trouble, sentence: str) -> None:
    with serving(Served(echo, lambda body, before: trouble)) as served:
        here = open_endpoint(served, timeout=0.2, tries=2)
        with pytest.raises(ValueError, match=sentence):
            list(here.answers([ask("x")]))


def test_a_server_without_token_ids_is_told_apart(tmp_path: Path) -> None:
    """Its text is tokenised again, ends as the target would end it, and what the server counted otherwise is said."""

    def reply(body: dict[str, Any]) -> dict[str, Any]:
        text = echo(body)["choices"][0]["text"]
        reason = "length" if "CUT" in text else "stop"
        made = said(text, None, len(body["prompt"]) + ("LONG" in text), finish_reason=reason)
        made["usage"]["completion_tokens"] = len(text) - ("ODD" in text) * 2
        return made

    rows = asked({"a": ["plain"], "b": ["a cut"], "c": ["odd"], "d": ["long"]})
    with serving(Served(reply)) as served:
        here = open_endpoint(served)
        regenerate(here, BYTES, rows, tmp_path / "said", TERMS)
    answers = {row["id"]: row["messages"][1] for row in conversations_of(tmp_path / "said")}
    assert answers["a"] == {"role": "assistant", "content": "PLAIN", "ids": [*BYTES("PLAIN").input_ids, END]}
    assert answers["b"]["ids"] == BYTES("A CUT").input_ids
    assert here.notes() == [
        f"{served.url} gives no token ids: 4 answers were tokenised again, 1 of them into other tokens than it counted",
        f"{served.url} read 1 prompts as another number of tokens than the target's template makes of them",
    ]


@pytest.mark.parametrize(
    ("ids", "reason", "wanted"),
    [
        ([72, 105, END], "stop", [72, 105, END]),
        ([72, 105], "stop", [72, 105, END]),
        ([72, 105], "length", [72, 105]),
        ([72, 105, END, 72], "length", [72, 105, END]),
        ([END], "stop", [END]),
        ([72] * 20, "length", [72] * LIMIT),
    ],
)
def test_an_answer_ends_where_the_target_ends_it(ids: list[int], reason: str, wanted: list[int]) -> None:
    text = BYTES.decode(ids, skip_special_tokens=True)
    with serving(Served(lambda body: said(text, ids, 1, finish_reason=reason))) as served:
        assert list(open_endpoint(served).answers([ask("x")])) == [(0, wanted)]


def test_the_target_speaks_by_its_own_distribution_and_every_answer_by_its_own_seed(tmp_path: Path) -> None:
    """The server's defaults, which may be the model's generation_config, are overruled."""
    seeds = []
    for name, talks in (("a", TALKS), ("b", {"two": TALKS["two"]})):
        with serving(Served(echo)) as served:
            here = open_endpoint(served, temperature=0.7, rows=1)
            regenerate(here, BYTES, asked(talks), tmp_path / name, TERMS)
        for body in served.asked:
            assert (body["temperature"], body["top_p"], body["top_k"], body["repetition_penalty"]) == (
                0.7,
                1.0,
                -1,
                1.0,
            )
            assert body["max_tokens"] == LIMIT
            assert body["return_token_ids"] is True
        seeds.append({json.dumps(body["prompt"]): body["seed"] for body in served.asked})
    assert len(set(seeds[0].values())) == len(seeds[0]) > len(seeds[1]) == 2
    assert seeds[1].items() <= seeds[0].items()
    with serving(Served(echo)) as served:
        list(open_endpoint(served).answers([ask("x")]))
    assert "seed" not in served.asked[0]
    assert served.asked[0]["temperature"] == 0


def test_the_key_comes_from_the_environment_and_goes_into_the_header_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in (None, "secret"):
        if key:
            monkeypatch.setitem(os.environ, endpoint.KEY, key)
        with serving(Served(echo)) as served:
            list(open_endpoint(served).answers([ask("x")]))
        assert [held.get("Authorization") for held in served.headers] == [key and "Bearer secret"]
        assert "secret" not in json.dumps(served.asked)


def test_an_asker_that_stops_leaves_no_thread_asking() -> None:
    asks = [ask(f"say {number}") for number in range(50)]
    with serving(Served(echo)) as served:
        answers = open_endpoint(served, rows=2).answers(asks)
        next(answers)
        answers.close()
        time.sleep(0.1)
        before = len(served.asked)
        time.sleep(0.1)
        assert len(served.asked) == before < 50
