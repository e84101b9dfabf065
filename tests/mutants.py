"""Mutation testing of the pure rooms: does a test fail if a decision is changed?

    make mutants                                              # coordination/, then core/: an hour or two
    python tests/mutants.py "outerstep.coordination.worker.*"  # some of it
    python tests/mutants.py --again                           # also those that were killed before
    python tests/mutants.py --report -v                       # what the last run found, without running

mutmut changes one operator, constant, argument or name at a time and runs the unit tests that reach the changed
function. This script gives it one folder per room (mutants/worker, mutants/core …), each with the tests of that room,
and reads what it found, module by module. A *survivor* is a change that no test noticed. It is either killed by a new
test, or explained in tests/mutants.toml by the change itself (not by mutmut's numbers, which shift with every edit).
After new tests, a run tries only what is not dead yet. Changes to the wording of messages are no decisions: they are
left out of the count.

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
import re
import shutil
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "mutants"
NOTES = ROOT / "tests" / "mutants.toml"
KILLED = {1, 3, 36, 24, -24, 152, 255, -11, -9}  # mutmut's codes: a test failed, ran for ever, or the process crashed
NOT_RUN = {None, 2, 34}
RUNNER = ROOT / "tests" / "mutmut_once.py"
AROUND = 40  # characters of a changed line that are shown before and after the change
PAGE = ROOT / "docs" / "results" / "mutants.md"
GENERATED = ("<!-- generated: python tests/mutants.py --report --page -->\n", "<!-- end of generated -->\n")


@dataclass(frozen=True)
class Room:
    """What is changed, the tests that must notice, and those among them that are too slow to run thousands of times:
    they start processes, compile, or play hundreds of generated schedules."""

    modules: tuple[str, ...]
    files: tuple[str, ...]
    tests: tuple[str, ...]
    too_slow: str = ""

    def found_tests(self) -> list[str]:
        return [str(path.relative_to(ROOT)) for pattern in self.tests for path in sorted(ROOT.glob(pattern))]


SHARED = ("outerstep.coordination.backoff.*", "outerstep.coordination.weights.*", "outerstep.screens.*")
ROOMS = {
    "server": Room(
        modules=("outerstep.coordination.server.*", *SHARED),
        files=(
            "src/outerstep/coordination/server/*",
            "src/outerstep/coordination/backoff.py",
            "src/outerstep/coordination/weights.py",
            "src/outerstep/screens.py",
        ),
        tests=("tests/unit/coordination", "tests/unit/test_screens.py"),
        too_slow="CoordinatorMachine",
    ),
    "worker": Room(
        modules=("outerstep.coordination.worker.*",),
        files=("src/outerstep/coordination/worker/*",),
        tests=("tests/unit/coordination/worker",),
    ),
    "leases": Room(
        modules=(
            "outerstep.coordination.leases.*",
            "outerstep.coordination.kept_leases.*",
            "outerstep.coordination.shared_*",
            "outerstep.coordination.shares.*",
            "outerstep.coordination.sub_leases.*",
            "outerstep.coordination.unit_parts.*",
        ),
        files=(
            "src/outerstep/coordination/*leases.py",
            "src/outerstep/coordination/shares.py",
            "src/outerstep/coordination/unit_parts.py",
        ),
        tests=(
            "tests/unit/coordination/test_*leases.py",
            "tests/unit/coordination/test_shared_table.py",
            "tests/unit/coordination/test_parts_of_units.py",
            "tests/unit/coordination/test_lease_accounts.py",
            "tests/unit/coordination/test_shares.py",
        ),
    ),
    "layers": Room(
        modules=("outerstep.coordination.layers.*",),
        files=(
            "src/outerstep/coordination/layers/[!lt]*",
            "src/outerstep/coordination/layers/leadership.py",
            "src/outerstep/coordination/layers/tasks.py",
        ),
        tests=("tests/unit/coordination/layers", "tests/unit/coordination/test_sub_leases.py"),
    ),
    "gossip": Room(
        modules=("outerstep.coordination.gossip.*",),
        files=("src/outerstep/coordination/gossip/*",),
        tests=("tests/unit/coordination/gossip",),
        too_slow="test_few_schedules or at_a_time_as_fit or two_hundred_come_and_go or sixty_four_decide "
        "or large_statements or turns_far_ahead or any_order_with_losses or of_many_small_ones",
    ),
    "planning": Room(
        modules=(
            "outerstep.coordination.autoconfig.*",
            "outerstep.coordination.planning.*",
            "outerstep.coordination.cost.*",
            "outerstep.coordination.failures.*",
            "outerstep.coordination.windows.*",
        ),
        files=(
            "src/outerstep/coordination/autoconfig/*",
            "src/outerstep/coordination/planning/*",
            "src/outerstep/coordination/cost.py",
            "src/outerstep/coordination/failures.py",
            "src/outerstep/coordination/windows.py",
        ),
        tests=(
            "tests/unit/coordination/autoconfig",
            "tests/unit/coordination/planning",
            "tests/unit/coordination/test_cost.py",
            "tests/unit/coordination/test_failures.py",
            "tests/unit/coordination/test_windows.py",
        ),
        too_slow="random_links or planted_restlessness or steady_noisy_link or one_of_four_says",
    ),
    "core": Room(
        modules=("outerstep.core.*",),
        files=("src/outerstep/core/*",),
        tests=("tests/unit/core",),
        too_slow="vector or threads or compiled",
    ),
}

UNCHANGED = {
    "src/outerstep/coordination/layers/lifecycle.py": "its table is made when it is imported, before the change",
    "src/outerstep/coordination/layers/lifecycle_page.py": "it decides nothing: it draws a page, which a test compares",
}
"""Files of the pure rooms in which nothing is changed, and why."""


@dataclass(frozen=True)
class Mutant:
    """One change. `function`: its dotted name; `change`: the lines that differ, "old → new"."""

    key: str
    function: str
    change: str
    is_wording: bool
    is_killed: bool


@dataclass
class Module:
    mutants: list[Mutant] = field(default_factory=list)
    not_run: int = 0

    @property
    def wording(self) -> int:
        return sum(mutant.is_wording for mutant in self.mutants)

    @property
    def decisions(self) -> list[Mutant]:
        return [mutant for mutant in self.mutants if not mutant.is_wording]

    @property
    def survivors(self) -> list[Mutant]:
        return [mutant for mutant in self.decisions if not mutant.is_killed]

    @property
    def killed(self) -> int:
        return len(self.decisions) - len(self.survivors)

    @property
    def share(self) -> float:
        """Of the changes to decisions, how many were noticed."""
        return self.killed / len(self.decisions) if self.decisions else 1.0


# --- running ------------------------------------------------------------------------------------------------------


def prepare(room: str) -> Path:
    """The folder in which mutmut works on this room: links to the project, and a configuration of its own."""
    folder, what = WORK / room, ROOMS[room]
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("src", "tests", "docs", "examples", "bench", "README.md", "Makefile", "CONTRIBUTING.md"):
        # A relative link: in a tree that was copied or moved, an absolute one would lead into the old tree.
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(Path("..", "..", name))
    skipped = ["-k", f"not ({what.too_slow})"] if what.too_slow else []
    settings = {
        "source_paths": ["src/outerstep"],
        "only_mutate": list(what.files),
        "also_copy": ["src", "tests", "docs", "examples", "bench", "README.md", "pyproject.toml"],
        "process_isolation": "forkserver",  # torch and hypothesis do not bear a fork of a process that has run tests
        "pytest_add_cli_args_test_selection": what.found_tests(),
        "pytest_add_cli_args": ["--hypothesis-profile", "quick", *skipped],
    }
    lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
    shared = (ROOT / "pyproject.toml").read_text()
    (folder / "pyproject.toml").write_text(f"{shared}\n[tool.mutmut]\n" + "\n".join(lines) + "\n")
    return folder


def run(room: str, names: list[str], *, jobs: int, again: bool) -> int:
    folder = prepare(room)
    # mutmut adds to what it has: it would keep tests that are gone, and think that moved functions have none.
    shutil.rmtree(folder / "mutants" / "tests", ignore_errors=True)
    (folder / "mutants" / "mutmut-stats.json").unlink(missing_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MUTANTS_AGAIN": str(int(again))}
    command = [sys.executable, str(RUNNER), "run", "--max-children", str(jobs), *names]
    return subprocess.run(command, cwd=folder, env=environment, check=False).returncode


# --- reading ------------------------------------------------------------------------------------------------------


class _NoWording(ast.NodeTransformer):
    """Sentences, f-strings, what an exception says and hints; a text without a space may be a key or a kind, and stays.
    Nor is it a decision whether `zip` checks that its arguments are as long as they always are."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Name) and node.func.id == "zip":
            node.keywords = []
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        text = node.value
        if isinstance(text, str) and " " in text.removeprefix("XX").removesuffix("XX").strip():
            return ast.Constant("")
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.Constant:
        return ast.Constant("")

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        if isinstance(node.exc, ast.Call):
            node.exc.args = []
            node.exc.keywords = [keyword for keyword in node.exc.keywords if keyword.arg != "hint"]
        return self.generic_visit(node)

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        node.msg = None
        return self.generic_visit(node)


