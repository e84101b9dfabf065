"""Every parameter of every layer, for readers: what it means, its default, and who sets it. Made from the definitions.

python -m outerstep.config.reference docs/reference/configuration.md docs/reference/layers.md        # renews both
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import msgspec

from ...coordination.autoconfig.layer_plan import LayerPlan
from ...coordination.autoconfig.state import ClusterState, LinkReport
from ...coordination.autoconfig.steering import ORDERS, TERMS
from ...defaults import ABOVE_EVERY, OUTER_PATIENCE
from ...types import Assignment
from ..setting import (
    ABOVE,
    AGGREGATION,
    ASYNC,
    EXCHANGES,
    MODEL,
    NO_SERVER,
    OUTER,
    PATIENCE,
    REPLICAS,
    ROUNDS,
    STREAMING,
    Setting,
)
from ..table import SERVER, WORKER, Role
from .tables import FOLLOWS

YOU, CONTROLLER, FILE = "you", "you, or the controller", "the file"
DECIDES = "the controller"
LAYER_PANELS = (MODEL, ROUNDS, AGGREGATION, ASYNC, STREAMING, OUTER, ABOVE)  # the others are of a process, not a layer
WORKER_PANELS = (EXCHANGES, PATIENCE, NO_SERVER, REPLICAS, ABOVE)
# The settings that a decision takes the place of in a run: what a server's controller carries out, and nothing else.
_SETTING_OF = {"delay": "fragment_delay", "carry": "fragment_carry"}  # where an order has another name
CONTROLLED = frozenset({*(_SETTING_OF.get(order, order) for order in ORDERS), *TERMS.values()})
# What a decision has, and no run carries out.
ONLY_SAID = {
    "down_codec": "the run, when it begins",
    "num_fragments": "the run, when it begins",
    "backend": "the controller, for people to see: a group chooses its own",
    "batch_size": "the controller, as a recommendation",
    "larger_batches": "the controller, as a recommendation",
}
# Defaults that differ from those of the command, because the file knows the other layers.
IN_LAYERS = {
    "sync_every": f"{ABOVE_EVERY} where members are clusters",
    "heartbeat_timeout_s": f"{OUTER_PATIENCE:g} times that of the layer inside, at least 120",
    "num_workers": "the clusters that the file names in it; where members are workers: 1",
    "outer_lr": "1 inside another layer",
    "outer_momentum": "0 inside another layer",
}
OWN = (
    ("layers", "engine", "What its members agree through: server, torchft, allreduce or ddp.", "server"),
    ("layers", "address", "host:port of the top's server, or lighthouse.", "required for the top"),
    ("layers", "also", "host:port that the top's server may be moved to.", "none"),
    ("clusters", "layer", "The layer that the cluster belongs to.", "the one below the top, if there are two"),
    ("clusters", "parent", "The cluster of the layer above that it is a member of.", "the top, one layer below it"),
    ("clusters", "address", "host:port of its server, or lighthouse.", "required, except for allreduce and ddp"),
    ("clusters", "also", "host:port that its server may be moved to.", "none"),
)
DECIDED = {
    "layer": "Which layer the plan is of.",
    "revision": "Counts the plans of a layer; two members with the same revision hold the same plan.",
    "from_round": "The round from which it holds.",
    "sync_every": "H of the cluster in the middle by speed.",
    "codec": "How contributions travel.",
    "down_codec": "How agreements travel.",
    "num_fragments": "Into how many pieces the model is cut; fixed once the run has begun.",
    "delay": "τ of the cluster in the middle by speed.",
    "carry": "Whether the steps taken during the delay are kept whole.",
    "outer_lr": "η of the outer step, which grows slowly with the interval.",
    "timeout_s": "How long a round waits for a member: its deadline.",
    "backend": "What values travel by inside a group: nccl if all can, else gloo.",
    "route": "star: each sends to the centre; tree: some send through another.",
    "not_planned_for": "Clusters whose links are so slow that the plan was made for the others.",
    "assignments": "One for each cluster: the rows below.",
    "cluster": "Whose assignment it is.",
    "leader": "Who speaks for the cluster.",
    "sends_to": "The centre, or the cluster that relays for it.",
    "local_steps": "H of this cluster.",
    "batch_size": "Samples of one of its steps.",
    "larger_batches": "How many of its steps take one sample more, so that the global batch is exact.",
}
MEASURED = {
    "name": "The cluster's name.",
    "step_s": "Seconds of one step; of a cluster, of one round.",
    "batch_size": "Samples of one step of the whole cluster.",
    "most_batch_size": "The most that fits.",
    "size": "Members.",
    "accelerators": "What they compute on.",
    "backends": "What they can speak with each other.",
    "data_location": "Where its data lies.",
    "candidates": "Who could lead it, each with its speed to the centre.",
    "leader": "Who leads it now, if any of them may.",
    "relays": "Whether it passes bytes on for others.",
    "source": "Where a link begins.",
    "target": "Where it ends.",
    "measured_by": "Which end says so.",
    "bytes_per_s": "How fast it is.",
    "latency_s": "Seconds until the first byte arrives.",
    "age_s": "Seconds since it was measured.",
}


def markdown_tables() -> dict[str, str]:
    """By mark."""
    server = [each for each in SERVER.settings if each.panel in LAYER_PANELS]
    return {
        "own keys": _table(
            ("table", "key", "meaning", "default", "set by"),
            ((f"`[{table}.NAME]`", f"`{key}`", text, usual, YOU) for table, key, text, usual in OWN),
        ),
        "server layers": _settings(SERVER, server),
        "torchft layers": _settings(WORKER, _for("torchft")),
        "allreduce layers": _settings(WORKER, _for("allreduce")),
        "job layers": _settings(WORKER, [each for each in _for("server") if each.field != "sync_every"]),
        "decided": _fields((LayerPlan, Assignment), DECIDED, DECIDES),
        "measured": _fields((ClusterState, LinkReport), MEASURED, "measured, or declared by the cluster"),
    }


def _for(topology: str) -> list[Setting]:
    """A worker's settings that have an effect with this topology."""
    usual = SimpleNamespace(**{**WORKER.defaults, "topology": topology, "above": "HOST:PORT"})
    return [
        each
        for each in WORKER.settings
        if each.panel in WORKER_PANELS and (each.needs is None or each.needs.holds(usual))
    ]


