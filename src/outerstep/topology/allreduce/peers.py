"""The ranks of a run without a server: what they tell each other beside the values, and who is still there.

They meet at the store of the job's process group (under torchrun the agent's, else rank 0's). At a meeting everybody
leaves a few bytes under a name and waits for those of all others: nothing is unpickled, no collective can be mixed up
with one of the user's, and whoever does not come is known by its number.

Values travel by a process group that nothing else uses (`Links`), in point-to-point operations: a connection that
breaks names the rank at its other end.

Every rank also has a pulse: a counter in the store that a thread moves every second. A counter that stands still is a
process that was killed or hangs as a whole; one that moves while its rank does not come is a training loop that is slow
or stuck. Who fails or leaves says so in its pulse, so the others neither wait for it nor guess.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Literal

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from ...errors import PeerLost, RoundStuck
from ..payload import KEPT, Memory, Rooms

PULSE_S = 1.0
SILENT_S = 30.0  # a pulse that stands still for so long is a dead process; compiling or loading may take a few
FIRST_LOOK_S, LONGEST_LOOK_S = 0.0005, 0.05  # between two looks into the store,
LOOK_SHARE = 0.05  # and this much of the time waited so far: nobody waits noticeably longer than it must
FAREWELL_S = 10.0
SPREAD_BYTES = 64 << 20  # of a whole anchor on its way through a GPU
LEAST_TIMEOUT_S = 300.0  # of an operation: a dead rank shows by its pulse long before

_names = itertools.count()  # of the workers of this process; all ranks make theirs in the same order


class RankPulse(msgspec.Struct, frozen=True, array_like=True):
    """A pulse, and how its rank is: "failed" and "left" are for good, `words` say why."""

    count: int
    state: Literal["here", "failed", "left"] = "here"
    words: str = ""


class Peers:
    """`name` tells this worker of the ranks from others before it in the same process group."""

    def __init__(self, store: Store, rank: int, size: int, *, name: str, timeout_s: float) -> None:
        """`timeout_s`: how long to wait for a rank that is alive and does not come."""
        self.rank, self.size = rank, size
        self.labels = [f"rank {r}" for r in range(size)]
        self._store = PrefixStore(f"outerstep/{name}", store)
        self._timeout_s = timeout_s
        self._silent_s = min(SILENT_S, max(timeout_s / 2, 2 * PULSE_S))  # a dead rank is not called slow
        self._meetings: dict[str, int] = {}
        self._seen: dict[int, tuple[RankPulse, float]] = {}  # of each rank the last beat, and when it was new
        self._looked_at = 0.0
        self._own = RankPulse(0)
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._set_pulse(self._own)
        self._heart = threading.Thread(target=self._beat, name="outerstep-pulse", daemon=True)
        self._heart.start()
        atexit.register(self._still)

    # --- meeting ----------------------------------------------------------------------------------------------------

    def exchange(self, kind: str, said: bytes, *, stuck_after_s: float | None = None) -> list[bytes]:
        """Everybody says something, everybody hears all, in the order of the ranks. Meetings of one kind take place in
        the same order on all ranks; other kinds may be held meanwhile by other threads.

        `stuck_after_s` replaces the usual patience with a rank that is alive, and ends in RoundStuck."""
        number = self._meetings.get(kind, 0)
        self._meetings[kind] = number + 1
        keys = [f"{kind}/{number}/{rank}" for rank in range(self.size)]
        try:
            self._store.set(keys[self.rank], said)  # type: ignore[arg-type]  # bytes are taken, the stub says str
            self._wait(kind, keys, stuck_after_s)
            heard = [bytes(one) for one in self._store.multi_get(keys)]
            if number > 0:  # all have come to this meeting, so all have heard the one before
                self._store.delete_key(f"{kind}/{number - 1}/{self.rank}")
        except (RuntimeError, OSError) as error:
            raise self._no_store(error) from error
        return heard

    def _wait(self, kind: str, keys: Sequence[str], stuck_after_s: float | None) -> None:
        began_at, waited_s, look_after_s = time.monotonic(), 0.0, PULSE_S
        while not self._store.check(list(keys)):
            time.sleep(min(max(FIRST_LOOK_S, LOOK_SHARE * waited_s), LONGEST_LOOK_S))
            waited_s = time.monotonic() - began_at
            if waited_s < look_after_s:
                continue
            look_after_s = waited_s + PULSE_S
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            self.check(needed=missing)
            limit_s = self._timeout_s if stuck_after_s is None else stuck_after_s
            if waited_s > limit_s and missing:
                who = ", ".join(self.labels[rank] for rank in missing)
                message = f"{who} did not come to the {kind} within {limit_s:g} s, and is alive: slow, stuck or done"
                raise RoundStuck(message) if stuck_after_s is not None else PeerLost(message)

    # --- who is there -----------------------------------------------------------------------------------------------

    def check(self, needed: Sequence[int] = ()) -> None:
        """Raise PeerLost if a rank has failed or is dead; and also if one of the `needed` has left. Looks once a
        second, however often it is asked."""
        if time.monotonic() - self._looked_at >= PULSE_S:
            self._look()
        seen, now = sorted(self._seen.items()), time.monotonic()
        for rank, (beat, _) in seen:  # first: the others may have left because of it
            if beat.state == "failed":
                raise PeerLost(f"{self.labels[rank]} failed: {beat.words}")
        for rank, (beat, since) in seen:
            if beat.state == "here" and now - since > self._silent_s:
                raise PeerLost(f"{self.labels[rank]} has died, or hangs: no sign of life for {now - since:.0f} s")
            if beat.state == "left" and rank in needed:
                raise PeerLost(
                    f"{self.labels[rank]} has left the run ({beat.words}) while others still exchange: all ranks must "
                    "take the same number of optimizer steps"
                )

    def lost(self, rank: int, error: BaseException) -> PeerLost:
        """The connection to a rank broke: why, as far as it is known. (It may have said so before it went.)"""
        try:
            self._look()
        except PeerLost as gone:
            return gone
        beat, _ = self._seen.get(rank, (RankPulse(0), 0.0))
        if beat.state == "failed":
            return PeerLost(f"{self.labels[rank]} failed: {beat.words}")
        return PeerLost(f"{self.labels[rank]} has died: its connection broke in the middle of an exchange ({error})")

    def _look(self) -> None:
        """At the others' pulses."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        try:
            there = [rank for rank in others if rank in self._seen or self._store.check([f"pulse/{rank}"])]
            beats = self._store.multi_get([f"pulse/{rank}" for rank in there]) if there else []
        except (RuntimeError, OSError) as error:
            raise self._no_store(error) from error
        self._looked_at = now = time.monotonic()
        for rank, data in zip(there, beats, strict=True):
            beat = msgspec.msgpack.decode(bytes(data), type=RankPulse)
            if rank not in self._seen or self._seen[rank][0] != beat:
                self._seen[rank] = beat, now

    def fail(self, error: BaseException) -> None:
        """Tell the others that this rank cannot go on. The first reason counts."""
        self._end("failed", f"{type(error).__name__}: {error}")

    def leave(self, reason: str) -> None:
        """Nothing more is to come from here. The rank that holds the store waits a while for the others to say so too:
        they may still have to hear the last words."""
        self._end("left", reason)
        atexit.unregister(self._still)
        self._still()
        try:
            self._store.set(f"farewell/{self.rank}", b"")  # type: ignore[arg-type]
            give_up_at = time.monotonic() + FAREWELL_S
            keys = [f"farewell/{rank}" for rank in range(self.size)]
            while self.rank == 0 and self._own.words == "done" and time.monotonic() < give_up_at:
                if self._store.check(keys):
                    return
                self.check()
                time.sleep(LONGEST_LOOK_S)
        except (RuntimeError, OSError, PeerLost):
            pass  # they are gone; there is nobody to be polite to

    def _end(self, state: Literal["failed", "left"], words: str) -> None:
        with self._lock:
            if self._own.state == "here":
                self._own = RankPulse(self._own.count + 1, state, words[:1000])
                self._over.set()
                with contextlib.suppress(RuntimeError, OSError):  # the store is gone: they will see that, too
                    self._set_pulse(self._own)

    def _still(self) -> None:
        """The process ends. A thread that is in the store just then would take all of it down with an abort."""
        self._over.set()
        self._heart.join(PULSE_S + SILENT_S)

    def _beat(self) -> None:
        while not self._over.wait(PULSE_S):
            with self._lock:
                if self._own.state != "here":
                    return
                self._own = RankPulse(self._own.count + 1)
                try:
                    self._set_pulse(self._own)
                except (RuntimeError, OSError):
                    return  # the process is ending, or the store is gone: who meets there next will say so

    def _set_pulse(self, beat: RankPulse) -> None:
        self._store.set(f"pulse/{self.rank}", msgspec.msgpack.encode(beat))  # type: ignore[arg-type]

    def _no_store(self, error: BaseException) -> PeerLost:
        return PeerLost(
            "the store at which the ranks meet is gone: the process that holds it (torchrun's agent, else rank 0) has "
            f"ended ({error})"
        )


