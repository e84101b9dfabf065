"""What the programs of peers.py share. Each runs one system in the environment that was made for it, and prints the
seconds of its rounds as one line of JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

from harness import Actor, say, together, wall_s


def run_rounds(actors: list[Actor], rounds: int) -> list[float]:
    """Seconds of each round, from a barrier until the last one is done; a first one warms up. Both must end up with
    the same values, or it was no averaging."""
    together(actors, "join")
    seconds = []
    for number in range(rounds + 1):
        together(actors, "train")
        spans = together(actors, "exchange")
        if number > 0:
            seconds.append(wall_s(spans))
            say(f"  round {number}: {seconds[-1]:.3f} s")
    ends = [span.value for span in together(actors, "digest")]
    if len(set(ends)) != 1:
        raise RuntimeError(f"the processes ended with different values: {ends}")
    return seconds


def started_by_peers(main: Callable[[int, int], list[float]]) -> None:
    parser = argparse.ArgumentParser(description=main.__module__)
    parser.add_argument("--values", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    arguments = parser.parse_args()
    print(json.dumps(main(arguments.values, arguments.rounds)), flush=True)
