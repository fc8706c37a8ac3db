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
    "refused": (401, None, "Invalid credentials in Authorization header"), "broken": (503, None, "Service Unavailable"),
}


class LocalHub(ThreadingHTTPServer):
    """Repositories by ``owner/name``, folders of this process, reachable by other processes."""

    daemon_threads = True

    def __init__(self, repositories: dict[str, Path]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories = repositories
        self.requests: list[dict[str, Any]] = []
        # What HF_ENDPOINT takes.
        self.address = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    server: LocalHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        asked = {"method": self.command, "path": path, "authorization": self.headers.get("Authorization")}
        self.server.requests.append(asked)
        status, content, headers = self.answer(path.strip("/").split("/"))
        self.send_response(status)
        for name, value in ({"X-Repo-Commit": COMMIT, "Content-Length": len(content)} | headers).items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    do_HEAD = do_GET

    def answer(self, parts: list[str]) -> tuple[int, bytes, dict[str, str]]:
        """Return status, body and headers."""
        is_api = parts[:2] == ["api", "models"]
        owner, name, *rest = parts[2:] if is_api else parts
        folder, refusal = self.server.repositories.get(f"{owner}/{name}"), REFUSALS.get(owner)
        if refusal or folder is None:
            status, code, message = refusal or (401, "RepoNotFound", "Repository not found")
            return status, b"{}", {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        if not is_api:
            target = folder.joinpath(*rest[2:])  # resolve/<revision>/<file>
            if not target.is_file():
                return 404, b"Entry not found", {"X-Error-Code": "EntryNotFound"}
            content = target.read_bytes()
            return 200, content, {"ETag": f'"{hashlib.sha256(content).hexdigest()}"'}
        files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
        listed = [{"type": "file", "path": name, "size": size, "oid": name} for name, size in files.items()]
        if rest[:1] == ["tree"]:
            # Every repository here is flat: a folder asked for by name is not there.
            return (404, b"{}", {"X-Error-Code": "EntryNotFound"}) if len(rest) > 2 else _json(listed)
        siblings = [{"rfilename": name} for name in files]
        return _json({"id": folder.name, "sha": COMMIT, "siblings": siblings, "tags": []})


def _json(value: Any) -> tuple[int, bytes, dict[str, str]]:
    return 200, json.dumps(value).encode(), {"Content-Type": "application/json"}
