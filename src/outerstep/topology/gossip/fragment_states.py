"""What a peer holds of a run: anchor and momentum of every fragment, and what the screens and the rule remember.

With a server all this is the server's. Here each peer has its own copy, moves it by the same decided rounds with the
same arithmetic, and gives it to whoever joins (standing.py).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...screens import History
from ..forms import Form, forms_of
from ..stepped import Momentum, Stepped
from ..terms import check_loaded
from ..update import WholeAnchor, anchor_hash
from .combined import Combined, Combiner
from .contents import Contents
from .node import DecidedRound
from .snapshot import Standing, on_host, read_standing, write_standing
from .terms import GossipTerms

log = logging.getLogger(__name__)


@dataclass
class Held:
    """Of one fragment, beside anchor and momentum. `version` and `anchor_hash` as they were confirmed."""

    version: int = 0
    anchor_hash: str = ""
    history: History = ()
    centre: dict[str, Tensor] | None = None
    is_moving: bool = True  # anchor and momentum do not belong together at the moment


@dataclass(frozen=True)
class Loaded:
    """A saved state, before the run is known."""

    versions: tuple[int, ...]
    anchors: dict[str, Tensor]
    histories: tuple[History, ...]
    centres: tuple[dict[str, Tensor] | None, ...]


@dataclass(frozen=True)
class Found:
    """An anchor, whole."""

    version: int
    update: WholeAnchor
    anchor_hash: str


class Holdings:
    def __init__(self, tensors: Mapping[str, Tensor], anchors: Mapping[str, Tensor]) -> None:
        """`tensors`: the model's by name; `anchors`: where the last agreed ones are found, once they are."""
        self._tensors, self._anchors = tensors, anchors
        self.momentum = Momentum()
        self._terms: GossipTerms | None = None
        self.forms: list[Form] = []
        self.contents: list[Contents] = []
        self._combiners: list[Combiner] = []
        self.roles: dict[str, str] = {}
        self._held: list[Held] = []
        self._lock = threading.Lock()  # anchors move only while `is_moving`, which changes only under it
        self.loaded: Loaded | None = None

    def prepare(self, terms: GossipTerms) -> None:
        """This is the run."""
        self._terms = terms
        self.forms = forms_of(terms.plan, terms.manifest)
        self.roles = {spec.name: spec.role for spec in terms.manifest.parameters}
        self.contents = [Contents(form) for form in self.forms]
        self._combiners = [
            Combiner(form, contents, terms.aggregator, terms.plan.weight_by)
            for form, contents in zip(self.forms, self.contents, strict=True)
        ]
        self._held = [Held() for _ in self.forms]
        if self.loaded is not None:
            check_loaded(terms.plan, self.loaded.versions, self.loaded.anchors.keys())

    def __getitem__(self, fragment: int) -> Held:
        return self._held[fragment]

    @property
    def are_complete(self) -> bool:
        """Is an anchor of every fragment here?"""
        return all(held.anchor_hash for held in self._held)

    def names(self, fragment: int) -> list[str]:
        return [entry.name for entry in self.forms[fragment].full.entries]

    # --- anchors, whole -----------------------------------------------------------------------------------------------

    def found(self, fragment: int) -> Found:
        """What a run begins with: this peer's weights, or the state that it was given."""
        held, values = self._held[fragment], self._tensors
        if self.loaded is not None:
            values, held.version = self.loaded.anchors, self.loaded.versions[fragment]
            held.history, held.centre = self.loaded.histories[fragment], self.loaded.centres[fragment]
        on_this = on_host({name: values[name] for name in self.names(fragment)})
        whole = {name: value.contiguous().clone() for name, value in on_this.items()}
        digest = anchor_hash(whole.values())
        return Found(held.version, WholeAnchor(whole, digest), digest)

    def is_as_loaded(self, fragment: int, found: Found) -> bool:
        """Is the run where the loaded state was?"""
        assert self.loaded is not None
        loaded = anchor_hash(self.loaded.anchors[name] for name in self.names(fragment))
        return (found.version, found.anchor_hash) == (self.loaded.versions[fragment], loaded)

    def read(self, fragment: int, data: memoryview) -> Found:
        """What another peer holds, momentum and all. The anchor itself is for whoever applies the update."""
        parameters = {name: role for name, role in self.roles.items() if role == "parameter"}
        standing = read_standing(self.forms[fragment], data, parameters)
        held = self.begin_to_move(fragment)
        for name, values in standing.momentum.items():
            self.momentum.of(name, values.numel(), self._home(name)).copy_(values)
        held.history = standing.history
        held.centre = {name: values.clone() for name, values in standing.centre.items()} or None
        return Found(standing.version, WholeAnchor(standing.anchor, standing.anchor_hash), standing.anchor_hash)

    def write(self, fragment: int) -> tuple[int, memoryview] | None:
        """The same from here, as it is at one moment; from any thread. None: it moves just now."""
        with self._lock:
            held, form = self._held[fragment], self.forms[fragment]
            if held.is_moving:
                return None
            standing = Standing(
                version=held.version,
                anchor_hash=held.anchor_hash,
                anchor=self.anchor(fragment),
                momentum=self._momentum_of(form),
                history=held.history,
                centre=held.centre or {},
            )
            return held.version, write_standing(form, standing)

    def anchor(self, fragment: int) -> dict[str, Tensor]:
        """As it is held, in host memory."""
        return on_host({name: self._anchors[name] for name in self.names(fragment)})

    def _momentum_of(self, form: Form) -> dict[str, Tensor]:
        """By tensor, zeros where nothing has moved yet: the same bytes on all peers."""
        if not self.run.keeps_momentum:
            return {}
        names = [entry.name for entry in form.full.entries if self.roles[entry.name] == "parameter"]
        return on_host({n: self.momentum.of(n, self._tensors[n].numel(), self._home(n)) for n in names})

    # --- moving -------------------------------------------------------------------------------------------------------

    def begin_to_move(self, fragment: int) -> Held:
        with self._lock:
            self._held[fragment].is_moving = True
        return self._held[fragment]

    def rest(self, fragment: int, version: int, digest: str) -> None:
        """Anchor and momentum are those of this version."""
        with self._lock:
            held = self._held[fragment]
            held.version, held.anchor_hash, held.is_moving = version, digest, False

    def combine(self, fragment: int, decided: DecidedRound, run_id: str, own_id: str) -> Combined:
        """One round more; its step is still to be taken."""
        held, version = self._held[fragment], decided.block.version
        combined = self._combiners[fragment].combine(
            f"{run_id}/{fragment}/{version}", decided.contributions, held.history, held.centre, own_id
        )
        held.history, held.centre = combined.history, combined.centre
        for peer_id, why in combined.refused.items():
            log.warning("fragment %d version %d: %s was left out: %s", fragment, version, peer_id, why)
        if combined.frame is None:
            log.warning("fragment %d version %d: too few have trained for it; nothing moves", fragment, version)
        return combined

    def step(self, fragment: int, frame: Tensor) -> Stepped:
        homes = self.homes(fragment)
        return Stepped(frame, self.forms[fragment], self.run.outer, self.momentum, homes, self.roles)

    # --- what must not be forgotten -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "versions": [held.version for held in self._held],
            "anchors": dict(self._anchors),
            "momentum": dict(self.momentum.tensors),
        }

    def rounds_dict(self) -> dict[str, Any]:
        """What screens and rule remember of earlier rounds; in pairs there is neither."""
        return {
            "histories": [[list(rates) for rates in held.history] for held in self._held],
            "centres": [dict(held.centre or {}) for held in self._held],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        nothing: list[dict[str, Tensor]] = [{}] * len(state["versions"])
        self.loaded = Loaded(
            versions=tuple(state["versions"]),
            anchors={name: value.clone() for name, value in state["anchors"].items()},
            histories=tuple(tuple(map(tuple, rounds)) for rounds in state.get("histories", nothing)),
            centres=tuple({n: v.clone() for n, v in one.items()} or None for one in state.get("centres", nothing)),
        )
        self.momentum.tensors = {name: value.clone() for name, value in state["momentum"].items()}

    # --- inside -------------------------------------------------------------------------------------------------------

    @property
    def run(self) -> GossipTerms:
        assert self._terms is not None, "not joined"
        return self._terms

    def homes(self, fragment: int) -> dict[str, torch.device]:
        """Where its anchor is, by tensor."""
        return {name: self._home(name) for name in self.names(fragment)}

    def _home(self, name: str) -> torch.device:
        return self._anchors[name].device if name in self._anchors else self._tensors[name].device


__all__ = ["Found", "Held", "Holdings"]
