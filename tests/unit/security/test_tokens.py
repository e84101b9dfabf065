"""The token file and the guard: who is let in, for whom they speak, and how tokens change while a server runs."""

from __future__ import annotations

import contextlib
import hmac
import os
from pathlib import Path

import pytest

from outerstep.errors import ConfigError, Forbidden, Unauthorized
from outerstep.security import TokenFile, TokenGuard
from outerstep.security.guard import OpenGuard
from outerstep.security.tokens import is_token, new_token


@pytest.fixture
def file(tmp_path: Path) -> TokenFile:
    made = TokenFile(tmp_path / "server" / "tokens.json")
    made.ensure()
    return made


def bearer(token: str) -> str:
    return f"Bearer {token}"


def test_tokens_are_made_once_and_for_their_owner_alone(file: TokenFile) -> None:
    before = file.load()
    assert TokenFile(file.path).ensure() == before
    assert is_token(before.run)
    assert is_token(before.admin)
    assert file.path.stat().st_mode & 0o777 == 0o600
    assert file.path.parent.stat().st_mode & 0o777 == 0o700


def test_no_two_are_alike_and_their_form_says_what_they_are_for() -> None:
    assert len({new_token("run") for _ in range(100)}) == 100
    assert new_token("worker").startswith("worker-")
    assert not is_token("run-short")


def test_each_token_is_known_for_what_it_is(file: TokenFile) -> None:
    guard, tokens = TokenGuard(file), file.load()
    own = file.give_worker("left")
    assert guard.admit(bearer(tokens.run)).kind == "run"
    assert guard.admit(f"bearer {tokens.admin}").kind == "admin"
    caller = guard.admit(bearer(own))
    assert (caller.kind, caller.worker_id) == ("worker", "left")


def wrong(run: str) -> list[str | None]:
    swapped = run[:-1] + ("A" if run[-1] != "A" else "B")
    return [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer  " + run,
        "Basic " + run,
        run,
        bearer(run[:-1]),
        bearer(run + "x"),
        bearer(swapped),
        bearer(run.upper()),
        bearer("x" * 12_000),
        bearer("schlüssel-" + "\xff" * 40),
        bearer("密码"),
        bearer(run + "\x00"),
        f"Bearer {run}, Bearer {run}",
    ]


def test_anything_else_is_refused_and_never_shown(file: TokenFile) -> None:
    guard, run = TokenGuard(file), file.load().run
    for presented in wrong(run):
        with pytest.raises(Unauthorized) as refused:
            guard.admit(presented)
        assert "outerstep join -" in refused.value.hint
        assert run[4:] not in str(refused.value)


