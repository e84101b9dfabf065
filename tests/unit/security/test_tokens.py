"""The token file and the guard: who is let in, for whom they speak, and how tokens change while a server runs."""

from __future__ import annotations

import contextlib
import hmac
import os
import time
from pathlib import Path

import pytest

from outerstep.errors import ConfigError, Forbidden, Unauthorized
from outerstep.security import TokenFile, TokenGuard
from outerstep.security.guard import OpenGuard
from outerstep.security.tokens import NamedToken, Right, Tokens, is_token, new_token


@pytest.fixture
def file(tmp_path: Path) -> TokenFile:
    made = TokenFile(tmp_path / "server" / "tokens.json")
    made.ensure()
    return made


def bearer(token: str) -> dict[str, str]:
    return headers(f"Bearer {token}")


def headers(authorization: str | None) -> dict[str, str]:
    return {} if authorization is None else {"authorization": authorization}


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
    assert guard.admit(headers(f"bearer {tokens.admin}")).kind == "admin"
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
        "Bearer " + run[:-1],
        f"Bearer {run}x",
        "Bearer " + swapped,
        "Bearer " + run.upper(),
        "Bearer " + "x" * 12_000,
        "Bearer schlüssel-" + "\xff" * 40,
        "Bearer 密码",
        f"Bearer {run}\x00",
        f"Bearer {run}, Bearer {run}",
    ]


def test_anything_else_is_refused_and_never_shown(file: TokenFile) -> None:
    guard, run = TokenGuard(file), file.load().run
    for presented in map(headers, wrong(run)):
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
    for presented in [bearer(run), *map(headers, wrong(run))]:
        compared.clear()
        with contextlib.suppress(Unauthorized):
            guard.admit(presented)
        assert compared == [(32, 32)] * 5


def test_a_new_token_holds_at_once_and_the_old_one_no_longer(file: TokenFile) -> None:
    """Another process changes the file, as `outerstep token rotate` does; this one is not told."""
    guard, old = TokenGuard(file), file.load()
    guard.admit(bearer(old.run))
    new = TokenFile(file.path).rotate("run")
    assert file.load().run == new != old.run
    assert file.load().admin == old.admin
    assert guard.admit(bearer(new)).kind == "run"
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
    file.revoke("left")
    guard.admit(bearer(tokens.run)).check_speaks_for("left")
    with pytest.raises(Unauthorized):
        guard.admit(bearer(own))
    with pytest.raises(ConfigError, match="no token of the name 'left'; known: none was made"):
        file.revoke("left")


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
    caller = OpenGuard().admit({})
    caller.check_operates()
    caller.check_speaks_for("anyone")


def test_what_holds_tokens_does_not_show_them(file: TokenFile) -> None:
    tokens = file.load()
    assert tokens.run not in repr(tokens)
    assert tokens.admin not in str(tokens)


def test_an_impossible_worker_id_is_refused(file: TokenFile) -> None:
    with pytest.raises(ConfigError, match=r"a worker id.* has 1 to 128"):
        file.give_worker("a b")


