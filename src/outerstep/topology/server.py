"""Contributions become agreements at a parameter server: the tensor side of the wire."""

from __future__ import annotations

import dataclasses
import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ..coordination.exchange import Exchange, Outcome, Patience, Share
from ..coordination.fetch import Piece, Wanted
from ..coordination.session import Session
from ..core.codecs import Codec
from ..core.codecs.recipe import WHOLE, Recipe
from ..core.views import bytes_of, fp32_views
from ..digest import data_hash, part_count, part_hash, part_range
from ..errors import ExchangeFailed, OuterstepError, Refused, UnknownWorker, UntrustedServer, WorkerError
from ..types import (
    PROTOCOL_VERSION,
    Agreement,
    Heartbeat,
    HeartbeatAnswer,
    Join,
    JoinAnswer,
    Leave,
    Manifest,
    Offer,
    ParameterSpec,
    WeightBy,
    Wishes,
)
from ..wire.frames import Layout, check_frame, layout
from ..wire.transport import Transport
from . import Agreed, Contribution, Joined, Orders, Sight, Ticket
from .courier import Courier

log = logging.getLogger(__name__)

HEARTBEAT_TIMEOUT_S = 5.0
LEAVE_TIMEOUT_S = 3.0
EXIT_FACTOR = 10  # how many times longer than for a stuck round a leaving worker waits for a silent server
NO_ORDERS = Orders()


class ServerTicket:
    """An exchange with the server, carried by a thread of its own."""

    def __init__(self, fragment: int, courier: Courier, again: Callable[[float | None], ServerTicket]) -> None:
        self.fragment = fragment
        self.courier = courier
        self.again = again  # the same exchange, from the beginning, with this stuck_after_s
        self._done = threading.Event()
        self._crash: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"outerstep-exchange-{fragment}", daemon=True)
        self._thread.start()

    @property
    def failed(self) -> bool:
        return self._crash is not None or self.courier.exchange.outcome is None

    def look(self, timeout_s: float) -> Sight:
        done, exchange = self.wait(timeout_s), self.courier.exchange
        missed = exchange.outcome is not None and not exchange.outcome.counted
        return Sight(done, exchange.wanted, exchange.waiting_for, exchange.silent_s(time.monotonic()), missed)

    def wait(self, timeout_s: float) -> bool:
        return self._done.wait(timeout_s)

    def join(self) -> None:
        while not self.wait(1.0):  # in slices, so that Ctrl-C gets through
            pass

    def cancel(self) -> None:
        self.courier.cancel()

    def outcome(self) -> Outcome:
        """What the exchange came to; whatever went wrong in the background is raised here, with its cause."""
        exchange = self.courier.exchange
        failure = self._crash or exchange.failure
        if isinstance(failure, WorkerError):
            raise failure
        if failure is not None:
            raise ExchangeFailed(f"the exchange of fragment {self.fragment} failed: {failure}") from failure
        if exchange.outcome is None:
            raise ExchangeFailed(f"the exchange of fragment {self.fragment} was cancelled")
        return exchange.outcome

    def _run(self) -> None:
        try:
            self.courier.run()
        except BaseException as error:  # noqa: BLE001 - it surfaces in outcome(), in the training thread
            self._crash = error
        finally:
            self._done.set()


