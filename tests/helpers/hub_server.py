"""A server that answers huggingface_hub as the Hugging Face Hub does, for folders on this machine."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from urllib.parse import parse_qs, unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"
"""The only commit of every repository; its branch is ``main``."""


class HubServer:
    """Serves folders by their names: models, and data sets as ``datasets/ORG/NAME``. `gated` ones refuse everyone."""

    def __init__(self, folders: Mapping[str, Path], gated: frozenset[str] = frozenset()) -> None:
        self.folders, self.gated = dict(folders), gated
        self.requests: list[str] = []
        self.downloads: list[str] = []
        """Files that were sent, by their names."""
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self, with_body=True)

            def do_POST(self) -> None:
                hub.answer(self, with_body=True)

            def do_HEAD(self) -> None:
                hub.answer(self, with_body=False)

            def log_message(self, format: str, *args: object) -> None:
                hub.requests.append(format % args)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> HubServer:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, request: BaseHTTPRequestHandler, *, with_body: bool) -> None:
        path = unquote(request.path.partition("?")[0]).rstrip("/").replace("/api/models/", "/api/")
        asked = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        found = re.fullmatch(r"/api/((?:datasets/)?[^/]+/[^/]+)(?:/(revision|tree|paths-info)/([^/]+)(/.+)?)?", path)
        if found is None:
            found = re.fullmatch(r"/((?:datasets/)?[^/]+/[^/]+)/(resolve)/[^/]+/(.+)", path)
        if found is None or found[1] not in self.folders:
            self._send(request, 401, b"", {"X-Error-Code": "RepoNotFound"}, with_body)
        elif found[1] in self.gated and found[2] in ("resolve", None):
            self._send(request, 403, b"", {"X-Error-Code": "GatedRepo"}, with_body)
        elif found[2] not in ("resolve", None) and found[3] not in ("main", COMMIT):
            self._send(request, 404, b"", {"X-Error-Code": "RevisionNotFound"}, with_body)
        elif found[2] == "tree" and found[4]:
            self._send(request, 404, b"", {"X-Error-Code": "EntryNotFound"}, with_body)  # there are no folders
        elif found[2] == "paths-info":
            paths = parse_qs(asked.decode())["paths"]
            entries = [entry for entry in _tree(self.folders[found[1]]) if entry["path"] in paths]
            self._send(request, 200, json.dumps(entries).encode(), {"Content-Type": "application/json"}, with_body)
        else:
            name = found[1].removeprefix("datasets/")
            self._send_file(request, self.folders[found[1]], name, found[2] or "revision", found[3], with_body)

    def _send_file(
        self, request: BaseHTTPRequestHandler, folder: Path, name: str, kind: str, what: str, with_body: bool
    ) -> None:
        files = sorted(path for path in folder.iterdir() if path.is_file())
        if kind == "revision":
            content = {"id": name, "sha": COMMIT, "siblings": [{"rfilename": path.name} for path in files]}
        elif kind == "tree":
            content = _tree(folder)
        elif (folder / what).is_file():
            headers = {"ETag": f'"{_digest(folder / what)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
            if with_body:
                self.downloads.append(what)
            self._send(request, 200, (folder / what).read_bytes(), headers, with_body)
            return
        else:
            self._send(request, 404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}, with_body)
            return
        self._send(request, 200, json.dumps(content).encode(), {"Content-Type": "application/json"}, with_body)

    @staticmethod
    def _send(
        request: BaseHTTPRequestHandler, status: int, body: bytes, headers: Mapping[str, str], with_body: bool
    ) -> None:
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range") or "")
        if span and status == 200 and with_body:
            status, body = 206, body[int(span[1]) : int(span[2]) + 1 if span[2] else None]
        request.send_response(status)
        for key, value in headers.items():
            request.send_header(key, value)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        if with_body:
            request.wfile.write(body)


def _tree(folder: Path) -> list[dict[str, object]]:
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return [{"type": "file", "path": path.name, "size": path.stat().st_size, "oid": _digest(path)} for path in files]


def _digest(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()
