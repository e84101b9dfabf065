"""The credentials folder: the identity of this user's own server, and the servers that this user has joined.

    ~/.config/outerstep/                 0700; or --credentials DIR, OUTERSTEP_CREDENTIALS, $XDG_CONFIG_HOME/outerstep
        known_servers.json               address -> token, fingerprint: what `outerstep join` stored
        worker.key                       the secret of which this user's workers make their keys; created at a join
        server/                          this user's own servers, on any port
            certificate.pem  key.pem     created at the first start
            tokens.json
            join-8512.txt                the join string of the server on that port

A server is looked up by its address: in OUTERSTEP_JOIN, else among the known servers; else, if the address is this
machine's, it is this user's own. So on one machine the user types nothing.

A worker's key belongs to its user and its id, not to a server or a machine: a restart finds it again, also on another
machine that has the same folder (docs/adr/0019-an-id-belongs-to-a-key.md).
"""

from __future__ import annotations

import logging
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import msgspec

from ..errors import ConfigError, NoCredentials
from .access import Access, is_here, is_join_string, is_loopback, parse_address, parse_join_string, write_address
from .identity import ServerIdentity, open_identity, own_fingerprint, token_file
from .interfaces import outward_hosts
from .secret_files import locked, read_secret, write_secret
from .signing import SigningKey, derive_key
from .tokens import TokenFile

log = logging.getLogger(__name__)

FOLDER_VARIABLE = "OUTERSTEP_CREDENTIALS"
JOIN_VARIABLE = "OUTERSTEP_JOIN"
LOOPBACKS = ("127.0.0.1", "::1", "localhost")
SECRET_BYTES = 32

_PASSING = secrets.token_bytes(SECRET_BYTES)  # this process's, where there is no place for a worker.key


class NoFolder(ConfigError):
    """This user has no folder for credentials."""


@dataclass(frozen=True)
class Known:
    """One known server. `own`: this user's, so its tokens are read from the server's own files."""

    token: str = field(default="", repr=False)
    admin: str = field(default="", repr=False)
    fingerprint: str | None = None
    own: bool = False


