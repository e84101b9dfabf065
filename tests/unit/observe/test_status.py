"""The status of a server and of a peer: one value on both sides of the wire."""

from __future__ import annotations

import msgspec
import pytest
import torch

from outerstep.errors import ProtocolMismatch
from outerstep.observe.status import PeerMemberStatus, PeerStatus, ServerStatus, Status, WorkerStatus, read_status
from outerstep.server import DiLoCoServer
from support import Ledger, count, memory_worker, tiny_model


def test_what_a_server_says_is_read_as_it_was_said() -> None:
    server = DiLoCoServer(Ledger().state_dict(), 1, port=0, sync_every=2, codec="fp32", insecure=True)
    server.service.start()
    model = Ledger()
    with memory_worker(server, "w", model, optimizer := torch.optim.SGD(model.parameters(), lr=1.0)):
        count(model, optimizer, 0, 2)
        typed, plain = server.typed_status(), server.status()
        there = read_status(msgspec.json.decode(msgspec.json.encode(plain)))
        assert isinstance(there, ServerStatus)
        assert (there.run_id, there.sync_round, there.workers["w"].contributions) == (server.run_id, 1, 1)
        assert [fragment.version for fragment in there.fragments] == [1]
        assert there.participants.keys() == {"w"}
        assert there.plan == typed.plan
        assert isinstance(plain["workers"], dict)
        assert plain.keys() == msgspec.to_builtins(typed).keys()
    server.service.stop()
    assert DiLoCoServer(tiny_model().state_dict(), 1, port=0).typed_status().plan is None


def test_what_a_peer_says_has_the_same_words() -> None:
    member = PeerMemberStatus(peer_id="anna", step=3, is_self=True)
    said = PeerStatus(mode="gossip", peer_id="anna", begun=True, members=[member])
    plain = msgspec.to_builtins(said)
    assert plain["members"][0]["self"] is True
    assert read_status(plain) == said
    assert said.participants == {"anna": member}
    shared = set(Status.__struct_fields__)
    assert shared <= set(ServerStatus.__struct_fields__) & set(PeerStatus.__struct_fields__)
    assert set(WorkerStatus.__struct_fields__) & set(PeerMemberStatus.__struct_fields__) == {
        *("step", "steps_per_second", "loss", "last_seen_s"),
    }


def test_another_versions_status_is_refused_by_name() -> None:
    with pytest.raises(ProtocolMismatch, match=r"\$\.sync_round"):
        read_status({"mode": "sync", "sync_round": "seven"})