def _functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and "__mutmut_" in node.name:
            yield node


def _text(node: ast.FunctionDef) -> list[str]:
    return [ast.unparse(node.args), *ast.unparse(ast.Module(node.body, [])).splitlines()]


def _meaning(node: ast.FunctionDef) -> str:
    return ast.dump(_NoWording().visit(ast.parse("\n".join(_text(node)[1:])))) + ast.dump(node.args)


def _common(one: str, other: str) -> int:
    """With how many equal characters they begin."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def find_wording(mutated: Path) -> set[str]:
    """The names of the mutants in this file that only change what is said."""
    meanings = {node.name: _meaning(node) for node in _functions(ast.parse(mutated.read_text()))}
    return {
        name for name in meanings if meanings[name] == meanings.get(f"{name.rpartition('__mutmut_')[0]}__mutmut_orig")
    }


def _compare(old: list[str], new: list[str]) -> str:
    """Of the lines that differ, what differs, with some of what is around it."""
    lines = [line for line in difflib.ndiff(old, new) if line[0] in "+-"]
    before, after = (" / ".join(line[2:].strip() for line in lines if line[0] == sign) for sign in "-+")
    start = _common(before, after)
    end = _common(before[start:][::-1], after[start:][::-1])
    first, last = max(0, start - AROUND), max(0, end - AROUND)
    shown = (text[first : len(text) - last] for text in (before, after))
    return " → ".join(f"{'…' if first else ''}{text}{'…' if last else ''}" for text in shown)


def read_results(patterns: list[str]) -> dict[str, Module]:
    """By module, what the last run found."""
    modules: dict[str, Module] = defaultdict(Module)
    for meta in sorted(WORK.glob("*/mutants/src/**/*.py.meta")):
        if not (ROOT / "src" / str(meta.with_suffix("")).rpartition("/mutants/src/")[2]).exists():
            continue  # what is left of a file that is gone
        codes: dict[str, int | None] = json.loads(meta.read_text())["exit_code_by_key"]
        wanted = {key: code for key, code in codes.items() if any(fnmatch.fnmatch(key, p) for p in patterns)}
        if not wanted:
            continue
        bodies = {node.name: node for node in _functions(ast.parse(meta.with_suffix("").read_text()))}
        wording = find_wording(meta.with_suffix(""))
        for key, code in wanted.items():
            module, _, name = key.rpartition(".")
            mangled = name.rpartition("__mutmut_")[0]
            if name not in bodies or (code in NOT_RUN and name not in wording):
                modules[module].not_run += 1
                continue
            origin = f"{mangled}__mutmut_orig"
            change = "" if code in KILLED or name in wording else _compare(_text(bodies[origin]), _text(bodies[name]))
            plain = mangled.removeprefix("xǁ").removeprefix("x_").replace("ǁ", ".")
            modules[module].mutants.append(Mutant(key, f"{module}.{plain}", change, name in wording, code in KILLED))
    return dict(modules)


def find_reason(survivor: Mutant, notes: list[dict[str, str]]) -> str | None:
    for note in notes:
        if fnmatch.fnmatch(survivor.function, note["function"]) and note.get("change", "") in survivor.change:
            return note["reason"]
    return None


# --- reporting ----------------------------------------------------------------------------------------------------


@dataclass
class Findings:
    """What was found, beside what tests/mutants.toml promises and explains."""

    modules: dict[str, Module]
    strict: dict[str, float]
    explained: list[dict[str, str]]

    @classmethod
    def of(cls, patterns: list[str]) -> Findings:
        notes = tomllib.loads(NOTES.read_text()) if NOTES.exists() else {}
        return cls(dict(sorted(read_results(patterns).items())), notes.get("strict", {}), notes.get("explained", []))

    def reasons(self, module: Module) -> list[tuple[Mutant, str | None]]:
        return [(survivor, find_reason(survivor, self.explained)) for survivor in module.survivors]

    def unexplained(self, module: Module) -> int:
        return sum(reason is None for _, reason in self.reasons(module))

    def promise(self, name: str) -> float | None:
        return next((share for pattern, share in self.strict.items() if fnmatch.fnmatch(name, pattern)), None)

    def is_broken(self, name: str) -> bool:
        promise, module = self.promise(name), self.modules[name]
        return promise is not None and (self.unexplained(module) > 0 or module.share < promise)

    @property
    def rows(self) -> list[tuple[str, Module]]:
        modules = self.modules.values()
        total = Module([each for module in modules for each in module.mutants], sum(m.not_run for m in modules))
        return [*self.modules.items(), ("all", total)]

    def show(self, *, verbose: bool) -> None:
        print(
            f"{'module':50s} {'changes':>7s} {'killed':>6s} {'share':>6s} {'open':>5s} {'wording':>7s} {'not run':>7s}"
        )
        for name, module in self.rows:
            row = f"{name:50s} {len(module.decisions):7d} {module.killed:6d} {module.share:6.1%}"
            broken = name in self.modules and self.is_broken(name)
            rest = f"{self.unexplained(module):5d} {module.wording:7d} {module.not_run:7d}"
            print(f"{row} {rest}{'  ✗' if broken else ''}")
            for survivor, reason in self.reasons(module) if name != "all" and (verbose or broken) else ():
                print(f"    {survivor.function.removeprefix(name + '.')}: {survivor.change}")
                print(f"        {reason or '(no reason)'}")

    def page(self) -> Iterator[str]:
        """The generated part of docs/results/mutants.md."""
        yield "| module | changes | killed | share | explained | open | wording | not run |"
        yield "|---|--:|--:|--:|--:|--:|--:|--:|"
        for name, module in self.rows:
            unexplained, mark = self.unexplained(module), "" if self.promise(name) is None else " §"
            explained = len(module.survivors) - unexplained
            counts = (explained, unexplained, module.wording, module.not_run)
            cells = (len(module.decisions), module.killed, f"{module.share:.1%}", *counts)
            yield f"| {name.removeprefix('outerstep.')}{mark} | {' | '.join(map(str, cells))} |"
        yield "\n### Survivors"
        for name, module in self.modules.items():
            grouped: dict[str | None, list[str]] = defaultdict(list)
            for survivor, reason in self.reasons(module):
                grouped[reason].append(f"`{survivor.function.removeprefix(name + '.')}`: ``{survivor.change}``")
            if grouped:
                yield f"\n**{name.removeprefix('outerstep.')}**\n"
            for reason, changes in sorted(grouped.items(), key=lambda item: item[0] is None):
                yield f"- {reason or 'Open: no test notices, no reason is given.'}"
                yield from (f"  - {change}" for change in changes)


def write_page(path: Path, findings: Findings) -> None:
    before, after = GENERATED
    head, _, rest = path.read_text().partition(before)
    old, _, tail = rest.partition(after)
    path.write_text(head + before + merged(old, "\n".join(findings.page()) + "\n") + after + tail)


def merged(old: str, new: str) -> str:
    """The new page; and of modules that this run did not come to, what the old one says."""
    came_to = _rows(new)
    rows = {name: row for name, row in (_rows(old) | came_to).items() if name != "all"}
    sections = {name: text for name, text in _sections(old).items() if name not in came_to} | _sections(new)
    sums = [sum(int(row[column]) for row in rows.values()) for column in (1, 2, 4, 5, 6, 7)]
    rows_and_all = [row for _, row in sorted(rows.items())]
    rows_and_all.append(["all", *map(str, sums[:2]), f"{sums[1] / max(sums[0], 1):.1%}", *map(str, sums[2:])])
    lines = [*new.splitlines()[:2], *(f"| {' | '.join(row)} |" for row in rows_and_all), "", "### Survivors"]
    return "\n".join([*lines, *(f"\n**{name}**\n{sections[name]}" for name in sorted(sections))]) + "\n"


def _rows(page: str) -> dict[str, list[str]]:
    """Module → the cells of its row, the first of which is the name, with its mark."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:2] == "| "]
    return {row[0].removesuffix(" §"): row for row in cells if row[0] != "module"}


