"""A nonce is one process's and lasts a while; a worker's key is one user's and lasts for ever."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from outerstep.errors import Busy, ConfigError
from outerstep.security import Credentials
from outerstep.security.joining import NONCE_LASTS_S, Nonces
from outerstep.security.signing import derive_key, verify


class TestNonces:
    def test_each_is_another_and_good_where_it_was_made(self) -> None:
        nonces = Nonces()
        made = {nonces.make() for _ in range(100)}
        assert len(made) == 100
        for nonce in made:
            nonces.check(nonce)
            with pytest.raises(Busy, match="not one of this server's"):
                Nonces().check(nonce)

    def test_it_lasts_a_while(self) -> None:
        now = 1000.0
        nonces = Nonces(lambda: now)
        nonce = nonces.make()
        now += NONCE_LASTS_S
        nonces.check(nonce)
        now += 1.0
        with pytest.raises(Busy, match="no longer"):
            nonces.check(nonce)

    @pytest.mark.parametrize("digit", range(0, 64, 7))
    def test_no_digit_can_be_another(self, digit: int) -> None:
        nonces = Nonces()
        nonce = nonces.make()
        changed = nonce[:digit] + ("0" if nonce[digit] != "0" else "1") + nonce[digit + 1 :]
        with pytest.raises(Busy):
            nonces.check(changed)


class TestTheKeyOfAWorker:
    def test_it_is_made_once_and_is_the_same_ever_after(self, tmp_path: Path) -> None:
        folder = tmp_path / "config"
        first = Credentials(folder).worker_key("left")
        assert Credentials(folder).worker_key("left").public == first.public
        assert Credentials(folder).worker_key("right").public != first.public
        assert Credentials(tmp_path / "another").worker_key("left").public != first.public
        assert (folder / "worker.key").stat().st_mode & 0o777 == 0o600
        assert verify(
            first.public, b"x", derive_key(bytes.fromhex((folder / "worker.key").read_text()), "left").sign(b"x")
        )

    def test_one_that_others_can_read_or_that_is_something_else_is_refused(self, tmp_path: Path) -> None:
        Credentials(tmp_path / "c").worker_key("left")
        file = tmp_path / "c" / "worker.key"
        file.write_text("hello")
        with pytest.raises(ConfigError, match="must hold 64 hexadecimal digits"):
            Credentials(tmp_path / "c").worker_key("left")
        os.chmod(file, 0o644)
        with pytest.raises(ConfigError, match="must be readable by its owner only"):
            Credentials(tmp_path / "c").worker_key("left")

    @pytest.mark.parametrize("where", ["no home", "a file in the way"])
    def test_without_a_place_to_keep_it_it_lasts_as_long_as_the_process(
        self, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def no_home() -> Path:
            raise RuntimeError("Could not determine home directory.")

        (tmp_path / "file").touch()
        monkeypatch.setattr(Path, "home", no_home)
        credentials = Credentials(environ={}) if where == "no home" else Credentials(tmp_path / "file" / "c")
        with caplog.at_level(logging.WARNING):
            key = credentials.worker_key("left")
        assert "cannot be kept" in caplog.text
        assert "OUTERSTEP_CREDENTIALS" in caplog.text
        assert credentials.worker_key("left").public == key.public
