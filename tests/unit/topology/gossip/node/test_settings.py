"""What a node is told is checked when it is told, and its address is where others reach it."""

from __future__ import annotations

from typing import Any

import pytest

from outerstep.errors import ConfigError, NoCredentials
from outerstep.topology.gossip.node import Node, NodeSettings


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"peer_id": "a b"}, "a peer id has 1 to 128"),
        ({"beat_every_s": 0.0}, "beat_every_s must be > 0"),
        ({"part_size_bytes": 0}, "part_size_bytes must be in"),
        ({"part_size_bytes": 17 << 20}, "part_size_bytes must be in"),
        ({"memory_bytes": -1}, "memory_bytes must be at least 0"),
    ],
)
def test_a_setting_out_of_range_is_refused(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        NodeSettings(**{"peer_id": "a", **wrong})


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"listen": "here:x"}, "listen must be host:port"),
        ({"listen": "192.0.2.1:0"}, "cannot listen on 192.0.2.1:0"),
        ({"join": ("192.0.2.1:8512",)}, "nothing is known here about 192.0.2.1:8512"),
        ({"join": ("http://192.0.2.1:8512",)}, "is reached without encryption"),
    ],
)
def test_a_place_that_cannot_be_is_refused(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Node(NodeSettings(**{"peer_id": "a", "listen": "127.0.0.1:0", **wrong}))


def test_a_peer_is_known_by_the_address_that_it_is_told_to_advertise() -> None:
    with Node(NodeSettings(peer_id="a", listen="127.0.0.1:0", advertise="example.org:9999")) as node:
        assert node.address == "example.org:9999"
        assert node.join_string.startswith("outerstep://run-")
        assert "@example.org:9999#sha256=" in node.join_string


def test_join_strings_of_two_runs_do_not_go_together() -> None:
    with Node(NodeSettings(peer_id="a", listen="127.0.0.1:0")) as node:
        other = node.join_string.replace("outerstep://run-", "outerstep://run-0")[: len("outerstep://run-") + 43]
        rest = node.join_string[len("outerstep://run-") + 43 :]
        with pytest.raises(ConfigError, match="carry the same token"):
            Node(NodeSettings(peer_id="b", listen="127.0.0.1:0", join=(node.join_string, other + rest)))


def test_an_admins_join_string_is_not_a_peers() -> None:
    with Node(NodeSettings(peer_id="a", listen="127.0.0.1:0")) as node:
        admin = node.join_string.replace("outerstep://run-", "outerstep://admin-")
        with pytest.raises(NoCredentials, match="not an admin's"):
            Node(NodeSettings(peer_id="b", listen="127.0.0.1:0", join=(admin,)))
