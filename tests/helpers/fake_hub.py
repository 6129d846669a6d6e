"""A hub on this machine: the part of its API that an upload uses, over HTTP."""

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import yaml

TOKEN = "hf_write"
LICENSES = ("mit", "apache-2.0")


class FakeHub(ThreadingHTTPServer):
    """What was uploaded: repositories, and their files by name."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.private: dict[str, bool] = {}
        self.files: dict[str, dict[str, bytes]] = {}
        self.commits: list[str] = []
        self.stored: dict[str, bytes] = {}
        """Large files by their SHA-256."""
        self.refuse: str | None = None
        """A part of the addresses that are answered with an error."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    hub = FakeHub()
    thread = Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def answer(self, content: Any, status: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if status >= 400:
            self.send_header("X-Error-Message", content["error"])
        self.end_headers()
        self.wfile.write(body)

    def body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def do_PUT(self) -> None:
        content = self.body()
        self.server.stored[self.path.rpartition("/")[2]] = content
        self.answer({})

    def do_POST(self) -> None:
        hub, content, path = self.server, self.body(), self.path.partition("?")[0]
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.answer({"error": "Invalid username or password."}, 401)
        elif hub.refuse is not None and hub.refuse in path:
            self.answer({"error": "You do not have the required permissions"}, 403)
        elif path == "/api/validate-yaml":
            front = yaml.safe_load(json.loads(content)["content"].split("---")[1])
            known = front["license"] in LICENSES
            errors = [] if known else [{"message": '"license" must be one of a list'}]
            self.answer({"errors": errors, "warnings": [], "error": ""}, 200 if known else 400)
        elif path == "/api/repos/create":
            given = json.loads(content)
            name = f"{given.get('organization') or 'me'}/{given['name']}"
            private = given.get("visibility") == "private" or bool(given.get("private"))
            hub.private.setdefault(name, private)
            hub.files.setdefault(name, {})
            self.answer({"url": f"{hub.url}/{name}"})
        elif "/preupload/" in path:
            files = json.loads(content)["files"]
            modes = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for file in files
            ]
            self.answer({"files": modes})
        elif path.endswith(".git/info/lfs/objects/batch"):
            objects = [
                {
                    "oid": entry["oid"],
                    "size": entry["size"],
                    "actions": {"upload": {"href": f"{hub.url}/store/{entry['oid']}"}},
                }
                for entry in json.loads(content)["objects"]
            ]
            self.answer({"transfer": "basic", "objects": objects})
        elif "/commit/" in path:
            name = path.removeprefix("/api/models/").partition("/commit/")[0]
            self.commit(name, [json.loads(line) for line in content.splitlines()])
        else:
            self.answer({"error": f"nothing at {path}"}, 404)

    def commit(self, name: str, lines: list[dict[str, Any]]) -> None:
        files = self.server.files[name]
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.server.commits.append(value["summary"])
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                stored = self.server.stored[value["oid"]]
                assert hashlib.sha256(stored).hexdigest() == value["oid"]
                files[value["path"]] = stored
        oid = "0" * 40
        url = f"{self.server.url}/{name}/commit/{oid}"
        self.answer({"success": True, "commitOid": oid, "commitUrl": url})
