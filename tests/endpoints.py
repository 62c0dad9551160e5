"""A stand-in for an OpenAI-compatible server: real HTTP on loopback, with the troubles that real ones have."""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = Callable[[dict[str, Any]], dict[str, Any]]
Trouble = Callable[[BaseHTTPRequestHandler], None]


@dataclass
class Served:
    """What a server was asked, and the trouble it makes for a prompt that was asked so many times before."""

    reply: Reply
    trouble: Callable[[dict[str, Any], int], Trouble | None] = lambda body, before: None
    models: tuple[str, ...] = ("tiny",)
    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)  # bodies, in the order in which they came
    answered: list[dict[str, Any]] = field(default_factory=list)  # those that got their answer whole
    headers: list[dict[str, str]] = field(default_factory=list)
    together: int = 0  # requests under way at once, at most, until their answers are sent
    busy: int = 0
    tries: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def enter(self, body: dict[str, Any], headers: dict[str, str]) -> int:
        """Take note of a request, and say how often its prompt was asked before."""
        with self.lock:
            self.asked.append(body)
            self.headers.append(headers)
            self.busy += 1
            self.together = max(self.together, self.busy)
            name = json.dumps(body.get("prompt", body.get("messages")))
            self.tries[name] += 1
            return self.tries[name] - 1

    def leave(self) -> None:
        with self.lock:
            self.busy -= 1


@contextmanager
def serving(served: Served) -> Iterator[Served]:
    """A server on a free port of loopback, until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            """Say nothing."""

        def do_GET(self) -> None:
            send(self, {"object": "list", "data": [{"id": name} for name in served.models]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            before = served.enter({**body, "path": self.path}, dict(self.headers))
            try:
                trouble = served.trouble(body, before)
                told = served.reply(body) if trouble is None else None
            finally:
                served.leave()  # before it is sent: whoever holds the answer may ask again at once
            try:
                if trouble is not None:
                    return trouble(self)
                send(self, told)
                with served.lock:
                    served.answered.append(body)
            except (BrokenPipeError, ConnectionResetError):
                pass  # the asker had lost its patience

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 64

    with Server(("127.0.0.1", 0), Handler) as server:
        served.url = f"http://127.0.0.1:{server.server_port}/v1"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield served
        finally:
            server.shutdown()
            thread.join()


def send(handler: BaseHTTPRequestHandler, told: Any, code: int = 200, **headers: str) -> None:
    """Answer `told` as JSON."""
    text = json.dumps(told).encode()
    handler.send_response(code)
    for name, value in {"Content-Type": "application/json", "Content-Length": str(len(text)), **headers}.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(text)


def too_many(handler: BaseHTTPRequestHandler) -> None:
    """429, to be asked again in a moment."""
    send(handler, {"error": {"message": "slow down"}}, 429, Retry_After="0.02")


def broken(handler: BaseHTTPRequestHandler) -> None:
    """500, without a word."""
    handler.send_error(500)


def slow(seconds: float) -> Trouble:
    """Nothing for so long, then an answer nobody waits for."""

    def wait(handler: BaseHTTPRequestHandler) -> None:
        time.sleep(seconds)
        send(handler, {"choices": [{"text": "too late", "token_ids": [1, 2], "finish_reason": "stop"}]})

    return wait


def cut(handler: BaseHTTPRequestHandler) -> None:
    """Half of an answer, and the line goes dead."""
    handler.send_response(200)
    handler.send_header("Content-Length", "200")
    handler.end_headers()
    handler.wfile.write(b'{"choices": [{"text": "half of')
    handler.wfile.flush()
    handler.connection.close()


def refused(code: int, message: str) -> Trouble:
    """An error that stays."""
    return lambda handler: send(handler, {"error": {"message": message, "code": code}}, code)
