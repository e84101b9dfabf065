"""A group of processes is one worker: a torchrun job whose ranks hold the same parameters (DDP).

Rank 0 speaks with the other side; what it learns, and the frames with the news of each anchor, goes to the other ranks
over the job's own network. All of them take the news over and compare the anchor's hash, so all hold the same bits.
sharded.py is the same for ranks that hold different rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
import torch

from ...digest import data_hash
from ...errors import ModelError
from ...types import Manifest, Participant, Plan, Watched, Wishes
from ..forms import Form, forms_of
from ..memory import KEPT, Memory
from ..news import Kind, News, read_news, release
from ..protocol import Agreed, Contribution, Joined, Orders, Sight, Ticket, Topology
from .ranks import Ranks


class Heard(msgspec.Struct, frozen=True):
    """How the exchange stands for one rank. None = this rank has no part in it."""

    sight: Sight | None = None
    failed: bool = False


class GroupTicket:
    """An exchange of the group; `own` is this rank's part in it. `claims`: it is about a contribution that an earlier
    start of the group made."""

    def __init__(self, fragment: int, ranks: Ranks, own: Ticket | None, *, claims: bool = False) -> None:
        self.fragment = fragment
        self.own = own
        self.claims = claims
        self.failed = False
        self._ranks = ranks

    def look(self, timeout_s: float) -> Sight:
        """As rank 0 sees it; and it is over as soon as it failed for anybody."""
        heard = self._ranks.gather(lambda: self._own_look(timeout_s if self._ranks.rank == 0 else 0.0), Heard)
        self.failed = any(one.failed for one in heard)
        sight = heard[0].sight
        assert sight is not None
        return dataclasses.replace(sight, done=sight.done or self.failed)

    def _own_look(self, timeout_s: float) -> Heard:
        if self.own is None:
            return Heard()
        sight = self.own.look(timeout_s)
        return Heard(sight, sight.done and self.own.failed)

    def cancel(self) -> None:
        if self.own is not None:
            self.own.cancel()


class Facts(msgspec.Struct, frozen=True):
    """An `Agreed` without its news; those have frames of these kinds."""

    fragment: int
    version: int
    counted: bool
    too_old: bool
    anchor_hash: str
    participants: tuple[Participant, ...]
    plan: Plan
    bytes_sent: int = 0
    bytes_received: int = 0
    retries: int = 0
    rejoins: int = 0
    counted_in: int = 0
    refused: str = ""
    steps_lost: int = 0
    watched: Watched | None = None
    kinds: tuple[Kind, ...] = ()

    @classmethod
    def of(cls, agreed: Agreed) -> Facts:
        facts = {name: getattr(agreed, name) for name in cls.__struct_fields__ if name != "kinds"}
        return cls(kinds=agreed.news.kinds, **facts)

    def with_news(self, news: News) -> Agreed:
        return Agreed(news=news, **{name: getattr(self, name) for name in self.__struct_fields__ if name != "kinds"})


class Welcome(msgspec.Struct, frozen=True):
    """A `Joined` without its news."""

    worker_id: str
    plan: Plan
    manifest: Manifest
    facts: tuple[Facts, ...]
    overtaken: tuple[int, ...]


class Amount(msgspec.Struct, frozen=True):
    """The training in one rank's share of a contribution."""

    samples: int
    tokens: int


