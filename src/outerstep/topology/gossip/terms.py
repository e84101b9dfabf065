"""What the peers of a run must have in common. The founder draws it up; a peer that joins gets it and follows it.

A joiner may leave everything out. What it does state must be what the run has: the first difference is refused, showing
both.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

import msgspec

from ...coordination.gossip import GossipRules
from ...coordination.server.plan import check_manifest
from ...core.codecs.recipe import Recipe
from ...core.fragments import check_cycle
from ...core.gossip import NoLoCo
from ...core.outer import OuterRule, OwnRule
from ...core.robust import RobustAggregator
from ...errors import BadRequest, ConfigError, PlanMismatch
from ...types import Dataset, Key, Label, Manifest, Plain, Plan, Positive, WeightBy, Wishes
from ...versions import OLDEST_PROTOCOL, PROTOCOL_VERSION, Since2, as_spoken
from ..terms import draw_up

Pattern = Literal["all", "pairs", "exponential"]
MOST_DOCUMENT_BYTES = 64 << 20
MIN_PEERS = 2


@dataclass(frozen=True, kw_only=True)
class GossipWishes:
    """What a peer wants of a run beside `Wishes`. None = whatever the run has; for its founder, the default."""

    outer_lr: float | None = None
    outer_momentum: float | None = None
    nesterov: bool | None = None  # True
    own_outer: OwnRule | None = None  # instead of those three
    weight_by: WeightBy | None = None  # equal
    aggregation: str | None = None  # mean
    trim_fraction: float | None = None
    cosine_screen: bool | None = None  # False
    bucket_size: int | None = None  # 1
    min_peers: int | None = None  # 2, or what the rule needs
    attackers: int | None = None
    round_deadline_s: float | None = None  # none
    heartbeat_timeout_s: float | None = None
    pattern: Pattern | None = None  # all
    protocol: int | None = None  # the highest
    invite_only: bool | None = None  # False


class GossipTerms(Plain, frozen=True):
    """The document of a run: `GossipWishes` with everything said, the plan, and the model."""

    manifest: Manifest
    plan: Plan
    outer_lr: float
    outer_momentum: float
    nesterov: bool
    aggregation: str
    trim_fraction: float | None
    cosine_screen: bool
    bucket_size: int
    min_peers: int
    attackers: int = msgspec.field(name="liars")  # as runs of earlier versions wrote it
    round_deadline_s: float | None
    heartbeat_timeout_s: float
    pattern: Pattern
    by_hand: bool = False  # the user exchanges contributions by hand; nobody trains a model (gradient_gossip.py)
    protocol: Since2[Positive] = msgspec.UNSET  # in protocol 1 nobody said so
    inviter: Since2[Key] = msgspec.UNSET  # the founder's key, if a peer needs an invitation
    datasets: Since2[tuple[Dataset, ...]] = msgspec.UNSET  # that the run leases
    own_outer: Since2[Label] = msgspec.UNSET  # a user's own outer step; every peer must name it itself

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, document: bytes) -> GossipTerms:
        """Read another peer's document, or refuse it (BadRequest) if it is none or states the impossible."""
        if len(document) > MOST_DOCUMENT_BYTES:
            raise BadRequest(f"a run's terms have at most {MOST_DOCUMENT_BYTES} bytes, got {len(document)}")
        try:
            terms = msgspec.msgpack.decode(document, type=cls)
            terms.check()
        except (msgspec.MsgspecError, UnicodeError, RecursionError, ConfigError) as error:
            raise BadRequest(
                f"the run's terms cannot be followed: {error}", hint="do all peers run the same version of outerstep?"
            ) from error
        return terms

    def check(self) -> None:
        """Refuse terms that cannot be carried out."""
        _ = self.outer, self.aggregator, self.rules, Recipe.parse(self.plan.codec), Recipe.parse(self.plan.down_codec)
        names = [spec.name for spec in self.manifest.parameters]
        if sorted(name for fragment in self.plan.fragments for name in fragment) != sorted(set(names)):
            raise ConfigError(f"the {len(self.plan.fragments)} fragments must hold each of the model's tensors once")
        check_cycle(self.plan.sync_every, len(self.plan.fragments))
        if self.pattern != "all":
            check_mean_alone(self.pattern, self.aggregation, self.cosine_screen, self.bucket_size)

    @property
    def outer(self) -> OuterRule:
        return OuterRule(self.outer_lr, self.outer_momentum, self.nesterov)

    @property
    def aggregator(self) -> RobustAggregator:
        return RobustAggregator(
            self.aggregation,
            trim_fraction=self.trim_fraction,
            min_peers=self.min_peers,
            cosine_screen=self.cosine_screen,
            bucket_size=self.bucket_size,
        )

    @property
    def keeps_momentum(self) -> bool:
        """Does the step depend on earlier ones? NoLoCo's always does, the mean of two never."""
        steps_by_own = self.own_outer is not msgspec.UNSET
        return self.pattern == "pairs" or (self.pattern == "all" and (bool(self.outer_momentum) or steps_by_own))

    @property
    def rules(self) -> GossipRules:
        return GossipRules(
            min_peers=self.min_peers,
            attackers=self.attackers,
            heartbeat_timeout_s=self.heartbeat_timeout_s,
            round_deadline_s=self.round_deadline_s,
            protocol=OLDEST_PROTOCOL if self.protocol is msgspec.UNSET else self.protocol,
            inviter="" if self.inviter is msgspec.UNSET else self.inviter,
        )


