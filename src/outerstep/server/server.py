"""DiLoCoServer: the parameter server as an object.

server = DiLoCoServer(model.state_dict(), num_workers=2, port=8512)
server.run()                      # or start() … stop()
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import secrets
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import msgspec
from torch import Tensor

from ..config import DEFAULT_PORT, ServerConfig, build, is_named, outer_arguments
from ..core.delayed import DelayedNesterov
from ..core.fragments import check_cycle
from ..core.outer import Nesterov, OptimizerFactory, TorchOuter, check_factory
from ..core.own_outer import named_factory, outer_of
from ..dashboard import Dashboard, ServerTokens, link_to
from ..durable.run_folder import RunFolder
from ..errors import ConfigError
from ..events import EventSink
from ..observe.loggers import check_installed
from ..observe.status import ServerStatus
from ..security import Access, Credentials, Guard, ServerIdentity, TokenGuard, is_loopback
from ..security.access import write_address
from ..types import Manifest
from ..wire.http_server import HttpServer, ServiceLimits
from .audit import Audit
from .model_state import ModelState
from .outer_state import OptimizerMaker, Outer, rule_told
from .reached import EVERYWHERE, advertised, open_port
from .resuming import find_run
from .run import read_codecs
from .saved import ServerState
from .service import ParameterService

log = logging.getLogger(__name__)

LOOK_S = 0.2  # between two looks whether a signal handler has asked the server to stop


class DiLoCoServer:
    """Holds the global model, takes contributions, steps, publishes.

    `model_state_dict` is the starting point; `outer_optimizer_factory(parameters)` builds any torch optimizer (default:
    Nesterov with `outer_lr` 0.7 and `outer_momentum` 0.9). `event_sink` is called with each event (events.py). Every
    other keyword is a field of `ServerConfig`.
    """

    def __init__(
        self,
        model_state_dict: Mapping[str, Tensor] | None,
        num_workers: int,
        port: int | None = DEFAULT_PORT,
        outer_optimizer_factory: OptimizerFactory | None = None,
        *,
        event_sink: EventSink | None = None,
        **settings: Any,
    ) -> None:
        self.config = build(ServerConfig, {"num_workers": num_workers, "port": port, **settings})
        if self.config.compat_port is not None:
            raise ConfigError(
                f"compat_port={self.config.compat_port} is for `outerstep server`, which opens that port: from Python "
                "use outerstep.compat.CompatServer(server, port) beside the server"
            )
        read_codecs(
            self.config.codec or "bf16", self.config.down_codec or "same"
        )  # what is wrong with them is said now
        if self.config.sync_every is not None and self.config.num_fragments is not None:
            check_cycle(self.config.sync_every, self.config.num_fragments)
        check_installed(self.config.log_to)
        folder = _open_folder(self.config.save_dir) if self.config.save_dir is not None else None
        try:
            self.service = self._make_service(model_state_dict, folder, outer_optimizer_factory, event_sink)
        except BaseException:
            if folder is not None:
                folder.close()
            raise
        self.dashboard = self._make_dashboard() if self.config.page else None
        self._http: HttpServer | None = None
        self._identity: ServerIdentity | None = None  # None = insecure, or not started yet
        self._stopped = False
        self._stopping = threading.Lock()
        self._asked_to_stop = threading.Event()
        self._stop_requested = False  # by a signal handler, perhaps
        self._life = threading.Lock()

    def _make_service(
        self,
        model_state_dict: Mapping[str, Tensor] | None,
        folder: RunFolder | None,
        outer_optimizer_factory: OptimizerFactory | None,
        event_sink: EventSink | None,
    ) -> ParameterService:
        """Of a new run, or of the one that is resumed from save_dir or from `resume`."""
        found, unused = find_run(self.config, folder), model_state_dict is not None
        if found is not None:
            if model_state_dict is not None:
                _check_same_model(model_state_dict, found.state, self.config)
            model_state_dict = {**found.state.rest, **found.state.params}
        if model_state_dict is None:
            raise ConfigError("a server needs a model: give model_state_dict, or resume=PATH of a saved state")
        run_id = folder.facts.run_id if folder is not None and folder.facts is not None else secrets.token_hex(8)
        service = ParameterService(
            self.config,
            ModelState(model_state_dict),
            _optimizer_maker(self.config, outer_optimizer_factory),
            run_id=run_id,
            folder=folder,
            on_stop=self._stop_soon,
            event_sink=event_sink,
        )
        if found is not None:
            service.restore(found)
            if unused:
                place, remedy = self.config.resume, "leave resume out"
                if found.in_place:
                    place, remedy = self.config.save_dir, "choose another save_dir (--save-dir), or move this one away"
                log.warning(
                    "the weights given (-m) are not used: the run in %s goes on from its own, at round %d. For a "
                    "new run %s",
                    *(place, service.coordinator.sync_round, remedy),
                )
        return service

    def _make_dashboard(self) -> Dashboard:
        service = self.service
        made = Dashboard(service.status, read_model=service.read_model, takes_orders=self.config.remote_control)
        service.events.add(made.happened)
        service.routes |= made.routes
        return made

    @property
    def address(self) -> str:
        """host:port, once started."""
        if self._http is None:
            raise ConfigError("the server has no address before start()")
        return write_address(self.config.host, self._http.port)

    @property
    def access(self) -> Access:
        """What a worker on another machine needs; `access.join_string` is the line to hand over. Once started."""
        if self._http is None or self._identity is None:
            raise ConfigError(
                "a server that was started insecure has no join string"
                if self.config.insecure
                else "the server has no join string before start()"
            )
        (host, port), *others = advertised(self.config, self._http.port)
        token = self._identity.tokens.load().run
        return Access(host, port, token, self._identity.fingerprint, others=tuple(others))

    def page_link(self) -> str:
        """A link to this server's page: it logs one browser in, once, within a quarter of an hour. Once started."""
        if self.dashboard is None:
            raise ConfigError("this server has no page: start it without page=False (--no-page)")
        if self.config.insecure:
            return link_to(self.address, "", plain=True)
        return link_to(self.access.address, self.dashboard.make_link("run").code, plain=False)

    @property
    def is_resumed(self) -> bool:
        """Has it resumed an earlier run?"""
        return self.service.resumed

    @property
    def run_id(self) -> str:
        return self.service.coordinator.run_id

    def save_state(self, path: str | os.PathLike[str] | None = None) -> Path:
        """Write the state of the run into `save_dir`, or a copy of it as the folder `path`, between two rounds. Returns
        where it is; `load_state` and `resume` take that."""
        return self.service.save("save_state()", "" if path is None else os.fspath(path))

    def expect_layer_above(self) -> None:
        """This server is a cluster of another layer, which leases to it what it leases to its workers. Said before its
        first worker joins; `Cluster` says it, too."""
        self.service.coordinator.leases.is_below = True

    def load_state(self, path: str | os.PathLike[str]) -> None:
        """Resume a saved run from a state, a folder of states, or an old `.pt`. Before anybody has joined."""
        config = dataclasses.replace(self.config, resume=os.fspath(path))
        found = find_run(config, self.service.writer.folder)
        assert found is not None
        self.service.restore(found)

    @property
    def sync_round(self) -> int:
        return self.service.coordinator.sync_round

    def start(self) -> DiLoCoServer:
        """Listen, in the background."""
        with self._life:
            if self._http is not None:
                raise ConfigError("this server was started before; make a new one")
            if self.config.save_dir is None:
                log.info("nothing of this run is kept on disk: give save_dir, and it survives a restart of the server")
            if not self.config.insecure:
                self._identity = self._credentials.server_identity(self.config.tls_cert, self.config.tls_key)
            http = self._listen()
            try:
                self._announce(http.port)
            except ConfigError:
                http.stop()
                raise
            self._http = http
        self.service.start()
        self.service.monitor.start()
        if self.dashboard is not None:
            self.dashboard.start()
        self._http.start()
        if self._identity is not None:
            log.info("listening on %s, certificate sha256 %s", self.address, self._identity.fingerprint)
            return self
        log.info("listening on %s", self.address)
        if not is_loopback(self.config.host):
            log.warning(
                "INSECURE: listening on %s without authentication or encryption. Anybody who reaches port %d can read "
                "and change the model; anybody who sees the traffic can read it. Leave insecure out, or stay on "
                "127.0.0.1.",
                self.config.host,
                self._http.port,
            )
        return self

    def run(self) -> None:
        """Start if need be, and stay until stop() or Ctrl-C."""
        if self._http is None:
            self.start()
        try:
            self.wait()
        finally:
            self.stop()

    def wait(self) -> None:
        """Until somebody asks the server to stop, or Ctrl-C: that is how a server is meant to be stopped."""
        with contextlib.suppress(KeyboardInterrupt):
            while not self._stop_requested and not self._asked_to_stop.wait(LOOK_S):
                pass

    def request_stop(self) -> None:
        """Make run() stop and return; for signal handlers too. One runs in the middle of whatever the main thread does,
        wait() included, so that it must not take a lock: not even an Event's."""
        self._stop_requested = True

    def _stop_soon(self) -> None:
        """The run has ended. In a thread of its own: stop() waits for the thread that noticed."""
        self._asked_to_stop.set()
        threading.Thread(target=self.stop, name="outerstep-stop").start()

    def stop(self) -> None:
        """Stop listening, finish what was decided, save if there is a save_dir. Safe to call twice."""
        self._asked_to_stop.set()
        with self._stopping:  # a second caller waits until it is done
            if self._http is None or self._stopped:
                self.service.writer.close()
                return
            self._stopped = True
            log.info("stopping at round %d", self.sync_round)
            self.service.release_polls()
            self._http.stop()
            self.service.monitor.stop()
            self.service.stop()
            if self.dashboard is not None:
                self.dashboard.stop()
            if self.config.save_dir is None:
                log.info("nothing was saved (no save_dir); the workers hold the weights")

    def status(self) -> dict[str, object]:
        """What `GET /status` answers, as a mapping; `typed_status` is the same as a value."""
        return cast("dict[str, object]", msgspec.to_builtins(self.typed_status()))

    def typed_status(self) -> ServerStatus:
        return self.service.status()

    def silence(self) -> str:
        """Who has not been heard from for long, and when it counts as dead; "" = nobody."""
        return self.service.silence()

    def get_global_params(self) -> dict[str, Tensor]:
        """A copy of the newest global weights, fp32."""
        return self.service.global_params()

    def __enter__(self) -> DiLoCoServer:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def _credentials(self) -> Credentials:
        return Credentials(self.config.credentials)

    def _announce(self, port: int) -> None:
        """So that this user's commands on this machine find the server's tokens and certificate by its address."""
        if self._identity is None:
            return
        hosts = {self.config.host, *(host for host, there in advertised(self.config, port) if there == port)}
        if hosts & set(EVERYWHERE):
            hosts = (hosts - set(EVERYWHERE)) | {"127.0.0.1"}
        self._credentials.announce(hosts, port, self._identity)

    def _listen(self) -> HttpServer:
        limits = ServiceLimits(
            max_connections=self.config.max_connections, control_from_anywhere=self.config.remote_control
        )
        tls = self._identity.context() if self._identity is not None else None
        guard: Guard | None = None
        tokens: ServerTokens | None = None
        if self._identity is not None:
            guard = known = TokenGuard(self._identity.tokens)
            self.service.valid_tokens = known.valid_names
            tokens = ServerTokens(self._identity.tokens, known)
        if self.dashboard is not None:
            self.dashboard.guard_with(tokens, tls=tls is not None)
        audit = Audit(self.service.events)

        def listen(port: int) -> HttpServer:
            return HttpServer(
                self.service.routes,
                self.config.host,
                port,
                limits,
                tls=tls,
                guard=guard,
                on_refusal=audit,
                names=[self.config.advertise or ""],
            )

        return open_port(self.config, listen)


