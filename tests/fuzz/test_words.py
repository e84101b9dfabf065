"""What people and programs write: messages, queries, settings, join strings. Right ones are read back as they were
written; whatever else comes is refused by name, and nothing else happens."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzz.cases import ODD, altered, cases, spoiled
from outerstep.config import ROLES, SERVER, Sourced, build, make_command, make_config, resolve, values_of
from outerstep.config.kinds import write
from outerstep.errors import ConfigError, OuterstepError, Refused
from outerstep.security import Access, parse_address, parse_join_string
from outerstep.security.access import redact
from outerstep.security.tokens import new_token
from outerstep.types import (
    Commit,
    CompleteOffer,
    Control,
    GetPart,
    Heartbeat,
    Join,
    Lease,
    Leave,
    Offer,
    Poll,
    PutPart,
    Request,
)
from outerstep.wire.messages import (
    address_of,
    decode_error,
    decode_json,
    encode_error,
    encode_json,
    parse_query,
)
from typed import typed

HEAD: dict[str, Any] = {"run_id": "r", "worker_id": "w", "incarnation": 1}
GOOD: dict[type[Request], dict[str, Any]] = {
    Join: {
        "protocol": 1,
        "worker_id": "w",
        "instance": "a" * 16,
        "hostname": "h",
        "manifest": {"parameters": [{"name": "p", "shape": [2, 3], "dtype": "float32"}], "aliases": {"q": "p"}},
        "wishes": {"sync_every": 5, "codec": "bf16", "tokenizer": "t"},
        "run_id": "r",
    },
    Lease: {
        **HEAD,
        "dataset": {"name": "train", "samples": 100, "unit_samples": 10},
        "number": 1,
        "want": 3,
        "holds": [[0, 2], [5, 6]],
        "dropped": [[7, 8]],
        "untrained": 2,
        "pace": 0.5,
    },
    Heartbeat: {**HEAD, "step": 3, "steps_per_second": 1.5, "loss": 0.5, "acknowledged": [1]},
    Leave: {**HEAD, "reason": "over"},
    Offer: {
        **HEAD, "fragment": 0, "sequence": 1, "base_version": 0, "oldest_base": 0, "steps": 1, "codec": "fp32",
        "size_bytes": 100, "samples": 1, "tokens": 2, "section_bytes": [50, 50],
    },
    CompleteOffer: {
        **HEAD, "fragment": 0, "sequence": 1, "base_version": 0, "oldest_base": 0, "steps": 1, "codec": "fp32",
        "size_bytes": 100, "samples": 1, "tokens": 2, "loss": 0.5, "hash": "0" * 16,
    },
    PutPart: {**HEAD, "fragment": 0, "sequence": 1, "part": 0, "hash": "0" * 16},
    Commit: {**HEAD, "fragment": 0, "sequence": 1, "payload_hash": "0" * 32},
    Poll: {
        **HEAD, "fragment": 0, "after": -1, "held": 0, "held_hash": "0" * 32, "wait_s": 1.0, "sections": 1,
        "takes_bytes": 5,
    },
    GetPart: {**HEAD, "fragment": 0, "version": 0, "part": 0, "kind": "full"},
    Control: {"kind": "plan", "worker_id": "w", "reason": "so", "changes": {"sync_every": 4}, "tokens": 1},
}  # fmt: skip
KINDS = st.sampled_from(sorted(GOOD, key=lambda kind: kind.__name__))


def check_message(data: bytes, kind: type[Request]) -> None:
    """A message, which says the same when it is written again, or a refusal that can itself be written and read."""
    try:
        message = decode_json(data, kind)
    except Refused as refusal:
        assert refusal.message
        assert refusal.status in (400, 426)
        again = decode_error(encode_error(refusal, "id"), refusal.status)
        assert (type(again), again.message) == (type(refusal), refusal.message)
    else:
        assert decode_json(encode_json(message), kind) == message


@cases(900)
@given(KINDS, st.data())
def test_a_message_with_spoiled_bytes_is_read_or_refused(kind: type[Request], data: st.DataObject) -> None:
    check_message(data.draw(spoiled(json.dumps(GOOD[kind]).encode())), kind)


@cases(1000)
@given(KINDS, st.data())
def test_a_message_with_odd_values_is_read_or_refused(kind: type[Request], data: st.DataObject) -> None:
    check_message(json.dumps(data.draw(altered(GOOD[kind]))).encode(), kind)


@cases(300)
@given(KINDS, st.binary(max_size=300) | st.recursive(ODD, lambda x: st.lists(x) | st.dictionaries(st.text(), x)).map(
    lambda value: json.dumps(value).encode()
))  # fmt: skip
def test_anything_at_all_is_read_or_refused(kind: type[Request], data: bytes) -> None:
    check_message(data, kind)


@cases(400)
@given(st.sampled_from([CompleteOffer, PutPart, GetPart]), st.data())
def test_a_query_is_read_or_refused(kind: type[Request], data: st.DataObject) -> None:
    target = address_of(msgspec.convert(GOOD[kind], kind))[1]
    assert parse_query(target.split("?")[1], kind) == msgspec.convert(GOOD[kind], kind)
    query = data.draw(spoiled(target.split("?")[1].encode())).decode("latin-1")
    try:
        message = parse_query(query, kind)
    except Refused as refusal:
        assert refusal.status == 400
    else:
        assert parse_query(address_of(message)[1].split("?")[1], kind) == message


# --- settings -------------------------------------------------------------------------------------------------------

ROLE = st.sampled_from(["server", "worker"])
MUST: dict[str, dict[str, Any]] = {"server": {"num_workers": 2}, "worker": {"server_addr": "127.0.0.1:1"}}


def check_settings(name: str, said: Mapping[str, Sourced], environ: Mapping[str, str], file: str | None) -> None:
    """A config that says the same in the environment's words, or a ConfigError."""
    role = ROLES[name]
    must = {field: Sourced(value, "flag") for field, value in MUST[name].items()}
    try:
        found = resolve(role, {**must, **said}, environ=environ, file=file)
        config = make_config(role, found)
        make_command(role, found)
    except ConfigError as error:
        assert str(error)
        assert "\n" not in str(error) or "not TOML" in str(error)
        return
    for field, value in values_of(config).items():
        if isinstance(value, str):  # as text it is read without the spaces around it, and "none" is a word for None
            value = None if value.strip().lower() in ("", "none") else value.strip()
        if value is not None:
            assert role.kinds[field].parse(write(value)) == value, field


