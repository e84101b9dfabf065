"""`outerstep plan`: what it reads, refuses, and prints."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from outerstep.cli import units
from outerstep.cli.plan import commands
from outerstep.cli.plan_sources import from_status
from outerstep.cli.simulate_file import read_scenario
from outerstep.coordination.planning import Choice, Situation, propose
from outerstep.errors import ConfigError
from outerstep.observe.status import (
    ClusterStatus,
    LinkStatus,
    PeerStatus,
    PlanStatus,
    ServerStatus,
    WorkerStatus,
)
from outerstep.types import THE_SERVER
from typed import typed

ASKED = "--params 7B --sites 4 --link 200mbit --latency 50ms --step-time 3s"


@pytest.fixture(autouse=True)
def _nothing_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in os.environ:
        if name.startswith(("DILOCO_", "OUTERSTEP_")):
            monkeypatch.delenv(name)


def run(line: str) -> str:
    result = typed(shlex.split(line), env={"COLUMNS": "200", "NO_COLOR": "1"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def asked(line: str) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(run(f"plan {line} --json"))
    return made


class TestUnits:
    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("200mbit", 25e6),
            ("1gbit", 125e6),
            ("1 Gbit", 125e6),
            ("25MB/s", 25e6),
            ("1.5Mbit", 187_500),
            ("64kbit", 8000),
        ],
    )
    def test_rates(self, text: str, value: float) -> None:
        assert units.rate(text, "x") == pytest.approx(value)

    @pytest.mark.parametrize(("text", "value"), [("7B", 7e9), ("150M", 150e6), ("0.5b", 5e8), ("124000000", 124e6)])
    def test_counts(self, text: str, value: float) -> None:
        assert units.count(text, "x") == value

    @pytest.mark.parametrize(("text", "value"), [("50ms", 0.05), ("3s", 3.0), ("2min", 120.0), ("0ms", 0.0)])
    def test_times(self, text: str, value: float) -> None:
        assert units.seconds(text, "x") == value

    def test_shares(self) -> None:
        assert units.share("95%", "x") == units.share("0.95", "x") == 0.95

    @pytest.mark.parametrize(
        ("read", "text"),
        [
            (units.rate, "200"),
            (units.rate, "200 megabit"),
            (units.rate, "200mb"),
            (units.rate, "0mbit"),
            (units.rate, "-5mbit"),
            (units.rate, "nan"),
            (units.rate, "1e9mbit"),
            (units.seconds, "3"),
            (units.seconds, "50 msec"),
            (units.seconds, "inf s"),
            (units.count, "7G"),
            (units.count, "seven"),
            (units.count, ""),
            (units.count, "0"),
            (units.count, "9" * 400),
        ],
    )
    def test_nothing_else(self, read: Any, text: str) -> None:
        with pytest.raises(ConfigError, match="--flag must be"):
            read(text, "--flag")

    @pytest.mark.parametrize(
        ("line", "meant"),
        [
            ("--params 7 --link 200mbit --step-time 3s", "7B .billions. or 7M .millions."),
            ("--params 1.5 --link 200mbit --step-time 3s", "1.5B .billions. or 1.5M"),
            ("--params 7B --link 200 --step-time 3s", "200mbit or 200MB/s"),
            ("--params 7B --link 200mbit --server-link 1000 --step-time 3s", "1000mbit or 1000MB/s"),
            ("--params 7B --link 200mbit --step-time 3", "3ms or 3s"),
            ("--params 7B --link 200mbit --step-time 3s --latency 50", "50ms or 50s"),
            ("--params 7B --link 200mbit --step-time 3s --target 95", "95%"),
            ("--params 7B --link 200mbit --step-time 3s --failures-per-hour 5", "5%"),
            ("--params 7B --link 200mbit --step-time 3s --failures-per-hour 5% --restart-after 10", "10ms or 10s"),
        ],
    )
    def test_a_number_without_its_unit_is_asked_what_it_meant(self, line: str, meant: str) -> None:
        """Each flag that takes a unit: none takes a small number alone as something that nobody means."""
        with pytest.raises(ConfigError, match=f"^--[a-z-]+ .*, got '[0-9.]+'; .*did you mean {meant}"):
            run(f"plan {line}")

    def test_a_size_in_full_and_a_share_need_no_unit(self) -> None:
        assert units.parameters("124000000", "x") == 124e6
        assert units.parameters("1000", "x") == 1000
        assert units.parameters("0.5K", "x") == 500
        assert units.share("1", "x") == 1.0
        assert units.share("500%", "x") == 5.0


class TestThePlan:
    def test_of_the_question_that_everybody_asks(self) -> None:
        shown = run(f"plan {ASKED}")
        for part in (
            "7.00 B parameters",
            "200 Mbit/s",
            "→",
            "server, memory",
            "To type",
            "outerstep server -m MODEL_DIR",
        ):
            assert part in shown
        assert "measured here on a 3.3M model" in shown

    def test_as_json_has_all_of_it(self) -> None:
        made = asked(ASKED)
        assert made["recommended"] == made["options"][0]
        assert made["recommended"]["server"]["memory"]["total_bytes"] > 7e9 * 12
        assert made["reasons"]
        assert made["commands"][0]["command"].startswith("outerstep server")
        assert made["situation"]["sites"][3]["round_trip_s"] == 0.05

    @pytest.mark.parametrize(("params", "percent", "digits"), [("150M", 99.5, 1), ("1B", 97, 0), ("7B", 82, 0)])
    def test_has_the_published_utilizations(self, params: str, percent: float, digits: int) -> None:
        line = f"--params {params} --sites 1 --link-up 1gbit --link-down 8000gbit --latency 0ms --step-time 1s"
        made = asked(f"{line} --sync-every 500 --codec bf16 --fragments 1 --delay 0 --ideal")
        assert round(100 * made["recommended"]["utilization"], digits) == percent

    def test_what_is_fixed_stays(self) -> None:
        made = asked(f"{ASKED} --sync-every 100 --codec int8 --fragments 4 --delay 3")["recommended"]
        assert [made[key] for key in ("sync_every", "codec", "num_fragments", "delay")] == [100, "int8", 4, 3]

    def test_of_a_file_has_its_sites(self, tmp_path: Path) -> None:
        (tmp_path / "sites.toml").write_text(
            'params = "1B"\nstep_time = "2s"\nlatency = "30ms"\ndtype = "fp32"\ntarget = "90%"\nserver_link = "2gbit"\n'
            '[[sites]]\nname = "home"\nup = "50mbit"\ndown = "200mbit"\n'
            '[[sites]]\nname = "lab"\nlink = "1gbit"\nworkers = 4\nstep_time = "1s"\n'
        )
        made = asked("sites.toml")["situation"]
        home, lab = made["sites"]
        assert (home["name"], home["up_bytes_per_s"], home["down_bytes_per_s"]) == ("home", 50e6 / 8, 200e6 / 8)
        assert (lab["workers"], lab["step_s"], lab["round_trip_s"], home["step_s"]) == (4, 1.0, 0.03, 2.0)
        assert (made["weights"], made["target_utilization"]) == ("fp32", 0.9)
        assert made["server_in_bytes_per_s"] == 250e6
        assert asked("sites.toml --params 2B")["situation"]["parameters"] == 2_000_000_000

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("sites = 3", "at least one table"),
            ("[[sites]]\nlink = 5\nstep_time = '1s'", "must be text with a unit"),
            ("[[sites]]\nlink = '1gbit'", "must have a step_time"),
            ("[[sites]]\nstep_time = '1s'", "must have a link"),
            ("[[sites]]\nlink = '1gbit'\nstep_time = '1s'\nworkers = 0", "whole number from 1 up"),
            ("[[sites]]\nlnik = '1gbit'", "'lnik' is not known"),
            ("prams = '1B'\n[[sites]]", "'prams' is not known"),
            ("[[sites]", "cannot be read as TOML"),
        ],
    )
    def test_of_a_file_with_mistakes_names_them(self, tmp_path: Path, text: str, said: str) -> None:
        (tmp_path / "sites.toml").write_text(text)
        with pytest.raises(ConfigError, match=said):
            run("plan sites.toml --params 1B")

    @pytest.mark.parametrize(
        ("line", "said"),
        [
            ("--sites 2 --link 1gbit --step-time 1s", "needs the size of the model"),
            ("--params 1B --step-time 1s", "needs --link"),
            ("--params 1B --link 1gbit", "needs --step-time"),
            ("--params 1B --link 1gbit --step-time 0s", "^--step-time must be above 0, got '0s'"),
            ("--params 1B --link fast --step-time 1s", "^--link must be a rate such as 200mbit"),
            (
                "--params 1B --link-up 25 --link-down 1gbit --step-time 1s",
                r"^--link-up must be .*; units: .*, MB/s, GB/s; did you mean 25mbit or 25MB/s\?$",
            ),
            ("--params 1B --link 1gbit --step-time 1s --latency 5", "^--latency must be a time"),
            ("--params 1B --link 1gbit --step-time 1s --dtype int3", "one of fp32, bf16, fp16"),
            ("--params 1B --link 1gbit --step-time 1s --codec mine", "size of codec 'mine' is not known"),
            ("missing.toml --params 1B", "there is no file missing.toml"),
            ("sites.toml --from 127.0.0.1:8512", "one source at a time"),
        ],
    )
    def test_refuses_what_it_cannot_plan_with(self, line: str, said: str) -> None:
        with pytest.raises(ConfigError, match=said):
            run(f"plan {line}")

    def test_is_drawn(self, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        run(f"plan {ASKED} --plot plan.png")
        assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
        with pytest.raises(ConfigError, match="cannot be written"):
            run(f"plan {ASKED} --plot nowhere/plan.png")

    def test_is_not_drawn_without_matplotlib_and_says_how(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        with pytest.raises(ConfigError, match=r"needs matplotlib; to install it: pip install"):
            run(f"plan {ASKED} --plot plan.png")


class TestCommands:
    """What is printed can be typed: each flag is one that its command has."""

    @pytest.mark.parametrize(
        "line",
        [
            ASKED,
            "--params 1B --sites 4 --workers-per-site 32 --link 200mbit --step-time 5s",
            "--params 1B --sites 4 --workers-per-site 32 --link 200mbit --step-time 5s --lan 100gbit",
        ],
    )
    def test_are_understood(self, line: str) -> None:
        made = asked(line)
        for each in made["commands"]:
            self._understood(each["command"])

    @pytest.mark.parametrize("topology", ["all-reduce", "gossip", "server", "hierarchy"])
    def test_of_every_topology_are_understood(self, topology: str) -> None:
        workers = 8 if topology == "hierarchy" else 1
        sites = tuple(_site(f"s{i}", workers) for i in range(4))
        situation = Situation(10**8, sites)
        option = next(each for each in propose(situation).options if each.topology == topology)
        for _, command in commands(situation, option):
            self._understood(command)

    def _understood(self, command: str) -> None:
        words = shlex.split(command.partition("#")[0])
        assert words[0] == "outerstep"
        if words[1] in ("server", "worker", "peer"):
            flags = words[2 : words.index("--")] if "--" in words else words[2:]
            run(shlex.join([words[1], *flags, "--help"]))  # a flag that does not exist is refused before
            if words[1] != "peer":
                run(shlex.join(["config", "show", words[1], *flags]))
        else:
            assert words == ["outerstep", "join"]

    @pytest.mark.parametrize("engine", ["allreduce", "server"])
    def test_of_sites_with_different_numbers_of_workers_are_one_for_each(self, engine: Any) -> None:
        sites = (_site("home", 2), _site("lab", 8), _site("hall", 8))
        situation = Situation(10**8, sites, choice=Choice(engine=engine))
        option = next(each for each in propose(situation).options if each.topology == "hierarchy")
        made = dict(commands(situation, option))
        place = "each site" if engine == "allreduce" else "each site's server"
        home, labs = made[f"{place}, NAME: home"], made[f"{place}, NAME: lab, hall"]
        flag = "--nproc-per-node" if engine == "allreduce" else "-n"
        assert f" {flag} 2 " in home
        assert f" {flag} 8 " in labs
        for command in (home, labs):
            self._understood(command)

    def test_of_unequal_sites_count_the_fastest_ones_steps(self) -> None:
        situation = Situation(10**8, (_site("a", 1, 1.0), _site("b", 1, 2.0)), choice=Choice(100, "bf16", 1, 0))
        line = commands(situation, propose(situation).recommended)[0][1]
        assert "--dylu" in line
        assert "--sync-every 200" in line  # 100 steps of the slower one, of 2 s each


def _site(name: str, workers: int, step_s: float = 1.0) -> Any:
    from outerstep.coordination.planning import PlannedSite

    return PlannedSite(name, 125e6, 125e6, 0.02, step_s, workers)


class TestFromAServer:
    def status(self, **changes: Any) -> ServerStatus:
        links = [
            LinkStatus(source="w0", target=THE_SERVER, bytes_per_s=1e6, latency_s=0.01, age_s=50.0),
            LinkStatus(source="w0", target=THE_SERVER, bytes_per_s=2e6, latency_s=0.01, age_s=1.0),
            LinkStatus(source=THE_SERVER, target="w0", bytes_per_s=3e6, latency_s=0.02),
        ]
        settings: dict[str, Any] = {
            "mode": "sync",
            "num_parameters": 10**7,
            "plan": PlanStatus(sync_every=100, codec="bf16", down_codec="bf16"),
            "links": links,
            "clusters": {"w0": ClusterStatus(step_s=0.5)},
            "workers": {"w0": WorkerStatus(), "w1": WorkerStatus()},
        }
        return ServerStatus(**{**settings, **changes})

    def test_takes_what_was_measured_and_the_median_of_what_was_not(self) -> None:
        found = from_status(self.status(), "x")
        assert found.parameters == 10**7
        first, second = found.sites
        assert (first.up_bytes_per_s, first.down_bytes_per_s, first.step_s) == (2e6, 3e6, 0.5)
        assert first.round_trip_s == pytest.approx(0.03)
        assert (second.name, second.up_bytes_per_s, second.step_s) == ("w1", 2e6, 0.5)
        assert found.assumed[0] == "w1: speed, way up, way down not measured yet"
        assert found.now == Choice(100, "bf16", 1, 0)

    def test_takes_the_word_of_who_receives_and_the_other_direction_for_what_is_missing(self) -> None:
        links = [
            LinkStatus(source="w0", target=THE_SERVER, bytes_per_s=1e6, measured_by=THE_SERVER, age_s=9.0),
            LinkStatus(source="w0", target=THE_SERVER, bytes_per_s=9e9, measured_by="w0"),
        ]
        found = from_status(self.status(links=links, workers={"w0": WorkerStatus()}), "x")
        assert [(site.up_bytes_per_s, site.down_bytes_per_s) for site in found.sites] == [(1e6, 1e6)]
        assert found.assumed[0] == "w0: way down not measured yet"

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"num_parameters": None}, "has no model yet"),
            ({"links": []}, "must have measured .* pieces of 32 KiB and more: for a smaller model"),
            ({"workers": {}}, "must have measured"),
        ],
    )
    def test_says_what_it_lacks(self, changes: dict[str, Any], said: str) -> None:
        with pytest.raises(ConfigError, match=said):
            from_status(self.status(**changes), "x")

    @pytest.mark.parametrize("rate", [float("nan"), float("inf"), -1.0, 0.0])
    def test_a_lie_is_refused_by_its_rule(self, rate: float) -> None:
        links = [LinkStatus(source=a, target=b, bytes_per_s=rate) for a, b in (("w0", THE_SERVER), (THE_SERVER, "w0"))]
        with pytest.raises(ConfigError, match="must be from"):
            Situation(10**7, from_status(self.status(links=links), "x").sites)

    def test_a_peer_measures_no_links(self) -> None:
        with pytest.raises(ConfigError, match="is a peer"):
            from_status(PeerStatus(mode="gossip", peer_id="p"), "x")


class TestFailures:
    many = (
        "--params 1B --sites 4 --workers-per-site 100 --link-up 110mbit --link-down 500mbit --step-time 1s "
        "--sync-every 500 --codec int4 --server-lan 100gbit --server-speed 16"
    )
    failing = "--failures-per-hour 5% --restart-after 10min"

    def test_with_them_the_commands_close_rounds_with_a_quorum(self) -> None:
        calm, failing = (asked(f"{self.many} --inside server {said}")["commands"] for said in ("", self.failing))
        assert not any("--quorum" in each["command"] for each in calm)
        assert any("--quorum 94 --grace 10" in each["command"] for each in failing)

    def test_the_flags_that_are_printed_are_those_of_the_server(self) -> None:
        result = typed(["server", "--help-all"], env={"COLUMNS": "200", "NO_COLOR": "1"})
        for flag in ("--quorum", "--grace", "--spool-bytes"):
            assert flag in result.output

    def test_a_server_has_room_for_a_round_of_contributions(self) -> None:
        few, many = (
            asked(f"{self.many} --inside server".replace("-site 100", f"-site {n}"))["commands"] for n in (2, 100)
        )
        assert not any("--spool-bytes" in each["command"] for each in few)
        assert any("--spool-bytes 50781250000" in each["command"] for each in many)

    def test_a_file_says_them_and_the_command_line_goes_before_it(self, tmp_path: Path) -> None:
        file = tmp_path / "sites.toml"
        file.write_text(
            'params = "1B"\nlink = "1gbit"\nstep_time = "1s"\nfailures_per_hour = "5%"\nrestart_after = "2min"\n'
            "[[sites]]\n[[sites]]\n"
        )
        assert asked("sites.toml")["situation"]["failures"] == {"per_hour": 0.05, "restart_s": 120.0}
        assert asked("sites.toml --failures-per-hour 10%")["situation"]["failures"]["per_hour"] == 0.1
        assert asked("sites.toml --failures-per-hour 0 --restart-after 0s")["recommended"]["utilization"] >= 0.95

    @pytest.mark.parametrize(
        ("said", "rule"),
        [
            ("--restart-after 5min", "give --failures-per-hour"),
            ("--failures-per-hour often", "share such as 95% or 0.95"),
            ("--failures-per-hour 9999999%", "per_hour must be from 0 to 60"),
            ("--failures-per-hour 5% --restart-after soon", "time such as 50ms"),
        ],
    )
    def test_nonsense_is_refused(self, said: str, rule: str) -> None:
        with pytest.raises(ConfigError, match=rule):
            run(f"plan {ASKED} {said}")


class TestScenario:
    @pytest.mark.parametrize(
        "line",
        [
            ASKED,
            f"{ASKED} --failures-per-hour 50% --server-link 1gbit",
            f"{ASKED} --delay 5 --ideal --failures-per-hour 50%",
            f"{TestFailures.many} {TestFailures.failing}",
            f"{TestFailures.many} --inside server --inside-every 100",
            "sites.toml --target 90%",
        ],
    )
    def test_what_is_recommended_is_what_is_played(self, tmp_path: Path, line: str) -> None:
        (tmp_path / "sites.toml").write_text(
            'params = "1B"\nstep_time = "1s"\n[[sites]]\nlink = "1gbit"\n[[sites]]\nlink = "1gbit"\nname = "lab"\n'
            '[[sites]]\nname = "home"\nup = "50mbit"\ndown = "200mbit"\nlatency = "30ms"\nstep_time = "1.5s"\n'
        )
        best = asked(f"{line} --scenario day.toml")["recommended"]
        scenario = read_scenario("day.toml")
        assert scenario.planned == pytest.approx(best["utilization"], abs=1e-6)
        assert scenario.topology == best["topology"]
        across, inside = scenario.across, best["inside"]
        assert across.sync_every == (best["sync_every"] if inside is None else inside["above_every"])
        assert (across.codec, across.num_fragments, across.delay) == (
            best["codec"],
            best["num_fragments"],
            best["delay"],
        )
        closing = (across.quorum and round(across.quorum * best["members"])), across.grace_s
        assert closing == (best["closing"]["quorum"], best["closing"]["grace_s"])
        if inside is not None:
            assert scenario.inside is not None
            assert (scenario.inside.sync_every, scenario.inside.codec) == (inside["sync_every"], inside["codec"])

    def test_it_says_what_to_type_next(self) -> None:
        assert "outerstep simulate day.toml" in run(f"plan {ASKED} --scenario day.toml")
        result = typed(["simulate", "day.toml", "--hours", "2"])
        assert result.exit_code == 0, result.output

    def test_what_cannot_be_written_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="cannot be written"):
            run(f"plan {ASKED} --scenario nowhere/day.toml")