def _optimizer_maker(config: ServerConfig, factory: OptimizerFactory | None) -> OptimizerMaker:
    """How the outer optimizer is made once the model is known. What is wrong with it is said now."""
    buffer_size = config.delayed_nesterov
    if config.async_mode and not buffer_size:
        log.warning(
            "asynchronous, and dn_buffer_size=0: the outer optimizer steps on every push. With momentum this tends to "
            "diverge; leave dn_buffer_size out for Delayed Nesterov."
        )
    if factory is not None and is_named(config):
        raise ConfigError(
            f"outer_optimizer ({config.outer_optimizer!r}) and outer_optimizer_factory both make the outer optimizer: "
            "leave one of the two out"
        )
    unread = {name: getattr(config, name) for name in ("outer_lr", "outer_momentum", "nesterov")}
    for name, value in unread.items():
        if factory is not None and value is not None:
            raise ConfigError(
                f"{name} ({value}) has no effect where outer_optimizer_factory makes the outer optimizer: leave it "
                "out, and say it there"
            )
    if factory is not None:
        check_factory(factory)
    elif is_named(config):
        check_factory(_named(config), f"outer_optimizer {config.outer_optimizer!r}")
    elif buffer_size and rule_told(config).momentum and not rule_told(config).nesterov:
        raise ConfigError(
            "Delayed Nesterov has no plain momentum, got nesterov=False with outer_momentum="
            f"{rule_told(config).momentum:g}: choose outer_momentum=0 (none at all), or dn_buffer_size=0"
        )
    made = _make_optimizer(config, factory, {"probe": (2, 2)})
    if config.device != "cpu" and isinstance(made, TorchOuter):
        raise ConfigError(
            f"with device {config.device!r} the outer step must have the same bits on the GPU and on the CPU (where "
            f"the server goes on if the GPU has no room), and torch's {made.name} promises none: use nesterov or an "
            "outerstep.OuterOptimizer, or leave device out"
        )
    return lambda config, manifest: _make_optimizer(config, factory, _shapes(manifest))


