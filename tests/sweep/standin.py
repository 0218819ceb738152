"""A stand-in for the Hugging Face hub: repositories are folders, answers are as the hub's, and requests are counted."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + 34 * "0"


class Hub:
    """Serves `<folder>/<owner>/<name>` as models and `<folder>/datasets/<owner>/<name>` as data sets."""

    def __init__(self, folder: Path, address: str) -> None:
        self.folder, self.address = folder, address
        self.gated: set[str] = set()
        self.requests: list[str] = []  # method and path

    def downloads(self, ending: str) -> int:
        """Return how often a file was sent whose name ends so."""
        return sum(line.startswith("GET ") and "/resolve/" in line and line.endswith(ending) for line in self.requests)


@contextmanager
def serving(folder: Path) -> Iterator[Hub]:
    """Run a hub on a free port of this machine."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Answers)
    server.hub = hub = Hub(folder, f"http://127.0.0.1:{server.server_port}")  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        hub: Hub = self.server.hub  # type: ignore[attr-defined]
        path = unquote(urlsplit(self.path).path)
        hub.requests.append(f"{self.command} {path}")
        kind, name, rest = _parts(path)
        root = hub.folder / ("datasets" if kind == "datasets" else "") / name
        if not root.is_dir():
            self._refuse(401 if "authorization" not in self.headers else 404, "RepoNotFound")
        elif name in hub.gated and rest.startswith(("resolve/", "auth-check")):
            self._refuse(403 if "authorization" in self.headers else 401, "GatedRepo")
        elif rest.startswith("resolve/"):
            self._send_file(root / rest.split("/", 2)[2])
        elif rest.startswith("tree/"):
            self._send_json([_entry(root, path) for path in sorted(root.rglob("*")) if path.is_file()])
        else:
            names = [str(path.relative_to(root)) for path in sorted(root.rglob("*")) if path.is_file()]
            self._send_json({"id": name, "sha": COMMIT, "siblings": [{"rfilename": file} for file in names]})

    do_HEAD = do_GET  # noqa: N815

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def _send_file(self, path: Path) -> None:
        if not path.is_file():
            self._refuse(404, "EntryNotFound")
            return
        self._send(200, path.read_bytes(), ETag=f'"{_digest(path)}"')

    def _send_json(self, content: Any) -> None:
        self._send(200, json.dumps(content).encode())

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"", **{"X-Error-Code": code})

    def _send(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), "X-Repo-Commit": COMMIT, **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Stay silent."""


def _parts(path: str) -> tuple[str, str, str]:
    """Return the kind, the name and the rest of `/api/models/o/n/rest`, `/o/n/rest` and `/datasets/o/n/rest`."""
    words = path.strip("/").removeprefix("api/").split("/")
    kind = words.pop(0) if words[0] in ("models", "datasets") else "models"
    return kind, "/".join(words[:2]), "/".join(words[2:])


def _entry(root: Path, path: Path) -> dict[str, Any]:
    return {
        "type": "file",
        "path": str(path.relative_to(root)),
        "size": path.stat().st_size,
        "oid": _digest(path),
    }


def _digest(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()
