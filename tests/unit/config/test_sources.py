"""Where settings come from: flag, environment, file, default; and what is said when one of them is wrong."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from outerstep.config import (
    ROLES,
    SERVER,
    WITHOUT_SERVER,
    WORKER,
    Role,
    ServerConfig,
    Sourced,
    WorkerConfig,
    build,
    environment_for,
    make_command,
    make_config,
    resolve,
    values_of,
)
from outerstep.config.keywords import other_names
from outerstep.config.kinds import Kind, write
from outerstep.config.reference import commented_toml, renew
from outerstep.config.toml_file import line_of
from outerstep.config.worker import ServerLinkConfig
from outerstep.errors import ConfigError

BOTH = pytest.mark.parametrize("role", ROLES.values(), ids=lambda role: role.name)
REFERENCE = Path(__file__).parents[3] / "docs" / "reference"


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def flags(**values: Any) -> dict[str, Sourced]:
    return {name: Sourced(value, f"flag --{name.replace('_', '-')}") for name, value in values.items()}


def server(environ: dict[str, str] | None = None, **values: Any) -> dict[str, Sourced]:
    return resolve(SERVER, flags(**values), environ=environ or {})


def worker(environ: dict[str, str] | None = None, **values: Any) -> dict[str, Sourced]:
    return resolve(WORKER, flags(**values), environ=environ or {})


class TestTheTable:
    @BOTH
    def test_every_field_has_a_row_and_every_row_a_field(self, role: Role) -> None:
        sections = [type(f.default) for f in fields(role.config) if is_dataclass(f.default)]
        every = [f for kind in (role.config, role.command, *sections) for f in fields(kind)]
        names = [f.name for f in every if not is_dataclass(f.default)]
        assert sorted(setting.field for setting in role.settings) == sorted(names)

    @BOTH
    def test_no_flag_is_given_twice(self, role: Role) -> None:
        every = [flag for setting in role.settings for flag in [*setting.flags.split(), setting.opposite]]
        assert len(every) == len(set(every))

    @BOTH
    def test_each_help_is_one_sentence_and_says_what_none_means(self, role: Role) -> None:
        for setting in role.settings:
            assert setting.help.endswith("."), setting.field
            assert ". " not in setting.help, setting.field
            if role.defaults.get(setting.field, "") is None:
                assert setting.unset, f"{setting.field}: what does None mean?"

    @BOTH
    def test_with_nothing_said_every_value_is_the_dataclass_default(self, role: Role) -> None:
        found = resolve(role, {}, environ={})
        stated = {"num_workers": 2} if role is SERVER else {"server_addr": "h:1"}
        config = role.config(**stated)
        for name in role.config_fields:
            if name in stated:
                assert found[name].source == "not set"
            else:
                assert found[name] == Sourced(values_of(config)[name], "default")

    def test_the_reference_page_has_the_tables_as_the_code_has_them(self) -> None:
        page = (REFERENCE / "configuration.md").read_text()
        assert page == renew(page), "run: python -m outerstep.config.reference docs/reference/configuration.md"

    def test_the_page_of_commands_names_every_flag_of_the_server(self) -> None:
        page = (REFERENCE / "cli.md").read_text()
        for setting in SERVER.settings:
            assert any(f"`{flag}`" in page for flag in [*setting.flags.split(), setting.opposite]), setting.field


class TestPrecedence:
    def test_a_flag_beats_the_environment_beats_the_file_beats_the_default(self, tmp_path: Path) -> None:
        Path("outerstep.toml").write_text("[server]\nouter_lr = 0.1\nsync_every = 10\nmin_workers = 2\n")
        environ = {"OUTERSTEP_OUTER_LR": "0.2", "OUTERSTEP_SYNC_EVERY": "20"}
        found = server(environ, outer_lr=0.3)
        assert found["outer_lr"] == Sourced(0.3, "flag --outer-lr")
        assert found["sync_every"] == Sourced(20, "OUTERSTEP_SYNC_EVERY")
        assert found["min_workers"] == Sourced(2, "outerstep.toml:4")
        assert found["keep_saves"] == Sourced(3, "default")

    def test_a_file_is_found_by_flag_then_by_variable_then_in_the_folder(self) -> None:
        for name, value in (("flag.toml", 1), ("variable.toml", 2), ("outerstep.toml", 3)):
            Path(name).write_text(f"[server]\nsync_every = {value}\n")
        by_variable = {"OUTERSTEP_CONFIG": "variable.toml"}
        assert resolve(SERVER, {}, environ=by_variable, file="flag.toml")["sync_every"].source == "flag.toml:2"
        assert resolve(SERVER, {}, environ=by_variable)["sync_every"].source == "variable.toml:2"
        assert resolve(SERVER, {}, environ={})["sync_every"].source == "outerstep.toml:2"

    def test_a_file_that_was_named_must_be_there(self) -> None:
        with pytest.raises(ConfigError, match=r"config file nowhere\.toml cannot be read: No such file"):
            resolve(SERVER, {}, environ={}, file="nowhere.toml")

    def test_a_falsy_flag_still_wins(self) -> None:
        found = server({"OUTERSTEP_SAVE_EVERY": "5", "OUTERSTEP_NESTEROV": "1"}, save_every=0, nesterov=False)
        assert (found["save_every"].value, found["nesterov"].value) == (0, False)

    def test_an_unknown_keyword_is_answered_with_the_nearest_known_one(self) -> None:
        with pytest.raises(ConfigError, match=r'unknown setting "sync_evry"; did you mean "sync_every"\?'):
            worker(sync_evry=5)


class TestTheEnvironment:
    @BOTH
    def test_every_setting_can_be_said_there_and_is_read_as_it_was_written(self, role: Role) -> None:
        examples = {int: 64, float: 0.5, bool: True, str: "text"}
        for field, kind in role.kinds.items():
            value = kind.choices[-1] if kind.choices else examples[kind.base]
            for variable in role.variables(field):
                assert resolve(role, {}, environ={variable: write(value)})[field] == Sourced(value, variable)
            if kind.optional:
                assert resolve(role, {}, environ={role.variables(field)[0]: "none"})[field].value is None

    def test_the_documented_names_of_a_worker_are_read(self) -> None:
        environ = {
            "DILOCO_SERVER": "10.0.0.1:8512",
            "DILOCO_SYNC_EVERY": "250",
            "DILOCO_BF16_COMM": "0",
            "DILOCO_DYLU": "1",
            "DILOCO_HEARTBEAT_INTERVAL": "7.5",
            "DILOCO_NUM_FRAGMENTS": "4",
            "DILOCO_WORKER_ID": "left",
        }
        found = worker(environ)
        assert make_config(WORKER, found) == WorkerConfig(
            server_addr="10.0.0.1:8512", sync_every=250, bf16_comm=False, server=ServerLinkConfig(dylu=True),
            heartbeat_interval_s=7.5, num_fragments=4, worker_id="left",
        )  # fmt: skip
        assert {found[field].source for field in WORKER.documented} == set(environ)

    def test_a_servers_settings_do_not_come_from_a_workers_variables(self) -> None:
        assert server({"DILOCO_SYNC_EVERY": "250"})["sync_every"].source == "default"

    def test_two_names_may_agree(self) -> None:
        found = worker({"OUTERSTEP_SYNC_EVERY": "0250", "DILOCO_SYNC_EVERY": "250"})
        assert found["sync_every"] == Sourced(250, "DILOCO_SYNC_EVERY")

    def test_two_names_that_disagree_are_both_named(self) -> None:
        environ = {"OUTERSTEP_SYNC_EVERY": "100", "DILOCO_SYNC_EVERY": "250"}
        message = "DILOCO_SYNC_EVERY='250' and OUTERSTEP_SYNC_EVERY='100' contradict each other"
        with pytest.raises(ConfigError, match=message):
            worker(environ)
        assert worker(environ, sync_every=3)["sync_every"].value == 3  # then it does not matter

    @pytest.mark.parametrize(
        ("variable", "text", "rule"),
        [
            ("OUTERSTEP_NUM_WORKERS", "two", "must be a whole number"),
            ("OUTERSTEP_NUM_WORKERS", "2.0", "must be a whole number"),
            ("OUTERSTEP_OUTER_LR", "fast", "must be a number"),
            ("OUTERSTEP_ASYNC_MODE", "yes", "must be 0, 1, true or false"),
            ("OUTERSTEP_NUM_WORKERS", "none", "must be a whole number"),
        ],
    )
    def test_a_value_of_the_wrong_type_names_the_variable(self, variable: str, text: str, rule: str) -> None:
        field = variable.removeprefix("OUTERSTEP_").lower()
        with pytest.raises(ConfigError, match=f"^{variable}='{text}' is not a valid {field}: {rule}$"):
            server({variable: text})

    def test_a_value_out_of_range_names_the_variable(self) -> None:
        found = server({"OUTERSTEP_SYNC_EVERY": "0"}, num_workers=2)
        message = r"^sync_every must be ≥ 1, got 0 \(sync_every: OUTERSTEP_SYNC_EVERY\)$"
        with pytest.raises(ConfigError, match=message):
            make_config(SERVER, found)

    def test_an_empty_variable_means_none_where_that_is_a_value_and_nothing_elsewhere(self) -> None:
        found = server({"OUTERSTEP_PORT": "", "OUTERSTEP_KEEP_SAVES": ""})
        assert found["port"] == Sourced(None, "OUTERSTEP_PORT")
        assert found["keep_saves"].source == "default"

    @pytest.mark.parametrize("text", ["1", "true", "True", "0", "false", "FALSE"])
    def test_truth_is_written_in_two_ways(self, text: str) -> None:
        assert Kind(bool).parse(text) is (text.lower() in ("1", "true"))

    def test_a_slip_in_a_name_is_noticed(self) -> None:
        with pytest.raises(ConfigError, match=r'"DILOCO_SYNC_EVRY"; did you mean "DILOCO_SYNC_EVERY"\?'):
            worker({"DILOCO_SYNC_EVRY": "5"})

    @pytest.mark.parametrize("name", ["OUTERSTEP_SERVICE_HOST", "OUTERSTEP_SERVICE_PORT", "DILOCO_HOME"])
    def test_somebody_elses_variables_are_left_alone(self, name: str) -> None:
        assert worker({name: "x"}) == worker()


class TestTheFile:
    def read(self, text: str, role: Role = SERVER) -> dict[str, Sourced]:
        Path("outerstep.toml").write_text(text)
        return resolve(role, {}, environ={})

    @pytest.mark.row("B17")
    def test_an_unknown_key_is_answered_with_file_line_and_the_nearest_known_one(self) -> None:
        text = "# a comment: sync_evry = 3\n[worker]\n\nsync_evry = 5\n"
        with pytest.raises(
            ConfigError, match=r'^outerstep\.toml:4: unknown key "sync_evry"; did you mean "sync_every"\?$'
        ):
            self.read(text)

    def test_a_key_in_the_wrong_table_is_sent_to_the_right_one(self) -> None:
        with pytest.raises(ConfigError, match=r'^outerstep\.toml:2: key "quorum" belongs in \[server\]$'):
            self.read("[worker]\nquorum = 2\n")

    def test_a_key_in_no_table_is_sent_to_one(self) -> None:
        with pytest.raises(ConfigError, match=r"^outerstep\.toml:1: quorum is in no table; write it under \[server\]$"):
            self.read("quorum = 2\n")

    def test_an_unknown_table_is_answered_with_the_nearest_known_one(self) -> None:
        with pytest.raises(ConfigError, match=r'^outerstep\.toml:3: unknown table "sever"; did you mean "server"\?$'):
            self.read("\n\n[sever]\nsync_every = 5\n")

    def test_a_table_is_a_table(self) -> None:
        with pytest.raises(ConfigError, match=r"^outerstep\.toml:1: \[server\] must be a table, got 3$"):
            self.read("server = 3\n")

    def test_both_tables_are_checked_whoever_asks(self) -> None:
        with pytest.raises(ConfigError, match=r"outerstep\.toml:4: unknown key"):
            self.read("[server]\nsync_every = 3\n[worker]\nzzz = 1\n", SERVER)

    @pytest.mark.row("B18")
    @pytest.mark.parametrize("value", ["0", "-3", '"5"', "1.5", "true", "[5]", "1979-05-27"])
    def test_a_bad_value_names_field_value_range_and_line(self, value: str) -> None:
        found = self.read(f"[server]\nnum_workers = 2\n\nsync_every = {value}\n")
        with pytest.raises(ConfigError, match=r"^sync_every must be .*≥ 1, got .* \(sync_every: outerstep\.toml:4\)$"):
            make_config(SERVER, found)

    @pytest.mark.parametrize(
        ("role", "line", "message"),
        [
            (SERVER, "model = 3", "model must be text, got 3"),
            (SERVER, 'from_checkpoint = "false"', "from_checkpoint must be one of True, False, got 'false'"),
            (WORKER, "devices = 0", "devices must be text, got 0"),
        ],
    )
    def test_what_only_the_command_is_told_is_checked_like_the_rest(self, role: Role, line: str, message: str) -> None:
        found = self.read(f"[{role.name}]\n\n{line}\n", role)
        with pytest.raises(ConfigError, match=rf"^{message} \({line.split()[0]}: outerstep\.toml:3\)$"):
            make_command(role, found)

    @pytest.mark.row("B18")
    def test_two_values_that_contradict_each_other_are_both_placed(self) -> None:
        found = self.read("[server]\nnum_workers = 2\nquorum = 3\n")
        message = r"\(num_workers: outerstep\.toml:2, quorum: outerstep\.toml:3\)$"
        with pytest.raises(ConfigError, match=r"quorum \(3\) must not exceed num_workers \(2\) " + message):
            make_config(SERVER, found)

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("[server]\nsync_every = \n", r"^outerstep\.toml:2: not TOML: "),
            ("[server]\nsync_every = 1\nsync_every = 2\n", r"not TOML: Cannot overwrite a value"),
            ("[server\n", r"^outerstep\.toml:1: not TOML: "),
        ],
    )
    def test_what_is_not_toml_says_where(self, text: str, said: str) -> None:
        with pytest.raises(ConfigError, match=said):
            self.read(text)

    def test_what_is_not_text_says_so(self) -> None:
        Path("outerstep.toml").write_bytes(b"[server]\nhost = '\xff'\n")
        with pytest.raises(ConfigError, match=r"outerstep\.toml is not UTF-8"):
            resolve(SERVER, {}, environ={})

    def test_none_is_written_as_a_word(self) -> None:
        assert self.read('[server]\nport = "none"\n')["port"] == Sourced(None, "outerstep.toml:2")

    def test_a_word_is_no_none_where_none_is_no_value(self) -> None:
        assert self.read('[server]\nhost = "none"\n')["host"].value == "none"

    @pytest.mark.parametrize(
        ("text", "line"),
        [
            ("[worker]\nsync_every=1\n[server]\nsync_every=2\n", 4),
            ("[worker]\nsync_every=1\n[ server ] # here\n\n'sync_every' = 2\n", 5),
            ("\nserver.sync_every = 2\n", 2),
            ("server = {port = 1, sync_every = 2}\n", 1),
            ("[server]\ndylu_base_sync_every = 3\n  sync_every\t= 2", 3),
        ],
    )
    def test_the_line_is_that_of_the_key_in_its_table(self, text: str, line: int) -> None:
        assert line_of(text, "sync_every", "server") == line
        assert self.read(text)["sync_every"] == Sourced(2, f"outerstep.toml:{line}")


class TestMakingAConfig:
    def test_what_is_missing_says_all_three_ways_to_say_it(self) -> None:
        with pytest.raises(ConfigError, match="num_workers is not set: give --num-workers") as error:
            make_config(SERVER, server())
        assert "OUTERSTEP_NUM_WORKERS" in str(error.value)
        assert "[server] in outerstep.toml" in str(error.value)

    def test_a_config_holds_what_was_said(self) -> None:
        made = make_config(SERVER, server({"OUTERSTEP_ASYNC_MODE": "1"}, num_workers=3, model="somewhere"))
        assert made == ServerConfig(num_workers=3, async_mode=True)

    def test_a_command_holds_the_rest(self) -> None:
        made = make_command(SERVER, server({"OUTERSTEP_FROM_CHECKPOINT": "0"}, num_workers=3, model="somewhere"))
        assert (made.model, made.from_checkpoint) == ("somewhere", False)


class TestTopologies:
    """An address is an address, a topology is a name; an address that names a topology is how it used to be said."""

    @pytest.mark.parametrize("name", WITHOUT_SERVER)
    def test_the_old_spelling_means_the_same_in_every_place(self, name: str) -> None:
        Path("outerstep.toml").write_text(f'[worker]\nserver_addr = "{name}"\n')
        by_file = worker()
        Path("outerstep.toml").unlink()
        assert by_file["topology"] == Sourced(name, "outerstep.toml:2")
        by_variable, by_flag = worker({"DILOCO_SERVER": name}), worker(server_addr=name)
        assert by_variable["topology"] == Sourced(name, "DILOCO_SERVER")
        assert by_flag["topology"] == Sourced(name, "flag --server-addr")
        expected = make_config(WORKER, worker(topology=name))
        assert (expected.topology, expected.server_addr) == (name, None)
        for found in (by_file, by_variable, by_flag):
            assert make_config(WORKER, found) == expected

    def test_the_one_with_more_say_holds(self) -> None:
        Path("outerstep.toml").write_text('[worker]\ntopology = "gossip"\n')
        found = worker({"DILOCO_SERVER": "h:1"})
        assert (found["topology"].value, found["server_addr"].value) == ("server", "h:1")
        found = worker({"DILOCO_SERVER": "h:1"}, topology="torchft")
        assert (found["topology"].value, found["server_addr"].value) == ("torchft", None)
        assert worker()["topology"] == Sourced("gossip", "outerstep.toml:2")

    def test_a_topology_with_a_server_leaves_the_address_to_others(self) -> None:
        found = worker({"DILOCO_SERVER": "h:1"}, topology="server")
        assert (found["topology"].value, found["server_addr"].value) == ("server", "h:1")
        found = worker({"DILOCO_SERVER": "h:1"}, topology="mine")
        assert (found["topology"].value, found["server_addr"].value) == ("mine", "h:1")
        assert make_config(WORKER, worker(topology="mine")).server_addr is None

    def test_both_in_one_place_contradict_each_other(self) -> None:
        message = (
            r"topology 'gossip' \(OUTERSTEP_TOPOLOGY\) has no server, got server_addr \(DILOCO_SERVER\) too: leave"
        )
        with pytest.raises(ConfigError, match=message):
            worker({"DILOCO_SERVER": "h:1", "OUTERSTEP_TOPOLOGY": "gossip"})
        assert worker({"DILOCO_SERVER": "gossip", "OUTERSTEP_TOPOLOGY": "gossip"})["topology"].value == "gossip"

    @pytest.mark.parametrize("stated", [{"topology": "gossip"}, {"server_addr": "h:1"}])
    def test_a_child_gets_one_of_the_two_whatever_was_set_before(self, stated: dict[str, str]) -> None:
        for environ in ({"DILOCO_SERVER": "other:1"}, {"OUTERSTEP_TOPOLOGY": "torchft"}, {"DILOCO_SERVER": "torchft"}):
            found = worker(environ, **stated)
            assert make_config(WORKER, worker(environment_for(WORKER, found, environ))) == make_config(WORKER, found)

    def test_a_script_that_reads_the_variable_itself_still_finds_the_name(self) -> None:
        child = environment_for(WORKER, worker(topology="gossip"), {})
        assert child == {"DILOCO_SERVER": "gossip", "OUTERSTEP_TOPOLOGY": "gossip"}


OTHER = [(role, *names) for role in ROLES.values() for names in other_names(role.config).items()]


class TestOtherNames:
    """Names of earlier versions, and those known from torchtitan and torchft, are valid wherever ours are."""

    VALUES: ClassVar = {
        "dylu": True,
        "attackers": 2,
        "save_every": 7,
        "sync_every": 8,
        "fragment_delay": 3,
        "fragment_alpha": 0.5,
    }

    @pytest.mark.parametrize(("role", "other", "current"), OTHER, ids=lambda value: getattr(value, "name", value))
    def test_another_name_means_ours_in_every_place(self, role: Role, other: str, current: str) -> None:
        value = self.VALUES.get(current, 7.0)
        assert resolve(role, {other: Sourced(value, "keyword")}, environ={})[current] == Sourced(value, "keyword")
        variable = f"OUTERSTEP_{other.upper()}"
        assert resolve(role, {}, environ={variable: write(value)})[current] == Sourced(value, variable)
        Path("outerstep.toml").write_text(f"[{role.name}]\n\n{other} = {json.dumps(value)}\n")
        assert resolve(role, {}, environ={})[current] == Sourced(value, "outerstep.toml:3")
        required = {"num_workers": 4, "save_dir": "run"} if role is SERVER else {"topology": "gossip"}
        required |= {"quorum": 2} if current == "grace_s" else {}
        assert values_of(build(role.config, {**required, other: value}))[current] == value

    @pytest.mark.parametrize(("role", "other", "current"), OTHER, ids=lambda value: getattr(value, "name", value))
    def test_both_names_at_once_are_refused(self, role: Role, other: str, current: str) -> None:
        what = "the old" if other in role.config.OLD_NAMES else "another"
        with pytest.raises(ConfigError, match=f"{other} is {what} name of {current}, got both: leave {other} out"):
            build(role.config, {other: 1, current: 2})
        Path("outerstep.toml").write_text(f"[{role.name}]\n{other} = 1\n{current} = 1\n")
        with pytest.raises(ConfigError, match=rf"^outerstep\.toml:2: {other} is {what} name of {current}"):
            resolve(role, {}, environ={})

    @BOTH
    def test_the_reference_page_names_every_one(self, role: Role) -> None:
        page = (REFERENCE / "configuration.md").read_text()
        for other, current in other_names(role.config).items():
            assert f"| `{other}` | `{current}` |" in page

    @BOTH
    def test_a_time_in_seconds_says_so(self, role: Role) -> None:
        for setting in role.settings:
            assert ("econds" in setting.help) == setting.field.endswith("_s"), setting.field


class TestHandingOver:
    def test_a_child_finds_what_was_said_and_nothing_else(self) -> None:
        environ = {"PATH": "/bin", "OUTERSTEP_SYNC_EVERY": "7", "OUTERSTEP_BUFFERS": "local"}
        found = worker(environ, server_addr="h:1", dylu=True, fragment_alpha=None)
        child = environment_for(WORKER, found, environ)
        assert child == {
            "PATH": "/bin",
            "DILOCO_SERVER": "h:1",
            "DILOCO_SYNC_EVERY": "7",
            "DILOCO_DYLU": "1",
            "OUTERSTEP_BUFFERS": "local",
            "OUTERSTEP_FRAGMENT_ALPHA": "none",
        }
        assert make_config(WORKER, worker(child)) == make_config(WORKER, found)

    def test_a_flag_leaves_no_second_name_to_contradict_it(self) -> None:
        environ = {"OUTERSTEP_SYNC_EVERY": "100"}
        child = environment_for(WORKER, worker(environ, server_addr="h:1", sync_every=250), environ)
        assert worker(child)["sync_every"].value == 250


class TestAFileToFillIn:
    def test_as_written_it_changes_nothing(self) -> None:
        Path("outerstep.toml").write_text(commented_toml())
        for role in ROLES.values():
            assert not any(at.is_said for at in resolve(role, {}, environ={}).values())

    def test_uncommented_it_says_every_default(self) -> None:
        lines = commented_toml().splitlines()
        bare = [line.removeprefix("# ") if " = " in line and line.split()[2] == "=" else line for line in lines]
        Path("outerstep.toml").write_text("\n".join(bare))
        for role in ROLES.values():
            found = resolve(role, {}, environ={})
            assert all(at.source.startswith("outerstep.toml:") for at in found.values())
            for field, value in role.defaults.items():
                assert found[field].value == value, field
            make_config(role, found)
