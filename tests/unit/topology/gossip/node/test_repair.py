"""A folder with something in it that cannot be carried out: what is taken out, what stays, and what is only said."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from outerstep.coordination.gossip import GossipPeer, GossipRules, Keepsake
from outerstep.coordination.gossip.ballot import Ballots, Bound
from outerstep.coordination.gossip.chain import GENESIS
from outerstep.errors import ConfigError
from outerstep.security.signing import make_key, verify
from outerstep.security.tokens import new_token
from outerstep.statements import Beat, ChainState, Change, Member, Signed, body_of
from outerstep.topology.gossip.node.records import PeerFolder, PeerRunFacts
from outerstep.topology.gossip.node.repair import repair
from typed import typed

RUN, TOKEN = "a-run", new_token("run")
GUEST = make_key()


def beat_of(name: str, **facts: object) -> bytes:
    usual = {"incarnation": 1, "number": 1, "address": "127.0.0.1:9", "fingerprint": "0" * 64}
    return body_of(Beat(run_id=RUN, peer_id=name, **{**usual, **facts}))  # type: ignore[arg-type]


def signed(body: bytes) -> Signed:
    return Signed(author=GUEST.public, body=body, signature=GUEST.sign(body))


def fill(
    place: Path,
    *beats: Signed,
    ballots: Ballots = Ballots(),  # noqa: B008 - frozen
    fragments: int = 1,
) -> Keepsake:
    """The folder of peer `a`, in a run with a guest."""
    folder = PeerFolder(place)
    members = (Member(peer_id="a", key=folder.key.public), Member(peer_id="guest", key=GUEST.public))
    state = ChainState(height=7, tip=GENESIS, members=members, versions=(3,) * fragments)
    folder.take_up(PeerRunFacts(run_id=RUN, peer_id="a", token=TOKEN), b"", state, beats)
    kept = Keepsake(run_id=RUN, state=state, incarnation=4, ballots=ballots, sequences=(12,))
    folder.keep(kept)
    folder.close()
    return kept


def test_a_beat_that_names_no_place_is_left_out(tmp_path: Path) -> None:
    kept = fill(tmp_path, signed(beat_of("guest", fingerprint="z" * 64)))
    told = repair(tmp_path)
    assert "a beat of guest is left out: it names a place that cannot be called" in told.mended[0]
    assert "where guest can be called is not known here" in told.noted[0]
    assert "2 of 2 members must be there" in told.noted[0]
    again = PeerFolder(tmp_path)
    assert (again.keepsake, again.beats) == (kept, ())
    again.close()
    assert repair(tmp_path).mended == ()


@pytest.mark.parametrize("fragments", [1, 300])
def test_what_can_be_used_stays(tmp_path: Path, fragments: int) -> None:
    good = signed(beat_of("guest", held=((3, "0" * 32),) * fragments))
    kept = fill(tmp_path, good, fragments=fragments)
    told = repair(tmp_path)
    assert (told.mended, told.noted) == ((), ())
    folder = PeerFolder(tmp_path)
    assert (folder.keepsake, folder.beats) == (kept, (good,))
    folder.close()


def test_looking_changes_nothing(tmp_path: Path) -> None:
    fill(tmp_path, signed(beat_of("guest", address="a\0b:1")))
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert repair(tmp_path, dry_run=True).mended
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def spoil_ballots(place: Path) -> None:
    """As only a disk does it."""
    file = place / "keepsake"
    facts = msgspec.msgpack.decode(file.read_bytes())
    file.write_bytes(msgspec.msgpack.encode({**facts, "ballots": {"own": 5}}))


def test_a_peer_that_has_forgotten_its_votes_does_not_vote_on_that_block(tmp_path: Path) -> None:
    kept = fill(tmp_path)
    spoil_ballots(tmp_path)
    with pytest.raises(ConfigError, match=r"keepsake cannot be read: .*; try `outerstep repair "):
        PeerFolder(tmp_path)
    assert "what it said about block 8 is dropped" in repair(tmp_path).mended[0]
    folder = PeerFolder(tmp_path)
    assert folder.keepsake == replace(kept, abstains_at=8)
    key = folder.key
    folder.close()

    alone = replace(kept.state, members=kept.state.members[:1])
    member = alone.members[0]
    rules = GossipRules(min_peers=1)

    def peer_at(state: ChainState) -> GossipPeer:
        keepsake = replace(kept, state=state, abstains_at=8)
        peer = GossipPeer(RUN, member, key.sign, verify, rules, keepsake, [100], 0.0)
        peer.belong(0.0)
        peer.hold_anchor(0, 3, "0" * 32)
        peer.offer(0, "1" * 64, "0" * 32, 0.0, steps=1)
        peer.tick(100.0)
        return peer

    silent = peer_at(alone)
    assert silent.state.versions == (3,)
    assert silent.keepsake.ballots == Ballots()
    assert silent.keepsake.abstains_at == 8
    later = peer_at(replace(alone, height=8))
    assert later.state.versions == (4,)
    assert later.keepsake.abstains_at is msgspec.UNSET


def test_a_lock_on_a_block_that_cannot_be_carried_out_is_dropped(tmp_path: Path) -> None:
    fill(tmp_path)
    folder = PeerFolder(tmp_path)
    kept = folder.keepsake
    assert kept is not None
    backwards = Change(height=8, parent=GENESIS, members=tuple(reversed(kept.state.members)))
    folder.keep(replace(kept, ballots=Ballots(locked=Bound(turn=0, block=backwards))))
    folder.close()
    assert repair(tmp_path).mended == ("what it said about block 8 is dropped: it names members twice, or in no order",)
    assert not repair(tmp_path).mended


def test_spoiled_beats_are_no_reason_not_to_begin(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fill(tmp_path, signed(beat_of("guest")))
    (tmp_path / "beats").write_bytes(b"\x91\x83\xa6author\xa2\xff\xfe")
    folder = PeerFolder(tmp_path)
    assert folder.beats == ()
    assert "beats is left aside" in caplog.text
    folder.close()


def test_what_makes_the_peer_who_it_is_cannot_be_repaired(tmp_path: Path) -> None:
    fill(tmp_path)
    (tmp_path / "keepsake").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="give this peer an empty folder"):
        repair(tmp_path)
    with pytest.raises(ConfigError, match=r"is not a peer's folder: there is no run.json"):
        repair(tmp_path / "nowhere")


def test_the_command_says_what_it_found_and_did(tmp_path: Path) -> None:
    fill(tmp_path, signed(beat_of("guest", address="\x1b[31m:9")))
    looked = typed(["repair", str(tmp_path), "--dry-run"]).output
    assert "peer a of run a-run, after block 7; members: a, guest" in looked
    assert "would be mended: a beat of guest is left out" in looked
    done = typed(["repair", str(tmp_path)]).output
    assert "\nmended: a beat of guest is left out" in done
    assert "\x1b[31m" not in done
    assert "there is nothing to repair" in typed(["repair", str(tmp_path)]).output
