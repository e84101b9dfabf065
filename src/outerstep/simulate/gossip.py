"""Peers without a server in virtual time: the real state machine of each, simulated links, disks, training and lies.

A contribution is a digest, an anchor the hash of the one before it and of what a round was made of: so two honest peers
that hold the same version hold the same bits, or it shows. Checked throughout:

    one block per height, and one anchor per version, at all honest peers
    no honest peer is ever proven to lie, and none is expelled, or blamed for what a liar said
    none stops, whatever it is told
    when the storm is over, rounds go on, and all honest peers belong to the run and hold its newest anchors

`python -m outerstep.simulate --gossip SEED` replays one.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b, sha256
from typing import Any

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from ..coordination.gossip import GossipPeer, GossipRules, Keepsake
from ..coordination.gossip import chain as chains
from ..coordination.gossip.ballot import TurnTimeouts
from ..coordination.gossip.heard import digests_of
from ..coordination.gossip.names import vouched
from ..statements import ChainState, Converse, Decision, Member, Ownership, Round, digest_of_block
from .agenda import Agenda
from .gossip_nonsense import callable_place
from .gossip_scenario import GossipFault, GossipScenario
from .history import Told
from .network import Network

RUN = "simulated"
BEAT_S = 4.0
TALK_S = 0.05  # news are collected for so long before they are told
SIZE_BYTES = 1000
PATIENCE_S = 900.0  # until everything is well again after the storm
NOTHING = "0" * 32


class Registry:
    """Who can have signed what."""

    def __init__(self) -> None:
        self._signers: dict[str, Callable[[bytes], bytes]] = {}

    def enter(self, name: str) -> tuple[str, Callable[[bytes], bytes]]:
        """A public key, and how its owner signs. As good as the real thing to code outside of this module."""
        secret = sha256(f"secret of {name}".encode()).digest()
        key = sha256(secret).hexdigest()
        self._signers[key] = sign = lambda body: blake2b(body, key=secret, digest_size=64).digest()
        return key, sign

    def verify(self, key: str, body: bytes, signature: bytes) -> bool:
        signer = self._signers.get(key)
        return signer is not None and signer(body) == signature


@dataclass
class GossipHistory(Told):
    """Of peers: one block per height, one anchor per version."""

    round_count: int = 0
    changes: int = 0
    expelled: int = 0
    _blocks: dict[int, str] = field(default_factory=dict)
    _anchors: dict[tuple[int, int], str] = field(default_factory=dict)

    def decided(self, who: str, decision: Decision) -> None:
        block = decision.block
        digest = digest_of_block(block)
        if block.height not in self._blocks:
            self.round_count += isinstance(block, Round)
            self.changes += not isinstance(block, Round)
            what = (
                f"round {block.fragment}/{block.version}"
                if isinstance(block, Round)
                else "members " + ", ".join(member.peer_id for member in block.members)
            )
            self.say(f"block {block.height} is decided: {what} (first at {who})")
        if self._blocks.setdefault(block.height, digest) != digest:
            self.violated(f"{who} has another block {block.height} than the others")

    def holds(self, who: str, fragment: int, version: int, anchor: str) -> None:
        self.say(f"{who} holds fragment {fragment} version {version}")
        if self._anchors.setdefault((fragment, version), anchor) != anchor:
            self.violated(f"{who} holds other bits of fragment {fragment} version {version} than the others")


class SimPeer:
    """A process, its disk and its training."""

    def __init__(self, world: GossipWorld, number: int) -> None:
        self.world = world
        self.name = f"p{number}"
        self.round_s = world.scenario.round_s[number]
        self.alive = False
        self.machine: GossipPeer
        self.keepsake: Keepsake | None = None  # on its disk
        self.identities = 0
        self._heights: dict[str, int] = {}
        self._held: set[str] = set()
        self._anchors: dict[int, tuple[int, str]] = {}
        self._lost: set[int] = set()  # fragments that have to be fetched whole
        self._life = 0
        self._talk_is_due = False
        self._asking: set[str] = set()
        self._answers: dict[int, dict[str, tuple[int, str]]] = {}

    # --- life ---------------------------------------------------------------------------------------------------------

    def start(self, *, disk_is_lost: bool = False) -> None:
        world = self.world
        if disk_is_lost:
            self.keepsake = None
        if self.keepsake is None:
            self.identities += 1
        key, sign = world.registry.enter(f"{self.name}/{self.identities}")
        member = Member(peer_id=self.name, key=key)
        owner, vouch = world.registry.enter(f"{self.name}/owner")
        ownership = Ownership(key=owner, signature=vouch(vouched(RUN, self.name, key)))
        kept = self.keepsake
        if kept is None:
            state = world.known_state() or chains.found(
                member,
                world.scenario.fragments,
                owner=owner,
                protocol=world.rules.protocol,
                data=world.found_data(member),
            )
            kept = Keepsake(run_id=RUN, state=state)
        else:
            kept = replace(kept, incarnation=kept.incarnation + 1)
        self.alive = True
        self._life += 1
        self._held, self._asking, self._answers = set(), set(), {}
        sizes = (SIZE_BYTES,) * world.scenario.fragments
        self.machine = GossipPeer(
            *(RUN, member, sign, world.registry.verify, world.rules, kept, sizes, world.agenda.now),
            can_call=callable_place,
            owner=ownership,
        )
        self._anchors = {}
        if kept.state.height == 0 and kept.state.members == (member,):
            self._anchors = dict.fromkeys(range(world.scenario.fragments), (0, NOTHING))
        self._lost = {f for f in range(world.scenario.fragments) if f not in self._anchors}
        for fragment, (version, anchor) in self._anchors.items():
            self.machine.hold_anchor(fragment, version, anchor)
        self._mine(self._beat)()
        self.world.agenda.after(self.world.rng.uniform(0.0, self.round_s), self._mine(self._train))

    def crash(self) -> None:
        self.alive = False
        self._life += 1

    def _mine(self, action: Callable[[], None]) -> Callable[[], None]:
        """Not if this process has died meanwhile."""
        life = self._life

        def act() -> None:
            if self.alive and life == self._life:
                action()

        return act

    # --- what a process does ------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        self.machine.tick(self.world.agenda.now)
        self._after_anything()
        self._talk()
        self.world.agenda.after(BEAT_S, self._mine(self._beat))

    def _train(self) -> None:
        """Every so often there is something to contribute to the fragment whose turn it is."""
        machine, now = self.machine, self.world.agenda.now
        for fragment in sorted(self._anchors, key=lambda f: (self._anchors[f][0], f)):
            version, anchor = self._anchors[fragment]
            due = machine.is_member and version == machine.state.versions[fragment]
            if due and fragment not in machine.rounds_offered():
                digest = sha256(f"{self.name} {self.identities} {self._life} {fragment} {version}".encode()).hexdigest()
                self._held.add(digest)
                machine.offer(fragment, digest, anchor, now, steps=10, **self._leased(fragment))
                break
        self._after_anything()
        self.world.agenda.after(self.round_s, self._mine(self._train))

    def _leased(self, fragment: int) -> dict[str, Any]:
        """What it says of leased data (gossip_data.py)."""
        return {}

    def _took(self, decision: Decision) -> None:
        """One more block."""

    def _after_anything(self) -> None:
        """Write down, take what was decided, ask for what is missing, tell the others."""
        machine = self.machine
        self.keepsake = machine.keepsake
        while (decision := machine.take()) is not None:
            self.world.history.decided(self.name, decision)
            self._took(decision)
        self._move_anchors()
        if not self._lost and machine.wants == "watch":
            machine.belong(self.world.agenda.now)
            self.keepsake = machine.keepsake
        self._fetch()
        if machine.stirred and not self._talk_is_due:
            machine.stirred = False
            self._talk_is_due = True
            self.world.agenda.after(TALK_S, self._mine(self._talk))

    def _move_anchors(self) -> None:
        for block in self.machine.recent_rounds():
            version, anchor = self._anchors.get(block.fragment, (-1, ""))
            if block.version <= version or block.fragment in self._lost:
                continue
            if block.version != version + 1 or block.base_hash != anchor:
                self._lost.add(block.fragment)
            elif self._held.issuperset(digests_of(block)):
                made = sha256((anchor + "".join(digests_of(block))).encode()).hexdigest()[:32]
                self._hold(block.fragment, block.version, made)
            else:
                break  # its bytes are on their way, and what comes after it builds on it
        for fragment, version in enumerate(self.machine.state.versions):
            held = self._anchors.get(fragment, (-1, ""))[0]
            if version - held > len(self.machine.recent_rounds()):
                self._lost.add(fragment)

    def _hold(self, fragment: int, version: int, anchor: str) -> None:
        self._anchors[fragment] = (version, anchor)
        self._lost.discard(fragment)
        self.machine.hold_anchor(fragment, version, anchor)
        self.world.history.holds(self.name, fragment, version, anchor)

    # --- conversations ------------------------------------------------------------------------------------------------

    def _talk(self) -> None:
        self._talk_is_due = False
        for other in self._others:
            said = self.says(self.machine.say_to(self._heights.get(other.name, self.machine.state.height)), other)
            self.world.send(self, other, partial(other.told, self, said))
            for fragment in self._lost:
                self.world.send(self, other, partial(other.asked_for_whole, self, fragment))

    @property
    def _others(self) -> list[SimPeer]:
        return [peer for peer in self.world.peers if peer is not self]

    def says(self, said: Converse, other: SimPeer) -> Converse:
        return said

    def told(self, sender: SimPeer, said: Converse) -> None:
        self._heights[sender.name] = said.height
        self.machine.hear(said, self.world.agenda.now)
        self._after_anything()
        answer = self.says(self.machine.say_to(said.height), sender)
        self.world.send(self, sender, lambda: sender.answered(self, answer))

    def answered(self, sender: SimPeer, said: Converse) -> None:
        self._heights[sender.name] = said.height
        self.machine.hear(said, self.world.agenda.now)
        self._after_anything()

    # --- bytes --------------------------------------------------------------------------------------------------------

    def _fetch(self) -> None:
        for digest in self.machine.wanted():
            if digest in self._held:  # of a member that was away: here already
                self.machine.hold(digest, self.world.agenda.now, good=True)
            elif digest not in self._asking:
                self._asking.add(digest)
                for other in self._others:
                    self.world.send(self, other, partial(other.asked_for, self, digest))
                self.world.agenda.after(1.0, self._mine(partial(self._asking.discard, digest)))

    def asked_for(self, asker: SimPeer, digest: str) -> None:
        if digest in self._held:
            self.world.send(self, asker, lambda: asker.given(digest, good=True))

    def given(self, digest: str, *, good: bool) -> None:
        if digest not in self._held and digest in self.machine.wanted():
            self._held.add(digest)
            self.machine.hold(digest, self.world.agenda.now, good=good)
            self._after_anything()

    def asked_for_whole(self, asker: SimPeer, fragment: int) -> None:
        if fragment in self._anchors and fragment not in self._lost:
            version, anchor = self._anchors[fragment]
            self.world.send(self, asker, lambda: asker.given_whole(self, fragment, version, anchor))

    def given_whole(self, giver: SimPeer, fragment: int, version: int, anchor: str) -> None:
        """The newest that more than f say the same of, if there are so many others."""
        if fragment not in self._lost:
            return
        heard = self._answers.setdefault(fragment, {})
        heard[giver.name] = (version, anchor)
        others = sum(member.peer_id != self.name for member in self.machine.state.members)
        needed = min(self.world.rules.attackers + 1, others)
        believed = [said for said, count in Counter(heard.values()).items() if count >= needed]
        if believed and max(believed)[0] >= self.machine.state.versions[fragment] - 1:
            self._answers.pop(fragment)
            self._hold(fragment, *max(believed))
            self._after_anything()


class GossipWorld:
    peer_type: type[SimPeer] = SimPeer

    def __init__(self, scenario: GossipScenario, seed: int, log: list[str] | None = None) -> None:
        from .gossip_liars import Liar

        self.scenario = scenario
        self.rng = random.Random(f"gossip world {seed}")
        self.rng_of_nonsense = random.Random(f"nonsense {seed}")
        self.agenda = Agenda()
        self.network = Network(self.agenda, self.rng)
        self.network.conditions.loss, self.network.conditions.repeat = scenario.loss, scenario.repeat
        self.registry = Registry()
        self._lost_keys: set[str] = set()
        self.rules = GossipRules(
            min_peers=scenario.min_peers,
            attackers=scenario.attackers,
            heartbeat_timeout_s=15.0,
            round_deadline_s=scenario.round_deadline_s,
            protocol=scenario.protocol,
            pace=TurnTimeouts(first_s=2.0, more_s=1.0, most_s=20.0),
        )
        self.history = GossipHistory(log=log, clock=lambda: self.agenda.now)
        self.peers: list[SimPeer] = [
            (Liar if number == scenario.liar else self.peer_type)(self, number) for number in range(scenario.peers)
        ]

    @property
    def honest(self) -> list[SimPeer]:
        return [peer for number, peer in enumerate(self.peers) if number != self.scenario.liar]

    def found_data(self, founder: Member) -> bytes | UnsetType:
        """The lease table that the run begins with (gossip_data.py)."""
        return UNSET

    def known_state(self) -> ChainState | None:
        """What a newcomer is told by the peer that it joins through."""
        running = [peer for peer in self.honest if peer.alive and hasattr(peer, "machine")]
        members = [peer for peer in running if peer.machine.is_member]
        return self.rng.choice(members).machine.state if members else None

    def send(self, source: SimPeer, target: SimPeer, deliver: Callable[[], None]) -> None:
        def arrive(damaged: bool) -> None:
            if target.alive and not damaged:
                deliver()

        self.network.send(source.name, target.name, arrive)

    # --- faults -------------------------------------------------------------------------------------------------------

    def inject(self, fault: GossipFault) -> None:
        peer = self.peers[fault.peer]
        self.history.faults[fault.kind] += 1
        self.history.say(f"{fault.kind} {peer.name} for {fault.lasts_s:.1f} s")
        if fault.kind in ("crash", "disk_lost"):
            self._crash(peer, fault)
        elif fault.kind == "cut":
            self._cut({(peer.name, o.name) for o in self.peers} | {(o.name, peer.name) for o in self.peers}, fault)
        elif fault.kind == "one_way":
            self._cut({(peer.name, o.name) for o in self.peers if self.rng.random() < 0.6}, fault)
        elif fault.kind == "partition":
            side = {p.name for p in self.peers if self.rng.random() < 0.5}
            names = [p.name for p in self.peers]
            self._cut({(a, b) for a in names for b in names if (a in side) != (b in side)}, fault)
        elif fault.kind == "bad_weather":
            before, self.network.conditions.loss = self.network.conditions.loss, 0.6
            self.agenda.after(fault.lasts_s, lambda: setattr(self.network.conditions, "loss", before))

    def _crash(self, peer: SimPeer, fault: GossipFault) -> None:
        """Of a decided round a quorum has the bytes: so many at once, and the run would be lost."""
        down = sum(not p.alive or bool(p._lost) for p in self.peers)
        spare = 1 if self.scenario.liar is not None else 0
        lost = fault.kind == "disk_lost"
        too_many = down + 1 + spare >= chains.quorum_of(self.scenario.peers, self.rules.attackers)
        if not peer.alive or too_many or (lost and not self._can_spare(peer)):
            self.history.faults[fault.kind] -= 1
            return
        peer.crash()
        if lost:
            self._lost_keys.add(peer.machine.member.key)
        self.agenda.after(fault.lasts_s, lambda: peer.start(disk_is_lost=lost) if not peer.alive else None)

    def _can_spare(self, peer: SimPeer) -> bool:
        """Can the others still agree without its vote, which nobody can cast any more when its disk is lost?"""
        for state in [p.machine.state for p in self.honest if p.identities]:
            keys = {p.machine.member.key for p in self.honest if p.identities and p is not peer}
            voters = sum(member.key in keys - self._lost_keys for member in state.members)
            if voters < chains.quorum_of(len(state.members), self.rules.attackers):
                return False
        return True

    def _cut(self, links: set[tuple[str, str]], fault: GossipFault) -> None:
        self.network.cut |= links
        self.agenda.after(fault.lasts_s, lambda: self.network.cut.difference_update(links))

    def check(self) -> None:
        """What else must be true at the end."""

    # --- the whole of it ----------------------------------------------------------------------------------------------

    def is_well(self, floor: list[int]) -> bool:
        """Do all honest peers belong to the run, with newer anchors than these, and the same?"""
        for peer in self.honest:
            if not peer.alive or not peer.machine.is_member or peer._lost:
                return False
            held = [peer._anchors.get(f, (-1, ""))[0] for f in range(self.scenario.fragments)]
            if any(version < least for version, least in zip(held, floor, strict=True)):
                return False
        return True


def run_gossip(
    scenario: GossipScenario,
    seed: int,
    *,
    log: list[str] | None = None,
    world_type: type[GossipWorld] = GossipWorld,
) -> GossipHistory:
    world = world_type(scenario, seed, log)
    try:
        _run(world)
    except Exception as error:  # noqa: BLE001 - whatever it is: a process would have ended there
        world.history.violated(f"a peer stopped: {type(error).__name__}: {error}")
    return world.history


def _run(world: GossipWorld) -> None:
    scenario, history, agenda = world.scenario, world.history, world.agenda
    for number, peer in enumerate(world.peers):
        agenda.at(scenario.starts_s[number], peer.start)
    for fault in scenario.faults:
        agenda.at(fault.at_s, partial(world.inject, fault))
    agenda.run_until(lambda: False, limit_s=scenario.calm_after_s)
    world.network.conditions.loss = world.network.conditions.repeat = 0.0
    world.network.cut.clear()
    for peer in world.honest:
        if not peer.alive:
            peer.start()
    versions = [max(p.machine.state.versions[f] for p in world.honest) for f in range(scenario.fragments)]
    well = agenda.run_until(
        lambda: world.is_well([v + 2 for v in versions]), limit_s=scenario.calm_after_s + PATIENCE_S
    )
    if not well:
        history.violated("rounds did not go on after the storm: " + _states(world))
    _check_justice(world)
    world.check()
    history.virtual_s = agenda.now


def _states(world: GossipWorld) -> str:
    return "; ".join(
        f"{p.name} height {p.machine.state.height} member {p.machine.is_member} holds "
        f"{[p._anchors.get(f, (-1, ''))[0] for f in range(world.scenario.fragments)]} waits for "
        f"{p.machine.waiting_for(0, world.agenda.now)!r}"
        for p in world.honest
        if p.alive
    )


def _check_justice(world: GossipWorld) -> None:
    honest = {peer.name for peer in world.honest}
    for peer in world.honest:
        machine = peer.machine
        framed = [m.peer_id for m in machine.state.expelled if m.peer_id in honest]
        names = {m.key: m.peer_id for m in machine.state.members}
        framed += [names[key] for key in machine.book.proofs if names.get(key) in honest]
        if framed:
            world.history.violated(f"{peer.name} believes that {framed[0]} lies, which is honest")
        blamed = [who for who in machine.refusals.counts if who in honest]
        if blamed:
            world.history.violated(f"{peer.name} blames {blamed[0]} for nonsense, which is honest")
        world.history.expelled = max(world.history.expelled, len(machine.state.expelled))
