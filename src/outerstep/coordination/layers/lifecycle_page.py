"""The diagrams and tables of docs/concepts/lifecycle.md, made from the table of a group's life.

python -m outerstep.coordination.layers.lifecycle_page docs/concepts/lifecycle.md        # renews the page
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

from .lifecycle import EDGES, IGNORED, RESERVED, STEPS, Edge, GroupPlace, GroupState, Happening, SubStep

NODES: dict[SubStep, str] = {
    SubStep.COMPUTE: "FORWARD, BACKWARD",
    SubStep.QUORUM: "QUORUM_COMPUTE",
    SubStep.SEND_CHECKPOINT: "SEND_CKPT",
    SubStep.FETCH_CHECKPOINT: "FETCH_CKPT",
    SubStep.SYNC: "SYNC_INTRA_CLUSTER_DDP",
    SubStep.VOTE: "SYNC_INTRA_REPLICA_GROUP",
    SubStep.COMMIT: "COMMIT, GLOBAL_SYNC_CHECK",
    SubStep.GLOBAL_QUORUM: "L_QUORUM_COMPUTE",
    SubStep.GLOBAL_SEND_CHECKPOINT: "L_SEND_CKPT",
    SubStep.GLOBAL_FETCH_CHECKPOINT: "L_FETCH_CKPT",
    SubStep.PSEUDOGRADIENT: "L_CALC_PG",
    SubStep.GLOBAL_ALLREDUCE: "L_ALLREDUCE_PG",
    SubStep.BROADCAST: "L_BCAST_PG",
    SubStep.GLOBAL_VOTE: "L_SYNC_REPLICA_GROUP",
    SubStep.GLOBAL_COMMIT: "L_GCOMMIT",
    SubStep.GLOBAL_SHUTDOWN: "PG_SHUTDOWN",
    SubStep.GLOBAL_RECONFIGURE: "PG_RECONFIG",
    SubStep.WAIT_BROADCAST: "F_WAIT_BCAST",
    SubStep.ASSIST: "F_LISTEN_CKPT",
    SubStep.FOLLOWER_COMMIT: "F_GCOMMIT",
    SubStep.TELL_ROLLBACK: "RB_BCAST",
    SubStep.CANCEL: "CANCEL_RELEVANT_FUTURES",
    SubStep.NOTICE_OTHERS: "D_START, D_NOTICE_OTHERS",
    SubStep.LAST_COMMIT: "D_COMMIT, D_EXIT",
    SubStep.RUN_TO_COMMIT: "D_START, D_RUN_UNTIL_COMMIT",
    SubStep.SURVIVOR_COMMIT: "D_COMMIT",
    SubStep.ADVERTISE: "JOIN_ADVERTISE",
    SubStep.WAIT_CURRENT: "JOIN_WAIT",
    SubStep.FINISH_ROUND: "RJ_RUN_UNTIL_COMMIT",
    SubStep.ADVERTISE_COMMIT: "RJ_ADVERTISE_COMMIT",
    SubStep.SHUTDOWN: "PG_SHUTDOWN",
    SubStep.RECONFIGURE: "PG_RECONFIG",
}
"""The name of each sub-step in the diagram that we follow."""

ROUND: tuple[SubStep, ...] = (
    *(SubStep.COMPUTE, SubStep.QUORUM, SubStep.SEND_CHECKPOINT, SubStep.FETCH_CHECKPOINT, SubStep.SYNC, SubStep.VOTE),
    *(SubStep.COMMIT, SubStep.SHUTDOWN, SubStep.RECONFIGURE),
)


def renew(page: str) -> str:
    """The page with its diagrams and tables renewed from the code, each between two marks."""
    made = {
        "states": _flow(),
        "training": _training(),
        "other states": _others(),
        "sub-steps": _step_table(),
        "edges": _edge_table(),
        "ignored": _ignored_table(),
        "reserved": _reserved_table(),
    }
    for name, text in made.items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        pattern = re.compile(f"{re.escape(begin)}.*{re.escape(end)}", re.DOTALL)
        assert pattern.search(page), f"the page has no {begin} … {end}"
        whole = f"{begin}\n{text}\n{end}"
        page = pattern.sub(lambda _, whole=whole: whole, page)  # type: ignore[misc]
    return page


# --- diagrams ---------------------------------------------------------------------------------------------------------


def _mermaid(lines: Iterable[str]) -> str:
    return "\n".join(["```mermaid", "stateDiagram-v2", *(f"    {line}" for line in lines), "```"])


def _arrows(pairs: Iterable[tuple[str, str, Happening]]) -> list[str]:
    """One arrow per pair of nodes, labelled with all its happenings."""
    labels: dict[tuple[str, str], dict[str, None]] = {}
    for source, target, happening in pairs:
        labels.setdefault((source, target), {})[happening] = None
    return [f"{source} --> {target}: {', '.join(found)}" for (source, target), found in labels.items()]


def _flow() -> str:
    """The states alone."""
    between = [edge for edge in EDGES if edge.source.state is not edge.target.state]
    arrows = _arrows((edge.source.state, edge.target.state, edge.happening) for edge in between)
    return _mermaid(["direction LR", "[*] --> INIT", *arrows, "EXIT --> [*]"])


def _node(place: GroupPlace) -> str:
    """A sub-step's name in a diagram, without blanks."""
    return re.sub(r"\W+", "_", f"{place.state}_{place.step}").strip("_")