class Links:
    """On gloo (host memory) or NCCL (a GPU's); counts the bytes that were handed to either. One thread speaks."""

    def __init__(
        self, group: dist.ProcessGroup, peers: Peers, device: torch.device, memory: Memory, *, pinned: bool = False
    ) -> None:
        """`pinned`: host memory is to be read by a GPU."""
        self.device, self.memory, self.pinned = device, memory, pinned
        self.bytes_sent = self.bytes_received = 0
        self._group, self._peers = group, peers
        rooms = Rooms(device, memory, pinned=pinned)
        self.take, self.give_back = rooms.take, rooms.give_back

    def swap(self, out: Sequence[tuple[int, Tensor]], into: Sequence[tuple[int, Tensor]]) -> None:
        """To each rank of `out` its bytes, from each rank of `into` its own; what goes to one rank comes in order."""
        ops = [dist.P2POp(dist.isend, data, rank, self._group) for rank, data in out if data.numel()]
        ops += [dist.P2POp(dist.irecv, data, rank, self._group) for rank, data in into if data.numel()]
        if not ops:
            return
        self.bytes_sent += sum(data.nbytes for _, data in out)
        self.bytes_received += sum(data.nbytes for _, data in into)
        ranks = [op.peer for op in ops]
        try:
            works = dist.batch_isend_irecv(ops)
        except RuntimeError as error:
            raise self._peers.lost(ranks[0], error) from error
        for rank, work in zip(ranks, works, strict=False):  # NCCL has one for all
            try:
                work.wait()
            except RuntimeError as error:
                raise self._peers.lost(rank, error) from error

    def spread(self, data: Tensor) -> None:
        """Rank 0's bytes into everybody's, which are in host memory."""
        for begin in range(0, data.numel(), SPREAD_BYTES):
            here = data[begin : begin + SPREAD_BYTES]
            there = here.to(self.device)
            try:
                dist.broadcast(there, src=0, group=self._group)
            except RuntimeError as error:
                raise self._peers.lost(0, error) from error
            if there is not here:
                here.copy_(there)


