"""A Hugging Face hub on loopback, with the part of its HTTP API that huggingface_hub needs to download a model."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "a" * 40


@dataclass
class Repository:
    """A repository of the hub.

    If `gated` is true, clients can list the files but cannot download them, as on the real hub.
    """

    files: Mapping[str, bytes]
    revisions: Mapping[str, str] = field(default_factory=lambda: {"main": COMMIT})
    gated: bool = False


class Hub:
    """A hub that records the requests it receives.

    While `stalls` is set, answers stop after the first half of a file.
    """

    def __init__(self, repositories: Mapping[str, Repository]) -> None:
        self.repositories = repositories
        self.requests: list[tuple[str, str]] = []
        self.downloaded: list[str] = []
        self.is_broken = False
        self.sent: dict[str, bytes] = {}  # content to send instead of the files at these paths
        self.stalls = threading.Event()
        self.has_stalled = threading.Event()
        self.goes_on = threading.Event()


@contextmanager
def serving(hub: Hub) -> Iterator[str]:
    """Run the hub, and yield its address."""

    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    # A shutdown waits for the next poll, by default up to half a second.
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        hub.goes_on.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path))
        if self.hub.is_broken:
            return self._send(500, b"out of order", with_body=with_body)
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            return self._api(parts[2:], with_body=with_body)
        if parts[2:3] == ["resolve"]:
            return self._file("/".join(parts[:2]), parts[3], "/".join(parts[4:]), with_body=with_body)
        return self._fail(404, "EntryNotFound", with_body=with_body)

    def _api(self, parts: list[str], *, with_body: bool) -> None:
        name, (kind, revision, *_) = "/".join(parts[:2]), [*parts[2:], "revision", "main"]
        repository = self._repository(name)
        if repository is None:
            return self._fail(401, "RepoNotFound", with_body=with_body)
        commit = repository.revisions.get(revision)
        if commit is None and revision not in repository.revisions.values():
            return self._fail(404, "RevisionNotFound", with_body=with_body)
        if kind == "tree":
            answer: Any = [
                {"type": "file", "path": path, "size": len(content), "oid": _git_digest(content)} | _lfs(path, content)
                for path, content in repository.files.items()
            ]
        else:
            answer = {"id": name, "modelId": name, "sha": commit or revision, "siblings": [], "private": False}
        return self._send(200, json.dumps(answer).encode(), with_body=with_body, kind="application/json")

    def _file(self, name: str, revision: str, path: str, *, with_body: bool) -> None:
        repository = self._repository(name)
        if repository is None:
            return self._fail(401, "RepoNotFound", with_body=with_body)
        if repository.gated:
            return self._fail(403, "GatedRepo", with_body=with_body)
        if path not in repository.files:
            return self._fail(404, "EntryNotFound", with_body=with_body)
        content = repository.files[path]
        if with_body:
            self.hub.downloaded.append(path)
        digest = _lfs(path, content)["lfs"]["oid"] if _lfs(path, content) else _git_digest(content)
        headers = {"ETag": f'"{digest}"', "X-Repo-Commit": repository.revisions.get(revision, revision)}
        content = self.hub.sent.get(path, content)
        return self._send(200, content, with_body=with_body, headers=headers)

    def _repository(self, name: str) -> Repository | None:
        return self.hub.repositories.get(name)

    def _fail(self, status: int, code: str, *, with_body: bool) -> None:
        self._send(status, b"{}", with_body=with_body, headers={"X-Error-Code": code})

    def _send(
        self, status: int, body: bytes, *, with_body: bool, kind: str = "application/octet-stream", headers: Any = None
    ) -> None:
        start = 0
        asked = self.headers.get("Range", "")
        if with_body and status == 200 and asked.startswith("bytes="):
            start = int(asked.removeprefix("bytes=").partition("-")[0])
            status = 206
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        if not with_body:
            return
        rest = body[start:]
        if self.hub.stalls.is_set() and "/resolve/" in self.path and len(rest) > 1 << 16:
            self.wfile.write(rest[: len(rest) // 2])
            self.wfile.flush()
            self.hub.has_stalled.set()
            self.hub.goes_on.wait()
            self.close_connection = True
            return
        self.wfile.write(rest)


def _git_digest(content: bytes) -> str:
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content, usedforsecurity=False).hexdigest()


def _lfs(path: str, content: bytes) -> dict[str, Any]:
    """Return the hub's description of a file in Git LFS, or an empty dict for other files."""
    if not path.endswith(".safetensors"):
        return {}
    digest = hashlib.sha256(content).hexdigest()
    lfs = {"oid": digest, "size": len(content), "pointerSize": 130}
    return {"lfs": lfs, "oid": _git_digest(digest.encode())}  # of the pointer file