def _inner(state: GroupState, steps: Iterable[SubStep]) -> list[str]:
    """The edges of a state among these of its sub-steps. Edges from the whole state are in the flow of states."""
    kept = [step for step in STEPS[state] if step in set(steps)]
    lines = [f"{_node(GroupPlace(state, step))}: {step}" for step in kept]
    within = [e for e in EDGES if e.source.state is e.target.state is state and e.source.step in kept]
    within = [e for e in within if e.target.step in kept]
    return lines + _arrows((_node(e.source), _node(e.target), e.happening) for e in within)


def _training() -> str:
    """TRAINING: the round of the group's own layer, and the layer above as leader and as follower."""
    leads = [step for step in STEPS[GroupState.TRAINING] if step.name.startswith("GLOBAL") or step in _LEADS]
    follows = [SubStep.WAIT_BROADCAST, SubStep.ASSIST, SubStep.FOLLOWER_COMMIT]
    groups = {"own round": ROUND, "global sync as leader": leads, "global sync as follower": follows}
    lines: list[str] = []
    where: dict[SubStep, str] = {}
    for title, steps in groups.items():
        name = title.replace(" ", "_")
        lines += [f'state "{title}" as {name} {{', *(f"    {one}" for one in _inner(GroupState.TRAINING, steps)), "}"]
        where |= dict.fromkeys(steps, name)
    across = [e for e in EDGES if e.source.state is e.target.state is GroupState.TRAINING]
    across = [e for e in across if where[e.source.step] != where[e.target.step]]
    return _mermaid([*lines, *_arrows((_node(e.source), _node(e.target), e.happening) for e in across)])


_LEADS = (SubStep.PSEUDOGRADIENT, SubStep.BROADCAST)


def _others() -> str:
    """The other states with sub-steps. (The flow of states shows faults and drains of whole states.)"""
    lines: list[str] = []
    for state in (GroupState.ROLLBACK, GroupState.DRAINING, GroupState.REJOIN, GroupState.RECEIVED_JOIN):
        lines += [f"state {state} {{", *(f"    {one}" for one in _inner(state, STEPS[state])), "}"]
    between = [e for e in EDGES if e.source.state is not e.target.state]
    ways_in = [e for e in between if e.source.state in (GroupState.TRAINING, GroupState.IDLE)]
    ways_out = [e for e in between if e.source.step is not SubStep.NONE]
    pairs = [(str(e.source.state), _node(e.target), e.happening) for e in ways_in if e.target.state.name in _INNER]
    pairs += [(_node(e.source), str(e.target.state), e.happening) for e in ways_out if e.source.state.name in _INNER]
    return _mermaid([*lines, *_arrows(pairs)])


_INNER = {"ROLLBACK", "DRAINING", "REJOIN", "RECEIVED_JOIN"}


# --- tables -----------------------------------------------------------------------------------------------------------


def _step_table() -> str:
    lines = ["| state | sub-step | there |", "|---|---|---|"]
    for state, steps in STEPS.items():
        lines += [f"| {state} | {step or '–'} | {NODES.get(step, state)} |" for step in steps]
    return "\n".join(lines)


def _edge_table() -> str:
    lines = ["| from | happening | to | label there, or why it is here |", "|---|---|---|---|"]
    return "\n".join(lines + [f"| {_from(e)} | `{e.happening}` | {e.target} | {_reason(e)} |" for e in EDGES])


def _from(edge: Edge) -> str:
    is_whole = not edge.source.step and STEPS[edge.source.state] != (SubStep.NONE,)
    return f"{edge.source.state} (anywhere)" if is_whole else str(edge.source)


def _reason(edge: Edge) -> str:
    return edge.theirs.replace("|", "\\|") if edge.theirs else f"*ours:* {edge.why}"


def _ignored_table() -> str:
    by_reason: dict[tuple[GroupState, str], list[Happening]] = {}
    for (state, happening), why in IGNORED.items():
        by_reason.setdefault((state, why), []).append(happening)
    lines = ["| in | ignored | because |", "|---|---|---|"]
    rows = by_reason.items()
    return "\n".join(lines + [f"| {s} | {', '.join(f'`{h}`' for h in found)} | {why} |" for (s, why), found in rows])


def _reserved_table() -> str:
    lines = ["| from | happening | why nothing takes this edge today |", "|---|---|---|"]
    return "\n".join(lines + [f"| {place} | `{happening}` | {why} |" for (place, happening), why in RESERVED.items()])


if __name__ == "__main__":
    for name in sys.argv[1:]:
        Path(name).write_text(renew(Path(name).read_text()))
