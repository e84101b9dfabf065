"""One file describes the layers: what it means for each process, and what it refuses."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from outerstep.config import SERVER, WORKER, make_command, make_config, resolve
from outerstep.config.layers import check_layers, read_layers, settings_for, starts
from outerstep.config.reference import renew
from outerstep.errors import ConfigError
from typed import typed

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "layers.toml"
PAGE = ROOT / "docs" / "reference" / "layers.md"

WORLD = '[layers.world]\naddress = "203.0.113.1:8512"\n'
ROOMS = "[layers.rooms]\n"
EAST = '[clusters.east]\naddress = "203.0.113.2:8512"\n'


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def written(text: str) -> str:
    Path("layers.toml").write_text(text)
    return "layers.toml"


def checked(text: str) -> Any:
    file = read_layers(written(text))
    check_layers(file)
    return starts(file)


def values(role: Any, path: str, name: str) -> dict[str, Any]:
    return {field: at.value for field, at in settings_for(role, path, name).items()}


class TestTheExample:
    def test_every_process_of_it_can_be_started_as_it_stands(self) -> None:
        file = read_layers(EXAMPLE)
        check_layers(file)
        commands = [shlex.split(start.command) for start in starts(file)]
        assert [words[1] for words in commands] == ["server", "server", "worker", "server", "worker"]
        for name in file.clusters:
            found = resolve(SERVER, {}, environ={}, layers=settings_for(SERVER, str(EXAMPLE), name))
            make_config(SERVER, found)
            make_command(SERVER, found)
            found = resolve(WORKER, {}, environ={}, layers=settings_for(WORKER, str(EXAMPLE), name))
            make_config(WORKER, found)

    def test_the_commands_are_understood_by_the_command_line(self) -> None:
        for start in starts(read_layers(EXAMPLE)):
            words = [word for word in shlex.split(start.command)[1:] if word not in ("-m", "MODEL_DIR")]
            words = words[: words.index("--")] if "--" in words else words
            shown = typed(["config", "show", *words, "--json"])
            assert shown.exit_code == 0, shown.output

    def test_a_cluster_is_a_worker_of_its_parent_and_the_top_is_nobodys(self) -> None:
        top, east = (values(SERVER, str(EXAMPLE), name) for name in ("world", "east"))
        assert "above" not in top
        assert "cluster" not in top
        assert (top["num_workers"], top["sync_every"], top["outer_momentum"]) == (2, 8, 0.9)
        assert (east["above"], east["cluster"]) == ("203.0.113.1:8512", "east")
        assert (east["host"], east["port"], east["advertise"]) == ("0.0.0.0", 8512, "203.0.113.2")
        assert (east["num_workers"], values(SERVER, str(EXAMPLE), "west")["num_workers"]) == (1, 2)
        assert values(WORKER, str(EXAMPLE), "west")["server_addr"] == "203.0.113.3:8512"

    def test_a_flag_wins_and_each_value_names_its_line(self) -> None:
        line = f"config show server --layers {EXAMPLE} --cluster east --sync-every 7 --json"
        shown = typed(shlex.split(line))
        assert '"value": 7,\n    "source": "flag --sync-every"' in shown.output
        assert re.search(r'"value": "203.0.113.1:8512",\n    "source": ".*layers.toml:\d+"', shown.output)

    def test_check_prints_the_layers_and_what_to_type(self) -> None:
        said = typed(["layers", "check", str(EXAMPLE)], env={"COLUMNS": "200", "NO_COLOR": "1"})
        assert said.exit_code == 0
        for words in ("8 rounds", "50 steps", "int8+feedback", "num_workers 2", "--cluster east -- python train.py"):
            assert words in said.output


def test_layers_any_number_deep() -> None:
    toml = re.search(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert toml is not None
    checked(toml[1])
    path = "layers.toml"
    top, middle, inner = (values(SERVER, path, name) for name in ("world", "europe", "paris"))
    assert (top["sync_every"], middle["sync_every"], inner["sync_every"]) == (4, 8, 50)
    assert (middle["above"], inner["above"]) == ("203.0.113.1:8512", "198.51.100.1:8512")
    waits = [each["heartbeat_timeout_s"] for each in (inner, middle, top)]
    assert waits == [120.0, 240.0, 480.0]
    assert "torchrun" in starts(read_layers(path))[-1].command


def test_a_torchrun_job_is_a_worker_with_its_clusters_name() -> None:
    text = WORLD + '[layers.nodes]\nengine = "ddp"\n[clusters.node-1]\n[clusters.node-2]\n'
    found = [start.command for start in checked(text)]
    assert found[1:] == [
        f"outerstep worker --layers layers.toml --cluster {name} -- torchrun --nproc-per-node GPUS train.py"
        for name in ("node-1", "node-2")
    ]
    worker = values(WORKER, "layers.toml", "node-1")
    assert (worker["server_addr"], worker["worker_id"]) == ("203.0.113.1:8512", "node-1")
    assert "sync_every" not in values(SERVER, "layers.toml", "world")  # in steps: the first worker says


def test_replicas_of_one_layer_meet_at_its_lighthouse() -> None:
    text = '[layers.rack]\nengine = "torchft"\naddress = "10.0.0.5:29510"\nsync_every = 20\n'
    assert [start.command.split()[1] for start in checked(text)] == ["lighthouse", "worker"]
    worker = values(WORKER, "layers.toml", "rack")
    assert (worker["topology"], worker["lighthouse"], worker["sync_every"]) == ("torchft", "10.0.0.5:29510", 20)
    with pytest.raises(ConfigError, match="no server"):
        settings_for(SERVER, "layers.toml", "rack")


def test_replicas_inside_another_layer_are_a_worker_of_their_parent() -> None:
    racks = '[layers.racks]\nengine = "torchft"\nsync_every = 20\n[clusters.one]\naddress = "10.0.0.5:29510"\n'
    found = checked(WORLD + "outer_momentum = 0\n" + racks)
    assert [start.command.split()[1] for start in found] == ["server", "lighthouse", "worker"]
    assert [start.joins for start in found] == ["", "", "world"]
    worker = values(WORKER, "layers.toml", "one")
    assert (worker["lighthouse"], worker["above"], worker["cluster"]) == ("10.0.0.5:29510", "203.0.113.1:8512", "one")
    assert values(SERVER, "layers.toml", "world")["sync_every"] == 8, "in rounds of the replicas"
    line = "config show worker --layers layers.toml --cluster one --json"
    assert '"value": "203.0.113.1:8512",\n    "source": "layers.toml:7"' in typed(shlex.split(line)).output
    checked(WORLD + "outer_momentum = 0\n" + racks.replace("[clusters", "outer_momentum = 0.9\n[clusters"))
    assert values(WORKER, "layers.toml", "one")["inner_momentum"] is True


def test_momentum_inside_is_allowed_if_there_is_none_outside() -> None:
    checked(WORLD + "outer_momentum = 0\n" + ROOMS + "outer_momentum = 0.9\n" + EAST)
    assert values(SERVER, "layers.toml", "east")["inner_momentum"] is True


def test_momentum_on_two_levels_is_taken_from_somebody_who_insists() -> None:
    inside = "outer_momentum = 0.3\ninner_momentum = true\n"
    checked(WORLD + ROOMS + inside + EAST)
    assert values(SERVER, "layers.toml", "east")["inner_momentum"] is True
    checked(WORLD + ROOMS + 'engine = "allreduce"\n' + inside + "[clusters.east]\n")
    assert values(WORKER, "layers.toml", "east")["inner_momentum"] is True


def test_ranks_of_a_job_are_a_cluster_and_torchrun_is_what_to_type() -> None:
    found = checked(WORLD + "sync_every = 8\n" + ROOMS + 'engine = "allreduce"\nsync_every = 50\n[clusters.east]\n')
    assert [(start.joins, start.command) for start in found[1:]] == [
        ("world", "outerstep worker --layers layers.toml --cluster east -- torchrun --nproc-per-node GPUS train.py")
    ]
    config = make_config(WORKER, resolve(WORKER, {}, environ={}, layers=settings_for(WORKER, "layers.toml", "east")))
    above = config.layer_above
    assert (config.topology, above.above, above.cluster) == ("allreduce", "203.0.113.1:8512", "east")
    assert (config.sync_every, above.above_every, above.inner_momentum) == (50, None, False)
    with pytest.raises(ConfigError, match="has engine 'allreduce', and therefore no server"):
        settings_for(SERVER, "layers.toml", "east")


def test_momentum_may_be_among_ranks_if_the_layer_above_has_none() -> None:
    inside = ROOMS + 'engine = "allreduce"\nouter_momentum = 0.5\n[clusters.east]\n'
    checked(WORLD + "outer_momentum = 0\n" + inside)
    assert values(WORKER, "layers.toml", "east")["inner_momentum"] is True


def test_what_a_cluster_says_wins_over_its_layer() -> None:
    checked(WORLD + ROOMS + "sync_every = 50\n" + EAST + 'sync_every = 20\nport = 9000\ncodec = "none"\n')
    east = values(SERVER, "layers.toml", "east")
    assert (east["sync_every"], east["codec"]) == (20, None)
    assert (east["port"], east["advertise"]) == (9000, "203.0.113.2:8512")  # called at another port than it listens on


def test_a_cluster_that_relays_is_another_way_up_for_those_beside_it() -> None:
    west = '[clusters.west]\naddress = "203.0.113.3:8512"\n'
    checked(WORLD + 'also = "203.0.113.9:8512"\n' + ROOMS + EAST + "relay = true\n" + west)
    east, west_ = (values(SERVER, "layers.toml", name) for name in ("east", "west"))
    assert (east["relay"], "via" in east) == (True, False)
    assert ("relay" in west_, west_["via"]) == (False, "203.0.113.2:8512")
    assert east["above"] == west_["above"] == "203.0.113.1:8512,203.0.113.9:8512"
    found = resolve(SERVER, {}, environ={}, layers=settings_for(SERVER, "layers.toml", "west"))
    assert make_command(SERVER, found).via == "203.0.113.2:8512"


REFUSED = {
    "gossip": (WORLD + 'engine = "gossip"\n', "layers.toml:3: engine must be one of.*got 'gossip'.*liar"),
    "torchft across": (
        WORLD + 'engine = "torchft"\n' + ROOMS + EAST,
        "must be server for a layer between clusters.*ledger of .cluster, sequence.",
    ),
    "gossip inside": (WORLD + ROOMS + 'engine = "gossip"\n' + EAST, "layers.toml:4: engine must be one of.*liar"),
    "allreduce across": (
        WORLD + 'engine = "allreduce"\n' + ROOMS + EAST,
        "must be server for a layer between clusters, got 'allreduce'.*ends when one of them does",
    ),
    "two momenta of ranks": (
        WORLD + ROOMS + 'engine = "allreduce"\nouter_momentum = 0.5\n[clusters.east]\n',
        "layers.toml:5: momentum belongs to one layer, got 0.5 in 'east' inside 'world'",
    ),
    "ddp alone": (WORLD + 'engine = "ddp"\n', "inside another layer"),
    "ddp every": (WORLD + ROOMS + 'engine = "ddp"\nsync_every = 5\n', "layers.toml:5: .*at every step.*leave it out"),
    "two momenta": (
        WORLD + ROOMS + "outer_momentum = 0.5\n" + EAST,
        r"layers.toml:4: momentum belongs to one layer, got 0.5 in 'east' inside 'world'.*outer_momentum = 0",
    ),
    "two momenta of one that insists, and one that does not": (
        WORLD + ROOMS + "outer_momentum = 0.5\n" + EAST + "inner_momentum = true\n[clusters.w]\naddress = 'h:1'\n",
        "got 0.5 in 'w' inside 'world'.*insist with inner_momentum = true under .layers.rooms.",
    ),
    "momentum, and somebody who says that there is none": (
        WORLD + "outer_momentum = 0\n" + ROOMS + "outer_momentum = 0.5\ninner_momentum = false\n" + EAST,
        "layers.toml:5: .*has none, but inner_momentum = false is said",
    ),
    "two momenta by name": (WORLD + ROOMS + 'outer_optimizer = "adamw"\n' + EAST, "'adamw' in 'east'"),
    "timeouts": (
        WORLD + "heartbeat_timeout_s = 60\n" + ROOMS + EAST,
        "timeout of 'east' must be below that of 'world'.*got 120 and 60 s.*raise the outer or lower the inner",
    ),
    "for ever inside": (WORLD + ROOMS + "heartbeat_timeout_s = 0\n" + EAST, "got inf"),
    "deadline": (
        WORLD + "round_deadline_s = 100\n" + ROOMS + EAST,
        "layers.toml:3: round_deadline_s of 'world' must be above the timeout of 'east'",
    ),
    "own deadline": (
        WORLD + "round_deadline_s = 100\n" + ROOMS + "round_deadline_s = 100\nheartbeat_timeout_s = 9\n" + EAST,
        "above the round_deadline_s of 'east' inside it, got 100 and 100 s",
    ),
    "no address": (WORLD + ROOMS + "[clusters.east]\n", "'east' must have an address.*under .clusters.east."),
    "one address twice": (WORLD + ROOMS + EAST.replace("113.2", "113.1"), "an address of its own"),
    "join string": (
        '[layers.world]\naddress = "outerstep://run-0123456789abcdef0123@h:1"\n',
        "layers.toml:2: address must be host:port, got a join string",
    ),
    "address of a layer": (WORLD + ROOMS + 'address = "h:1"\n', "belongs to a cluster"),
    "not an address": ('[layers.world]\naddress = "h:x"\n', "layers.toml:2: server address must be host:port"),
    "no parent": (WORLD + "[layers.a]\n[layers.b]\n" + EAST + 'layer = "b"\n', "must say its parent"),
    "wrong parent": (WORLD + ROOMS + EAST + 'parent = "wrld"\n', 'did you mean "world"'),
    "no layer": (WORLD + "[layers.a]\n[layers.b]\n" + EAST, "must say its layer"),
    "wrong layer": (WORLD + ROOMS + EAST + 'layer = "room"\n', 'layers.toml:6: .*did you mean "rooms"'),
    "key": (WORLD + "sync_evry = 5\n", 'layers.toml:3: unknown key "sync_evry"; did you mean "sync_every"?'),
    "type": (WORLD + 'sync_every = "often"\n', "layers.toml:3: sync_every must be a whole number"),
    "range": (WORLD + "sync_every = 0\n", "layers.toml:3: sync_every must be ≥ 1, got 0"),
    "via": (WORLD + ROOMS + EAST + 'via = "h:1"\n', "via follows from relay, of the clusters beside it"),
    "relay of the top": (WORLD + "relay = true\n", "relay .True. needs above"),
    "also": (WORLD + 'also = "h:x"\n', "layers.toml:3: server address must be host:port"),
    "follows": (WORLD + ROOMS + EAST + 'above = "h:1"\n', "layers.toml:6: above follows from the cluster's parent"),
    "no effect": (WORLD + "grace_s = 5\n", "grace_s .5. needs quorum.*layers.toml:3"),
    "together": (WORLD + "quorum = 3\n", "quorum .3. must not exceed num_workers"),
    "worker's": (WORLD + "connections = 5\n", 'unknown key "connections"'),
    "table": ("[layer.world]\n", 'unknown table "layer"; did you mean "layers"?'),
    "empty": ("", "there must be a layer, got none"),
    "top twice": (WORLD + ROOMS + "[clusters.world]\n", "layers.toml:4: 'world' is the top layer"),
    "clusters of nothing": (WORLD + EAST, "there is none: add .layers.NAME."),
    "a value": ("layers.world = 5\n", "must stand in a table"),
    "no tables": ("layers = 5\n", "must be tables"),
    "name": ('[layers."a b"]\n', "got 'a b'"),
    "not TOML": ("[layers", "not TOML"),
}


@pytest.mark.parametrize("text", REFUSED.values(), ids=REFUSED)
def test_what_cannot_work_is_refused_with_rule_value_and_remedy(text: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match=text[1]):
        checked(text[0])


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (f"worker --layers {EXAMPLE}", "add --cluster NAME"),
        (f"server --layers {EXAMPLE}", "add --cluster NAME"),
        (f"server --layers {EXAMPLE} --cluster eat", 'did you mean "east"'),
        ("server --layers nowhere.toml --cluster east", "nowhere.toml cannot be read"),
    ],
)
def test_a_part_of_the_file_must_be_named(line: str, says: str) -> None:
    result = typed(["config", "show", *shlex.split(line)])
    assert says in str(result.exception)


def test_the_reference_page_has_the_tables_as_the_code_has_them() -> None:
    page = PAGE.read_text()
    assert page == renew(page), "run: python -m outerstep.config.reference docs/reference/layers.md"
