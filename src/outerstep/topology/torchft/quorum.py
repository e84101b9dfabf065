"""torchft's Manager, and what has to be done around it so that a run outlives what happens to it.

torchft 0.2.0 elects the quorum, carries the state that a replica heals from, and takes the vote. Around it:

    a quorum that does not come about    is asked for again; the Manager would repeat its first error for ever
    a lighthouse that was restarted      counts its quorums from 1 again, and the Manager takes equal numbers for
                                         equal connections: so every quorum gets process groups of its own. (A firewall
                                         may forget connections that were idle for an hour of training, too.)
    a state on its way to be healed from is read without running any code that it may hold
    the own address                      is the one that the lighthouse is reached from; a host name need not resolve
    the end of the process               does not wait for a quorum that was asked for
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import os
import time
import urllib.request
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import msgspec
import xxhash
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed._serialization import _streaming_load  # what HTTPTransport itself reads with

from ...core.outer import OuterRule

os.environ.setdefault("RUST_LOG", "warn")  # torchft's Rust side reports every quorum otherwise; it looks once

from torchft import Manager
from torchft.checkpointing import HTTPTransport

from ...errors import ServerUnreachable
from ...types import WeightBy
from ..carrying import CarryingThread
from ..group.ranks import Ranks
from .process_groups import ProcessGroups, WantedBackend

log = logging.getLogger(__name__)

HEARTBEAT_S = 0.1  # the Manager's own; its thread does not wait for the training
CONNECT_S = 10.0
ASK_AGAIN_S = 0.2  # between two tries to meet
SAY_SO_S = 10.0
UNWANTED = "Unable to reset NCCL flight recorder"  # with every quorum, where there is none

logging.getLogger("torchft.manager").addFilter(lambda record: UNWANTED not in record.getMessage())


@dataclass(frozen=True)
class TorchftSettings:
    """What a server would say, and where to meet. `quorum_timeout_s`: of one try to meet; `transfer_timeout_s`: of
    everything that a quorum does together."""

    lighthouse: str  # host:port
    outer: OuterRule
    weight_by: WeightBy
    min_replicas: int
    backend: WantedBackend
    quorum_timeout_s: float
    transfer_timeout_s: float
    join_timeout_s: float
    give_up_after_s: float
    on_divergence: Literal["stop", "repair"]


@dataclass(frozen=True)
class Quorum:
    """This replica's rank among those that meet. `healed`: the state it was given, because it was behind. `heals`: it
    gave its own to others that were."""

    rank: int
    size: int
    healed: dict[str, Any] | None
    heals: bool


class Quorums:
    """The quorums of one replica, by torchft's Manager; of a replica of several processes, those of one rank."""

    def __init__(
        self,
        replica_id: str,
        settings: TorchftSettings,
        groups: ProcessGroups,
        ranks: Ranks | None,
        *,
        state: Callable[[], dict[str, Any]],
    ) -> None:
        """`state`: a copy of all that another replica needs to heal. Called in a thread of the Manager's."""
        self._settings = settings
        self._away_since: float | None = None  # the lighthouse
        self._alone = ranks is None
        self._given: dict[str, Any] | None = None
        host = self._own_host()
        self._store: TCPStore | None = None
        port = self._open_store(host) if ranks is None else ranks.tell(lambda: self._open_store(host), int)
        host = host if ranks is None else ranks.tell(lambda: host, str)
        timeout = timedelta(seconds=settings.transfer_timeout_s)
        self._manager = Manager(
            pg=groups,
            load_state_dict=self._keep,
            state_dict=state,
            min_replica_size=settings.min_replicas,
            use_async_quorum=False,
            timeout=timeout,
            quorum_timeout=timedelta(seconds=settings.quorum_timeout_s),
            connect_timeout=timedelta(seconds=CONNECT_S),
            rank=0 if ranks is None else ranks.rank,
            world_size=1 if ranks is None else ranks.size,
            store_addr=host,
            store_port=port,
            lighthouse_addr=f"http://{settings.lighthouse}",
            replica_id=replica_id,
            port=0,
            hostname=host,
            heartbeat_interval=timedelta(seconds=HEARTBEAT_S),
            checkpoint_transport=PlainTransport(host, timeout),
            init_sync=False,  # of several ranks, each would begin with the weights of another replica
            quorum_retries=0,  # it would go on with one that nobody waits for any more, beside the next
        )
        self._client = self._manager._client = _Client(self._manager._client)
        self._manager._executor = _Hand()

    # --- the round of a quorum ------------------------------------------------------------------------------------

    def meet(self, look: Callable[[], None]) -> Quorum:
        """Wait until there is a quorum with this replica in it. `look` is called after each try in vain, and may raise.
        A replica that lags behind the others has their state afterwards."""
        began_at, said = time.monotonic(), False
        self._given = None
        while True:
            try:
                self._manager.start_quorum()
                break
            except (RuntimeError, OSError) as error:  # of the Rust side: no lighthouse, or not everybody in time
                self._manager._quorum_future = None  # else it raises the same error from now on
                self._note_lighthouse(error)
                if not said and time.monotonic() - began_at > SAY_SO_S:
                    log.info("still no quorum: %s", error)
                    said = True
                look()
                if self._away_since is not None:  # else at once: the lighthouse still counts on us
                    time.sleep(ASK_AGAIN_S)
        self._away_since = None
        quorum, given, self._given = self._client.last, self._given, None
        heals = bool(quorum.recover_dst_replica_ranks)
        return Quorum(quorum.replica_rank, quorum.replica_world_size, given, heals)

    def report(self, error: Exception) -> None:
        """The round failed here: this replica will vote against it."""
        self._manager.report_error(error)

    @property
    def errored(self) -> str:
        """What went wrong between the start of the quorum and now ("" = nothing)."""
        error = self._manager.errored()
        return str(error.original_exception) if error is not None else ""

    def vote(self) -> bool:
        """Do all ranks of this replica hold what was agreed? Once per quorum."""
        try:
            committed: bool = self._manager.should_commit()
        except (RuntimeError, OSError) as error:
            log.warning("the commit vote came to nothing: %s", error)
            return False
        return committed

    def rest(self) -> None:
        """Between a vote that failed and the next quorum."""
        time.sleep(ASK_AGAIN_S)

    def _keep(self, state: dict[str, Any]) -> None:
        self._given = state

    # --- where it stands ------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Votes that were carried, of all replicas; a replica with fewer is healed."""
        return int(self._manager.current_step())

    @step.setter
    def step(self, step: int) -> None:
        self._manager.load_state_dict({"step": step, "batches_committed": 0})

    @property
    def silent_s(self) -> float:
        """For how long the lighthouse has not answered. (Processes of one replica must not decide by their clocks.)"""
        return time.monotonic() - self._away_since if self._alone and self._away_since is not None else 0.0

    def close(self) -> None:
        self._manager.shutdown(wait=False)

    # --- inside ---------------------------------------------------------------------------------------------------

    def _note_lighthouse(self, error: Exception) -> None:
        try:
            self._look_for_lighthouse()
            self._away_since = None
        except (OSError, http.client.HTTPException) as away:
            now = time.monotonic()
            self._away_since = self._away_since or now
            if now - self._away_since > self._settings.give_up_after_s:
                raise ServerUnreachable(
                    f"no lighthouse at {self._settings.lighthouse} for {now - self._away_since:.0f} s ({away}); start "
                    "it again there (outerstep lighthouse): it remembers nothing that would be needed"
                ) from error

    def _own_host(self) -> str:
        """The address that the lighthouse sees. Waits for it: whoever starts first may be a replica."""
        give_up_at = time.monotonic() + self._settings.join_timeout_s
        while True:
            try:
                return self._look_for_lighthouse()
            except (OSError, http.client.HTTPException) as error:
                if time.monotonic() > give_up_at:
                    raise ServerUnreachable(
                        f"no lighthouse at {self._settings.lighthouse} ({error}); start one there: outerstep lighthouse"
                    ) from error
                time.sleep(ASK_AGAIN_S)

    def _look_for_lighthouse(self) -> str:
        """It shows a page to whoever asks; a port that is only forwarded does not. Returns where we asked from."""
        host, _, port = self._settings.lighthouse.rpartition(":")
        connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=CONNECT_S)
        with contextlib.closing(connection):
            connection.request("GET", "/")
            own = str(connection.sock.getsockname()[0])
            connection.getresponse()
            return own

    def _open_store(self, host: str) -> int:
        """Of this replica alone: the Manager's keys have no name in front."""
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return int(self._store.port)


