"""Ed25519 keys of peers: made once, the owner's alone, and nobody else's signature passes."""

from __future__ import annotations

from pathlib import Path

import pytest

from outerstep.errors import ConfigError
from outerstep.security.certificate import make_certificate
from outerstep.security.signing import make_key, open_key, verify


def test_a_signature_holds_for_its_key_and_its_bytes_alone() -> None:
    key, other = make_key(), make_key()
    signature = key.sign(b"said")
    assert verify(key.public, b"said", signature)
    assert not verify(key.public, b"Said", signature)
    assert not verify(other.public, b"said", signature)
    assert not verify(key.public, b"said", bytes(64))
    assert not verify(key.public, b"said", signature[:63])


@pytest.mark.parametrize("public", ["ff" * 32, "00" * 31, ""])
def test_what_is_no_key_verifies_nothing(public: str) -> None:
    assert not verify(public, b"said", bytes(64))


def test_a_key_is_made_once_and_only_its_owner_may_read_it(tmp_path: Path) -> None:
    file = tmp_path / "peer" / "key.pem"
    first = open_key(file)
    assert open_key(file).public == first.public
    assert verify(first.public, b"x", open_key(file).sign(b"x"))
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700


def test_a_key_that_others_can_read_is_not_used(tmp_path: Path) -> None:
    file = tmp_path / "peer" / "key.pem"
    open_key(file)
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        open_key(file)


@pytest.mark.parametrize(
    "content", [b"", b"no key", make_certificate()[0]], ids=["empty", "text", "another kind of key"]
)
def test_a_file_that_holds_something_else_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "key.pem"
    tmp_path.chmod(0o700)
    file.write_bytes(content)
    file.chmod(0o600)
    with pytest.raises(ConfigError, match="must hold"):
        open_key(file)
