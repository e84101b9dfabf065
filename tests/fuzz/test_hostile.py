"""Whoever holds a token may say anything to real processes: none stops, none grows, rounds go on, and what is true
stays true. A short run of hostile.py; `make soak` runs a long one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzz.cases import cases
from fuzz.grammar import Grammar, as_json, as_msgpack
from fuzz.hostile import LIAR, PEER_REQUESTS, SERVER_REQUESTS, attack_peers, attack_server
from outerstep.errors import Refused
from outerstep.statements import AnyStatement, Converse, body_of, statement_of
from outerstep.wire.messages import PLACES, decode_json


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_four_peers_under_a_member_that_says_everything_keep_deciding(tmp_path: Path) -> None:
    found = attack_peers(3000, 1, tmp_path)
    assert found["said"]["signed by a member"] >= 1000
    assert found["expelled"] in ([], [LIAR])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_peers_that_are_killed_meanwhile_come_back_to_the_same_bits(tmp_path: Path) -> None:
    assert attack_peers(1500, 2, tmp_path, kills=3)["rounds"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_server_under_a_worker_that_says_everything_keeps_closing_rounds(tmp_path: Path) -> None:
    found = attack_server(1500, 1, tmp_path)
    assert found["said"]["with a session"] >= 300


KINDS = st.sampled_from([*SERVER_REQUESTS, *PEER_REQUESTS, Converse])


def test_every_request_of_both_ends_is_drawn() -> None:
    assert set(PLACES) == {*SERVER_REQUESTS, *PEER_REQUESTS, Converse}


@cases(500)
@given(KINDS, st.randoms(use_true_random=False))
def test_a_message_that_the_types_allow_is_read_or_refused(kind: type, rng: random.Random) -> None:
    data = as_json(Grammar(rng, {"run_id": ["r"]}).draw(kind))
    try:
        message = decode_json(data, kind)
    except Refused as refusal:
        assert refusal.message
        assert refusal.status in (400, 426)
    else:
        assert isinstance(message, kind)


@cases(500)
@given(st.randoms(use_true_random=False))
def test_a_statement_that_the_types_allow_is_read_back_as_it_was_written_or_is_none(rng: random.Random) -> None:
    grammar = Grammar(rng, {"run_id": ["r"]})
    statement = statement_of(grammar.spoil(as_msgpack(grammar.draw(AnyStatement))))
    assert statement is None or statement_of(body_of(statement)) == statement