def make_links(peers: Peers, tensors: Mapping[str, Tensor], timeout_s: float) -> Links:
    """NCCL if the job has it and every rank has its model on a GPU; else gloo."""
    devices = {tensor.device for tensor in tensors.values()}
    on_gpu = all(device.type == "cuda" for device in devices) and len(devices) == 1
    wanted = b"nccl" if on_gpu and "nccl" in dist.get_backend_config() else b"gloo"
    backend = "nccl" if set(peers.exchange("links", wanted)) == {b"nccl"} else "gloo"
    try:
        group = dist.new_group(backend=backend, timeout=timedelta(seconds=max(timeout_s, LEAST_TIMEOUT_S)))
    except RuntimeError as error:
        raise PeerLost(f"the ranks could not connect to each other over {backend}: {error}") from error
    assert group is not None
    pinned = any(device.type == "cuda" for device in devices)
    device = devices.pop() if backend == "nccl" else torch.device("cpu")
    return Links(group, peers, device, Memory(KEPT), pinned=pinned)


def peers_of_job(timeout_s: float) -> Peers:
    """All ranks of the default process group."""
    store = dist.distributed_c10d._get_default_store()  # there is no public way to it
    return Peers(store, dist.get_rank(), dist.get_world_size(), name=str(next(_names)), timeout_s=timeout_s)