class _Hand:
    """What the Manager asks for quorums with. Its own would be waited for at the end of the process, up to the timeout
    of a quorum that nobody wants any more."""

    def submit(self, work: Callable[..., None], **given: Any) -> Future[None]:
        thread = CarryingThread("outerstep-quorum")
        done = thread.submit(partial(work, **given))
        thread.stop()
        return done

    def shutdown(self, wait: bool = True) -> None:
        """It ends with the process."""


class _Client:
    """The Manager's line to its own server, with a number of its own for each quorum."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.last: Any = None

    def _quorum(self, **asked: Any) -> Any:
        self.last = quorum = self._inner._quorum(**asked)
        key = msgspec.json.encode([quorum.quorum_id, quorum.replica_ids, quorum.max_step])
        facts = {name: getattr(quorum, name) for name in QUORUM_FACTS}
        return SimpleNamespace(**facts, quorum_id=xxhash.xxh3_64_intdigest(key) >> 1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


QUORUM_FACTS = (
    "replica_rank",
    "replica_world_size",
    "recover_src_manager_address",
    "recover_src_replica_rank",
    "recover_dst_replica_ranks",
    "store_address",
    "max_step",
    "max_replica_rank",
    "max_world_size",
    "heal",
    "replica_ids",
)


class PlainTransport(HTTPTransport[dict[str, Any]]):  # type: ignore[misc]
    """torchft's, but what it fetches may hold tensors, numbers, text and their containers only; and it comes straight
    from the member that has it, over no proxy of the environment and after no redirect."""

    def __init__(self, host: str, timeout: timedelta) -> None:
        self._host = host
        super().__init__(timeout=timeout, num_chunks=0)

    def address(self) -> str:
        port = self._server.socket.getsockname()[1]
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{port}/checkpoint/"

    @classmethod
    def _load_from_address(cls, address: str, timeout: timedelta) -> object:
        opener = urllib.request.OpenerDirector()
        opener.add_handler(urllib.request.HTTPHandler())
        opener.add_handler(urllib.request.UnknownHandler())
        opener.add_handler(urllib.request.HTTPErrorProcessor())  # anything but 2xx
        opener.add_handler(urllib.request.HTTPDefaultErrorHandler())  # is an HTTPError
        with opener.open(address, timeout=timeout.total_seconds()) as body, warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "The given buffer is not writable"
            )  # it is copied before it is written to
            return _streaming_load(body, weights_only=True)