class ServerTopology:
    def __init__(
        self,
        transport: Transport,
        *,
        worker_id: str,
        instance: str,
        hostname: str,
        patience: Patience = Patience(),  # noqa: B008 - frozen
        join_timeout_s: float = 120.0,
    ) -> None:
        self._transport = transport
        self._worker_id, self._instance, self._hostname = worker_id, instance, hostname
        self._patience = patience
        self._join_timeout_s = join_timeout_s
        self._rng = random.Random(instance)
        self._session: Session | None = None
        self.up: list[Layout] = []
        self.down: list[Layout] = []
        self.codec = Recipe.parse("fp32")
        self.codecs: dict[str, Codec] = {}  # of contributions, by tensor
        self._sequence: list[int] = []
        self._leaving = threading.Lock()
        self._left = False
        self._asked = NO_ORDERS
        self._asked_lock = threading.Lock()
        self._seen: set[int] = set()  # commands that were passed on
        self._obeyed: set[int] = set()  # and those the server has not been told about yet

    # --- membership -----------------------------------------------------------------------------------------------

    def join(self, manifest: Manifest | None, wishes: Wishes) -> Joined:
        """Introduce ourselves and fetch the newest anchor of every fragment."""
        tickets = self.introduce(manifest, wishes)
        anchors = tuple(self.finish(ticket) for ticket in tickets)
        return Joined(self._worker_id, self.session.joined.plan, anchors)

    def introduce(self, manifest: Manifest | None, wishes: Wishes, share: Share | None = None) -> list[ServerTicket]:
        """Join, and ask for the newest agreement of every fragment; with a `share`, ask only and fetch nothing."""
        join = Join(
            protocol=PROTOCOL_VERSION,
            worker_id=self._worker_id,
            instance=self._instance,
            hostname=self._hostname,
            manifest=manifest,
            wishes=wishes,
        )
        self._session = Session(join)
        # The first fetch does the joining; only then is it known how many fragments there are.
        first = self._ask(0, share, _with_limit(self._patience, self._join_timeout_s))
        first.join()
        try:
            first.outcome()
        except ExchangeFailed as failure:
            if isinstance(failure.__cause__, Refused | UntrustedServer):
                raise failure.__cause__ from None  # "no" at join is said as the server said it
            raise
        self._adopt_plan(self.session.joined)
        return [first, *(self._ask(fragment, share, self._patience) for fragment in range(1, len(self.down)))]

    def follow(self, join: Join, answer: JoinAnswer) -> None:
        """Speak for a worker that another process of its group has joined."""
        self._session = Session(join)
        self._session.answer = answer
        self._adopt_plan(answer)

    def ask(self, fragment: int, share: Share, after: int) -> ServerTicket:
        """The newest agreement, if there is one after that version; nothing is fetched."""
        return self._ask(fragment, share, self._patience, after)

    def _ask(self, fragment: int, share: Share | None, patience: Patience, after: int = -1) -> ServerTicket:
        assert self._session is not None
        exchange = Exchange(
            self._session, fragment=fragment, after=after, now=time.monotonic(), share=share, patience=patience
        )
        return self._start(exchange, fragment)

    def heartbeat(self, step: int, steps_per_second: float, loss: float | None) -> None:
        """A stalled heartbeat must not keep the next one waiting, so it is not given long."""
        session = self.session
        message = Heartbeat(
            **session.head, step=step, steps_per_second=steps_per_second, loss=loss, acknowledged=tuple(self._obeyed)
        )
        try:
            answer = self._transport.call(message, timeout_s=HEARTBEAT_TIMEOUT_S)
            assert isinstance(answer, HeartbeatAnswer)
            self._heard(answer, message.acknowledged)
        except UnknownWorker:
            with self._leaving:  # a heartbeat that arrives after our own goodbye must not bring us back
                if self._left:
                    return
                log.warning("the server had given this worker up; joining again, local progress is kept")
                joined = self._transport.call(session.join_request, timeout_s=HEARTBEAT_TIMEOUT_S)
                assert isinstance(joined, JoinAnswer)
                session.answer = joined

    def _heard(self, answer: HeartbeatAnswer, acknowledged: tuple[int, ...]) -> None:
        """Remember what is asked of us. A command comes again until our "got it" arrives, and is obeyed once."""
        with self._asked_lock:
            self._asked = dataclasses.replace(self._asked, sync_every=answer.sync_every)
            self._obeyed -= set(acknowledged)
            for command in answer.commands:
                if command.id not in self._seen:
                    self._seen.add(command.id)
                    reason = command.reason or command.kind
                    if command.kind == "drain":
                        self._asked = dataclasses.replace(self._asked, drain=reason)
                    else:
                        self._asked = dataclasses.replace(self._asked, sync=reason)
                self._obeyed.add(command.id)

    def orders(self, *, at_exchange: bool) -> Orders:
        if self._asked is not NO_ORDERS:
            with self._asked_lock:
                asked = self._asked
                self._asked = dataclasses.replace(asked, drain="", sync="")
                return asked
        return NO_ORDERS

    def leave(self, reason: str) -> None:
        """Best effort, and short: a server that does not hear it finds out by itself."""
        with self._leaving:
            self._left = True
        if self._session is not None and self._session.answer is not None:
            printable = reason.encode("utf-8", "replace").decode("utf-8")[:256]
            try:
                self._transport.call(Leave(**self._session.head, reason=printable), timeout_s=LEAVE_TIMEOUT_S)
            except OuterstepError as error:
                log.info("the server was not told that this worker leaves: %s", error)
        self._transport.close()

    # --- exchanges ------------------------------------------------------------------------------------------------

    def begin(self, contribution: Contribution, *, stuck_after_s: float | None = None) -> ServerTicket:
        """Encode now (the weights will change), send in the background."""
        payload = encode_frame(contribution.deltas, self.up[contribution.fragment], self.codecs)
        offer = self.make_offer(contribution, (len(payload),))
        return self.carry(offer, self.part_hashes(payload), payload, stuck_after_s)

    def make_offer(self, contribution: Contribution, section_bytes: tuple[int, ...]) -> Offer:
        """The next one of its fragment: its key is fixed here."""
        _check_reported(contribution, self.session.joined.plan.weight_by)
        fragment = contribution.fragment
        self._sequence[fragment] += 1
        return Offer(
            **self.session.head,
            fragment=fragment,
            sequence=self._sequence[fragment],
            base_version=contribution.base_version,
            oldest_base=contribution.oldest_base,
            steps=contribution.steps,
            samples=contribution.samples,
            tokens=contribution.tokens,
            codec=self.codec.name,
            size_bytes=sum(section_bytes),
            section_bytes=section_bytes if len(section_bytes) > 1 else (),
        )

    def part_hashes(self, payload: memoryview) -> tuple[str, ...]:
        size = self.session.joined.plan.part_size_bytes
        return tuple(
            part_hash(payload[slice(*part_range(i, len(payload), size))]) for i in range(part_count(len(payload), size))
        )

    def resume(self, ticket: Ticket, *, stuck_after_s: float | None = None) -> ServerTicket:
        assert isinstance(ticket, ServerTicket)
        ticket.cancel()
        return ticket.again(stuck_after_s)

    def carry(
        self,
        offer: Offer,
        hashes: tuple[str, ...],
        payload: memoryview,
        stuck_after_s: float | None,
        share: Share | None = None,
    ) -> ServerTicket:
        """Send what was offered, or our share of it; wait for the agreement, and fetch it unless it is shared."""
        exchange = Exchange(
            self.session,
            fragment=offer.fragment,
            after=offer.base_version,
            now=time.monotonic(),
            offer=offer,
            part_hashes=hashes,
            share=share,
            patience=_with_limit(self._patience, self._patience.give_up_after_s, stuck_after_s),
            rng=self._rng,
        )

        def again(stuck_after_s: float | None) -> ServerTicket:
            return self.carry(offer, hashes, payload, stuck_after_s, share)

        return self._start(exchange, offer.fragment, payload, again, share.parts.start if share else 0)

    def fetch(self, agreement: Agreement, pieces: tuple[Piece, ...]) -> ServerTicket:
        """Some pieces of an agreement."""
        exchange = Exchange(
            self.session,
            fragment=agreement.fragment,
            after=agreement.version,
            now=time.monotonic(),
            fetch=Wanted(agreement, pieces),
            patience=self._patience,
            rng=self._rng,
        )
        return self._start(exchange, agreement.fragment)

    def finish(self, ticket: Ticket) -> Agreed:
        assert isinstance(ticket, ServerTicket)
        ticket.join()
        outcome = ticket.outcome()
        agreement, courier = outcome.agreement, ticket.courier
        down = self.down[ticket.fragment]
        try:
            check_frame(courier.received[0], down)
        except Refused as error:
            raise ExchangeFailed(f"the server sent something else than fragment {ticket.fragment}: {error}") from error
        anchor = fp32_views(courier.received[0], down.places, down.data_begin)
        got = anchor_hash(anchor.values())
        if got != agreement.anchor_hash:
            raise ExchangeFailed(
                f"fragment {ticket.fragment} version {agreement.version}: our anchor's hash is {got}, "
                f"the server's {agreement.anchor_hash}"
            )
        return Agreed(
            fragment=ticket.fragment,
            version=agreement.version,
            counted=outcome.counted,
            too_old=outcome.too_old,
            anchor=anchor,
            anchor_hash=agreement.anchor_hash,
            participants=agreement.participants,
            bytes_sent=courier.bytes_sent,
            bytes_received=courier.bytes_received,
            retries=courier.exchange.retries,
            rejoins=courier.exchange.rejoins,
            plan=self.session.joined.plan,
            counted_in=outcome.counted_in,
        )

    # --- inside ---------------------------------------------------------------------------------------------------

    @property
    def session(self) -> Session:
        if self._session is None or self._session.answer is None:
            raise ExchangeFailed("not joined yet: call join first")
        return self._session

    def _start(
        self,
        exchange: Exchange,
        fragment: int,
        payload: memoryview | None = None,
        again: Callable[[float | None], ServerTicket] | None = None,
        first_part: int = 0,
    ) -> ServerTicket:
        session = self._session
        assert session is not None
        courier = Courier(
            self._transport,
            exchange,
            part_size_bytes=lambda: session.joined.plan.part_size_bytes,
            payload=payload,
            first_part=first_part,
            max_download_bytes=lambda: self.down[fragment].size_bytes if self.down else None,
        )
        return ServerTicket(fragment, courier, again or (lambda _: self._start(exchange, fragment)))

    def _adopt_plan(self, answer: JoinAnswer) -> None:
        self.codec = Recipe.parse(answer.plan.codec)
        specs = {spec.name: spec for spec in answer.manifest.parameters}
        groups = [[specs[name] for name in names] for names in answer.plan.fragments]
        self.codecs = {spec.name: self.codec.codec(spec) for spec in answer.manifest.parameters}
        self.up = [_layout(self.codec, group) for group in groups]
        self.down = [_layout(WHOLE, group) for group in groups]
        self._sequence = [state.last_sequence for state in answer.fragments]


