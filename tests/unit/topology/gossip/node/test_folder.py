"""A peer's folder: the same peer after a restart, bound by what it said before."""

from __future__ import annotations

from pathlib import Path

import pytest

from outerstep.coordination.gossip import Keepsake
from outerstep.coordination.gossip.ballot import Ballots
from outerstep.coordination.gossip.chain import found
from outerstep.errors import ConfigError
from outerstep.statements import ChainState, Member, Signed
from outerstep.topology.gossip.node.records import PeerFolder, PeerRunFacts

FACTS = PeerRunFacts(run_id="run", peer_id="a", token="run-secret")


def state_at(height: int) -> ChainState:
    member = Member(peer_id="a", key="a" * 64)
    return ChainState(height=height, tip="0" * 64, members=(member,), versions=found(member, 2).versions)


def signed(body: bytes) -> Signed:
    return Signed(author="a" * 64, body=body, signature=bytes(64))


def test_what_was_kept_is_there_after_a_restart(tmp_path: Path) -> None:
    folder = PeerFolder(tmp_path / "a")
    key = folder.key.public
    assert folder.facts is None
    keepsake = folder.take_up(FACTS, b"document", state_at(3), (signed(b"beat"),))
    assert keepsake == Keepsake(run_id="run", state=state_at(3), incarnation=1)
    said = Keepsake(run_id="run", state=state_at(4), ballots=Ballots(own=(signed(b"vote"),)), sequences=(5, 6))
    folder.keep(said)
    folder.close()

    again = PeerFolder(tmp_path / "a")
    assert again.key.public == key
    assert again.facts == FACTS
    assert again.document == b"document"
    assert again.beats == (signed(b"beat"),)
    taken = again.take_up(FACTS, b"document", state_at(4), ())
    assert taken == Keepsake(
        run_id="run", state=state_at(4), incarnation=2, ballots=Ballots(own=(signed(b"vote"),)), sequences=(5, 6)
    )
    assert again.beats == (signed(b"beat"),)
    again.close()


def test_words_about_a_block_that_is_decided_bind_no_more_but_sequences_do(tmp_path: Path) -> None:
    folder = PeerFolder(tmp_path)
    folder.take_up(FACTS, b"", state_at(4), ())
    folder.keep(Keepsake(run_id="run", state=state_at(4), ballots=Ballots(own=(signed(b"vote"),)), sequences=(5, 6)))
    taken = folder.take_up(FACTS, b"", state_at(9), ())
    assert taken.state.height == 9
    assert taken.ballots == Ballots()
    assert taken.sequences == (5, 6)
    assert folder.take_up(FACTS, b"", state_at(2), ()).state.height == 9


def test_another_run_is_refused(tmp_path: Path) -> None:
    folder = PeerFolder(tmp_path)
    folder.take_up(FACTS, b"", state_at(0), ())
    other = PeerRunFacts(run_id="other", peer_id="a")
    with pytest.raises(ConfigError, match="holds run run, this is run other"):
        folder.take_up(other, b"", state_at(0), ())


def test_the_token_is_the_owners_alone(tmp_path: Path) -> None:
    PeerFolder(tmp_path / "a").take_up(FACTS, b"", state_at(0), ())
    assert (tmp_path / "a" / "run.json").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o700


def test_two_peers_cannot_have_one_folder(tmp_path: Path) -> None:
    first = PeerFolder(tmp_path)
    with pytest.raises(ConfigError, match="belongs to a peer that is running"):
        PeerFolder(tmp_path)
    first.close()
    PeerFolder(tmp_path).close()


@pytest.mark.parametrize("name", ["keepsake", "run.json"])
def test_a_file_that_cannot_be_read_is_named_and_an_old_copy_warned_of(tmp_path: Path, name: str) -> None:
    folder = PeerFolder(tmp_path)
    folder.take_up(FACTS, b"", state_at(0), ())
    folder.close()
    (tmp_path / name).write_bytes(b"\xff\xff")
    with pytest.raises(ConfigError, match=rf"{name} cannot be read.*never with an older copy"):
        PeerFolder(tmp_path)


def test_a_folder_of_another_format_is_refused(tmp_path: Path) -> None:
    folder = PeerFolder(tmp_path)
    folder.take_up(PeerRunFacts(run_id="run", peer_id="a", version=2), b"", state_at(0), ())
    folder.close()
    with pytest.raises(ConfigError, match="must have format 'outerstep peer' 1"):
        PeerFolder(tmp_path)


def test_a_place_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        PeerFolder(tmp_path / "file" / "below")