def found(
    manifest: Manifest, wishes: Wishes, own: GossipWishes, peer_id: str, key: str = "", *, by_hand: bool = False
) -> GossipTerms:
    """The terms of a run that begins here; `peer_id` and `key` are the founder's. Everybody gets everybody's
    contributions, and takes the step from them: of what came out nothing travels, so there is no codec for it."""
    if wishes.down_codec not in (None, "same", "fp32"):
        raise ConfigError(
            f"down_codec is how a server sends agreements; between peers only contributions travel, got "
            f"{wishes.down_codec!r}: leave it out"
        )
    usual, rules = OuterRule(), GossipRules()
    aggregation, bucket_size = own.aggregation or "mean", own.bucket_size or 1
    screened = bool(own.cosine_screen)
    plan = draw_up(msgspec.structs.replace(wishes, down_codec="fp32"), own.weight_by or "equal", manifest, peer_id)
    timeout_s = rules.heartbeat_timeout_s if own.heartbeat_timeout_s is None else own.heartbeat_timeout_s
    terms = GossipTerms(
        manifest=manifest,
        plan=msgspec.structs.replace(plan, heartbeat_timeout_s=timeout_s, tokenizer=wishes.tokenizer or ""),
        outer_lr=usual.lr if own.outer_lr is None else own.outer_lr,
        outer_momentum=_momentum(own, usual.momentum),
        nesterov=usual.nesterov if own.nesterov is None else own.nesterov,
        aggregation=aggregation,
        trim_fraction=own.trim_fraction,
        cosine_screen=screened,
        bucket_size=bucket_size,
        min_peers=_min_peers(own, aggregation, bucket_size, cosine_screen=screened),
        attackers=_attackers(own, rules.attackers),
        round_deadline_s=own.round_deadline_s,
        heartbeat_timeout_s=timeout_s,
        pattern=own.pattern or "all",
        by_hand=by_hand,
        protocol=PROTOCOL_VERSION if own.protocol is None else own.protocol,
        inviter=key if own.invite_only else msgspec.UNSET,
        own_outer=own.own_outer.name if own.own_outer is not None else msgspec.UNSET,
    )
    if own.own_outer is not None and terms.rules.protocol < 2:
        raise ConfigError(
            f"protocol {terms.rules.protocol} has no outer_optimizer but nesterov, got {own.own_outer.name!r}: "
            "leave one of the two out"
        )
    terms.check()
    return as_spoken(terms, terms.rules.protocol)


def _momentum(own: GossipWishes, usual: float) -> float:
    if own.outer_momentum is not None:
        return own.outer_momentum
    return NoLoCo().momentum if own.pattern == "pairs" else usual


