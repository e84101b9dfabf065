"""What the worker's machine and its driver say to each other: how exchanges stand, what they came to, what to do.

A driver carries effects out in the order in which it gets them, on whatever it has: tensors, or sets of steps. An
effect names a fragment; the driver keeps that fragment's ticket, what was sent, and its newest agreement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from ...types import Participant, Plan

# --- what the machine is told ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sight:
    """How an exchange stands. `wanted`: (fragment, version) of other rounds that wait for this worker; `waiting_for`:
    what its own round waits for, in words; `silent_s`: for how long nobody has answered; `missed`: it is over, and its
    round closed without it; `failed`: it is over without an agreement."""

    done: bool
    wanted: frozenset[tuple[int, int]] = frozenset()
    waiting_for: str = ""
    silent_s: float = 0.0
    missed: bool = False
    failed: bool = False


class Result(Protocol):
    """What an exchange came to, as far as decisions depend on it: the newest agreement, and whether the contribution
    counts in it or in a round still open."""

    @property
    def fragment(self) -> int: ...
    @property
    def version(self) -> int: ...
    @property
    def counted(self) -> bool: ...
    @property
    def counted_in(self) -> int:
        """The version that holds the contribution; above `version` if it was late."""

    @property
    def too_old(self) -> bool:
        """The contribution will never count, because of its age."""

    @property
    def refused(self) -> str:
        """Why nobody has any use for the contribution; "" = somebody has."""

    @property
    def unchanged(self) -> bool:
        """The agreement is the anchor that this worker holds already."""

    @property
    def steps_lost(self) -> int:
        """Of an earlier, late contribution that does not count after all."""

    @property
    def above(self) -> tuple[int, ...]:
        """Recent versions that no round made: they came from a layer above."""

    @property
    def participants(self) -> tuple[Participant, ...]: ...
    @property
    def plan(self) -> Plan: ...
    @property
    def also(self) -> Sequence[Result]:
        """Agreements on other fragments that came along, to be adopted first."""


# --- what the machine asks for: exchanges ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Send:
    """Contribute what is unsent. `keep`: keep a copy too, because training goes on before the agreement is here.
    `last`: the worker leaves after this, and stays for the very round that holds it, within its patience. `units`: of
    leased data, by the worker's own numbers."""

    fragment: int
    base_version: int
    oldest_base: int
    steps: int
    samples: int
    tokens: int
    keep: bool = False
    last: bool = False
    units: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Resume:
    """Carry an exchange on under the same key: it failed, or is the `last` now."""

    fragment: int
    last: bool = False


@dataclass(frozen=True)
class Finish:
    """The exchange is over: report its result to `outcome`, or `failed`."""

    fragment: int


@dataclass(frozen=True)
class Keep:
    """Training goes on without the agreement: keep a copy of what was sent. (The weights are still those.)"""

    fragment: int


@dataclass(frozen=True)
class PutOff:
    """The contribution counts in a round to come: its exchange is kept until an agreement is held that includes it."""

    fragment: int


@dataclass(frozen=True)
class Recall:
    """The exchange that was put off is in flight again: its round is waited for."""

    fragment: int


@dataclass(frozen=True)
class CatchUp:
    """Ask for what was agreed since the saved state; if that is overtaken, for the agreement that holds what overtook
    it."""

    fragment: int


@dataclass(frozen=True)
class Reopen:
    """Carry a saved contribution on. `late`: it counts in a round to come. If it never will, report `dropped`."""

    fragment: int
    late: bool = False


# --- what the machine asks for: moves of the local weights. A is the anchor, θ′ the agreed one. A = θ′ after each -----


@dataclass(frozen=True)
class Adopt:
    """local = θ′"""

    fragment: int


@dataclass(frozen=True)
class Rebase:
    """local += θ′ − A: unsent steps are kept."""

    fragment: int


@dataclass(frozen=True)
class Carry:
    """local = θ′ + what was done since the contribution was sent."""

    fragment: int


@dataclass(frozen=True)
class Mix:
    """local = α·local + (1 − α)·θ′"""

    fragment: int
    alpha: float


@dataclass(frozen=True)
class Prove:
    """Nothing moves: is A = θ′?"""

    fragment: int


@dataclass(frozen=True)
class Reload:
    """local = A in every fragment, and nothing that was made of the local weights is kept."""


@dataclass(frozen=True)
class StartOver:
    """local = A in every fragment, and what the codec left out of earlier contributions is not sent any more: somebody
    else has moved the weights."""


@dataclass(frozen=True)
class Depart:
    """The exchanges are over. `weights`: which ones the model keeps: the agreed ones, its own from before the last
    contribution, or those it has."""

    weights: Literal["agreed", "own", "as they are"]


# --- what is worth a line in the log --------------------------------------------------------------------------------

NoteKind = Literal[
    "agreed",  # on `version`, with our contribution
    "left out",  # agreed on, with a weight of 0 for our `steps`
    "missed",  # version `version` came about without our `steps`
    "discarded",  # `steps` were too old
    "lost",  # `steps` of a late contribution
    "changed outside",  # the local weights, by somebody else; `steps` are dropped
    "changed at the end",  # likewise, and this worker leaves
    "refused",  # nobody has any use for our contribution: `why`
    "mended",  # the anchor was not the one agreed on as `version`
    "plan",  # it has changed
    "deferred",  # nobody answers; training goes on
    "overtaken",  # the saved state, whose `steps` are in the model
    "caught up",  # to `version`, with `steps` unsent
    "leaving",  # training is over
    "stuck",  # `why`; leaving nevertheless
    "unreachable",  # `why`; leaving nevertheless
    "out of time",  # leaving nevertheless
]


@dataclass(frozen=True)
class Note:
    kind: NoteKind
    fragment: int = 0
    version: int = 0
    steps: int = 0
    why: str = ""


Move = Adopt | Rebase | Carry | Mix | Prove
Effect = Send | Resume | Finish | Keep | PutOff | Recall | CatchUp | Reopen | Move | Reload | StartOver | Depart | Note
