"""A group of processes whose ranks hold different rows of the parameters (FSDP2) is one worker.

Nothing gathers the whole model. Every rank has its own way to the server and speaks for the same worker:

    contribute   each rank sends its rows as one section of the contribution (wire/frames.py), all under one key;
                 rank 0 commits when the server misses nothing. The server is where they meet.
    agree        rank 0 hears of the agreement and tells the others.
    fetch        each rank fetches the parts that cover its rows, of the whole anchor or of the updates that lead to it.
                 If the server holds them no longer, all try the newest: either every rank takes a version over, or none
                 does. Taking it over, each compares the hash of its rows with the one that the agreement names for its
                 section.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import torch
from torch import Tensor

from ...coordination.worker.exchange import Piece, Share
from ...coordination.worker.units import LeaseRequest
from ...core.codecs import FP32, Codec
from ...core.watch import as_seen_by
from ...digest import Parts
from ...errors import ExchangeFailed, ModelError, Superseded
from ...tiling import Place
from ...types import Agreement, Join, JoinAnswer, LeaseAnswer, Manifest, Offer, Plan, Wishes
from ...wire.frames import Entry, Layout, rows_of, section_layout
from ..encode import Excerpt
from ..forms import Form
from ..payload import OutgoingFrame
from ..protocol import Agreed, Contribution, Joined, Orders, Sight
from ..server.exchange import ServerTicket
from ..server.saved import is_without_bytes, unpack_offer
from ..server.topology import ServerTopology
from ..update import AnchorUpdate, Cutter, Extent, UpdateChain, WholeAnchor, covering, leads_on
from .ranks import Ranks
from .topology import AgreedFacts, Amount, GroupTopology, check_same_model, look_together, of_all

VERSIONS_TRIED = 8  # a group that is overtaken so often is too slow to ever catch up


@dataclass(frozen=True)
class Shards:
    """What this rank holds: section `section` of `sections` of the tensors in `names`, and all of every other one. Not
    `by_rows`: it is cut in another way, into so many. `places`: the same as boxes, of all tensors."""

    sections: int
    section: int
    names: frozenset[str]
    by_rows: bool = True
    places: Mapping[str, Place] = field(default_factory=dict)


class Entered(msgspec.Struct, frozen=True):
    """How rank 0 joined."""

    join: Join
    answer: JoinAnswer


class SettledExchange(msgspec.Struct, frozen=True):
    """What the exchange came to, as rank 0 knows it."""

    agreement: Agreement
    counted: bool
    too_old: bool
    plan: Plan
    counted_in: int = 0
    steps_lost: int = 0


class SectionHeld(msgspec.Struct, frozen=True):
    sections: int
    section: int


class ShardedTicket:
    """An exchange of the group; `own` is this rank's part in it. `claims`: it is about a contribution that an earlier
    start of the group made."""

    def __init__(
        self,
        group: ShardedTopology,
        fragment: int,
        own: ServerTicket | None,
        *,
        claims: bool = False,
        sequence: int = 0,
    ) -> None:
        """`sequence`: of that contribution, if the state knows it (0 = it does not)."""
        self.fragment = fragment
        self.sequence = sequence
        self.own = own
        self.claims = claims
        self.failed = False
        self._group = group

    def look(self, timeout_s: float) -> Sight:
        sight = look_together(self._group.ranks, self.own, timeout_s)
        self.failed = sight.failed
        return sight

    def finish(self, *, reload: bool = False) -> Agreed:
        """Ranks that hold different rows do not reload: a contribution without use is an error on all of them."""
        return self._group.settle(self)

    def confirm(self, agreed: Agreed, intact: bool) -> Agreed | None:
        return self._group.adopted(agreed, intact)

    def resume(self, *, stuck_after_s: float | None = None) -> ShardedTicket:
        again = self.own.resume(stuck_after_s=stuck_after_s) if self.own is not None else None
        return ShardedTicket(self._group, self.fragment, again, claims=self.claims, sequence=self.sequence)

    def pack(self) -> dict[str, Any]:
        """What this rank sends of it; a rank that sends nothing remembers nothing."""
        if self.own is None and self.sequence:
            return {"sequence": self.sequence}
        return self.own.pack() if self.own is not None else {}

    def cancel(self) -> None:
        if self.own is not None:
            self.own.cancel()


class ShardedTopology:
    """`inner`: this rank's own way to the server. All ranks have the same worker id, instance and host name."""

    def __init__(self, ranks: Ranks, inner: ServerTopology, shards: Shards) -> None:
        self.ranks = ranks
        self._inner = inner
        self._shards = shards
        self._speaker = GroupTopology(ranks, inner if ranks.rank == 0 else None)
        self._owners = _find_owners(ranks, shards)
        self._shapes: dict[str, tuple[int, ...]] = {}

    # --- membership -----------------------------------------------------------------------------------------------

    def join(self, manifest: Manifest | None, wishes: Wishes) -> Joined:
        assert manifest is not None
        check_same_model(self.ranks, manifest)
        self._shapes = {spec.name: spec.shape for spec in manifest.parameters}
        self._inner.keep_owed({name: self._sent_of(name) for name in self._shapes} if self._owns else {})
        entered = self.ranks.tell(lambda: self._enter(manifest, wishes), Entered)
        if self.ranks.rank != 0:
            self._inner.follow(entered.join, entered.answer)
        answer = entered.answer
        return Joined(entered.join.worker_id, answer.plan, answer.manifest, self._inner.overtaken)

    def _enter(self, manifest: Manifest, wishes: Wishes) -> Entered:
        self._inner.introduce(manifest, wishes, self._listening)
        session = self._inner.session
        return Entered(session.join_request, session.joined)

    def heartbeat(self, step: int, steps_per_second: float, loss: float | None) -> None:
        self._speaker.heartbeat(step, steps_per_second, loss)

    def orders(self, *, at_exchange: bool) -> Orders:
        return self._speaker.orders(at_exchange=at_exchange)

    def lease(self, request: LeaseRequest) -> LeaseAnswer:
        return self._speaker.lease(request)

    def leave(self, reason: str) -> None:
        self._speaker.leave(reason)
        if self.ranks.rank != 0:
            self._inner.close()

    def state_dict(self, under_way: Collection[int]) -> dict[str, Any]:
        """This rank's own."""
        return self._inner.state_dict(under_way)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._inner.load_state_dict(state)

    def reopen(self, fragment: int, packed: Mapping[str, Any], *, late: bool = False) -> ShardedTicket | None:
        if self.ranks.tell(lambda: is_without_bytes(packed), bool):
            return None if late else self._reclaim(fragment, packed["sequence"])
        made = self.ranks.check(lambda: self._unpack(fragment, packed) if self._takes_part else None)
        offer, payload = made or (None, None)
        ticket = self._carry(fragment, offer, payload, None, lambda payload: None)
        if late and ticket.own is not None:
            self._inner.put_off(ticket.own)
        return ticket

    def _reclaim(self, fragment: int, sequence: int) -> ShardedTicket | None:
        """Rank 0 asks for it; each settles what it owes."""
        speaks, inner = self.ranks.rank == 0, self._inner
        own = self.ranks.check(lambda: inner.reclaim(fragment, sequence, self._listening) if speaks else None)
        if self.ranks.tell(lambda: own is not None, bool):
            return ShardedTicket(self, fragment, own, claims=True, sequence=sequence)
        if not speaks:
            inner.give_up(fragment, sequence)
        return None

    def _unpack(self, fragment: int, packed: Mapping[str, Any]) -> tuple[Offer, OutgoingFrame]:
        offer = unpack_offer(packed, self._inner.session.head, fragment)
        form = self._inner.form_of(fragment, offer.codec)
        return offer, self._inner.unpack_payload(packed, self._up(form), self._ours(offer).start)

    def catch_up(self, fragment: int) -> ShardedTicket:
        """Rank 0 hears of it; each fetches its rows."""
        speaks = self.ranks.rank == 0
        own = self.ranks.check(lambda: self._inner.catch_up(fragment, self._listening) if speaks else None)
        return ShardedTicket(self, fragment, own, claims=fragment in self._inner.overtaken)

    # --- contributing ---------------------------------------------------------------------------------------------

    def begin(self, contribution: Contribution, *, stuck_after_s: float | None = None) -> ShardedTicket:
        """Everybody offers the same at once, and sends its rows while it encodes them."""
        fragment = contribution.fragment
        amounts = self.ranks.gather(lambda: Amount(contribution.samples, contribution.tokens), Amount)
        form = self._inner.forms[fragment]
        sizes = tuple(self._layout(form, section).size_bytes for section in range(self._shards.sections))
        offer = self._inner.make_offer(of_all(contribution, amounts), form, sizes)
        payload, up = None, self._up(form)
        if self._takes_part:
            payload = self._inner.new_payload(contribution.deltas, up, self._ours(offer).start)

        def encode(payload: OutgoingFrame) -> None:
            if up is not None:
                self._inner.encode(contribution, offer.sequence, payload, form, up, self._excerpts(form))
                payload.wait()

        return self._carry(fragment, offer, payload, stuck_after_s, encode)

    def _carry(
        self,
        fragment: int,
        offer: Offer | None,
        payload: OutgoingFrame | None,
        stuck_after_s: float | None,
        write: Callable[[OutgoingFrame], None],
    ) -> ShardedTicket:
        """This rank's part of it, if it has one, when `write` has written it; then all know all hashes."""
        if offer is None or payload is None:
            self.ranks.gather(tuple, tuple[str, ...])
            return ShardedTicket(self, fragment, None)
        share = self._share(self._ours(offer), speaks=self.ranks.rank == 0)
        own = self._inner.carry(offer, payload, stuck_after_s if share.speaks else None, share)
        try:
            told = self.ranks.gather(lambda: _hashes(payload, share.parts, write), tuple[str, ...])
        except BaseException:
            own.cancel()
            raise
        parts = self._parts(offer)
        for section, owner in enumerate(self._owners):
            for part, part_hash in zip(parts.of_section(section), told[owner], strict=True):
                payload.tell(part, part_hash)
        return ShardedTicket(self, fragment, own)

    def _parts(self, offer: Offer) -> Parts:
        return Parts(offer.section_bytes, self._inner.session.joined.plan.part_size_bytes)

    def _ours(self, offer: Offer) -> range:
        return self._parts(offer).of_section(self._shards.section) if self._owns else range(0)

    def _up(self, form: Form) -> Layout | None:
        return self._layout(form, self._shards.section) if self._owns else None

    def _layout(self, form: Form, section: int) -> Layout:
        """Of a section's frame. A tensor that every rank holds whole is sent in shares all the same."""
        tensors = [(e.name, e.shape, form.rules[e.name].codec.encoded_bytes) for e in form.up.entries]
        return section_layout(form.up.header.codec, tensors, self._shards.sections, section)

    def _excerpts(self, form: Form) -> dict[str, Excerpt]:
        found: dict[str, Excerpt] = {}
        for entry in form.up.entries:
            first = rows_of(entry.shape, self._shards.sections, self._shards.section).first_value
            found[entry.name] = Excerpt(whole=first, held=0 if entry.name in self._shards.names else first)
        return found

    # --- taking over ----------------------------------------------------------------------------------------------

    def settle(self, ticket: ShardedTicket) -> Agreed:
        """What the exchange came to, and our rows of it."""
        ours = self.ranks.check(lambda: self._outcome(ticket))
        settled = self.ranks.tell(lambda: _known(ours), SettledExchange)
        self._inner.follow_plan(settled.plan)
        agreed, own = self._take(settled), ticket.own
        if own is None:
            if ticket.claims and agreed.counted:
                self._inner.claimed(ticket.fragment, ticket.sequence)
            return agreed
        self._inner.conclude(own, agreed)
        return replace(agreed, bytes_sent=own.bytes_sent, retries=own.exchange.retries, rejoins=own.exchange.rejoins)

    def adopted(self, agreed: Agreed, intact: bool) -> Agreed | None:
        """What went wrong on one rank is mended on all."""
        if all(self.ranks.gather(lambda: intact, bool)):
            return self._inner.adopted(agreed, True)
        newest = self.ranks.tell(lambda: self._newest(agreed.fragment), Agreement)
        return self._take(SettledExchange(newest, counted=False, too_old=False, plan=agreed.plan))

    def _outcome(self, ticket: ShardedTicket) -> SettledExchange | None:
        """Rank 0 knows what it came to. The others have sent their parts, or are not needed any more; if one could
        not, that is what it came to."""
        own = ticket.own
        if own is None:
            return None
        if self.ranks.rank == 0 and not ticket.failed:
            own.join()
        if not own.over.is_set():
            own.cancel()
            return None
        outcome = own.outcome()
        plan = self._inner.session.joined.plan
        lost = self._inner.steps_lost(own)
        return SettledExchange(outcome.agreement, outcome.counted, outcome.too_old, plan, outcome.counted_in, lost)

    def _take(self, settled: SettledExchange) -> Agreed:
        """Fetch our rows of the agreement. If that does not lead on from the anchor that we hold (which is the same for
        all ranks), or if one of them came too late for it, all take the whole of the newest."""
        agreement = settled.agreement
        fits = leads_on(agreement, self._inner.told(agreement.fragment))
        for _ in range(VERSIONS_TRIED):
            fetched = self.ranks.check(lambda: self._fetch(agreement) if fits else None)  # noqa: B023 - at once
            if all(self.ranks.gather(lambda: fetched is not None, bool)):  # noqa: B023
                assert fetched is not None
                fetched = self._pass_on(agreement, fetched)
                assert fetched.update is not None
                return AgreedFacts(
                    agreement.fragment,
                    agreement.version,
                    settled.counted,
                    settled.too_old,
                    agreement.anchor_hash,
                    agreement.participants,
                    settled.plan,
                    bytes_received=fetched.bytes_received,
                    counted_in=settled.counted_in,
                    steps_lost=settled.steps_lost,
                    watched=as_seen_by(self._inner.session.join_request.worker_id, agreement),
                ).with_update(fetched.update)
            agreement = self.ranks.tell(lambda: self._newest(agreement.fragment), Agreement)  # noqa: B023
            fits = leads_on(agreement, None)
        raise ExchangeFailed(
            f"fragment {agreement.fragment}: {VERSIONS_TRIED} versions were replaced before all ranks had fetched "
            "theirs; exchange less often, or in more fragments"
        )

    def _pass_on(self, agreement: Agreement, fetched: Fetched) -> Fetched:
        """All have fetched theirs: here, all that they need."""
        return fetched

    def _newest(self, fragment: int) -> Agreement:
        ticket = self._inner.ask(fragment, self._listening)
        ticket.join()
        return ticket.outcome().agreement

    def _fetch(self, agreement: Agreement) -> Fetched | None:
        """Our rows of this version, or of what leads there; None if the server holds that no longer."""
        form, count = self._inner.forms[agreement.fragment], len(agreement.payloads)
        is_whole = any(payload.kind == "full" for payload in agreement.payloads)
        layout = form.full if is_whole else form.update
        codecs = dict.fromkeys(form.codecs, FP32) if is_whole else form.codecs
        if agreement.size_bytes != count * layout.size_bytes or len(agreement.range_hashes) != self._shards.sections:
            raise ExchangeFailed(
                f"the server announces {agreement.size_bytes} bytes and {len(agreement.range_hashes)} ranges for "
                f"fragment {agreement.fragment}; it has {count * layout.size_bytes} and {self._shards.sections}"
            )
        places = {entry.name: self._place(entry, layout, codecs[entry.name]) for entry in layout.entries}
        size = self._inner.session.joined.plan.part_size_bytes
        parts = sorted({part for begin, end in places.values() for part in range(begin // size, -(-end // size))})
        pieces = tuple(Piece(i, part) for i in range(count) for part in parts)
        got = self._get(agreement, pieces) if pieces else None
        if pieces and got is None:
            return None
        cutters = [cutter_of(got, i) for i in range(count)]
        frames = got.frames if got is not None else ()
        extents = {entry.name: self._extent(entry) for entry in layout.entries}
        proof = agreement.range_hashes[self._shards.section]
        if not is_whole:
            return Fetched(UpdateChain(cutters, layout, codecs, proof, extents, frames), got)
        values = {name: cutters[0](*place).view(torch.float32) for name, place in places.items()}
        shaped = {name: values[name].view(self._shape(name)) for name in values}
        return Fetched(WholeAnchor(shaped, proof, extents, frames), got)

    def _get(self, agreement: Agreement, pieces: tuple[Piece, ...]) -> ServerTicket | None:
        ticket = self._inner.fetch(agreement, pieces)
        ticket.join()
        try:
            ticket.outcome()
        except ExchangeFailed as failure:
            if isinstance(failure.__cause__, Superseded):
                return None
            raise
        return ticket

    def _place(self, entry: Entry, layout: Layout, codec: Codec) -> tuple[int, int]:
        """Where in a frame the codec's blocks are that cover what we hold of a tensor. Nowhere: (0, 0)."""
        extent, numel = self._extent(entry), math.prod(self._shape(entry.name))
        if numel == 0:
            return 0, 0
        first, last = covering(codec, extent.first, extent.first + numel, math.prod(entry.shape))
        offset = layout.data_begin + entry.begin
        return offset + codec.encoded_bytes(first), offset + codec.encoded_bytes(last)

    def _shape(self, name: str) -> tuple[int, ...]:
        """Of what we hold."""
        whole = self._shapes[name]
        is_cut = name in self._shards.names
        return rows_of(whole, self._shards.sections, self._shards.section).shape if is_cut else whole

    def _sent_of(self, name: str) -> range:
        """Which of the values that we hold."""
        rows = rows_of(self._shapes[name], self._shards.sections, self._shards.section)
        first = 0 if name in self._shards.names else rows.first_value
        return range(first, first + rows.numel)

    def _extent(self, entry: Entry) -> Extent:
        """The hash is over our section's rows, also of the tensors that we hold whole."""
        rows = rows_of(entry.shape, self._shards.sections, self._shards.section)
        if entry.name in self._shards.names:
            return Extent(first=rows.first_value)
        return Extent(hashed=range(rows.first_value, rows.first_value + rows.numel))

    @property
    def _owns(self) -> bool:
        """Do we send our section? (Of several ranks that hold the same rows, the lowest does.)"""
        return self._owners[self._shards.section] == self.ranks.rank

    @property
    def _takes_part(self) -> bool:
        return self._owns or self.ranks.rank == 0

    @property
    def _listening(self) -> Share:
        return self._share(range(0), speaks=True)

    def _share(self, parts: range, *, speaks: bool) -> Share:
        return Share(self._shards.sections, parts, speaks)


@dataclass(frozen=True)
class Fetched:
    """None: not before all have passed on what they fetched (tiled.py)."""

    update: AnchorUpdate | None
    got: ServerTicket | None

    @property
    def bytes_received(self) -> int:
        return self.got.bytes_received if self.got is not None else 0


def cutter_of(got: ServerTicket | None, payload: int) -> Cutter:
    """Bytes of a frame of which only some parts were fetched."""
    if got is None:
        return lambda begin, end: torch.empty(0, dtype=torch.uint8)
    data = torch.frombuffer(got.frames[payload], dtype=torch.uint8)

    def cut(begin: int, end: int) -> Tensor:
        offset = got.place(payload, begin) if end > begin else 0
        return data[offset : offset + end - begin]

    return cut


def _hashes(payload: OutgoingFrame, parts: range, write: Callable[[OutgoingFrame], None]) -> tuple[str, ...]:
    """Of these parts, once they are written."""
    write(payload)
    return payload.hashes(parts)


def _known(settled: SettledExchange | None) -> SettledExchange:
    assert settled is not None, "rank 0 has a part in every exchange"
    return settled


def _find_owners(ranks: Ranks, shards: Shards) -> list[int]:
    """Per section, the rank that sends it."""
    seats = ranks.gather(lambda: SectionHeld(shards.sections, shards.section), SectionHeld)
    held = [seat.section for seat in seats]
    if {seat.sections for seat in seats} != {shards.sections} or set(held) != set(range(shards.sections)):
        raise ModelError(
            f"the ranks hold sections {held} of {shards.sections}: all must shard over the same mesh, and the ranks of "
            "this job must hold all of the model"
        )
    return [held.index(section) for section in range(shards.sections)]