def _sections(page: str) -> dict[str, str]:
    """Module → what is said of its survivors."""
    found = re.findall(r"^\*\*([\w.]+)\*\*\n(.*?)(?=^\*\*[\w.]+\*\*$|\Z)", page, re.MULTILINE | re.DOTALL)
    return {name: text.rstrip() for name, text in found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("patterns", nargs="*", help="modules, or functions in them; all if none is given")
    parser.add_argument("--again", action="store_true", help="run those too that a test has killed before")
    parser.add_argument("--report", action="store_true", help="only show what the last run found")
    parser.add_argument("--page", action="store_true", help=f"and write it into {PAGE.relative_to(ROOT)}")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants at a time")
    parser.add_argument("-v", "--verbose", action="store_true", help="list every survivor with its reason")
    args = parser.parse_args()
    patterns = args.patterns or [pattern for room in ROOMS.values() for pattern in room.modules]
    for name, room in {} if args.report else ROOMS.items():
        roots = [module.rstrip("*") for module in room.modules]
        stems = {pattern: pattern.rstrip("*") for pattern in patterns}
        names = [p for p, stem in stems.items() if any(stem.startswith(r) or r.startswith(stem) for r in roots)]
        if names and (code := run(name, names, jobs=args.jobs, again=args.again)):
            return code
    findings = Findings.of(patterns)
    findings.show(verbose=args.verbose)
    if args.page:
        write_page(PAGE, findings)
    return int(any(map(findings.is_broken, findings.modules)))


if __name__ == "__main__":
    sys.exit(main())