@cases(700)
@given(ROLE, st.data())
def test_a_setting_of_any_value_is_taken_or_refused(role: str, data: st.DataObject) -> None:
    fields = data.draw(st.lists(st.sampled_from(sorted(ROLES[role].by_field)), min_size=1, max_size=3))
    values = st.integers() | st.floats() | st.booleans() | st.none() | st.text(max_size=20) | ODD
    said = {field: Sourced(data.draw(values), f"flag --{field}") for field in fields}
    check_settings(role, said, {}, "/dev/null")


@cases(500)
@given(ROLE, st.data())
def test_a_variable_of_any_text_is_taken_or_refused(role: str, data: st.DataObject) -> None:
    names = [name for field in ROLES[role].by_field for name in ROLES[role].variables(field)]
    chosen = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=3))
    texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
    numbers = st.integers().map(str) | st.floats().map(str)
    environ = {name: data.draw(texts | numbers | st.sampled_from(["", "none", "0", "1", "true"])) for name in chosen}
    if data.draw(st.booleans()):
        environ["OUTERSTEP_" + data.draw(st.sampled_from(["SYNC_EVRY", "X", "sync_every", ""]))] = "1"
    check_settings(role, {}, environ, "/dev/null")


TOML = b"""[server]
num_workers = 2
sync_every = 5          # H
codec = "bf16"
insecure = false
round_deadline_s = 1.5
"max_staleness" = 4
[worker]
server_addr = "127.0.0.1:8512"
sync_every = 5
"""


@cases(600)
@given(spoiled(TOML, most=4) | st.binary(max_size=100), ROLE)
def test_a_settings_file_of_any_bytes_is_taken_or_refused_naming_it(text: bytes, role: str) -> None:
    with tempfile.NamedTemporaryFile(suffix=".toml") as file:
        file.write(text)
        file.flush()
        try:
            resolve(ROLES[role], {}, environ={}, file=file.name)
        except ConfigError as error:
            assert file.name in str(error)
            check_settings(role, {}, {}, file.name)


@cases(300)
@given(ROLE, st.dictionaries(st.text(max_size=12) | st.sampled_from(sorted(SERVER.by_field)), ODD, max_size=3))
def test_keywords_of_any_name_are_taken_or_refused(role: str, settings: dict[str, Any]) -> None:
    try:
        build(ROLES[role].config, {**MUST[role], **settings})
    except ConfigError as error:
        assert str(error)


@cases(300)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ["server", "worker", "-n", "2", "-m", "/nonexistent", "--", "--sync-every", "none", "status", "config", "show",
     "token", "--server", "h:1", "true", "--debug", "--config", "/dev/null"]
), max_size=5))  # fmt: skip
def test_a_command_line_of_any_words_ends_with_a_documented_exit_code(words: list[str]) -> None:
    """Words that would start something are left out: what is tested is how they are read."""
    if any(word in ("worker", "demo", "join", "control", "status", "token", "init") for word in words):
        words = [*words, "--no-such-option"]
    result = typed(words, env={"OUTERSTEP_CONFIG": "/dev/null"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        assert isinstance(result.exception, OuterstepError), (
            result.exception
        )  # main() makes it one line and exit code 2
    else:
        assert result.exit_code in (0, 2)


# --- join strings ---------------------------------------------------------------------------------------------------

TOKEN = new_token("run")
JOIN_STRING = Access("192.168.1.100", 8512, TOKEN, "ab" * 32).join_string
HOSTS = st.sampled_from(["h", "gpu.example.org", "192.168.1.1", "::1", "fe80::1%eth0", "xn--bcher-kva.example", "a_b"])


@cases(300)
@given(HOSTS, st.integers(1, 65535), st.none() | st.binary(min_size=32, max_size=32).map(bytes.hex), st.booleans())
def test_a_join_string_is_read_back_as_it_was_written(host: str, port: int, pin: str | None, admin: bool) -> None:
    token = new_token("admin" if admin else "run")
    access = Access(host, port, fingerprint=pin, **{"admin" if admin else "token": token})
    assert parse_join_string(access.join_string) == access
    assert token not in repr(access)


@cases(500)
@given(spoiled(JOIN_STRING.encode()) | st.binary(max_size=100) | st.text(max_size=60).map(str.encode))
def test_a_spoiled_join_string_is_read_or_refused_without_showing_its_token(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    try:
        access = parse_join_string(text)
    except ConfigError as error:
        secret = TOKEN.removeprefix("run-")
        assert not any(secret[i : i + 20] in str(error) for i in range(len(secret) - 20))
    else:
        assert parse_join_string(access.join_string) == access
    try:
        host, port = parse_address(text)
    except ConfigError as error:
        assert TOKEN not in str(error)
    else:
        assert host
        assert 0 < port < 65536
    assert TOKEN not in redact(text)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_no_message_is_ever_written_with_a_number_that_json_does_not_have(number: float) -> None:
    assert b"NaN" not in encode_json({"x": number})
    assert b"Inf" not in encode_json({"x": number})
