"""`outerstep simulate`: what it reads, refuses, prints and draws."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from outerstep.cli.simulate_file import read_scenario
from outerstep.errors import ConfigError
from outerstep.simulate.fleet import run_fleet
from typed import typed

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "simulate"
SMALL = """
params = "100M"
hours = 0.5
[plan]
sync_every = 200
[[clusters]]
count = 3
link = "100mbit"
step_time = "1s"
"""


def file_of(tmp_path: Path, text: str) -> str:
    path = tmp_path / "fleet.toml"
    path.write_text(text)
    return str(path)


def test_the_examples_are_scenarios_and_say_what_they_are_named_for() -> None:
    large, flat, eight = (
        read_scenario(str(EXAMPLES / f"{n}.toml")) for n in ("ten-thousand", "thousand-flat", "eight")
    )
    assert [each.workers for each in (large, flat, eight)] == [10_000, 1_000, 8]
    assert (large.topology, flat.topology, eight.topology) == ("hierarchy", "server", "server")
    assert large.inside is not None
    assert large.inside.sync_every * large.across.sync_every == flat.across.sync_every == 500
    assert {each.failures.per_hour for each in (large, flat, eight)} == {0.05}
    assert large.planned is not None
    assert large.planned >= 0.86
    assert large.inside.quorum is not None
    assert large.why


def test_it_says_where_the_time_went_and_ends_well(tmp_path: Path) -> None:
    result = typed(["simulate", file_of(tmp_path, SMALL)], env={"COLUMNS": "160", "NO_COLOR": "1"})
    assert result.exit_code == 0, result.output
    for part in ("3 workers", "Useful work:", "planned:", "waiting", "Every promise was kept"):
        assert part in result.output, part


def test_as_json_it_is_the_report_and_a_seed_fixes_it(tmp_path: Path) -> None:
    name = file_of(tmp_path, SMALL + "[failures]\nper_hour = '100%'\nrestart = '1min'\n")
    first, again, other = (
        json.loads(typed(["simulate", name, "--json", "--seed", seed]).output) for seed in ("1", "1", "2")
    )
    for each in (first, again, other):
        each.pop("cpu_s")
    assert first == again != other
    assert first["broken"] == []
    assert sum(first["shares"].values()) == pytest.approx(1.0)
    assert len(first["moments"]) == 241


def test_hours_go_before_the_file(tmp_path: Path) -> None:
    assert read_scenario(file_of(tmp_path, SMALL), hours=2.0).duration_s == 7200.0


def test_what_is_left_out_is_as_the_planner_says(tmp_path: Path) -> None:
    open_ = SMALL.replace("100M", "1B").replace("[plan]\nsync_every = 200\n", "")
    chosen, fixed = read_scenario(file_of(tmp_path, open_)), read_scenario(file_of(tmp_path, SMALL))
    assert fixed.across.sync_every == 200 != chosen.across.sync_every
    assert chosen.planned is not None
    assert chosen.planned >= 0.95


def test_it_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "fleet.png"
    result = typed(["simulate", file_of(tmp_path, SMALL), "--plot", str(picture)])
    assert result.exit_code == 0, result.output
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    result = typed(["simulate", file_of(tmp_path, SMALL), "--plot", str(tmp_path / "nowhere" / "fleet.png")])
    assert isinstance(result.exception, ConfigError)


def test_a_picture_of_a_kind_that_nobody_writes_is_refused_before_the_work(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = file_of(tmp_path, SMALL.replace("hours = 0.5", "hours = 700").replace("count = 3", "count = 90"))
    result = typed(["simulate", file, "--plot", str(tmp_path / "fleet.xyz")])
    assert isinstance(result.exception, ConfigError)
    assert "a kind that matplotlib writes, got 'xyz'" in str(result.exception)


def test_a_file_that_is_not_there_is_said_with_what_writes_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no file .*none\.toml; outerstep plan … --scenario FILE writes one"):
        read_scenario(str(tmp_path / "none.toml"))


def test_all_of_the_members_may_be_waited_for(tmp_path: Path) -> None:
    """Though the planner would close rounds with a quorum."""
    failing = SMALL.replace("count = 3", "count = 100") + "[failures]\nper_hour = '50%'\n"
    assert read_scenario(file_of(tmp_path, failing)).across.quorum is not None
    said = failing.replace("sync_every = 200", "sync_every = 200\nquorum = 'all'")
    assert read_scenario(file_of(tmp_path, said)).across.quorum is None


def test_it_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from outerstep.cli.simulate_file import read_scenario; from outerstep.simulate.fleet import "
        f"run_fleet; run_fleet(read_scenario({file_of(tmp_path, SMALL)!r}, hours=0.01)); "
        "assert not {'torch', 'numpy', 'matplotlib'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", "must have at least one table"),
        ("params = ", "cannot be read as TOML"),
        ("a = " + "[" * 5000, "cannot be read as TOML"),
        (SMALL.replace('"100M"', "100"), "params must be text, got 100; put it between quotes"),
        (SMALL.replace('"100M"', '"100"'), "params without a unit must be at least 1000, got '100'; did you mean 100B"),
        (SMALL.replace('"100M"', '"100K"'), "params must be from 1M to 10T"),
        (SMALL.replace('"100M"', '"9' + "9" * 400 + '"'), "params"),
        (SMALL.replace("hours = 0.5", "hours = 1e5"), "hours must be above 0 and at most 744"),
        (SMALL.replace("hours = 0.5", "hours = nan"), "hours must be a number"),
        (SMALL.replace("hours = 0.5", "hours = true"), "hours must be a number"),
        (SMALL.replace("hours = 0.5", "seed = -1"), "seed must be a whole number"),
        (SMALL.replace("hours = 0.5", "hour = 1"), "'hour' is not known; did you mean 'hours'? known: "),
        (SMALL.replace("sync_every = 200", "sync_every = 200\nfragments = 201"), "no more fragments than steps"),
        (
            SMALL.replace("sync_every = 200", "quorum = '7500%'"),
            "must be a share above 0 and at most 100 %, got 75",
        ),
        (SMALL.replace("[plan]", "[plans]"), "'plans' is not known"),
        (
            SMALL.replace("sync_every = 200", "sync_every = 2").replace("= 3", "= 2000").replace("0.5", "24"),
            "may exchange 5e+07 times, got 8.64e+07; raise sync_every",
        ),
        (SMALL.replace("sync_every = 200", "sync_every = 0"), "sync_every"),
        (SMALL.replace("sync_every = 200", "sync_every = 2.5"), "sync_every must be a whole number"),
        (SMALL.replace("sync_every = 200", "codec = 'zip'"), "'zip'"),
        (SMALL.replace("sync_every = 200", "quorum = '200%'"), "quorum must be a share"),
        (SMALL.replace("sync_every = 200", "fragments = 100000"), "fragments"),
        (SMALL.replace("sync_every = 200", "delay = 99999999999"), "delay"),
        (SMALL.replace("count = 3", "count = 30000000"), "count must be from 1 to 20000"),
        (SMALL.replace("count = 3", "count = 20000\nworkers = 20000"), "at most 20000 workers"),
        (SMALL.replace("count = 3", "count = 0"), "count must be from 1"),
        (SMALL.replace('"100mbit"', '"fast"'), "link must be a rate such as 200mbit"),
        (SMALL.replace('link = "100mbit"', ""), "clusters must have a link"),
        (SMALL.replace('"1s"', '"0s"'), "step_time above 0"),
        (SMALL + "latency = '5'\n", "latency must be a time such as 50ms"),
        (SMALL + "spread = '95%'\n", "spread must be from 0 to 90 %"),
        (SMALL + "[failures]\nper_hour = 5\n", "per_hour must be text"),
        (SMALL + "[failures]\nper_hour = '999999999%'\n", "per_hour must be from 0 to 60"),
        (SMALL + "[liars]\nkind = 'polite'\nshare = '5%'\n", "kind must be one of nan, huge, boast, got 'polite'"),
        (SMALL + "[server]\nspeed = 0\n", "speed must be a number from 0.01"),
        (SMALL + "[server]\npool = '1 elephant'\n", "pool"),
        (SMALL + "[server]\npool = '64'\n", "must be at least 1048576 bytes, got '64'; did you mean 64GB"),
        (
            SMALL + "[failures]\nper_hour = '5'\n",
            "per_hour must be a share such as 95% or 0.95, got '5'; did you mean 5",
        ),
        ("heartbeat = '0s'" + SMALL, "heartbeat must be from 1 s"),
        ("topology = 'ring'" + SMALL, "topology must be one of server, hierarchy"),
        ("topology = 'hierarchy'" + SMALL, "leave topology out"),
        ("failures = 3" + SMALL, r"failures must be a table"),
    ],
)
def test_a_wrong_file_is_refused_by_rule_value_and_remedy(tmp_path: Path, text: str, rule: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_scenario(file_of(tmp_path, text))
    assert rule in str(refused.value), str(refused.value)
    assert len(str(refused.value)) < 1000


def test_a_file_that_is_too_large_or_not_there_is_refused(tmp_path: Path) -> None:
    large = tmp_path / "large.toml"
    large.write_text("#" * ((1 << 20) + 1))
    for name in (str(large), str(tmp_path / "none.toml"), str(tmp_path)):
        with pytest.raises(ConfigError):
            read_scenario(name)


def test_a_hierarchy_from_a_file_is_played_to_the_end(tmp_path: Path) -> None:
    clusters = SMALL.replace("count = 3", "count = 2\nworkers = 3\nserver_lan = '10gbit'")
    scenario = read_scenario(file_of(tmp_path, 'topology = "hierarchy"' + clusters + "[inside]\nsync_every = 100\n"))
    assert scenario.topology == "hierarchy"
    report = run_fleet(scenario)
    assert not report.broken
    assert report.steps.useful > 0.0