class GroupTopology:
    """`speaker` is rank 0's way to the others; the other ranks have none."""

    def __init__(self, ranks: Ranks, speaker: Topology | None) -> None:
        assert (speaker is not None) == (ranks.rank == 0)
        self._ranks = ranks
        self._speaker = speaker
        self._forms: list[Form] = []
        self._orders = Orders()
        self._memory = Memory(KEPT)

    def join(self, manifest: Manifest | None, wishes: Wishes) -> Joined:
        assert manifest is not None
        check_same_model(self._ranks, manifest)
        joined: list[Joined] = []
        welcome = self._ranks.tell(lambda: self._join(manifest, wishes, joined), Welcome)
        self._forms = forms_of(welcome.plan, welcome.manifest)
        news = [agreed.news for agreed in joined[0].anchors] if joined else [None] * len(welcome.facts)
        anchors = tuple(self._hand_on(facts, one) for facts, one in zip(welcome.facts, news, strict=True))
        return Joined(welcome.worker_id, welcome.plan, welcome.manifest, anchors, frozenset(welcome.overtaken))

    def _join(self, manifest: Manifest, wishes: Wishes, joined: list[Joined]) -> Welcome:
        assert self._speaker is not None
        joined.append(self._speaker.join(manifest, wishes))
        one = joined[0]
        facts = tuple(map(Facts.of, one.anchors))
        return Welcome(one.worker_id, one.plan, one.manifest, facts, tuple(sorted(one.overtaken)))

    def begin(self, contribution: Contribution, *, stuck_after_s: float | None = None) -> GroupTicket:
        """Rank 0's parameters are everybody's; the samples and tokens are everybody's own."""
        amounts = self._ranks.gather(lambda: Amount(contribution.samples, contribution.tokens), Amount)
        whole = of_all(contribution, amounts)
        speaker = self._speaker
        own = self._ranks.check(lambda: speaker.begin(whole, stuck_after_s=stuck_after_s) if speaker else None)
        return GroupTicket(contribution.fragment, self._ranks, own)

    def finish(self, ticket: Ticket, *, reload: bool = False) -> Agreed:
        assert isinstance(ticket, GroupTicket)
        agreed: list[Agreed] = []
        facts = self._ranks.tell(lambda: self._finish(ticket, agreed, reload=reload), Facts)
        return self._hand_on(facts, agreed[0].news if agreed else None)

    def _finish(self, ticket: GroupTicket, agreed: list[Agreed], *, reload: bool) -> Facts:
        assert self._speaker is not None
        assert ticket.own is not None
        agreed.append(self._speaker.finish(ticket.own, reload=reload))
        return Facts.of(agreed[0])

    def confirm(self, agreed: Agreed, intact: bool) -> Agreed | None:
        """What went wrong on one rank is mended on all: they take over the same news."""
        if all(self._ranks.gather(lambda: intact, bool)):
            if self._speaker is not None:
                return self._speaker.confirm(agreed, True)
            release(agreed.news, self._forms[agreed.fragment], self._memory)
            return None
        whole: list[Agreed] = []
        facts = self._ranks.tell(lambda: self._mend(agreed, whole), Facts)
        return self._hand_on(facts, whole[0].news if whole else None)

    def _mend(self, agreed: Agreed, whole: list[Agreed]) -> Facts:
        assert self._speaker is not None
        mended = self._speaker.confirm(agreed, False)
        assert mended is not None
        whole.append(mended)
        return Facts.of(mended)

    def _hand_on(self, facts: Facts, news: News | None) -> Agreed:
        """The news that rank 0 has, on every rank."""
        form = self._forms[facts.fragment]
        sizes = [(form.full if kind == "full" else form.update).size_bytes for kind in facts.kinds]
        frames = [self._memory.take(size) for size in sizes] if news is None else news.frames
        self._ranks.spread(torch.frombuffer(frame, dtype=torch.uint8) for frame in frames)
        here = self._ranks.check(lambda: news or read_news(form, facts.kinds, frames, facts.anchor_hash))
        if news is None:
            facts = msgspec.structs.replace(facts, bytes_sent=0, bytes_received=0, retries=0, rejoins=0)
        return facts.with_news(here)

    def resume(self, ticket: Ticket, *, stuck_after_s: float | None = None) -> GroupTicket:
        assert isinstance(ticket, GroupTicket)
        speaker, own = self._speaker, ticket.own
        again = self._ranks.check(lambda: speaker.resume(own, stuck_after_s=stuck_after_s) if speaker and own else None)
        return GroupTicket(ticket.fragment, self._ranks, again)

    def heartbeat(self, step: int, steps_per_second: float, loss: float | None) -> None:
        """From a thread of its own, so without a word to the other ranks: they train in step with rank 0."""
        self._memory.rest()
        if self._speaker is not None:
            self._speaker.heartbeat(step, steps_per_second, loss)

    def orders(self, *, at_exchange: bool) -> Orders:
        """All ranks must obey at the same step; they confer only where they have just conferred anyway."""
        if not at_exchange:
            return dataclasses.replace(self._orders, drain="", sync="")
        speaker = self._speaker
        self._orders = self._ranks.tell(lambda: speaker.orders(at_exchange=True) if speaker else Orders(), Orders)
        return self._orders

    def state_dict(self, under_way: Collection[int]) -> dict[str, Any]:
        """Rank 0's; the others have nothing to remember."""
        return self._speaker.state_dict(under_way) if self._speaker is not None else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._speaker is not None:
            self._speaker.load_state_dict(state)

    def pack(self, ticket: Ticket) -> dict[str, Any]:
        assert isinstance(ticket, GroupTicket)
        return self._speaker.pack(ticket.own) if self._speaker is not None and ticket.own is not None else {}

    def unpack(self, fragment: int, packed: Mapping[str, Any], *, late: bool = False) -> GroupTicket:
        speaker = self._speaker
        own = self._ranks.check(lambda: speaker.unpack(fragment, packed, late=late) if speaker else None)
        return GroupTicket(fragment, self._ranks, own)

    def catch_up(self, fragment: int) -> GroupTicket:
        speaker = self._speaker
        own = self._ranks.check(lambda: speaker.catch_up(fragment) if speaker else None)
        return GroupTicket(fragment, self._ranks, own)

    def leave(self, reason: str) -> None:
        if self._speaker is not None:
            self._speaker.leave(reason)


def check_same_model(ranks: Ranks, manifest: Manifest) -> None:
    """All ranks must mean the same tensors: a job that splits its layers over ranks is not one worker."""
    prints = ranks.gather(lambda: data_hash([msgspec.msgpack.encode(manifest)]), str)
    odd = next((rank for rank, one in enumerate(prints) if one != prints[0]), None)
    if odd is not None:
        raise ModelError(
            f"ranks 0 and {odd} hold different models (names, shapes or dtypes); the ranks of one worker must hold the "
            "same parameters, whole (DDP) or in shards (FSDP2). Ranks that are workers of their own: group='off'"
        )


def of_all(contribution: Contribution, amounts: Sequence[Amount]) -> Contribution:
    """The same contribution with every rank's samples and tokens."""
    samples, tokens = sum(a.samples for a in amounts), sum(a.tokens for a in amounts)
    return dataclasses.replace(contribution, samples=samples, tokens=tokens)


__all__ = ["Amount", "Facts", "GroupTicket", "GroupTopology", "check_same_model", "of_all"]
