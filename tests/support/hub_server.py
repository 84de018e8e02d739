"""A hub on loopback: what huggingface_hub asks of one, over real HTTP.

It serves ``/api/{models,datasets}/REPO[/revision/REV]`` and ``[/datasets/]REPO/resolve/REV/FILE`` with the headers of the real one. What is
asked is noted, and how it fails can be set.
"""

import hashlib
import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from shared.process.embedded_servers import free_port


class HubServer:
    """A hub with the repositories that a test commits to it. Use as a context manager.

    ``asked``: ``METHOD path`` of every request. ``gated``: repositories that need ``token``. ``cut``: file → how many bytes come before the
    connection breaks off, once each where ``heals``. ``over_xet``: files that are offered over Xet as well, whose storage does not
    answer.
    """

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.gated: set[str] = set()
        self.token = "hf_of-a-test"
        self.cut: dict[str, int] = {}
        self.heals = True
        self.over_xet: set[str] = set()
        self._storage = free_port()
        self._commits: dict[str, dict[str, dict[str, bytes]]] = {}
        self._refs: dict[str, dict[str, str]] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "HubServer":
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def commit(self, kind: str, repo: str, files: Mapping[str, bytes], branch: str = "main") -> str:
        """Makes the branch point to a commit of these files; returns the commit. ``kind``: models or datasets."""
        key = f"{kind}/{repo}"
        sha = hashlib.sha1(repr((key, sorted(files.items()))).encode()).hexdigest()
        self._commits.setdefault(key, {})[sha] = dict(files)
        self._refs.setdefault(key, {})[branch] = sha
        return sha

    def downloads(self) -> list[str]:
        """The files that were asked for, once each, in order."""
        gets = [line.partition("/resolve/")[2] for line in self.asked if line.startswith("GET ") and "/resolve/" in line]
        return list(dict.fromkeys(path.partition("/")[2] for path in gets))

    def answer(self, path: str, token: str | None) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body for a path."""
        words = [unquote(word) for word in path.strip("/").split("/")]
        if words[0] == "api":
            kind, repo, rest = words[1], "/".join(words[2:4]), words[4:]
            revision, file = (rest[1] if rest[:1] == ["revision"] else "main"), None
        else:
            kind = "datasets" if words[0] == "datasets" else "models"
            words = words[1:] if kind == "datasets" else words
            repo, revision, file = "/".join(words[:2]), words[3], "/".join(words[4:])
        key = f"{kind}/{repo}"
        if words[-2] == "xet-read-token":
            return 200, {}, json.dumps({"accessToken": "x", "exp": 1 << 40, "casUrl": f"http://127.0.0.1:{self._storage}"}).encode()
        if key not in self._commits:
            return 401 if token is None else 404, {"X-Error-Code": "RepoNotFound"}, b""
        sha = self._refs[key].get(revision, revision)
        files = self._commits[key].get(sha)
        if files is None:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        if file is None:
            siblings = [{"rfilename": name, "size": len(content)} for name, content in files.items()]
            body: dict[str, Any] = {"id": repo, "sha": sha, "siblings": siblings, "tags": [], "private": False}
            return 200, {"Content-Type": "application/json"}, json.dumps(body).encode()
        if repo in self.gated and token != f"Bearer {self.token}":
            return 401 if token is None else 403, {"X-Error-Code": "GatedRepo"}, b""
        if file not in files:
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": sha}, b""
        headers = {"ETag": f'"{hashlib.sha1(files[file]).hexdigest()}"', "X-Repo-Commit": sha, "Accept-Ranges": "bytes"}
        if file in self.over_xet:
            headers |= {"X-Xet-Hash": "0" * 64, "Link": f'<{self.url}/api/{key}/xet-read-token/main>; rel="xet-auth"'}
        return 200, headers, files[file]


def _handler(hub: HubServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._respond(False)

        def do_GET(self) -> None:
            self._respond(True)

        def _respond(self, with_body: bool) -> None:
            path = urlsplit(self.path).path
            hub.asked.append(f"{self.command} {path}")
            status, headers, body = hub.answer(path, self.headers.get("Authorization"))
            begin = self.headers.get("Range", "").removeprefix("bytes=").partition("-")[0]
            if begin and status == 200 and with_body:
                headers["Content-Range"] = f"bytes {begin}-{len(body) - 1}/{len(body)}"
                status, body = 206, body[int(begin) :]
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if not with_body:
                return
            file = path.rpartition("/")[2]
            if file in hub.cut:
                body = body[: hub.cut[file]]
                hub.cut[file] = 0  # what comes after it never does
                if hub.heals:
                    del hub.cut[file]
                self.close_connection = True
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: Any) -> None: ...

    return Handler
