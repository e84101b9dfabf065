"""Mutation testing of the pure rooms: does a test fail if a decision is changed?

    make mutants                                              # all of coordination/ and core/: an hour or two
    python tests/mutants.py "outerstep.coordination.worker.*"  # some of it
    python tests/mutants.py --report                          # what the last run found, without running

mutmut changes one operator, constant or call at a time and runs the unit tests that reach the changed function. This
script reads what it found, module by module. A *survivor* is a change that no test noticed. It is either killed by a
new test, or explained in tests/mutants.toml by the change itself (not by mutmut's numbers, which shift with every
edit). Changes to the text of messages are counted apart: their wording is no decision.

The run fails if a module named there under `strict` has a survivor without an explanation, or kills less than it
promises.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import fnmatch
import json
import os
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MUTANTS = ROOT / "mutants" / "src"
NOTES = ROOT / "tests" / "mutants.toml"
ROOMS = ("outerstep.coordination.*", "outerstep.core.*", "outerstep.screens*")
KILLED = {1, 3, 36, 24, -24, 152, 255, -11, -9}  # mutmut's codes: a test failed, ran for ever, or the process crashed
NOT_RUN = {None, 2, 34}


@dataclass(frozen=True)
class Survivor:
    """A change that no test noticed. `function`: its dotted name; `change`: the lines that differ, "old → new"."""

    function: str
    change: str
    is_wording: bool


@dataclass
class Module:
    killed: int = 0
    survivors: list[Survivor] = field(default_factory=list)

    @property
    def wording(self) -> int:
        return sum(survivor.is_wording for survivor in self.survivors)

    @property
    def decisions(self) -> list[Survivor]:
        return [survivor for survivor in self.survivors if not survivor.is_wording]

    @property
    def share(self) -> float:
        """Of the changes to decisions, how many were noticed."""
        total = self.killed + len(self.decisions)
        return self.killed / total if total else 1.0


class _NoText(ast.NodeTransformer):
    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        return ast.Constant("") if isinstance(node.value, str) else node


def _functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and "__mutmut_" in node.name:
            yield node


def _compare(before: ast.FunctionDef, after: ast.FunctionDef) -> tuple[str, bool]:
    """What differs, and whether that is only text."""
    old, new = (ast.unparse(ast.Module(node.body, [])).splitlines() for node in (before, after))
    old += [ast.unparse(before.args)]
    new += [ast.unparse(after.args)]
    lines = [line for line in difflib.ndiff(old, new) if line[0] in "+-"]
    removed, added = ([line[2:].strip() for line in lines if line[0] == sign] for sign in "-+")
    plain = [ast.dump(_NoText().visit(ast.parse("\n".join(text)))) for text in (old[:-1], new[:-1])]
    return f"{' / '.join(removed)} → {' / '.join(added)}", plain[0] == plain[1] and old != new


def read_results(patterns: list[str]) -> dict[str, Module]:
    """By module, what the last run found."""
    modules: dict[str, Module] = defaultdict(Module)
    for meta in sorted(MUTANTS.rglob("*.py.meta")):
        codes: dict[str, int | None] = json.loads(meta.read_text())["exit_code_by_key"]
        wanted = {key: code for key, code in codes.items() if any(fnmatch.fnmatch(key, p) for p in patterns)}
        if not wanted:
            continue
        bodies = {node.name: node for node in _functions(ast.parse(meta.with_suffix("").read_text()))}
        for key, code in wanted.items():
            module, _, name = key.rpartition(".")
            if code in NOT_RUN:
                continue
            if code in KILLED:
                modules[module].killed += 1
                continue
            mangled = name.rpartition("__mutmut_")[0]
            change, is_wording = _compare(bodies[f"{mangled}__mutmut_orig"], bodies[name])
            plain = mangled.removeprefix("xǁ").removeprefix("x_").replace("ǁ", ".")
            modules[module].survivors.append(Survivor(f"{module}.{plain}", change, is_wording))
    return dict(modules)


def find_reason(survivor: Survivor, notes: list[dict[str, str]]) -> str | None:
    for note in notes:
        if fnmatch.fnmatch(survivor.function, note["function"]) and note.get("change", "") in survivor.change:
            return note["reason"]
    return None


def report(patterns: list[str], *, verbose: bool) -> bool:
    """Print the table; True if every promise of tests/mutants.toml is kept."""
    notes = tomllib.loads(NOTES.read_text()) if NOTES.exists() else {}
    strict: dict[str, float] = notes.get("strict", {})
    explained: list[dict[str, str]] = notes.get("explained", [])
    kept, killed, total = True, 0, 0
    print(f"{'module':58s} {'changes':>7s} {'killed':>6s} {'share':>6s} {'open':>5s} {'wording':>7s}")
    for name, module in sorted(read_results(patterns).items()):
        count = module.killed + len(module.decisions)
        reasons = [(survivor, find_reason(survivor, explained)) for survivor in module.decisions]
        unexplained = [survivor for survivor, reason in reasons if reason is None]
        promise = next((share for pattern, share in strict.items() if fnmatch.fnmatch(name, pattern)), None)
        broken = promise is not None and (bool(unexplained) or module.share < promise)
        kept, killed, total = kept and not broken, killed + module.killed, total + count
        mark = "  ✗" if broken else ""
        row = f"{name:58s} {count:7d} {module.killed:6d} {module.share:6.1%}"
        print(f"{row} {len(unexplained):5d} {module.wording:7d}{mark}")
        for survivor, reason in reasons if verbose or broken else ():
            print(f"    {survivor.function.removeprefix(name + '.')}: {survivor.change}")
            print(f"        {reason or '(no reason)'}")
    print(f"{'all':58s} {total:7d} {killed:6d} {killed / total if total else 1.0:6.1%}")
    return kept


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("patterns", nargs="*", default=list(ROOMS), help="modules, or functions in them")
    parser.add_argument("--report", action="store_true", help="only show what the last run found")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants at a time")
    parser.add_argument("-v", "--verbose", action="store_true", help="list every survivor with its reason")
    args = parser.parse_args()
    os.chdir(ROOT)
    if not args.report:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [str(Path(sys.executable).with_name("mutmut")), "run", "--max-children", str(args.jobs)]
        done = subprocess.run([*command, *args.patterns], env=environment, check=False)
        if done.returncode:
            return done.returncode
    return 0 if report(args.patterns, verbose=args.verbose) else 1


if __name__ == "__main__":
    sys.exit(main())