def _settings(role: Role, settings: Iterable[Setting]) -> str:
    def default(setting: Setting) -> str:
        usual = role.default_text(setting).removeprefix("Default: ").removesuffix(".")
        here = IN_LAYERS.get(setting.field)
        if here is None or (role is WORKER and setting.field == "sync_every"):
            return usual
        return f"{usual}; {here}" if usual != "Required" else here

    def who(field: str) -> str:
        if field in FOLLOWS:
            return f"{FILE}: {FOLLOWS[field]}"
        return CONTROLLER if role is SERVER and field in CONTROLLED else YOU

    rows = (
        (f"`{each.field}`", each.sentence if role is SERVER else each.help, default(each), who(each.field))
        for each in settings
    )
    return _table(("parameter", "meaning", "default", "set by"), rows)


def _fields(kinds: Iterable[type[msgspec.Struct]], meanings: Mapping[str, str], who: str) -> str:
    names = [name for kind in kinds for name in kind.__struct_fields__]
    assert set(names) == set(meanings), f"say what these mean, in layers/parameters.py: {set(names) ^ set(meanings)}"
    return _table(
        ("parameter", "meaning", "set by"),
        ((f"`{n}`", meanings[n], ONLY_SAID.get(n, who) if who == DECIDES else who) for n in dict.fromkeys(names)),
    )


def _table(heads: tuple[str, ...], rows: Iterable[tuple[Any, ...]]) -> str:
    lines = [heads, ("---",) * len(heads), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)
