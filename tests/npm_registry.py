"""A small npm registry with one package in it, on a port of this machine; and the lock that names it."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

TARBALL = "chart/-/chart-1.0.0.tgz"
FILES = {"chart.js": b"var chart = 1;", "chart.css": b".chart {}"}


def archive(files: dict[str, bytes]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(f"package/dist/{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return gzip.compress(made.getvalue(), mtime=0)  # the same bytes each time


class Registry:
    """Answers in turn: `None` with 500; what is last, again and again."""

    def __init__(self, *answers: bytes | None) -> None:
        self.asked: list[str] = []
        outer, left = self, list(answers)

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked.append(self.path)
                answer = left.pop(0) if len(left) > 1 else left[0]
                self.send_response(500 if answer is None else 200)
                self.send_header("Content-Length", str(len(answer or b"")))
                self.end_headers()
                self.wfile.write(answer or b"")

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    @property
    def environ(self) -> dict[str, str]:
        return {"npm_config_registry": f"{self.url}/"}

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


def write_lock(path: Path, tarball: bytes) -> None:
    integrity = "sha512-" + base64.b64encode(hashlib.sha512(tarball).digest()).decode()
    files = {
        name: {"from": f"package/dist/{name}", "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in FILES.items()
    }
    lock = {"name": "chart", "version": "1.0.0", "tarball": TARBALL, "integrity": integrity, "files": files}
    path.write_text(json.dumps(lock))