class Credentials:
    def __init__(self, folder: str | os.PathLike[str] | None = None, environ: Mapping[str, str] | None = None) -> None:
        self._environ = os.environ if environ is None else environ
        self._named = folder

    @cached_property
    def folder(self) -> Path:
        """Resolved lazily: a process that has a join string may have no home folder at all."""
        return _folder(self._named, self._environ)

    @property
    def known_file(self) -> Path:
        return self.folder / "known_servers.json"

    @property
    def server_folder(self) -> Path:
        return self.folder / "server"

    # --- a client's side ------------------------------------------------------------------------------------------

    def find(self, server: str) -> Access | None:
        """How to reach `server`: host:port, http://host:port (plain) or a join string. NoCredentials if it is not
        known; None if it must be this user's own, and this user has not started any yet."""
        if is_join_string(server):
            return parse_join_string(server)
        host, port = parse_address(server)
        if server.strip().startswith("http://"):
            return Access(host, port, plain=True)
        carried = self._carried()
        if carried is not None:
            for place in carried.places:
                if _place(*place) == _place(host, port):
                    return carried.at(*place)
        known = self.known().get(_place(host, port))
        if known is not None and not known.own:
            return Access(host, port, known.token, known.fingerprint, known.admin)
        if known is not None or is_loopback(host) or is_here(host):
            return self._own(host, port, known.fingerprint if known is not None else None)
        address = write_address(host, port)
        raise NoCredentials(
            f"nothing is known here about {address}: give the join string that its server printed to `outerstep "
            f"join -`. (If it was started with --insecure, and you trust the network: http://{address})"
        )

    def remember(self, access: Access) -> None:
        """Store it; a run token and an admin token of the same server are both kept."""
        if access.plain:
            raise ConfigError(f"http://{access.address} has no credentials to store")
        with self._changing() as known:
            before = known.get(_place(access.host, access.port), Known())
            same = before.fingerprint == access.fingerprint and not before.own
            known[_place(access.host, access.port)] = Known(
                access.token or (before.token if same else ""),
                access.admin or (before.admin if same else ""),
                access.fingerprint,
            )

    def known(self) -> dict[str, Known]:
        try:
            return msgspec.json.decode(read_secret(self.known_file), type=dict[str, Known])
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise ConfigError(f"{self.known_file} cannot be read: {error.strerror}") from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(
                f"{self.known_file} is not a file of known servers: {error}; delete it, and join the servers again"
            ) from error

    def _carried(self) -> Access | None:
        text = self._environ.get(JOIN_VARIABLE, "").strip()
        if not text:
            return None
        try:
            return parse_join_string(text)
        except ConfigError as error:
            raise ConfigError(f"{JOIN_VARIABLE}: {error}") from error

    def _own(self, host: str, port: int, fingerprint: str | None) -> Access | None:
        with self._usable():
            try:
                tokens = self.tokens.load()
                pin = fingerprint or own_fingerprint(self.server_folder)
            except FileNotFoundError:
                return None
        return Access(host, port, tokens.run, pin, tokens.admin)

    def worker_key(self, worker_id: str) -> SigningKey:
        """With which a worker of this user proves that the id is its own. Where there is no folder to keep it in, it
        lasts as long as this process."""
        try:
            return derive_key(self._worker_secret(), worker_id)
        except (OSError, NoFolder) as error:
            log.warning(
                "the key of this user's workers cannot be kept (%s): a restart of worker %s is not known to be the "
                "same worker, unless it resumes its saved state or has a token of its own. Name a folder that stays "
                "with --credentials or %s",
                error,
                worker_id,
                FOLDER_VARIABLE,
            )
            return derive_key(_PASSING, worker_id)

    def _worker_secret(self) -> bytes:
        file = self.folder / "worker.key"
        try:
            text = read_secret(file)
        except FileNotFoundError:
            with locked(self.folder):
                if not file.exists():
                    write_secret(file, secrets.token_hex(SECRET_BYTES).encode() + b"\n")
            text = read_secret(file)
        if re.fullmatch(rb"[0-9a-f]{64}\s*", text) is None:
            raise ConfigError(
                f"{file} must hold 64 hexadecimal digits; restore it, or delete it: then this user's workers are "
                "strangers to the servers that know them, until an admin releases their ids"
            )
        return bytes.fromhex(text.decode())

    # --- the server's side ----------------------------------------------------------------------------------------

    @property
    def tokens(self) -> TokenFile:
        return token_file(self.server_folder)

    def server_identity(self, tls_cert: str | None = None, tls_key: str | None = None) -> ServerIdentity:
        with self._usable():
            return open_identity(self.server_folder, tls_cert, tls_key)

    def announce(self, hosts: set[str], port: int, identity: ServerIdentity) -> None:
        """Let this user's clients on this machine find the server under these hosts. The loopback addresses need no
        entry, unless the server's certificate is not its folder's, or an older entry says something else."""
        if hosts & set(LOOPBACKS):
            hosts = hosts | set(LOOPBACKS)
        usual = identity.certificate.parent == self.server_folder
        entry = Known(own=True, fingerprint=None if usual else identity.fingerprint)
        wanted = {_place(host, port): None if usual and is_loopback(host) else entry for host in hosts}
        held = self.known()
        if all(held.get(place) == needed for place, needed in wanted.items()):
            return
        with self._changing() as known:
            for place, needed in wanted.items():
                known.pop(place, None)
                if needed is not None:
                    known[place] = needed

    def write_join_file(self, access: Access) -> Path:
        file = self.server_folder / f"join-{access.port}.txt"
        with self._usable():
            write_secret(file, access.join_string.encode() + b"\n")
        return file

    def join_files(self) -> list[tuple[Path, Access]]:
        """The join strings of this user's servers, as they were last started."""
        files = sorted(self.server_folder.glob("join-*.txt"))
        return [(file, parse_join_string(read_secret(file).decode("utf-8", "replace"))) for file in files]

    # --- inside ---------------------------------------------------------------------------------------------------

    @contextmanager
    def _changing(self) -> Iterator[dict[str, Known]]:
        with self._usable(), locked(self.folder):
            known = self.known()
            yield known
            write_secret(self.known_file, msgspec.json.format(msgspec.json.encode(known)) + b"\n")

    @contextmanager
    def _usable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"the credentials folder {self.folder} cannot be used: {error.strerror or error}; choose another with "
                f"--credentials or {FOLDER_VARIABLE}"
            ) from error


def outward_host() -> str:
    """This machine's address as other machines most likely see it."""
    return outward_hosts()[0]


def _place(host: str, port: int) -> str:
    return write_address(host.lower().rstrip("."), port)


def _folder(given: str | os.PathLike[str] | None, environ: Mapping[str, str]) -> Path:
    named = given or environ.get(FOLDER_VARIABLE)
    try:
        if named:
            return Path(named).expanduser().absolute()
        base = environ.get("XDG_CONFIG_HOME", "")
        return (Path(base) if os.path.isabs(base) else Path.home() / ".config") / "outerstep"
    except RuntimeError as error:
        raise NoFolder(f"this user has no home folder for credentials: pass --credentials DIR ({error})") from error