def _attackers(own: GossipWishes, usual: int) -> int:
    """How many attackers the run withstands. In pairs none: nobody checks what one peer tells another."""
    if own.pattern in (None, "all"):
        return usual if own.attackers is None else own.attackers
    if own.attackers:
        raise ConfigError(
            f"attackers={own.attackers} is for pattern='all', where all see the same; with pattern={own.pattern!r} "
            "nobody can tell: leave it out"
        )
    return 0


def _min_peers(own: GossipWishes, aggregation: str, bucket_size: int, *, cosine_screen: bool) -> int:
    """The least number of peers. The mean needs two, to agree at all; a robust rule what it is defined for, at least
    three."""
    if own.min_peers is not None:
        return own.min_peers
    if aggregation == "mean" and not cosine_screen:
        return MIN_PEERS
    return RobustAggregator(
        aggregation, trim_fraction=own.trim_fraction, cosine_screen=cosine_screen, bucket_size=bucket_size
    ).min_peers


def check_mean_alone(pattern: str, aggregation: str, cosine_screen: bool, bucket_size: int) -> None:
    """Refuse a robust rule in pairs: two peers have no majority that could tell which of them is wrong."""
    for name, value, usual in (
        ("aggregation", aggregation, "mean"),
        ("cosine_screen", cosine_screen, False),
        ("bucket_size", bucket_size, 1),
    ):
        if value != usual:
            raise ConfigError(
                f"{name}={value} compares the contributions of many, and with pattern={pattern!r} a peer sees one "
                "other's: use pattern='all', or leave it out"
            )


def check_joiner(
    terms: GossipTerms, manifest: Manifest, wishes: Wishes, own: GossipWishes, *, by_hand: bool = False
) -> None:
    """Refuse a joiner with another model, or with a wish that the run does not meet."""
    if terms.by_hand != by_hand:
        kinds = {True: "exchanges contributions by hand (GradientGossip)", False: "trains a model (DiLoCoWorker)"}
        raise PlanMismatch(f"the run {kinds[terms.by_hand]}, and this peer {kinds[by_hand]}", hint="join another run")
    check_manifest(terms.manifest, manifest)
    said, has_own = own.own_outer.name if own.own_outer else None, terms.own_outer
    if (has_own if has_own is not msgspec.UNSET else None) != said:
        # A class is never imported because a stranger names it: each peer's own user must name it.
        raise PlanMismatch(
            f"the run steps by outer_optimizer {has_own or 'nesterov'!r}, and this peer by {said or 'nesterov'!r}",
            hint="give every peer the same outer_optimizer and outer_options",
        )
    for name, has, wanted in [*_wished(terms.plan, wishes), *_own(terms, own)]:
        if wanted is not None and wanted != has:
            raise PlanMismatch(
                f"this peer wants {name}={wanted}, but the run has {name}={has}",
                hint=f"leave {name} out to follow the run, or found a run of your own (no join address)",
            )


def _wished(plan: Plan, wishes: Wishes) -> list[tuple[str, Any, Any]]:
    codec = None if wishes.codec is None else Recipe.parse(wishes.codec).name
    down = None if wishes.down_codec in (None, "same") else wishes.down_codec
    return [
        ("sync_every", plan.sync_every, wishes.sync_every),
        ("codec", plan.codec, codec),
        ("down_codec", plan.down_codec, down),
        ("num_fragments", len(plan.fragments), wishes.num_fragments),
        ("fragment_delay", plan.delay, wishes.delay),
        ("fragment_alpha", plan.alpha, wishes.alpha),
        ("fragment_carry", plan.carry, wishes.carry),
        ("tokenizer", plan.tokenizer, wishes.tokenizer),
    ]


def _own(terms: GossipTerms, own: GossipWishes) -> list[tuple[str, Any, Any]]:
    has = {**msgspec.structs.asdict(terms), "weight_by": terms.plan.weight_by, "protocol": terms.rules.protocol}
    has["invite_only"] = bool(terms.rules.inviter)
    compared = [field.name for field in fields(GossipWishes) if field.name != "own_outer"]
    return [(name, has[name], getattr(own, name)) for name in compared]
