"""`outerstep run -n 2 -- COMMAND`: a server in this process, and the training script beside it as the first worker.

    1  listen, and print the line for the second PC
    2  start the script; where it attaches, it hands its model over (worker/initial.py), and the server begins with it
    3  wait for the script, then for the workers elsewhere; or for Ctrl-C, which lets everybody contribute and leave
    4  save, and say where the model is

A run that is in the folder already is resumed, and its model is the run's own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..attached import ATTACHED_VARIABLE, INITIAL_VARIABLE
from ..config import SERVER, WORKER, ServerCommand, ServerConfig, Sourced, make_command, make_config, resolve
from ..durable.run_folder import RunFolder
from ..errors import ConfigError, OuterstepError
from ..events import Event, WorkerDied, WorkerJoined, WorkerLeft
from ..security import Access, Credentials
from ..security.access import write_address
from ..types import Control
from . import server as server_command
from .discovery import announced
from .options import Found
from .qr import qr_code
from .stopping import Stopping
from .tether import tethered
from .worker import NEVER_ATTACHED, script_environment
from .worker_names import take_name

if TYPE_CHECKING:
    from ..server import DiLoCoServer
    from ..server.waiting import WaitingRoom

log = logging.getLogger(__name__)

LOOK_S = 0.1
CLEAR_LINE = "\r\x1b[2K"
INITIAL = "initial"  # in the run's folder, until the first state is there
NOT_YET = (
    "the run has not begun: the script on the first PC has not come to its outerstep.attach yet, which brings the model"
)
NO_MODEL = (
    "The script ended (exit code {code}) and never came to outerstep.attach, which brings the model: no run was begun. "
    "Put `with outerstep.attach(model, optimizer):` around its training loop"
)
LOCAL = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class FirstScript:
    """The training script beside the server: a process group of its own, which is told once what this process is. What
    is told before it is started keeps it from being started."""

    def __init__(self, program: str, words: list[str]) -> None:
        self._words = [program, *words[1:]]
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()  # signals arrive in a thread of their own
        self._stopped_by: int | None = None  # before it was started
        self._attached = ""  # a file that is there until the script attaches

    def start(self, environ: dict[str, str]) -> None:
        """From the main thread, whose death would end it."""
        handle, self._attached = tempfile.mkstemp(prefix="outerstep-not-attached-")
        os.close(handle)
        words, environ = tethered(self._words), {**environ, ATTACHED_VARIABLE: self._attached}
        with self._lock:
            if self._stopped_by is None:
                self._process = subprocess.Popen(words, env=environ, stdin=subprocess.DEVNULL, process_group=0)

    @property
    def code(self) -> int | None:
        """As a shell shows it; None = it runs, or was not started yet."""
        if self._process is None and self._stopped_by is not None:
            return 128 + self._stopped_by
        code = self._process.poll() if self._process is not None else None
        return code if code is None or code >= 0 else 128 - code

    @property
    def has_attached(self) -> bool:
        return not os.path.exists(self._attached)

    def send(self, number: int) -> None:
        with self._lock:
            if self._process is None:
                self._stopped_by = number
            elif self._process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, number)

    def end(self) -> None:
        """However this command ends, its script ends before."""
        self.send(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()
        with contextlib.suppress(OSError):
            os.unlink(self._attached)


class FirstPc:
    """One life of `outerstep run` on the first PC."""

    def __init__(
        self,
        found: Found,
        command: list[str],
        program: str,
        worker_id: str | None,
        config_file: str | None,
        *,
        announce: bool = False,
        qr: bool = False,
    ) -> None:
        self._announce, self._qr = announce, qr
        self._found = server_command.with_run_folder(found)
        self._config: ServerConfig = make_config(SERVER, self._found)
        self._own: ServerCommand = make_command(SERVER, self._found)
        self._command, self._worker_id, self._config_file = command, worker_id, config_file
        self._script = FirstScript(program, command)
        self._stopping = Stopping(self._say)
        self._made: DiLoCoServer | None = None

    def run(self) -> int:
        """Returns the script's exit code; 1 if it ended well and the server could not save."""
        _check_folder(self._config)
        server_command.show_log(as_json=self._own.log_json)
        if not self._own.log_json:
            logging.getLogger().setLevel(logging.WARNING)  # the script tells the story
        with self._stopping, contextlib.ExitStack() as around:
            around.callback(self._script.end)
            self._stopping.gently(self._leave, self._script.end)
            made = self._start_server(around)
            if made is None:
                return self._ended_without_model()
            self._await_end(made)
        return self._report(made)

    def _say(self, text: str) -> None:
        """On a terminal the script's countdown may stand on the line that is written to."""
        clear = CLEAR_LINE if sys.stderr.isatty() and not self._own.log_json else ""
        server_command.say(clear + text, as_json=self._own.log_json)

    # --- the start ------------------------------------------------------------------------------------------------

    def _start_server(self, around: contextlib.ExitStack) -> DiLoCoServer | None:
        """With the script running beside it; None: the script ended before it brought a model."""
        from ..model_folder import WEIGHTS

        if self._own.model is not None or self._config.resume is not None or _holds_run(self._config):
            made = server_command.make_server(self._found, self._config, self._own)
            around.callback(made.stop)
            made.service.events.add(self._heard)
            self._made = made.start()
            access = None if self._config.insecure else made.access
            self._say_line(access, made.address, resumed_at=made.sync_round)
            self._tell_network(around, access)
            self._say_page(made)
            self._script.start(self._environment(made.address))
            return made
        held = around.enter_context(contextlib.closing(_FolderHeld(self._config)))
        folder = around.enter_context(_initial_folder(self._config))
        with self._listen() as room:
            address = write_address(self._config.host, room.port)
            access = self._access(room.port)
            self._say_line(access, address)
            self._tell_network(around, access)
            self._script.start({**self._environment(address), INITIAL_VARIABLE: str(folder)})
            while not (folder / WEIGHTS).exists():
                if self._script.code is not None or self._stopping.asked is not None:
                    return None
                time.sleep(LOOK_S)
            config = replace(self._config, port=room.port)
            held.close()  # from here on it is the server's
            made = server_command.make_server(self._found, config, replace(self._own, model=str(folder)))
            around.callback(made.stop)
            made.service.events.add(self._heard)
        self._made = made.start()
        (folder / WEIGHTS).unlink()  # the server has it; until its first state is there, a new start asks once more
        self._say_page(made)
        return made

    def _listen(self) -> WaitingRoom:
        from ..server.reached import open_port
        from ..server.waiting import WaitingRoom

        config = self._config
        identity = None
        if not config.insecure:
            identity = Credentials(config.credentials).server_identity(config.tls_cert, config.tls_key)
        return open_port(config, lambda port: WaitingRoom(config.host, port, identity, NOT_YET))

    def _access(self, port: int) -> Access | None:
        from ..server.reached import advertised

        config = self._config
        if config.insecure:
            return None
        identity = Credentials(config.credentials).server_identity(config.tls_cert, config.tls_key)
        (host, there), *others = advertised(config, port)
        return Access(host, there, identity.tokens.load().run, identity.fingerprint, others=tuple(others))

    def _environment(self, address: str) -> dict[str, str]:
        """Of the script: the server is on this machine."""
        host, _, port = address.rpartition(":")
        bare = host.strip("[]")
        local = write_address(LOCAL.get(bare, bare), int(port))
        said = {"server_addr": Sourced(f"http://{local}" if self._config.insecure else local, "`outerstep run`")}
        if self._worker_id is not None:
            said["worker_id"] = Sourced(self._worker_id, "flag --worker-id")
        if self._own.log_json:
            said["log_json"] = Sourced(True, self._found["log_json"].source)
        if self._config.credentials is not None:
            said["credentials"] = Sourced(self._config.credentials, self._found["credentials"].source)
        found = resolve(WORKER, said, file=self._config_file)
        if found["worker_id"].value is None:
            said["worker_id"] = Sourced(take_name(self._config.credentials, keep=False), "`outerstep run`")
            found = resolve(WORKER, said, file=self._config_file)
        make_config(WORKER, found)
        return script_environment(found, self._config_file)

    def _say_line(self, access: Access | None, address: str, resumed_at: int = 0) -> None:
        """For the operator's eyes: a terminal shows the token, anything else may become a log file."""
        count, command = self._config.num_workers, shlex.join(self._command)
        waits = "This PC trains alone (-n 1)."
        if resumed_at:
            waits = f"The run goes on at round {resumed_at}."
        elif count > 1:
            waits = f"The first round waits for {'one' if count == 2 else count - 1} more (-n {count})."
        where = f"{waits} On {'the second' if count == 2 else 'another'} PC, in a folder with the same script"
        if access is None:
            place = f"http://{socket.gethostname()}:{address.rpartition(':')[2]}"
            self._say(f"{where}:\n\n    outerstep run --join {place} -- {command}\n")
            return
        file = Credentials(self._config.credentials).write_join_file(access)
        if sys.stderr.isatty():
            line = f'outerstep run --join "{access.join_string}" -- {command}'
            self._say(f"{where}, paste this line (it holds a token: keep it private):\n\n{line}\n")
            if self._qr and (drawn := qr_code(line)):
                self._say(drawn)
        else:
            self._say(f'{where}: outerstep run --join "LINE" -- {command}, with the line in {file}')

    def _say_page(self, made: DiLoCoServer) -> None:
        if self._config.page:
            self._say(server_command.page_line(made, self._config, as_json=self._own.log_json))

    def _tell_network(self, around: contextlib.ExitStack, access: Access | None) -> None:
        if self._announce and access is None:
            raise ConfigError(
                "--announce needs a certificate to announce, and --insecure has none: leave one of them out"
            )
        if self._announce and access is not None:
            around.enter_context(announced(access))
            self._say("This network is told where the server is: a PC that has joined before finds it with --discover.")

    def _heard(self, event: Event) -> None:
        """Who comes and goes; the script's own lines tell the rest."""
        match event:
            case WorkerJoined(worker=worker, host=host):
                self._say(f"{worker} joined (from {host}).")
            case WorkerLeft(worker=worker, reason=reason):
                self._say(f"{worker} left: {reason}.")
            case WorkerDied(worker=worker, silent_s=silent_s):
                self._say(
                    f"{worker} has been silent for {silent_s:.0f} s: the run goes on without it, until it is back."
                )

    # --- the end --------------------------------------------------------------------------------------------------

    def _leave(self) -> None:
        """Somebody asks this command to stop: the script is told so too, and every other worker contributes and leaves.
        In the thread of the signals."""
        self._script.send(self._stopping.asked or signal.SIGTERM)
        if self._made is None:
            return
        try:
            self._made.service.answer(Control(kind="shutdown", reason="the first PC ended the run"))
        except OuterstepError:  # it has failed, and says so at its end
            self._made.request_stop()

    def _await_end(self, made: DiLoCoServer) -> None:
        while self._script.code is None:
            time.sleep(LOOK_S)
        if self._stopping.asked is not None:
            made.wait()
        elif self._script.code == 0 and self._script.has_attached:
            self._await_others(made)

    def _await_others(self, made: DiLoCoServer) -> None:
        """The script is done; workers elsewhere may not be."""
        said: list[str] = []
        while self._stopping.asked is None and (there := sorted(made.typed_status().workers)):
            if there != said:
                self._say(f"The script here is done. Still training: {', '.join(there)}. Ctrl-C ends the run now.")
                said = there
            time.sleep(LOOK_S)
        if self._stopping.asked is not None:
            made.wait()

    def _ended_without_model(self) -> int:
        code = self._await_script()
        if self._stopping.asked is None and not self._script.has_attached:
            self._say(NO_MODEL.format(code=code))
        return code

    def _await_script(self) -> int:
        while self._script.code is None:
            time.sleep(LOOK_S)
        return self._script.code

    def _report(self, made: DiLoCoServer) -> int:
        code, place = self._script.code or 0, self._config.save_dir
        if self._stopping.asked is None and not self._script.has_attached:
            self._say(NEVER_ATTACHED.format(place="outerstep run"))
        status = made.typed_status()
        if status.failure or status.last_save.startswith("failed"):
            self._say(f"error: {status.failure or f'the last save {status.last_save}'}")
            return code or 1
        if place is not None and (Path(place) / "latest").is_dir():
            model = Path(place) / "latest"
            self._say(f"The model of round {made.sync_round} is in {model}. The same command resumes the run.")
        if code and self._stopping.asked is None:
            self._say(f"The script here ended with exit code {code}; workers elsewhere wait for the same command here.")
        return code


