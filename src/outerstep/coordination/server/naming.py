"""What a run trains, and in which order, as long as nobody has brought a manifest.

The server has a state dict. It does not say which of its tensors are buffers, and a file of safetensors sorts them by
name. A worker's manifest says what is trained, in the model's order. A client that brings none (of the older protocol,
or a program of its own) says it by what it sends:

    nothing yet        every floating-point tensor is taken to be trained, for now
    a whole model      its tensors are what is trained, in its order
    fragment 0, 1, …   its tensors are that fragment. What nobody has named is not trained

The first worker with a manifest settles the rest. What was named before stays as it is; a manifest that does not fit it
is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from ...errors import ManifestMismatch
from ...types import Manifest


@dataclass(frozen=True)
class Naming:
    """How far that has come. `named`: so many fragments, the first ones, are settled; `whole`: and there are no others.
    `first`: the version that each begins with. `imported`: from a server of the older protocol."""

    first: int = 0
    named: int = 0
    whole: bool = False
    imported: bool = False

    def is_news(self, fragment: int | None) -> bool:
        """Would the names of this fragment, or of the whole model, settle something?"""
        return not self.whole and (fragment is None or fragment == self.named)


def stated(known: Manifest, shapes: Mapping[str, tuple[int, ...]], others: Collection[str]) -> Manifest | None:
    """What a submission says is trained: its tensors, in its order, by the names that it has for them. None: it is not
    of this model. `known`: the floating-point tensors that the server has; `others`: the rest of its state dict."""
    specs = {spec.name: spec for spec in known.parameters}
    kept: dict[str, str] = {}  # as the server calls it → as the submission does
    aliases: dict[str, str] = {}
    for name, shape in shapes.items():
        home = known.aliases.get(name, name)
        if home not in specs and name in others:
            continue
        if home not in specs or specs[home].shape != shape:
            return None
        if kept.setdefault(home, name) != name:
            aliases[name] = kept[home]
    for other, home in [*known.aliases.items(), *((home, home) for home in kept)]:
        if home in kept and other != kept[home]:
            aliases[other] = kept[home]
    parameters = tuple(replace(specs[home], name=name) for home, name in kept.items())
    return Manifest(parameters=parameters, aliases=aliases) if parameters else None


def fitting(run: Manifest, named: Sequence[str], offered: Manifest, *, whole: bool) -> Manifest:
    """The first worker's manifest, for a run in which these tensors have been named. They keep what their form on the
    wire depends on, all but their dtype. `whole`: no other parameter is trained."""
    ours, theirs = {spec.name: spec for spec in run.parameters}, {spec.name: spec for spec in offered.parameters}
    wrong = [f"{name!r} is {'frozen' if name in offered.frozen else 'missing'}" for name in named if name not in theirs]
    wrong += [
        f"{name!r}: got {list(theirs[name].shape)}, run has {list(ours[name].shape)}"
        for name in named
        if name in theirs and theirs[name].shape != ours[name].shape
    ]
    wrong += [f"{name!r} is a buffer" for name in named if name in theirs and theirs[name].role != "parameter"]
    if whole:
        extra = [name for name, spec in theirs.items() if name not in ours and spec.role == "parameter"]
        wrong += [f"{name!r} is not in the run" for name in extra]
    if wrong:
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ManifestMismatch(
            f"this worker's model is not the run's, as the clients that were here first have named it: "
            f"{'; '.join(wrong[:3])}{more}",
            hint="let all train the same tensors; to let this worker decide which, let it join a new run first",
        )
    kept = set(named)
    parameters = tuple(
        replace(ours[spec.name], dtype=spec.dtype) if spec.name in kept else spec for spec in offered.parameters
    )
    return replace(offered, parameters=parameters)


def same_fragments(
    before: tuple[Sequence[Sequence[str]], Manifest], after: tuple[Sequence[Sequence[str]], Manifest]
) -> int:
    """How many fragments, the first ones, travel in the same form in both: the same tensors in the same order."""
    forms = [{spec.name: replace(spec, dtype="") for spec in manifest.parameters} for manifest in (before[1], after[1])]
    count = 0
    for ours, theirs in zip(before[0], after[0], strict=False):
        if list(ours) != list(theirs) or any(forms[0][name] != forms[1][name] for name in ours):
            break
        count += 1
    return count
