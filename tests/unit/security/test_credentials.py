"""The credentials folder: what a client finds where, and what a server makes once."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from outerstep.errors import ConfigError, NoCredentials
from outerstep.security import Access, Credentials, parse_join_string
from outerstep.security.tokens import new_token
from support import in_threads

PIN = "ab" * 32
OTHER_PIN = "cd" * 32
TOKEN, ADMIN = new_token("run"), new_token("admin")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "credentials"


def credentials(folder: Path, **environ: str) -> Credentials:
    return Credentials(folder, environ=environ)


def files(folder: Path) -> dict[str, int]:
    return {str(p.relative_to(folder)): stat.S_IMODE(p.stat().st_mode) for p in [folder, *folder.rglob("*")]}


def test_the_folder_is_the_one_named_else_the_users() -> None:
    home = {"XDG_CONFIG_HOME": "/x", "OUTERSTEP_CREDENTIALS": "/o"}
    assert Credentials("/given", environ=home).folder == Path("/given")
    assert Credentials(environ=home).folder == Path("/o")
    assert Credentials(environ={"XDG_CONFIG_HOME": "/x"}).folder == Path("/x/outerstep")
    assert Credentials(environ={"XDG_CONFIG_HOME": "relative"}).folder == Path.home() / ".config" / "outerstep"
    assert Credentials("~/here", environ={}).folder == Path.home() / "here"


def test_who_was_handed_a_join_string_needs_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    carried = Access("gpu", 8512, TOKEN, PIN)
    assert Credentials(environ={"OUTERSTEP_JOIN": carried.join_string}).find("gpu") == carried
    with pytest.raises(ConfigError, match="no home folder for credentials: pass --credentials DIR"):
        Credentials(environ={}).find("gpu")


def test_a_joined_server_is_found_by_its_address(folder: Path) -> None:
    known = credentials(folder)
    with pytest.raises(NoCredentials, match=r"nothing is known here about gpu:8512: .*outerstep join -"):
        known.find("gpu")
    access = Access("gpu", 8512, TOKEN, PIN)
    known.remember(access)
    for written in ("gpu:8512", "gpu", " GPU:8512 ", "gpu."):
        found = known.find(written)
        assert found is not None
        assert (found.token, found.fingerprint, found.plain) == (TOKEN, PIN, False)
    with pytest.raises(NoCredentials):
        known.find("gpu:8513")


def test_an_admin_token_joins_a_run_token_of_the_same_server_only(folder: Path) -> None:
    known = credentials(folder)
    known.remember(Access("gpu", 8512, TOKEN, PIN))
    known.remember(Access("gpu", 8512, fingerprint=PIN, admin=ADMIN))
    assert known.find("gpu") == Access("gpu", 8512, TOKEN, PIN, ADMIN)
    known.remember(Access("gpu", 8512, fingerprint=OTHER_PIN, admin=ADMIN))
    assert known.find("gpu") == Access("gpu", 8512, "", OTHER_PIN, ADMIN)


def test_plain_text_has_to_be_asked_for_by_name(folder: Path) -> None:
    known = credentials(folder)
    known.remember(Access("gpu", 8512, TOKEN, PIN))
    assert known.find("http://gpu:8512") == Access("gpu", 8512, plain=True)
    with pytest.raises(ConfigError, match="no credentials to store"):
        known.remember(Access("gpu", 8512, plain=True))


def test_a_join_string_or_the_variable_goes_before_the_file(folder: Path) -> None:
    credentials(folder).remember(Access("gpu", 8512, TOKEN, PIN))
    carried = Access("gpu", 8512, new_token("run"), OTHER_PIN)
    assert credentials(folder, OUTERSTEP_JOIN=carried.join_string).find("gpu") == carried
    assert credentials(folder, OUTERSTEP_JOIN=carried.join_string).find("http://gpu").plain  # type: ignore[union-attr]
    assert credentials(folder).find(carried.join_string) == carried
    elsewhere = Access("cpu", 8512, TOKEN, PIN).join_string
    found = credentials(folder, OUTERSTEP_JOIN=elsewhere).find("gpu")
    assert found is not None
    assert found.token == TOKEN
    with pytest.raises(ConfigError, match=r"^OUTERSTEP_JOIN: this is not a join string") as refused:
        credentials(folder, OUTERSTEP_JOIN=f"outerstep://{TOKEN}@").find("gpu")
    assert TOKEN[4:] not in str(refused.value)


def test_on_the_loopback_it_is_ones_own_server_whichever_port_it_has(folder: Path) -> None:
    known = credentials(folder)
    assert known.find("127.0.0.1:9") is None  # not yet
    identity = known.server_identity()
    tokens = identity.tokens.load()
    for address in ("127.0.0.1:9", "localhost:8512", "[::1]:4000"):
        found = known.find(address)
        assert found is not None
        assert (found.token, found.admin, found.fingerprint) == (tokens.run, tokens.admin, identity.fingerprint)


def test_so_it_is_on_another_address_of_this_machine_and_on_no_one_elses(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = credentials(folder)
    identity = known.server_identity()
    bound: list[str] = []

    def bind(_: socket.socket, address: tuple[str, int]) -> None:
        bound.append(address[0])
        if address[0] != "192.0.2.77":
            raise OSError("Cannot assign requested address")

    monkeypatch.setattr(socket.socket, "bind", bind)
    found = known.find("192.0.2.77:9000")
    assert found is not None
    assert (found.host, found.fingerprint) == ("192.0.2.77", identity.fingerprint)
    for elsewhere in ("192.0.2.78:9000", "example.org:9000", "0.0.0.0:9000"):
        with pytest.raises(NoCredentials):
            known.find(elsewhere)
    assert bound == ["192.0.2.77", "192.0.2.78", "0.0.0.0"]  # a name is not looked up


def test_a_tunnel_on_the_loopback_is_found_before_ones_own_server(folder: Path) -> None:
    known = credentials(folder)
    identity = known.server_identity()
    tunnel = Access("127.0.0.1", 8512, TOKEN, PIN)
    known.remember(tunnel)
    assert known.find("127.0.0.1:8512") == tunnel
    known.announce({"127.0.0.1"}, 8512, identity)  # and then one's own server starts there
    assert known.find("127.0.0.1:8512").fingerprint == identity.fingerprint  # type: ignore[union-attr]


def test_ones_own_server_on_another_address_is_found_with_the_tokens_it_has_now(folder: Path) -> None:
    known = credentials(folder)
    identity = known.server_identity()
    known.announce({"192.168.1.100", "127.0.0.1"}, 8512, identity)
    assert list(known.known()) == ["192.168.1.100:8512"]
    rotated = identity.tokens.rotate("run")
    assert known.find("192.168.1.100:8512").token == rotated  # type: ignore[union-attr]
    assert rotated not in known.known_file.read_text()


def test_an_identity_is_made_once_and_stays(folder: Path) -> None:
    first = credentials(folder).server_identity()
    before = {file: file.read_bytes() for file in folder.rglob("*.*")}
    second = credentials(folder).server_identity()
    assert second.fingerprint == first.fingerprint
    assert {file: file.read_bytes() for file in folder.rglob("*.*")} == before


def test_servers_that_start_together_agree_on_one(folder: Path) -> None:
    made = in_threads(*[lambda: credentials(folder).server_identity() for _ in range(6)])
    assert len({(identity.fingerprint, identity.tokens.load().run) for identity in made}) == 1


def test_half_an_identity_is_made_whole(folder: Path) -> None:
    first = credentials(folder).server_identity()
    first.certificate.unlink()  # the power was cut between the two files
    second = credentials(folder).server_identity()
    second.context()
    assert second.fingerprint != first.fingerprint


def test_everything_in_it_is_the_owners_alone(folder: Path) -> None:
    before = os.umask(0)
    try:
        known = credentials(folder)
        known.announce({"10.0.0.1"}, 8512, known.server_identity())
        known.remember(Access("gpu", 8512, TOKEN, PIN))
        known.write_join_file(Access("10.0.0.1", 8512, TOKEN, PIN))
    finally:
        os.umask(before)
    modes = files(folder)
    assert {name for name, mode in modes.items() if mode == 0o700} == {".", "server"}
    assert all(mode == 0o600 for name, mode in modes.items() if name not in (".", "server")), modes
    assert not [name for name in modes if name.startswith(".k")], "a temporary file was left behind"


def test_a_join_file_holds_the_line(folder: Path) -> None:
    access = Access("10.0.0.1", 8600, TOKEN, PIN)
    file = credentials(folder).write_join_file(access)
    assert parse_join_string(file.read_text()) == access
    assert credentials(folder).join_files() == [(file, access)]


def test_a_damaged_file_of_known_servers_is_named(folder: Path) -> None:
    known = credentials(folder)
    known.remember(Access("gpu", 8512, TOKEN, PIN))
    known.known_file.write_text("{")
    with pytest.raises(ConfigError, match=r"known_servers\.json is not a file of known servers"):
        known.find("gpu")
    known.known_file.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        known.find("gpu")


def test_a_folder_that_cannot_be_made_is_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be used: Not a directory; choose another with --credentials"):
        credentials(tmp_path / "file" / "x").server_identity()


def test_a_certificate_of_the_operators_choice_is_checked(folder: Path, tmp_path: Path) -> None:
    known = credentials(folder)
    ours = known.server_identity()
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    with pytest.raises(ConfigError, match=r"tls_cert .*cert\.pem' cannot be read: No such file"):
        known.server_identity(str(cert), str(key))
    cert.write_text("hello")
    with pytest.raises(ConfigError, match="not a certificate in PEM form: no certificate in it"):
        known.server_identity(str(cert), str(key))
    cert.write_bytes(ours.certificate.read_bytes())
    key.write_text("no key")
    chosen = known.server_identity(str(cert), str(key))
    assert chosen.fingerprint == ours.fingerprint
    with pytest.raises(ConfigError, match=r"cannot be used: .*must be PEM files that belong together"):
        chosen.context()
    known.announce({"127.0.0.1"}, 8512, chosen)  # another file than the folder's: its pin is written down
    assert known.known()["localhost:8512"].fingerprint == chosen.fingerprint
