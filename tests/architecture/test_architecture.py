"""The house keeps its shape: who may import whom, which rooms are pure, what stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import outerstep

SOURCE = Path(outerstep.__file__).parent
PLAIN = {
    "attached",
    "types",
    "errors",
    "events",
    "defaults",
    "digest",
    "lanes",
    "printable",
    "ranges",
    "schedule",
    "screens",
    "statements",
    "tiling",
    "versions",
}

# room -> what of outerstep it may import, besides itself
MAY_IMPORT = {
    "types": {"versions"},
    "attached": set(),
    "errors": set(),
    "versions": {"errors"},
    "digest": set(),
    "installing": set(),
    "lanes": {"defaults"},
    "ranges": set(),
    "schedule": set(),
    "screens": {"errors"},
    "events": {"printable", "types"},
    "printable": set(),
    "statements": {"types", "versions"},
    "tiling": {"digest", "errors", "types"},
    "defaults": set(),
    "pool": set(),
    "threads": set(),
    "security": PLAIN,
    "config": PLAIN | {"coordination", "security"},
    "torch_file": PLAIN,
    "model_folder": PLAIN | {"torch_file"},
    "core": PLAIN,
    "coordination": PLAIN,
    "wire": PLAIN | {"security"},
    "durable": PLAIN,
    "topology/gossip/node": PLAIN | {"coordination", "dashboard", "durable", "observe", "pool", "security", "wire"},
    "simulate": PLAIN | {"coordination", "durable"},
    "topology": PLAIN | {"core", "coordination", "threads", "wire"},
    "observe": PLAIN | {"installing"},
    "dashboard": PLAIN | {"observe", "security", "wire"},
    "server": PLAIN
    | {"config", "core", "coordination", "dashboard", "durable", "model_folder", "observe", "pool"}
    | {"security", "threads", "torch_file", "wire"},
    "worker": PLAIN
    | {"config", "core", "coordination", "installing", "model_folder", "observe", "security", "threads"}
    | {"data", "topology", "wire"}
    | {"hierarchy"},  # where replicas are a cluster: the one that leads is a worker of another run, too
    "data": PLAIN | {"coordination", "topology"},
    "hierarchy": PLAIN | {"coordination", "durable", "observe", "security", "server", "topology", "wire", "worker"},
    "compat": PLAIN | {"config", "core", "coordination", "pool", "server", "topology", "wire"},
    "demo": PLAIN | {"", "dashboard", "data", "installing", "model_folder", "security", "torch_file", "wire"},
    "cli": PLAIN
    | {
        "compat",
        "config",
        "coordination",
        "core",
        "dashboard",
        "data",
        "demo",
        "durable",
        "hierarchy",
        "installing",
        "model_folder",
        "observe",
        "security",
        "server",
        "simulate",
    }
    | {"threads", "topology", "wire"},
    "integrations": PLAIN
    | {"core", "data", "installing", "model_folder", "torch_file", "worker"},  # optional; imported by these alone:
    **{trainer: {"integrations"} for trainer in ("accelerate", "hf", "lightning", "torchtitan")},
    "__main__": {"cli"},
    "extending": {"coordination", "core", "errors"},
    "": {"core", "errors", "extending", "model_folder", "server", "topology", "worker"},
}
# room -> modules that would make it impure
FORBIDDEN_OUTSIDE = {
    "core": {"socket", "threading", "time", "logging", "os", "http", "queue", "random"},
    "coordination": {"socket", "threading", "time", "logging", "os", "http", "torch", "numpy", "queue"},
    "simulate": {"socket", "threading", "time", "os", "http", "torch", "numpy"},
    "wire": {"torch", "numpy"},
    "topology/gossip/node": {"torch", "numpy"},
    "dashboard": {"torch", "numpy"},
    "durable": {"torch", "numpy", "socket", "time"},
    "security": {"torch", "numpy", "random"},
    "types": {"torch", "numpy", "os"},
}


def room_of(file: Path) -> str:
    """The innermost folder that has a rule of its own, or the file itself at the top."""
    path = file.relative_to(SOURCE)
    for folder in path.parents:
        if folder.as_posix() in MAY_IMPORT:
            return folder.as_posix()
    return "" if path.name == "__init__.py" else path.parts[0].removesuffix(".py")


def imports_of(file: Path) -> set[tuple[str, bool]]:
    """(module, is it ours?) for every import in the file, wherever it stands."""
    package = ["outerstep", *file.relative_to(SOURCE).parts[:-1]]
    found: set[tuple[str, bool]] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            target = base + (node.module.split(".") if node.module else [])
            names = [".".join([*target, alias.name]) for alias in node.names] if not node.module else [".".join(target)]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            continue
        found |= {(name, name.split(".")[0] == "outerstep") for name in names}
    return found


FILES = sorted(SOURCE.rglob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_imports_point_one_way(file: Path) -> None:
    room = room_of(file)
    allowed = MAY_IMPORT[room] | {room.split("/")[0]}
    for module, ours in imports_of(file):
        if ours:
            target = module.split(".")[1] if "." in module else ""
            assert target in allowed, f"{room or 'outerstep'} must not import {module}"
        else:
            assert module.split(".")[0] not in FORBIDDEN_OUTSIDE.get(room, set()), f"{room} must not import {module}"


def test_every_room_has_a_rule() -> None:
    assert {room_of(file) for file in FILES} <= MAY_IMPORT.keys()


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_every_module_says_what_it_is_for(file: Path) -> None:
    assert ast.get_docstring(ast.parse(file.read_text())), f"{file.name} has no docstring"


def test_pickles_are_read_in_one_file_and_only_for_their_tensors() -> None:
    for file in FILES:
        text = file.read_text()
        assert "import pickle" not in text, file
        calls = [
            node
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "load", "pickle.load", "loads")
        ]
        assert not calls or file.name == "torch_file.py", file
        for call in calls:
            assert "weights_only=True" in ast.unparse(call)


def test_every_public_name_can_be_loaded() -> None:
    assert sorted(outerstep.__all__) == outerstep.__all__ == sorted(outerstep._WHERE)
    for name in outerstep.__all__:
        assert getattr(outerstep, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'DiLoCoSever'"):
        outerstep.DiLoCoSever  # noqa: B018


LIGHT = [
    "import outerstep",
    "import outerstep.coordination.server.coordinator, outerstep.simulate, outerstep.wire.http_server",
    "import outerstep.topology.gossip.node",
    "import outerstep.cli, outerstep.config",
    "import outerstep.cli, sys; sys.argv = ['outerstep', 'status', '--help']\n"
    "try: outerstep.cli.main()\nexcept SystemExit: pass",
    "import outerstep.cli, sys; sys.argv = ['outerstep', 'config', 'show']\n"
    "try: outerstep.cli.main()\nexcept SystemExit: pass",
    "import outerstep.cli, sys\n"
    "sys.argv = 'outerstep plan --params 7B --link 1gbit --step-time 1s'.split()\n"
    "try: outerstep.cli.main()\nexcept SystemExit as end: assert not end.code",
    "import outerstep.cli, sys; sys.argv = ['outerstep', 'status', '--server', '127.0.0.1:9']\n"
    "try: outerstep.cli.main()\nexcept SystemExit: pass",
]


def test_trainers_are_modules_of_the_package_and_loaded_when_they_are_named() -> None:
    code = (
        "import outerstep, sys\n"
        "from outerstep.installing import install_line\n"
        "libraries = {'transformers', 'accelerate', 'lightning', 'torchtitan'}\n"
        "assert not libraries & sys.modules.keys(), 'outerstep imports them'\n"
        "assert outerstep.torchtitan.settings_from.__module__ == 'outerstep.integrations.torchtitan'\n"
        "assert not libraries & sys.modules.keys(), 'the worker imports them'\n"
        "class Nothing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name in libraries: raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Nothing())\n"
        "for name, package in ('hf', 'transformers'), ('accelerate', 'accelerate'), ('lightning', 'lightning'):\n"
        "    try: getattr(outerstep, name)\n"
        "    except ModuleNotFoundError as error:\n"
        "        assert f'needs the package {package}' in str(error), error\n"
        "        assert install_line(name) in str(error), error\n"
        "    else: raise AssertionError(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("code", LIGHT)
def test_what_needs_no_tensors_imports_no_torch(code: str) -> None:
    check = f"{code}\nimport sys; assert 'torch' not in sys.modules, 'torch was imported'"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