@pytest.mark.row("B01")
def test_the_same_is_compared_whatever_is_presented(file: TokenFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Constant time: a digest of 32 bytes against every digest there is, right or wrong, early or late."""
    for name in ("a", "b", "c"):
        file.give_worker(name)
    compared: list[tuple[int, int]] = []
    compare = hmac.compare_digest

    def counting(left: bytes, right: bytes) -> bool:
        compared.append((len(left), len(right)))
        return compare(left, right)

    monkeypatch.setattr(hmac, "compare_digest", counting)
    guard, run = TokenGuard(file), file.load().run
    for presented in [bearer(run), *wrong(run)]:
        compared.clear()
        with contextlib.suppress(Unauthorized):
            guard.admit(presented)
        assert compared == [(32, 32)] * 5


def test_a_new_token_holds_at_once_and_the_old_one_no_longer(file: TokenFile) -> None:
    """Another process changes the file, as `outerstep token rotate` does; this one is not told."""
    guard, old = TokenGuard(file), file.load()
    guard.admit(bearer(old.run))
    new = TokenFile(file.path).rotate("run")
    assert new.admin == old.admin
    assert guard.admit(bearer(new.run)).kind == "run"
    with pytest.raises(Unauthorized, match="not valid here, or no longer"):
        guard.admit(bearer(old.run))


def test_the_file_is_not_read_again_unless_it_changed(file: TokenFile, monkeypatch: pytest.MonkeyPatch) -> None:
    guard, tokens = TokenGuard(file), file.load()
    guard.admit(bearer(tokens.run))

    def read_again(self: TokenFile) -> None:
        raise AssertionError

    monkeypatch.setattr(TokenFile, "load", read_again)
    for _ in range(5):
        guard.admit(bearer(tokens.run))


@pytest.mark.parametrize("damage", [b"", b"{", b'{"run": "", "admin": ""}', b"[]"])
def test_a_damaged_file_stops_a_start_but_not_a_run(file: TokenFile, damage: bytes) -> None:
    guard, tokens = TokenGuard(file), file.load()
    guard.admit(bearer(tokens.run))
    file.path.write_bytes(damage)
    assert guard.admit(bearer(tokens.run)).kind == "run"
    with pytest.raises(ConfigError, match=r"tokens\.json is not a file of tokens.*delete it"):
        TokenFile(file.path).current()


def test_a_file_that_others_can_read_is_not_used(file: TokenFile) -> None:
    os.chmod(file.path, 0o640)
    with pytest.raises(ConfigError, match=r"must be readable by its owner only, got mode 0640: chmod 600"):
        file.load()
    os.chmod(file.path, 0o600)
    os.chmod(file.path.parent, 0o770)
    with pytest.raises(ConfigError, match=r"must not be writable by others, got mode 0770: chmod 700"):
        file.load()


def test_a_worker_with_a_token_of_its_own_is_nobody_elses(file: TokenFile) -> None:
    guard, tokens = TokenGuard(file), file.load()
    own = file.give_worker("left")
    guard.admit(bearer(own)).check_speaks_for("left")
    with pytest.raises(Forbidden, match="belongs to worker 'left', the request speaks for 'right'"):
        guard.admit(bearer(own)).check_speaks_for("right")
    with pytest.raises(Forbidden, match="'left' has a token of its own"):
        guard.admit(bearer(tokens.run)).check_speaks_for("left")
    guard.admit(bearer(tokens.run)).check_speaks_for("right")
    file.take_from_worker("left")
    guard.admit(bearer(tokens.run)).check_speaks_for("left")
    with pytest.raises(Unauthorized):
        guard.admit(bearer(own))
    with pytest.raises(ConfigError, match="worker 'left' does not have its own token; known: no worker has one"):
        file.take_from_worker("left")


def test_a_second_token_for_a_worker_replaces_the_first(file: TokenFile) -> None:
    first, second = file.give_worker("left"), file.give_worker("left")
    guard = TokenGuard(file)
    assert guard.admit(bearer(second)).worker_id == "left"
    with pytest.raises(Unauthorized):
        guard.admit(bearer(first))


def test_a_workers_token_is_not_in_the_file(file: TokenFile) -> None:
    assert file.give_worker("left") not in file.path.read_text()


def test_only_the_admin_token_operates_and_it_does_nothing_else(file: TokenFile) -> None:
    guard, tokens = TokenGuard(file), file.load()
    guard.admit(bearer(tokens.admin)).check_operates()
    with pytest.raises(Forbidden, match="control needs the admin token"):
        guard.admit(bearer(tokens.run)).check_operates()
    with pytest.raises(Forbidden, match="control needs the admin token"):
        guard.admit(bearer(file.give_worker("left"))).check_operates()
    with pytest.raises(Forbidden, match="workers do not join with it"):
        guard.admit(bearer(tokens.admin)).check_speaks_for("left")


def test_an_open_door_lets_everybody_do_everything() -> None:
    caller = OpenGuard().admit(None)
    caller.check_operates()
    caller.check_speaks_for("anyone")


def test_what_holds_tokens_does_not_show_them(file: TokenFile) -> None:
    tokens = file.load()
    assert tokens.run not in repr(tokens)
    assert tokens.admin not in str(tokens)


def test_an_impossible_worker_id_is_refused(file: TokenFile) -> None:
    with pytest.raises(ConfigError, match="a worker id has 1 to 128"):
        file.give_worker("a b")
