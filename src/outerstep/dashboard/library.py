"""The chart library of the page: fetched when this package is built, never by a browser, and not in the repository.

`library.json` locks it: name, version, where it lies in an npm registry, the hash of that archive as npm writes it, and
the hash of each file taken out. What is in `vendor/` with the right hash is not fetched again, so a build without a
network works from then on, and so does one from the source distribution.

The build of the package calls this (hatch_build.py), before anything of the package is installed: nothing but the
standard library is imported. If the download was impossible then, this fetches it later:

    python -m outerstep.dashboard.library
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import http.client
import io
import json
import os
import sys
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
REGISTRY = "https://registry.npmjs.org"
REGISTRY_VARIABLES = ("npm_config_registry", "NPM_CONFIG_REGISTRY")
MOST_BYTES = 8 << 20  # of an archive
ATTEMPTS = 3
PAUSE_S = 1.0  # after the first attempt; twice as long after the next
TIMEOUT_S = 20.0
REMEDY = "python -m outerstep.dashboard.library"


class LibraryMissing(Exception):
    """It is not here, and could not be fetched."""


@dataclass(frozen=True)
class ChartLibrary:
    """What is locked, and the folder where it belongs. `files`: name here → where in the archive, and its SHA-256."""

    name: str
    version: str
    tarball: str
    integrity: str
    files: Mapping[str, Mapping[str, str]]
    folder: Path

    def is_here(self) -> bool:
        return all(self.read(name) is not None for name in self.files)

    def read(self, name: str) -> bytes | None:
        """None: it is not here, or not what it should be."""
        try:
            data = (self.folder / name).read_bytes()
        except FileNotFoundError:
            return None
        return data if _sha256(data) == self.files[name]["sha256"] else None

    def place(self, environ: Mapping[str, str] = os.environ) -> bool:
        """Fetch it unless it is here. True: it was fetched."""
        if self.is_here():
            return False
        found = self._unpack(self._fetch(registry_in(environ)))
        self.folder.mkdir(exist_ok=True)
        for name, data in found.items():
            _write(self.folder / name, data)
        return True

    def _fetch(self, registry: str) -> bytes:
        url, why = f"{registry}/{self.tarball}", ""
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(PAUSE_S * 2 ** (attempt - 1))
            try:
                data = _download(url)
            except (OSError, http.client.HTTPException) as error:  # URLError is an OSError
                why = str(error) or type(error).__name__
                continue
            if _is(data, self.integrity):
                return data
            why = f"its hash must be {self.integrity}, got sha512-{_sha512(data)}"
        raise LibraryMissing(
            f"{self.name} {self.version} could not be fetched from {url}, in {ATTEMPTS} attempts: {why}. Without it "
            f"the page shows tables and no charts. When the registry can be reached ({REGISTRY_VARIABLES[0]} names "
            f"another one): {REMEDY}"
        )

    def _unpack(self, archive: bytes) -> dict[str, bytes]:
        found = {}
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as tar:
            for name, file in self.files.items():
                inside = file["from"] in tar.getnames()
                member = tar.extractfile(file["from"]) if inside else None
                data = member.read(MOST_BYTES) if member is not None else b""
                if _sha256(data) != file["sha256"]:
                    raise LibraryMissing(f"{file['from']} must have the SHA-256 {file['sha256']}, got {_sha256(data)}")
                found[name] = data
        return found


def chart_library(folder: Path = HERE) -> ChartLibrary:
    """The locked one."""
    lock: dict[str, Any] = json.loads((folder / "library.json").read_text())
    return ChartLibrary(**lock, folder=folder / "vendor")


def registry_in(environ: Mapping[str, str]) -> str:
    """As npm finds it, without its files."""
    named = next((environ[name] for name in REGISTRY_VARIABLES if environ.get(name)), REGISTRY)
    if not named.startswith(("https://", "http://")):
        raise LibraryMissing(f"{REGISTRY_VARIABLES[0]} must begin with https:// or http://, got {named!r}")
    return named.rstrip("/")


def _download(url: str) -> bytes:
    """Through the proxy, and with the certificates, that the environment names."""
    request = urllib.request.Request(url, headers={"User-Agent": "outerstep-build"})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        data: bytes = answer.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise OSError(f"it is larger than {MOST_BYTES} bytes")
    return data


def _is(data: bytes, integrity: str) -> bool:
    """`integrity` as npm and browsers write it: sha512-BASE64."""
    kind, _, value = integrity.partition("-")
    try:
        wanted = base64.b64decode(value, validate=True)
    except binascii.Error:
        return False
    return kind == "sha512" and hmac.compare_digest(wanted, hashlib.sha512(data).digest())


def _sha512(data: bytes) -> str:
    return base64.b64encode(hashlib.sha512(data).digest()).decode()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _write(path: Path, data: bytes) -> None:
    """Whole or not at all: two builds may do it at a time."""
    handle, name = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
    Path(name).chmod(0o644)
    Path(name).replace(path)


def main() -> int:
    library = chart_library()
    try:
        if library.place():
            print(f"fetched {library.name} {library.version} for the page's charts")
    except (LibraryMissing, OSError) as error:
        print(f"warning: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
