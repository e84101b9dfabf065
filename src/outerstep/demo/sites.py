"""Where the clusters of a demo live: each in a network namespace of its own, where this machine allows that.

A *site* is a place with a network of its own. Its processes see each other, and of the rest of the world one address:
the near end of the link across. Namespaces need no root: the demo starts itself again in a user namespace, in which it
may make networks (`enter_namespace`). Where that is not allowed, all sites share the loopback, and only the emulated
link lies between them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass, field

from ..errors import OuterstepError
from .link import LOOPBACK

INSIDE = "OUTERSTEP_DEMO_NAMESPACE"  # set: this process may make networks
UNSHARE = ("unshare", "--user", "--map-root-user", "--net", "--")
TRY_S = 20.0


class NoNamespace(OuterstepError):
    """A network could not be made."""


@dataclass(frozen=True)
class Site:
    """`host`: the address of its processes. `gate`: the address on which its end of the link across listens. `enter`:
    the words in front of a command that runs there. `network`: the kernel's name of its network."""

    name: str
    host: str = LOOPBACK
    gate: str = LOOPBACK
    enter: tuple[str, ...] = ()
    network: str = ""


def why_no_namespaces() -> str:
    """Try it: a namespace, and a cable in it. "": it works."""
    words = [*UNSHARE, "sh", "-c", "ip link set lo up && ip link add near type veth peer name far && nsenter --version"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=TRY_S, check=False)
    except FileNotFoundError:
        return f"there is no {words[0]} (of util-linux) on this machine"
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if done.returncode == 0 else done.stderr.strip() or f"{words[0]} ended with {done.returncode}"


def enter_namespace() -> None:
    """This command, once more, with networks of its own: it takes the place of this process."""
    words = [*UNSHARE, sys.executable, "-m", "outerstep", *sys.argv[1:]]
    os.execvpe(words[0], words, {**os.environ, INSIDE: "1"})


def is_inside_namespace() -> bool:
    return INSIDE in os.environ


@dataclass
class Sites:
    """Makes sites, and ends them."""

    separate: bool
    _keepers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.separate:
            _run("ip", "link", "set", "lo", "up")

    def open(self, name: str) -> Site:
        if not self.separate:
            return Site(name, network=network_of("self"))
        number = len(self._keepers) + 1
        # A namespace lasts as long as a process in it; this one ends with its standard input, that is with us.
        keeper = subprocess.Popen(
            ["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
        )
        self._keepers.append(keeper)
        _wait_until_apart(keeper)
        near, far = f"10.77.{number}.1", f"10.77.{number}.2"
        enter = ("nsenter", "--target", str(keeper.pid), "--net", "--")
        cable = f"site{number}"
        _run("ip", "link", "add", cable, "type", "veth", "peer", "name", "across", "netns", str(keeper.pid))
        _run("ip", "address", "add", f"{near}/24", "dev", cable)
        _run("ip", "link", "set", "dev", cable, "up")
        _run(*enter, "ip", "link", "set", "dev", "lo", "up")
        _run(*enter, "ip", "address", "add", f"{far}/24", "dev", "across")
        _run(*enter, "ip", "link", "set", "dev", "across", "up")
        return Site(name, far, near, enter, network_of(keeper.pid))

    def close(self) -> None:
        for keeper in self._keepers:
            keeper.kill()
            keeper.communicate()
        self._keepers.clear()


def network_of(process: int | str) -> str:
    """`net:[NUMBER]`: equal for two processes if they share their network."""
    return os.readlink(f"/proc/{process}/ns/net")


def _wait_until_apart(keeper: subprocess.Popen[bytes]) -> None:
    ours = network_of("self")
    give_up_at = time.monotonic() + TRY_S
    while keeper.poll() is None and time.monotonic() < give_up_at:
        if network_of(keeper.pid) != ours:
            return
        time.sleep(0.01)
    raise NoNamespace("a network namespace could not be made; use --no-namespaces")


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=TRY_S, check=False)
    if done.returncode:
        raise NoNamespace(f"`{' '.join(words)}` failed: {done.stderr.strip()}; use --no-namespaces")
