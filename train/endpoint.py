"""The target behind an OpenAI-compatible endpoint: vLLM, SGLang, TGI.

It is given the prompt's token ids, so that no template but the target's own is in play, and asked for the answer's
(`return_token_ids`: vLLM from 0.10.2, SGLang from 2026). A server that gives none, or renders messages itself, is told apart
and what came of it is said.
"""

import json
import os
import queue
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from email.message import Message as Headers
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from transformers import PreTrainedTokenizerBase

from conf.schema import Api, Regenerate
from train.asking import Ask

KEY = "OUTRIDER_API_KEY"  # the environment variable with the endpoint's key: keys do not belong in a conf
PATIENT = (408, 425, 429)  # these and all from 500 on may pass
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0  # seconds before the second try, doubled before every further one


class PassingError(Exception):
    """A failure that another try may mend; `after` is how many seconds the server asks to wait."""

    def __init__(self, reason: str, after: float = 0.0):
        super().__init__(reason)
        self.after = after


class Endpoint:
    """A server's answers, `how.rows` requests at a time."""

    def __init__(self, how: Regenerate, tokenizer: PreTrainedTokenizerBase, ends: frozenset[int]):
        if not str(how.url).startswith(("http://", "https://")):
            raise ValueError(f"regenerate.url={how.url} is no address; give one such as http://localhost:8000/v1")
        self.how, self.url, self.tokenizer, self.ends = how, str(how.url).rstrip("/"), tokenizer, ends
        self.over = threading.Event()  # nobody waits for answers any more
        self.respelled = self.retokenised = self.rendered = 0
        self.model = self._model()

    def answers(self, asks: Sequence[Ask]) -> Iterator[tuple[int, list[int]]]:
        """What the server says; raises ValueError once a request fails for good, after whatever else is there by then."""
        waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        done: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        for number in range(len(asks)):
            waiting.put(number)
        self.over.clear()
        for _ in range(min(self.how.rows, len(asks))):
            threading.Thread(target=self._work, args=(asks, waiting, done), daemon=True).start()
        try:
            for _ in asks:
                number, reply = done.get()
                if isinstance(reply, Exception):
                    yield from self._rest(asks, done)
                    raise reply
                yield number, self.ids_of(reply, asks[number])
        finally:
            self.over.set()

    def _work(self, asks: Sequence[Ask], waiting: "queue.SimpleQueue[int]", done: "queue.SimpleQueue[Any]") -> None:
        with suppress(queue.Empty):
            while not self.over.is_set():
                number = waiting.get_nowait()
                try:
                    done.put((number, self._ask(asks[number])))
                except Exception as error:  # whatever it is, the thread that reads `done` must hear of it
                    done.put((number, error))

    def _rest(self, asks: Sequence[Ask], done: "queue.SimpleQueue[Any]") -> Iterator[tuple[int, list[int]]]:
        self.over.set()
        with suppress(queue.Empty):
            while True:
                number, reply = done.get_nowait()
                if not isinstance(reply, Exception):
                    yield number, self.ids_of(reply, asks[number])

    def _ask(self, ask: Ask) -> Any:
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": self.how.tokens,
            "temperature": self.how.temperature,
            "return_token_ids": True,
        }
        if self.how.temperature:
            body["seed"] = ask.seed
        if self.how.api is Api.chat:
            said = [{key: value for key, value in message.items() if key != "ids"} for message in ask.messages]
            return self._call("/chat/completions", {**body, "messages": said}, f"conversation {ask.name}")
        # a server's own defaults may come from the model's generation_config, and are not the target's distribution
        plain = {"top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0}
        return self._call("/completions", {**body, **plain, "prompt": ask.prompt}, f"conversation {ask.name}")

    def _call(self, path: str, body: dict[str, Any] | None, what: str) -> Any:
        """The server's JSON; failures that may pass are tried again, later each time."""
        for attempt in range(self.how.tries):
            try:
                return self._once(path, body, what)
            except PassingError as error:
                last = error
            if attempt + 1 < self.how.tries:
                wait = min(FIRST_WAIT * 2**attempt, LONGEST_WAIT) * random.uniform(
                    0.5, 1.0
                )  # so that not all come at once
                if self.over.wait(max(wait, min(last.after, self.how.timeout))):
                    break
        raise ValueError(
            f"{self.url} gave no answer for {what} in {self.how.tries} tries ({last}); the answers so far are kept: "
            f"see to the server, then start the same command again, which asks only for the others"
        )

    def _once(self, path: str, body: dict[str, Any] | None, what: str) -> Any:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(KEY):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        try:
            with urlopen(Request(self.url + path, data, headers), timeout=self.how.timeout) as response:
                return json.loads(response.read())
        except HTTPError as error:
            said = f"HTTP {error.code}: {complaint(error)}"
            if error.code in PATIENT or error.code >= 500:
                raise PassingError(said, retry_after(error.headers)) from None
            hint = f"; the key is read from ${KEY}" if error.code in (401, 403) else ""
            raise ValueError(f"{self.url}{path} refuses {what} ({said}){hint}") from None
        except (OSError, HTTPException) as error:
            raise PassingError(str(error) or type(error).__name__) from None
        except ValueError:
            raise PassingError("what it sent is no JSON, or ends too early") from None

    def _model(self) -> str:
        """What the server calls the target: the name that is given, if it is served, or the only one that is."""
        reply = self._call("/models", None, "the list of its models")
        listed = reply.get("data") if isinstance(reply, dict) else None
        served = [str(one["id"]) for one in listed or () if isinstance(one, dict) and "id" in one]
        if self.how.model in served:
            return str(self.how.model)
        if self.how.model is None and len(served) == 1:
            return served[0]
        asked = f"not {self.how.model}" if self.how.model else "and which one is the target"
        raise ValueError(
            f"{self.url} serves {', '.join(served) or 'no model'}, {asked}; set regenerate.model= to one of them"
        )

    def ids_of(self, reply: Any, ask: Ask) -> list[int]:
        """The answer in `reply` as token ids, which end with an end token where the target ended it."""
        choices = reply.get("choices") if isinstance(reply, dict) else None
        choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
        held = choice.get("message") if self.how.api is Api.chat else choice
        text = (
            (held.get("content") if self.how.api is Api.chat else held.get("text")) if isinstance(held, dict) else None
        )
        ids, ended = choice.get("token_ids"), choice.get("finish_reason") == "stop"
        if not ids and not (isinstance(text, str) and (text or ended)):
            raise ValueError(
                f"{self.url} answered conversation {ask.name} without tokens or text ({json.dumps(reply)[:200]}); "
                f"check regenerate.api and the server's settings, such as a parser that takes reasoning out of answers"
            )
        usage = reply.get("usage") or {}
        self.rendered += usage.get("prompt_tokens", len(ask.prompt)) != len(ask.prompt)
        counted = usage.get("completion_tokens")
        said = self._spelled(ids, text, ask) if ids else self._retokenised(str(text or ""), ended, counted)
        end = next((at for at, token in enumerate(said) if token in self.ends), None)
        if end is not None:
            return said[: end + 1]
        return [*said, self._end()] if ended else said[: self.how.tokens]

    def _spelled(self, ids: list[int], text: Any, ask: Ask) -> list[int]:
        """`ids`, once they read as the `text` beside them: those of another model do not."""
        spelled = str(self.tokenizer.decode(ids, skip_special_tokens=True))
        if isinstance(text, str) and letters(spelled) != letters(text):
            raise ValueError(
                f"{self.url} answered conversation {ask.name} with tokens that do not read as its text in the target's "
                f"tokenizer ({spelled[:40]!r}, not {text[:40]!r}); let it serve the target, or set target= to what it serves"
            )
        return list(ids)

    def _retokenised(self, text: str, ended: bool, counted: int | None) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        same = self.tokenizer.decode(ids, skip_special_tokens=True) == text
        self.retokenised += 1
        # servers differ in whether they count the end token
        self.respelled += not same or (counted is not None and counted not in (len(ids), len(ids) + ended))
        return ids

    def _end(self) -> int:
        own = self.tokenizer.eos_token_id
        return own if isinstance(own, int) else min(self.ends)

    def notes(self) -> list[str]:
        """Where the ids may not be those that were generated, and prompts not those that were meant."""
        said = []
        if self.retokenised:
            said.append(
                f"{self.url} gives no token ids: {self.retokenised:,} answers were tokenised again, {self.respelled:,} of "
                f"them into other tokens than it counted"
            )
        if self.rendered:
            said.append(
                f"{self.url} read {self.rendered:,} prompts as another number of tokens than the target's template makes of them"
            )
        return said


def complaint(error: HTTPError) -> str:
    """What the server says is wrong, in a line."""
    try:
        text = error.read().decode(errors="replace")
        told = json.loads(text)
    except (OSError, HTTPException):
        return str(error.reason)
    except ValueError:
        return " ".join(text.split())[:200] or str(error.reason)
    inner = told.get("error", told) if isinstance(told, dict) else told
    return str(inner.get("message", inner) if isinstance(inner, dict) else inner)[:200]


def retry_after(headers: Headers) -> float:
    """Seconds that the server asks to wait, 0 where it does not say so in seconds."""
    try:
        return max(0.0, float(headers.get("Retry-After", 0)))
    except ValueError:
        return 0.0


def letters(text: str) -> str:
    """`text` without its spaces and what stands for broken letters, which servers write in their own ways."""
    return "".join(text.replace("\ufffd", "").split())