def _check_reported(contribution: Contribution, unit: WeightBy) -> None:
    """Said here, where the amounts of all processes of a group are known, rather than by a refusal."""
    if unit != "equal" and contribution.steps and not getattr(contribution, unit):
        raise WorkerError(
            f"the run weighs contributions by {unit}, and none were reported in {contribution.steps} steps: "
            f"call worker.count({unit}=…) at each step"
        )


def encode_frame(deltas: Mapping[str, Tensor], up: Layout, codecs: Mapping[str, Codec]) -> memoryview:
    """The frame of these tensors: encoded on their device, then copied once into place."""
    frame = memoryview(bytearray(up.size_bytes))
    frame[: up.data_begin] = up.prefix
    for entry in up.entries:
        if entry.end == entry.begin:
            continue
        count, offset = entry.end - entry.begin, up.data_begin + entry.begin
        target = torch.frombuffer(frame, dtype=torch.uint8, count=count, offset=offset)
        values, codec = deltas[entry.name].detach().reshape(-1), codecs[entry.name]
        if values.device.type == "cpu":
            codec.encode(values, target)
        else:
            encoded = torch.empty(count, dtype=torch.uint8, device=values.device)
            codec.encode(values, encoded)
            target.copy_(encoded)
    return frame


def anchor_hash(tensors: Iterable[Tensor]) -> str:
    """The identity of an anchor: over its fp32 values in the fragment's order."""
    return data_hash(bytes_of(tensor) for tensor in tensors if tensor.numel())


def _layout(recipe: Recipe, specs: Sequence[ParameterSpec]) -> Layout:
    return layout(recipe.name, [(s.name, s.shape, recipe.codec(s).encoded_bytes(s.numel)) for s in specs])


def _with_limit(patience: Patience, give_up_after_s: float, stuck_after_s: float | None = None) -> Patience:
    """With a limit on being stuck it is the worker's last contribution, which is worth waiting for; but not for hours
    if there is no server any more."""
    if stuck_after_s is not None:
        give_up_after_s = min(give_up_after_s, EXIT_FACTOR * stuck_after_s)
    return dataclasses.replace(
        patience,
        give_up_after_s=give_up_after_s,
        stuck_after_s=stuck_after_s,
        stay_for_own_round=stuck_after_s is not None,
    )
