"""The commands, in this process: what their flags mean, what they start, what they say."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from outerstep import model_folder, server
from outerstep.cli.options import _read
from outerstep.cli.peer import PEER
from outerstep.cli.server import spelled_out
from outerstep.cli.worker import training_command
from outerstep.config import ROLES, SERVER, WORKER, Role, resolve
from outerstep.errors import ConfigError
from outerstep.security import Access
from outerstep.types import Control, ControlAnswer, Wishes
from outerstep.wire.http_transport import HttpTransport
from typed import typed


@pytest.fixture(autouse=True)
def _nothing_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    for name in os.environ:
        if name.startswith(("DILOCO_", "OUTERSTEP_")):
            monkeypatch.delenv(name)


def run(line: str) -> str:
    """What a command prints; its error is raised."""
    result = typed(shlex.split(line), env={"COLUMNS": "200", "NO_COLOR": "1"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def shown(line: str) -> dict[str, Any]:
    """`config show` as JSON: what was said, and the values."""
    found = json.loads(run(f"config show {line} --json"))
    return {field: at["value"] for field, at in found.items() if at["source"] not in ("default", "not set")}


class TestFlags:
    """The documented command lines, flag by flag."""

    @pytest.mark.parametrize(
        ("line", "said"),
        [
            ("-m path/to/model -n 2 --port 8512", {"model": "path/to/model", "num_workers": 2, "port": 8512}),
            (
                "-m path/to/model -n 3 --async --dn-buffer-size 3 --dylu --dylu-base-sync-every 500",
                {
                    "model": "path/to/model",
                    "num_workers": 3,
                    "async_mode": True,
                    "dn_buffer_size": 3,
                    "dylu": True,
                    "dylu_base_sync_every": 500,
                },
            ),
            (
                "-c -m output_models/my_model/checkpoint-1000 -n 2",
                {"from_checkpoint": True, "model": "output_models/my_model/checkpoint-1000", "num_workers": 2},
            ),
            (
                "-m model -n 2 --outer-lr 0.5 --outer-momentum 0.95",
                {"model": "model", "num_workers": 2, "outer_lr": 0.5, "outer_momentum": 0.95},
            ),
            ("-m model -n 2 --no-nesterov", {"model": "model", "num_workers": 2, "nesterov": False}),
            (
                "-m model -n 2 --outer-optimizer adamw --outer-option lr=0.1 --outer-option betas=0.9,0.95",
                {
                    "model": "model",
                    "num_workers": 2,
                    "outer_optimizer": "adamw",
                    "outer_options": "lr=0.1 betas=0.9,0.95",
                },
            ),
            (
                "-m model -n 5 --aggregation trimmed_mean --trim-fraction 0.2",
                {"model": "model", "num_workers": 5, "aggregation": "trimmed_mean", "trim_fraction": 0.2},
            ),
            (
                "-m model -n 9 --aggregation multi_krum --attackers 1 --bucket-size 2 --cosine-screen",
                {
                    "model": "model",
                    "num_workers": 9,
                    "aggregation": "multi_krum",
                    "attackers": 1,
                    "bucket_size": 2,
                    "cosine_screen": True,
                },
            ),
            (
                "-m model -n 5 --aggregation centered_clipping --clip-radius 1.5 --aggregation-iterations 2",
                {
                    "model": "model",
                    "num_workers": 5,
                    "aggregation": "centered_clipping",
                    "clip_radius": 1.5,
                    "aggregation_iterations": 2,
                },
            ),
            (
                "-m model -n 2 --save-dir /path/to/saves --save-every 10",
                {"model": "model", "num_workers": 2, "save_dir": "/path/to/saves", "save_every": 10},
            ),
            (
                "-m model -n 2 --resume /path/to/saves/diloco_server_state_latest.pt",
                {"model": "model", "num_workers": 2, "resume": "/path/to/saves/diloco_server_state_latest.pt"},
            ),
            (
                "-n 2 --host 0.0.0.0 --heartbeat-timeout 60 --min-workers 2",
                {"num_workers": 2, "host": "0.0.0.0", "heartbeat_timeout_s": 60.0, "min_workers": 2},
            ),
            ("-n 2 --fragments 4 --no-fragment-carry", {"num_workers": 2, "num_fragments": 4, "fragment_carry": False}),
            ("-n 2 --compat-port 8600 --insecure", {"num_workers": 2, "compat_port": 8600, "insecure": True}),
            ("--port none", {"port": None}),
        ],
    )
    def test_of_a_server(self, line: str, said: dict[str, Any]) -> None:
        assert shown(f"server {line}") == said

    @pytest.mark.parametrize(
        ("line", "said"),
        [
            ("--server 192.168.1.100:8512 --sync-every 500", {"server_addr": "192.168.1.100:8512", "sync_every": 500}),
            (
                "--sync-every 500 --dylu --heartbeat-interval 30 -d 0",
                {"sync_every": 500, "dylu": True, "heartbeat_interval_s": 30.0, "devices": "0"},
            ),
            (
                "--worker-id left --no-bf16 --num-fragments 4",
                {"worker_id": "left", "bf16_comm": False, "num_fragments": 4},
            ),
        ],
    )
    def test_of_a_worker(self, line: str, said: dict[str, Any]) -> None:
        assert shown(f"worker {line}") == said

    @pytest.mark.parametrize("role", ROLES.values(), ids=lambda role: role.name)
    def test_each_setting_has_one_that_sets_it_and_nothing_else(self, role: Role) -> None:
        examples, special = (
            {int: 64, float: 0.5, str: "/tmp"},
            {"advertise": "h:1", "above": "h:1", "via": "h:1", "topology": "gossip"},
        )
        needed = {
            "from_checkpoint": " -m x",
            "via": " --above h:1",
            "relay": " --above h:1",
            "cluster": " --above h:1",
            "above_every": " --above h:1",
            "above_wait_s": " --above h:1",
            "inner_momentum": " --above h:1",
            "tls_cert": " --tls-key x",
            "tls_key": " --tls-cert x",
        }
        for setting in role.settings:
            kind = role.kinds[setting.field]
            if kind.base is bool:
                lines = {setting.flag: True, setting.opposite: False}
            else:
                value = kind.choices[-1] if kind.choices else special.get(setting.field, examples[kind.base])
                lines = {f"{flag} {value}": value for flag in setting.flags.split()}
            for line, value in lines.items():
                said = shown(f"{role.name} {line}{needed.get(setting.field, '')}")
                assert said[setting.field] == value, line
                assert len(said) == 1 + (setting.field in needed), line

    @pytest.mark.parametrize("role", ROLES.values(), ids=lambda role: role.name)
    def test_help_lists_each_with_its_sentence_and_its_default(self, role: Role) -> None:
        text = " ".join(run(f"{role.name} --help-all").replace("│", " ").split())
        for setting in role.settings:
            assert setting.flag in text
            assert f"{setting.sentence} {role.default_text(setting)}" in text
        panels = list(dict.fromkeys(setting.panel for setting in role.settings))
        assert sorted(panels, key=lambda panel: text.index(f"─ {panel} ─")) == panels

    @pytest.mark.parametrize("role", [SERVER, WORKER, PEER], ids=["server", "worker", "peer"])
    def test_help_is_short_and_shows_what_people_need_with_an_example(self, role: Role) -> None:
        name = "peer" if role is PEER else role.name
        text = run(f"{name} --help")
        assert 9 <= len(role.group_of) <= 10
        assert role.group_of.keys() <= role.by_field.keys()
        for setting in role.settings:
            rows = [line for line in text.splitlines() if re.match(rf"│ {setting.flag}[ ,]", line)]
            assert len(rows) == (setting.field in role.group_of), setting.flag
        for word in (f"Example: outerstep {name} -", "--help-all", *role.essential):
            assert word in text
        assert len(text.splitlines()) < 75

    def test_a_trim_that_trims_nothing_is_refused_with_where_it_was_said(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """One of the settings is in a file, one in a variable, one on the command line."""
        Path("outerstep.toml").write_text('[server]\naggregation = "trimmed_mean"\n')
        monkeypatch.setenv("OUTERSTEP_TRIM_FRACTION", "0.2")
        run("config show server -n 5")
        with pytest.raises(ConfigError, match=r"'trimmed_mean' needs at least 5 .*trims nothing of 4") as told:
            run("config show server -n 4")
        for said in ("num_workers: flag --num-workers", "aggregation: outerstep.toml:2", "OUTERSTEP_TRIM_FRACTION"):
            assert said in str(told.value)

    def test_one_of_the_wrong_type_is_refused_with_its_name(self) -> None:
        with pytest.raises(ConfigError, match="--sync-every 'often' is not a valid sync_every: must be a whole number"):
            run("config show server --sync-every often")


class TestConfig:
    def test_show_tells_where_each_value_came_from(self, monkeypatch: pytest.MonkeyPatch) -> None:
        Path("outerstep.toml").write_text("[server]\nnum_workers = 3\n")
        monkeypatch.setenv("OUTERSTEP_OUTER_LR", "0.5")
        rows = {
            line.split("│")[1].strip(): line for line in run("config show server --async").splitlines() if "│" in line
        }
        assert "outerstep.toml:2" in rows["num_workers"]
        assert "OUTERSTEP_OUTER_LR" in rows["outer_lr"]
        assert "flag --async" in rows["async_mode"]
        assert "default" in rows["nesterov"]
        assert "all expected workers" in rows["quorum"]

    def test_show_without_a_role_shows_both(self) -> None:
        found = json.loads(run("config show --json"))
        assert {name: set(settings) for name, settings in found.items()} == {
            role.name: set(role.by_field) for role in ROLES.values()
        }
        assert "heartbeat_timeout_s" in run("config show")

    def test_show_takes_another_file(self) -> None:
        Path("other.toml").write_text("[worker]\nsync_every = 9\n")
        assert shown("worker --config other.toml") == {"sync_every": 9}

    def test_show_complains_like_the_command_itself(self) -> None:
        with pytest.raises(ConfigError, match=r"quorum \(3\) must not exceed num_workers \(2\)"):
            run("config show server -n 2 --quorum 3")

    def test_options_before_the_role_are_not_lost_in_silence(self) -> None:
        with pytest.raises(ConfigError, match="write --json and --config after 'server'"):
            run("config show --json server")

    def test_init_writes_a_file_once(self) -> None:
        run("config init")
        assert "[server]" in Path("outerstep.toml").read_text()
        with pytest.raises(ConfigError, match=r"outerstep\.toml is there already"):
            run("config init")
        run("config init --force")
        assert run("config init -") == Path("outerstep.toml").read_text()


class Started:
    """Stands for DiLoCoServer: keeps what it was given, and ends at once."""

    last: Started

    def __init__(self, state: dict[str, Any], **settings: Any) -> None:
        self.state, self.settings, self.address = state, settings, "127.0.0.1:8512"
        self.access = Access("127.0.0.1", 8512, "run-" + 43 * "x", 64 * "0")
        Started.last = self

    sync_round = 7
    is_resumed = False

    def silence(self) -> str:
        return ""

    def start(self) -> Started:
        return self

    def run(self) -> None:
        pass

    def wait(self) -> None:
        pass

    def request_stop(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def status(self) -> dict[str, object]:
        return {"failure": "", "last_save": ""}


@pytest.fixture
def _no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "DiLoCoServer", Started)
    monkeypatch.setattr(model_folder, "load_state_dict", lambda folder: {"from": str(folder)})
    found = Path("folder/checkpoint-7")
    monkeypatch.setattr(model_folder, "load_checkpoint", lambda folder: ({"checkpoint": folder}, found))


@pytest.mark.usefixtures("_no_server")
class TestServer:
    def test_it_is_made_from_every_setting(self) -> None:
        run("server -m folder -n 3 --quorum 2 --weight-by tokens")
        assert Started.last.state == {"from": "folder"}
        assert Started.last.settings.keys() == set(ROLES["server"].config_fields)
        assert Started.last.settings["quorum"] == 2
        assert Started.last.settings["weight_by"] == "tokens"

    def test_a_checkpoint_is_loaded_as_one(self) -> None:
        run("server -c -m folder -n 3")
        assert Started.last.state == {"checkpoint": "folder"}
        assert Started.last.settings["model_files"] == "folder/checkpoint-7"

    def test_a_saved_state_needs_no_model(self) -> None:
        run("server -n 3 --resume saves")
        assert (Started.last.state, Started.last.settings["resume"]) == (None, "saves")

    @pytest.mark.parametrize(
        ("line", "save_dir", "resume"),
        [
            ("-m folder", "outerstep-run", None),
            ("-m folder --save-every 5", "outerstep-run", None),
            ("-m folder --save-dir kept", "kept", None),
            ("-m folder --durability none", None, None),
            ("-m folder --durability none --save-dir kept", "kept", None),
            ("-m folder --save-dir none", None, None),
            ("--resume", "outerstep-run", "outerstep-run"),
            ("--resume --save-dir kept", "kept", "kept"),
            ("--resume old/state --save-dir kept", "kept", "old/state"),
            ("--resume=old/state", "outerstep-run", "old/state"),
        ],
    )
    def test_where_the_run_is_kept_and_what_is_resumed(
        self, line: str, save_dir: str | None, resume: str | None
    ) -> None:
        run(" ".join(spelled_out(["server", "-n", "3", *line.split()])))
        assert (Started.last.settings["save_dir"], Started.last.settings["resume"]) == (save_dir, resume)

    def test_resuming_what_is_kept_nowhere_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="resumes the run in save_dir, and there is none"):
            run("server -n 3 --durability none --resume=save_dir")

    def test_nor_does_a_folder_that_holds_a_run(self) -> None:
        Path("outerstep-run").mkdir()
        Path("outerstep-run/run.json").write_text("{}")
        run("server -n 3")
        assert (Started.last.state, Started.last.settings["save_dir"]) == (None, "outerstep-run")

    def test_without_either_it_says_what_to_give(self) -> None:
        with pytest.raises(ConfigError, match="no model to train: give -m MODEL_DIR, or --resume"):
            run("server -n 3")

    @pytest.mark.parametrize(
        ("end", "said"),
        [
            ({"failure": "CloseRound failed", "last_save": ""}, "CloseRound failed"),
            ({"failure": "", "last_save": "failed: No space left on device"}, "No space left on device"),
        ],
    )
    def test_one_that_ends_with_something_undone_says_so_by_exit_code_1(
        self, end: dict[str, object], said: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Started, "status", lambda _: end)
        done = typed(["server", "-m", "folder", "-n", "3"])
        assert done.exit_code == 1
        assert said in done.output

    def test_the_compatibility_port_is_opened_when_asked_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        opened: list[str] = []

        class CompatServer:
            def __init__(self, made: Started, port: int, host: str | None) -> None:
                assert made is Started.last
                self.place = f"{host}:{port}"

            def __enter__(self) -> CompatServer:
                opened.append(self.place)
                return self

            def __exit__(self, *exc: object) -> None:
                opened.append("closed")

            address = "127.0.0.1:8600"

        module = ModuleType("outerstep.compat")
        module.CompatServer = CompatServer  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "outerstep.compat", module)
        run("server -m folder -n 3")
        assert opened == []
        run("server -m folder -n 3 --host 0.0.0.0 --compat-port 8600")
        run("server -m folder -n 3 --host 0.0.0.0 --compat-port 8600 --compat-host 10.0.0.1")
        assert opened == ["None:8600", "closed", "10.0.0.1:8600", "closed"]
        assert Started.last.settings["compat_port"] is None  # the command's business, not the server's

    @pytest.mark.parametrize(("line", "field"), [("model = 3", "model"), ('from_checkpoint = "no"', "from_checkpoint")])
    def test_a_file_with_the_wrong_kind_of_value_is_named_before_anything_starts(self, line: str, field: str) -> None:
        Path("outerstep.toml").write_text(f"[server]\nnum_workers = 3\nresume = 'saves'\n{line}\n")
        for command in ("server", "config show server"):
            with pytest.raises(ConfigError, match=rf"^{field} must be .* \({field}: outerstep\.toml:4\)$"):
                run(command)


class TestWorker:
    @pytest.fixture(autouse=True)
    def _nobody_is_asked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """tests/integration/test_reaching.py looks at servers, and at the end of scripts."""
        monkeypatch.setattr("outerstep.cli.worker.check_server", lambda server, credentials, worker_id: "")
        monkeypatch.setattr("outerstep.cli.worker.promise", lambda message: "file")

    @pytest.mark.parametrize(
        ("command", "project", "template", "words"),
        [
            ("train", "my_project", "train.yaml", "forgather -p my_project -t train.yaml train"),
            ("train --max-steps 5", None, "train.yaml", "forgather -t train.yaml train --max-steps 5"),
            ("train", None, None, "forgather train"),
            ("python train.py", None, None, "python train.py"),
            ("train --fast", None, None, "train --fast"),
        ],
    )
    def test_the_words_that_are_run(self, command: str, project: str | None, template: str | None, words: str) -> None:
        assert training_command(command.split(), project, template) == words.split()

    def test_without_forgather_it_says_what_to_write_instead(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", "/nonexistent")
        with pytest.raises(
            ConfigError, match=r"command not found: 'forgather'.*`-- python train.py` instead.*--compat-port"
        ):
            run("worker --server h:1 -p my_project -t train.yaml train")

    def test_settings_from_a_file_reach_the_script(self, monkeypatch: pytest.MonkeyPatch) -> None:
        handed: dict[str, str] = {}
        monkeypatch.setattr("os.execve", lambda program, words, environ: handed.update(environ))
        Path("outerstep.toml").write_text('[worker]\nserver_addr = "h:1"\nstalled_after_s = 5\ndevices = "1"\n')
        run(f"worker --no-bf16 -- {sys.executable} train.py")
        ours = {k: v for k, v in handed.items() if k.startswith(("DILOCO_", "OUTERSTEP_", "CUDA_VIS"))}
        assert ours == {
            "DILOCO_SERVER": "h:1",
            "DILOCO_BF16_COMM": "0",
            "OUTERSTEP_STALLED_AFTER_S": "5",
            "OUTERSTEP_METRICS_DIR": "outerstep-metrics",
            "OUTERSTEP_ATTACHED_FILE": "file",
            "CUDA_VISIBLE_DEVICES": "1",
        }

    def test_devices_that_are_no_text_are_refused_with_file_and_line(self) -> None:
        Path("outerstep.toml").write_text('[worker]\nserver_addr = "h:1"\ndevices = 0\n')
        with pytest.raises(ConfigError, match=r"^devices must be text, got 0 \(devices: outerstep\.toml:3\)$"):
            run(f"worker -- {sys.executable} train.py")

    def test_another_file_is_the_scripts_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        handed: dict[str, str] = {}
        monkeypatch.setattr("os.execve", lambda program, words, environ: handed.update(environ))
        Path("outerstep.toml").write_text("[worker]\nsync_every = 5\n")
        Path("other.toml").write_text('[worker]\nserver_addr = "h:1"\n')
        run(f"worker --config other.toml -- {sys.executable} train.py")
        assert handed["OUTERSTEP_CONFIG"] == os.path.abspath("other.toml")
        assert resolve(WORKER, {}, environ=handed)["sync_every"].source == "default"

    def test_a_topology_stands_for_the_server_that_is_not_needed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        handed: dict[str, str] = {}
        monkeypatch.setattr("os.execve", lambda program, words, environ: handed.update(environ))
        run(f"worker --topology torchft --lighthouse h:29510 -- {sys.executable} train.py")
        assert (handed["DILOCO_SERVER"], handed["OUTERSTEP_LIGHTHOUSE"]) == ("torchft", "h:29510")
        with pytest.raises(ConfigError, match="leave one of the two out"):
            run(f"worker --topology torchft --server h:1 -- {sys.executable} train.py")
        with pytest.raises(ConfigError, match="lighthouse must be host:port, got 'h'"):
            run(f"worker --topology torchft --lighthouse h -- {sys.executable} train.py")


class TestControl:
    @pytest.fixture
    def sent(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Control]]:
        messages: list[tuple[str, Control]] = []

        def call(self: HttpTransport, request: Control, **_: object) -> ControlAnswer:
            messages.append((self.address, request))
            return ControlAnswer(done="it is done")

        monkeypatch.setattr(HttpTransport, "call", call)
        return messages

    @pytest.mark.parametrize(
        ("line", "order"),
        [
            ("save", Control(kind="save")),
            ("kick left --reason broken", Control(kind="kick", worker_id="left", reason="broken")),
            ("drain", Control(kind="drain")),
            ("drain left", Control(kind="drain", worker_id="left")),
            ("sync", Control(kind="sync")),
            ("sync left", Control(kind="sync", worker_id="left")),
            (
                "plan --sync-every 100 --fragment-delay 3 --fragment-alpha 0.5 --no-fragment-carry",
                Control(kind="plan", changes=Wishes(sync_every=100, delay=3, alpha=0.5, carry=False)),
            ),
            ("budget 1000000", Control(kind="budget", tokens=1_000_000)),
            ("shutdown --reason enough", Control(kind="shutdown", reason="enough")),
        ],
    )
    def test_each_order_is_sent_and_answered(self, line: str, order: Control, sent: list[tuple[str, Control]]) -> None:
        assert run(f"control --server http://10.0.0.1:8000 {line}") == "it is done\n"
        assert sent == [("10.0.0.1:8000", order)]

    def test_the_server_is_this_machines_unless_said_otherwise(
        self, sent: list[tuple[str, Control]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run("control save")
        monkeypatch.setenv("DILOCO_SERVER", "http://10.0.0.2:8512")
        run("control save")
        assert [address for address, _ in sent] == ["127.0.0.1:8512", "10.0.0.2:8512"]

    @pytest.mark.parametrize(
        ("line", "said"),
        [
            ("plan", "nothing to change: pass --sync-every"),
            ("kick -- 'a b'", "worker_id"),
            ("drain -- ''", "worker_id"),
        ],
    )
    def test_a_mistake_is_answered_without_a_connection(
        self, line: str, said: str, sent: list[tuple[str, Control]]
    ) -> None:
        with pytest.raises(ConfigError, match=said):
            run(f"control {line}")
        assert sent == []


@pytest.mark.parametrize(("typed_as", "named"), [("--grace-period", "--grace-period"), ("--grace", "--grace")])
def test_a_refusal_names_the_flag_that_was_typed(typed_as: str, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["outerstep", "server", "-m", "x", "-n", "2", f"{typed_as}=soon"])
    with pytest.raises(ConfigError, match=f"^{named} 'soon' is not a valid grace_s"):
        _read(SERVER, SERVER.by_field["grace_s"], "soon")
