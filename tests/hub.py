"""A stand-in for the Hub's HTTP interface on the loopback: repositories in memory, as huggingface_hub writes and reads them."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Hub:
    """What was sent, and how the stand-in behaves."""

    url: str = ""
    private: dict[str, bool] = field(default_factory=dict)  # by repository
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    denied: bool = False
    breaking: int = 0  # commits that break off before they answer

    @property
    def commit(self) -> str:
        """A commit's name, made from what it holds."""
        return hashlib.sha1(
            repr(sorted((name, sorted(held.items())) for name, held in self.files.items())).encode()
        ).hexdigest()


class Handler(BaseHTTPRequestHandler):
    """The few requests that an upload and a download make."""

    hub: Hub

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def answer(self, body: Any = None, status: int = 200, **headers: str) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for key, value in {"Content-Length": str(len(content)), "X-Repo-Commit": self.hub.commit, **headers}.items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def do_POST(self) -> None:
        sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.hub.denied:
            return self.answer({"error": "Forbidden"}, 403)
        if self.path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if self.path == "/api/repos/create":
            asked = json.loads(sent)
            name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
            self.hub.private[name] = asked.get("private") or asked.get("visibility") == "private"
            return self.answer({"url": f"{self.hub.url}/{name}"})
        name, action = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(preupload|commit)/main.*", self.path).groups()
        if action == "preupload":
            return self.answer(
                {
                    "files": [
                        {**file, "uploadMode": "regular", "shouldIgnore": False} for file in json.loads(sent)["files"]
                    ]
                }
            )
        if self.hub.breaking:
            self.hub.breaking -= 1
            return self.answer({"error": "the line broke"}, 500)
        for line in sent.decode().splitlines():
            value = json.loads(line)
            if value["key"] == "file":
                held = self.hub.files.setdefault(name, {})
                held[value["value"]["path"]] = base64.b64decode(value["value"]["content"])
        return self.answer(
            {
                "success": True,
                "commitOid": self.hub.commit,
                "commitUrl": f"{self.hub.url}/{name}/commit/{self.hub.commit}",
            }
        )

    def do_GET(self) -> None:
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/?]+))?(?:\?.*)?", self.path):
            name, revision = match.groups()
            if name not in self.hub.files:
                return self.answer({"error": "no"}, 404, X_Error_Code="RepoNotFound")
            if revision not in (None, "main", self.hub.commit):
                return self.answer({"error": "no"}, 404, X_Error_Code="RevisionNotFound")
            siblings = [{"rfilename": file} for file in self.hub.files[name]]
            return self.answer(
                {
                    "id": name,
                    "sha": self.hub.commit,
                    "siblings": siblings,
                    "tags": [],
                    "downloads": 0,
                    "likes": 0,
                    "private": True,
                }
            )
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", self.path):
            content = self.hub.files[match[1]][match[2]]
            return self.answer(content, ETag=f'"{hashlib.sha1(content).hexdigest()}"')
        if match := re.match(r"/api/models/([^/]+/[^/]+)/tree/", self.path):
            return self.answer(
                [
                    {"type": "file", "path": path, "size": len(held), "oid": hashlib.sha1(held).hexdigest()}
                    for path, held in self.hub.files.get(match[1], {}).items()
                ]
            )
        return self.answer({"error": f"the stand-in does not know {self.path}"}, 404)

    def do_HEAD(self) -> None:
        """As GET, without the content."""
        self.do_GET()


@contextmanager
def standing() -> Iterator[Hub]:
    """The stand-in, while the block runs."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
