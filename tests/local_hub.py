"""A server on 127.0.0.1 that speaks the routes of the hub which huggingface_hub and transformers use.

It serves folders as repositories.  What a repository's name says is how it behaves: see `REFUSALS`.  Every request is
kept, with its path and its ``Authorization``.
"""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

# The commit at which every repository stands.
COMMIT = "0123456789abcdef0123456789abcdef01234567"

# Status, error code, message: as the hub words them.
REFUSALS = {
    "gated": (401, "GatedRepo", "Access to model gated/model is restricted."),
    "gated-to-you": (403, "GatedRepo", "Access to model is restricted and you are not in the authorized list."),
    "refused": (401, None, "Invalid credentials in Authorization header"),
    "broken": (503, None, "Service Unavailable"),
}


class LocalHub(ThreadingHTTPServer):
    """Repositories in memory of this process, reachable by other processes.

    Parameters
    ----------
    repositories : dict of str to Path
        Folders by ``owner/name``.
    """

    daemon_threads = True

    def __init__(self, repositories: dict[str, Path]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories = repositories
        self.requests: list[dict[str, Any]] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        """Give what HF_ENDPOINT takes."""
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: LocalHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        self.server.requests.append(
            {"method": self.command, "path": path, "authorization": self.headers.get("Authorization")}
        )
        parts = path.strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        owner, name, *rest = parts[2:] if is_api else parts
        refusal = REFUSALS.get(owner)
        if refusal is None and f"{owner}/{name}" not in self.server.repositories:
            refusal = (401, "RepoNotFound", "Repository not found")
        if refusal is not None:
            status, code, message = refusal
            return self.send(
                status, b"{}", with_body, {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
            )
        folder = self.server.repositories[f"{owner}/{name}"]
        if is_api:
            return self.answer_api(folder, rest, with_body)
        _, _, *file = rest  # resolve/<revision>/<file>
        target = folder.joinpath(*file)
        if not target.is_file():
            return self.send(404, b"Entry not found", with_body, {"X-Error-Code": "EntryNotFound"})
        content = target.read_bytes()
        return self.send(200, content, with_body, {"ETag": f'"{hashlib.sha256(content).hexdigest()}"'})

    def answer_api(self, folder: Path, rest: list[str], with_body: bool) -> None:
        files = sorted(path.name for path in folder.iterdir())
        if rest[:1] == ["tree"]:
            # Every repository here is flat: a folder asked for by name is not there.
            if len(rest) > 2:
                return self.send(404, b"{}", with_body, {"X-Error-Code": "EntryNotFound"})
            listed = [
                {"type": "file", "path": name, "size": (folder / name).stat().st_size, "oid": name} for name in files
            ]
            return self.send_json(listed, with_body)
        about = {"id": folder.name, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files], "tags": []}
        return self.send_json(about, with_body)

    def send_json(self, value: Any, with_body: bool) -> None:
        self.send(200, json.dumps(value).encode(), with_body, {"Content-Type": "application/json"})

    def send(self, status: int, content: bytes, with_body: bool, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"X-Repo-Commit": COMMIT, **headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if with_body:
            self.wfile.write(content)
