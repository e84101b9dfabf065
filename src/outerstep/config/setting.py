"""A setting: a field of a config class that also says its flags, its panel in --help, and a sentence.

    quorum: Positive | None = setting(None, ROUNDS, "Contributions that close a round.", "all expected workers")

Flags, environment variables, TOML keys, `outerstep config`, and the tables in docs/reference/configuration.md are all
made from these fields.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

from .effects import Needs, with_topology

T = TypeVar("T")

# The panels of --help, in their order.
PANELS = (
    (MODEL := "Model"),
    (ROUNDS := "Rounds"),
    (AGGREGATION := "Robust aggregation"),
    (ASYNC := "Asynchronous"),
    (STREAMING := "Streaming"),
    (OUTER := "Outer step"),
    (CONTROLLER := "Controller"),
    (ABOVE := "Layer above"),
    (SAVING := "Saving"),
    (NETWORK := "Network"),
    (SECURITY := "Security"),
    (LIMITS := "Limits"),
    (JOINING := "Joining"),
    (EXCHANGES := "Exchanges"),
    (PATIENCE := "Patience"),
    (NO_SERVER := "Without a server"),
    (OBSERVING := "Observing"),
    (REPLICAS := "torchft"),
    (PEERS := "Between peers"),
)
OF_PANEL = {REPLICAS: with_topology("torchft"), PEERS: with_topology("gossip")}  # what all settings of a panel need


@dataclass(frozen=True)
class Setting:
    """`unset` says what None means. A switch, "--async", also has its opposite, "--no-async". `needs`: without it the
    setting has no effect."""

    field: str
    panel: str
    help: str
    unset: str
    flags: str
    needs: Needs | None = None
    repeats: bool = False  # its flag may be given several times; the texts are joined with spaces

    @property
    def sentence(self) -> str:
        """For --help and the reference, without the default. What a whole panel needs is not repeated."""
        if self.needs is None or self.panel in OF_PANEL:
            return self.help
        return f"{self.help} Needs {self.needs.text}."

    @property
    def flag(self) -> str:
        """The one that errors and `config show` name."""
        return next(flag for flag in self.flags.split() if flag.startswith("--"))

    @property
    def opposite(self) -> str:
        """Of a switch."""
        return f"--no-{self.flag.removeprefix('--')}"


def setting(
    default: T,
    panel: str,
    help_: str,
    unset: str = "",
    *,
    flags: str = "",
    needs: Needs | None = None,
    repeats: bool = False,
) -> T:
    """A field with a default. `flags` "" = "--" and the field's name, without "_s"."""
    made: T = field(default=default, metadata=row(panel, help_, unset, flags=flags, needs=needs, repeats=repeats))
    return made


def row(
    panel: str, help_: str, unset: str = "", *, flags: str = "", needs: Needs | None = None, repeats: bool = False
) -> dict[str, Any]:
    """The metadata of a field without a default."""
    needs = needs or OF_PANEL.get(panel)
    return {"panel": panel, "help": help_, "unset": unset, "flags": flags, "needs": needs, "repeats": repeats}