class TestNames:
    """Tokens that an operator makes: a name, rights, an end, and perhaps the one worker they speak for."""

    def test_rights_say_what_a_token_is_good_for(self, file: TokenFile) -> None:
        guard = TokenGuard(file)
        reader = guard.admit(bearer(file.give("dashboard", rights=["read"])))
        reader.check_reads()
        with pytest.raises(Forbidden, match="the token 'dashboard' does not have the right to join"):
            reader.check_speaks_for("left")
        with pytest.raises(Forbidden, match="control needs the admin token"):
            reader.check_operates()
        joiner = guard.admit(bearer(file.give("site-a", rights=["join"])))
        joiner.check_speaks_for("left")
        with pytest.raises(Forbidden, match="the token 'site-a' does not have the right to read"):
            joiner.check_reads()
        operator = guard.admit(bearer(file.give("night-shift", rights=["control"])))
        operator.check_operates()
        with pytest.raises(Forbidden):
            operator.check_reads()
        with pytest.raises(Forbidden):
            operator.check_speaks_for("left")

    def test_a_named_token_does_not_speak_for_a_worker_with_its_own(self, file: TokenFile) -> None:
        file.give_worker("left")
        with pytest.raises(Forbidden, match="'left' has a token of its own"):
            TokenGuard(file).admit(bearer(file.give("site-a"))).check_speaks_for("left")

    def test_it_is_refused_once_it_has_expired(self, file: TokenFile) -> None:
        now = time.time()
        guard = TokenGuard(file, lambda: now)
        token = file.give("guest", expires_in_s=60.0)
        assert guard.admit(bearer(token)).name == "guest"
        assert "guest" in guard.valid_names()
        now += 61.0
        with pytest.raises(Unauthorized, match=r"the token 'guest' was valid until 20.* UTC"):
            guard.admit(bearer(token))
        assert guard.valid_names() == {"run", "admin"}

    @pytest.mark.parametrize("name", ["run", "admin", "guest"])
    def test_old_and_new_are_valid_while_a_rotation_overlaps(self, file: TokenFile, name: str) -> None:
        now = time.time()
        guard, made = TokenGuard(file, lambda: now), file.give("guest")
        old = {"run": file.load().run, "admin": file.load().admin, "guest": made}[name]
        new = file.rotate(name, overlap_s=60.0)
        assert guard.admit(bearer(old)) == guard.admit(bearer(new))
        assert guard.admit(bearer(new)).name == name
        now += 61.0
        with pytest.raises(Unauthorized):
            guard.admit(bearer(old))
        assert guard.admit(bearer(new)).name == name

    def test_what_is_revoked_is_refused_with_all_that_it_replaced(self, file: TokenFile) -> None:
        guard, first = TokenGuard(file), file.give("guest")
        second = file.rotate("guest", overlap_s=3600.0)
        file.revoke("guest")
        for token in (first, second):
            with pytest.raises(Unauthorized):
                guard.admit(bearer(token))
        assert not file.load().replaced

    def test_rotating_at_once_ends_an_overlap_too(self, file: TokenFile) -> None:
        """It has leaked: neither it nor the one before is to be valid."""
        guard, first = TokenGuard(file), file.load().run
        second = file.rotate("run", overlap_s=3600.0)
        file.rotate("run")
        for token in (first, second):
            with pytest.raises(Unauthorized):
                guard.admit(bearer(token))

    def test_a_worker_may_have_several_of_its_own(self, file: TokenFile) -> None:
        guard, first = TokenGuard(file), file.give_worker("left")
        second = file.give("left-spare", worker="left", expires_in_s=3600.0)
        assert guard.admit(bearer(first)).worker_id == guard.admit(bearer(second)).worker_id == "left"

    @pytest.mark.parametrize("name", ["run", "admin", "", "a b", "x" * 129])
    def test_a_name_must_be_free_and_printable(self, file: TokenFile, name: str) -> None:
        with pytest.raises(ConfigError, match=r"is taken|has 1 to 128"):
            file.give(name)

    @pytest.mark.parametrize("rights", [[], ["join", "control"]])
    def test_a_token_that_joins_gives_no_orders(self, file: TokenFile, rights: list[Right]) -> None:
        with pytest.raises(ConfigError, match="one that joins gives no orders"):
            file.give("both", rights=rights)

    def test_neither_run_nor_admin_can_be_revoked(self, file: TokenFile) -> None:
        with pytest.raises(ConfigError, match="always has its run token"):
            file.revoke("run")

    def test_the_file_of_an_older_release_is_read_and_written_as_it_was(self, file: TokenFile) -> None:
        run, admin = new_token("run"), new_token("admin")
        file.path.write_text(f'{{"run": "{run}", "admin": "{admin}", "workers": {{"left": "{"ab" * 32}"}}}}')
        assert file.load() == Tokens(run, admin, {"left": "ab" * 32})
        assert file.load().all_named == {"left": NamedToken("ab" * 32, worker="left")}
        file.give_worker("right")
        assert set(file.load().workers) == {"left", "right"}
        assert not file.load().named

    def test_nothing_that_is_shown_holds_a_digest(self, file: TokenFile) -> None:
        file.give("guest")
        assert file.load().named["guest"].digest not in repr(file.load())