def _named(config: ServerConfig) -> OptimizerFactory:
    return named_factory(config.outer_optimizer, outer_arguments(config))


def optimizer_of_settings(config: ServerConfig, manifest: Manifest) -> Outer:
    """To replay a run that is not to be served. Its folder may be a stranger's: no module is imported because a record
    in it says so."""
    if ":" in config.outer_optimizer:
        raise ConfigError(f"its outer optimizer is a class of somebody's own, {config.outer_optimizer!r}")
    return _make_optimizer(config, None, _shapes(manifest))


def _make_optimizer(
    config: ServerConfig, factory: OptimizerFactory | None, shapes: Mapping[str, tuple[int, ...]]
) -> Outer:
    buffer_size, factory = config.delayed_nesterov, _named(config) if is_named(config) else factory
    if factory is not None:
        return DelayedNesterov.from_sgd(buffer_size, factory, shapes) if buffer_size else outer_of(factory, shapes)
    rule = rule_told(config)
    if buffer_size:
        return DelayedNesterov(buffer_size, rule.lr, rule.momentum)
    portable = config.deterministic or config.device != "cpu"
    return Nesterov(rule.lr, rule.momentum, nesterov=rule.nesterov, portable=portable)


def _shapes(manifest: Manifest) -> dict[str, tuple[int, ...]]:
    return {spec.name: spec.shape for spec in manifest.parameters if spec.role == "parameter"}


def _check_same_model(given: Mapping[str, Tensor], saved: ServerState, config: ServerConfig) -> None:
    odd = ModelState(given).differing({**saved.rest, **saved.params}, saved.manifest)
    if odd and config.resume is None:
        raise ConfigError(
            f"save_dir {config.save_dir!r} holds run {saved.run_id} of another model than the one given: {odd[0]!r} is "
            "missing or has another shape; give this model a save_dir of its own, or leave the model out to resume it"
        )
    if odd:
        raise ConfigError(
            f"the saved state is of another model than the one given: {odd[0]!r} is missing or has another shape; "
            "leave the model out to resume, or leave resume out to train this one from its start"
        )


def _open_folder(place: str) -> RunFolder:
    """Ours from now on, and known to be writable rather than found not to be after the first rounds."""
    try:
        folder = RunFolder(Path(place))
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise ConfigError(f"save_dir {place!r} cannot be written: {error.strerror}") from error
    return folder