class _FolderHeld:
    """The run's folder, if it has one, for as long as the server is not there that will hold it: a second command would
    remove what the first one's script has put there."""

    def __init__(self, config: ServerConfig) -> None:
        self._folder: RunFolder | None = None
        if config.save_dir is not None:
            try:
                self._folder = RunFolder(Path(config.save_dir))
            except OSError as error:
                why = error.strerror or error
                raise ConfigError(f"save_dir {config.save_dir!r} cannot be written: {why}") from error

    def close(self) -> None:
        if self._folder is not None:
            self._folder.close()


def _check_folder(config: ServerConfig) -> None:
    """Is another server at work in it? Better said before the script is started."""
    _FolderHeld(config).close()


def _holds_run(config: ServerConfig) -> bool:
    from ..server.resuming import holds_run

    if config.save_dir is None:
        return False
    folder = RunFolder(Path(config.save_dir))
    try:
        return holds_run(folder)
    finally:
        folder.close()


@contextlib.contextmanager
def _initial_folder(config: ServerConfig) -> Iterator[Path]:
    """Only this user can read it, or write to it; gone afterwards."""
    if config.save_dir is None:
        with tempfile.TemporaryDirectory(prefix="outerstep-initial-") as made:
            yield Path(made)
        return
    place = Path(config.save_dir).absolute() / INITIAL
    shutil.rmtree(place, ignore_errors=True)  # of a start that was cut off
    place.mkdir(mode=0o700)
    yield place
