"""The state dict that the server was given, and how a worker's manifest fits it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from ..core.manifest import block_of, check_dense, check_name
from ..errors import ManifestMismatch, ModelError
from ..types import Manifest, ParameterSpec

log = logging.getLogger(__name__)


class ModelState:
    """Everything the model file held. What workers train lives in the fragment stores; the rest stays as it is here."""

    def __init__(self, state: Mapping[str, Tensor], lent: Mapping[str, torch.dtype] = MappingProxyType({})) -> None:
        """`lent`: these tensors are windows on a fragment store, fp32; to be kept they are copied, in this dtype."""
        self._state = {name: tensor.detach() for name, tensor in state.items()}
        self._names = list(self._state)
        self._lent = dict(lent)
        for name, tensor in self._state.items():
            check_name(name)
            check_dense(name, tensor)
        if not any(tensor.is_floating_point() and tensor.numel() for tensor in self._state.values()):
            raise ModelError("the model's state dict holds no floating-point tensors")
        on_meta = next((name for name, tensor in self._state.items() if tensor.is_meta), None)
        if on_meta is not None:
            raise ModelError(
                f"tensor {on_meta!r} is on the meta device: it has a shape but no values; load the weights first"
            )

    def manifest(self) -> Manifest:
        """For clients that bring none: every floating-point tensor is trained, tied ones once."""
        parameters: list[ParameterSpec] = []
        aliases: dict[str, str] = {}
        first_name: dict[tuple[object, ...], str] = {}
        for name, tensor in self._state.items():
            if not tensor.is_floating_point():
                continue
            place = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tuple(tensor.shape))
            if tensor.numel() and place in first_name:
                aliases[name] = first_name[place]
                continue
            first_name[place] = name
            shape, dtype = tuple(tensor.shape), _name(self._dtype(name))
            parameters.append(ParameterSpec(name=name, shape=shape, dtype=dtype, block=block_of(name)))
        return Manifest(parameters=tuple(parameters), aliases=aliases)

    def counters(self) -> set[str]:
        """The names of what cannot be trained."""
        return {name for name, tensor in self._state.items() if not tensor.is_floating_point()}

    def named_for(self, wanted: Sequence[str], aliases: Mapping[str, str] = MappingProxyType({})) -> ModelState:
        """This model under the names that a worker has for it. A base model is saved without the prefix that it has in
        a model with a head ("h.0.weight" for "transformer.h.0.weight"); `from_pretrained` adds or drops it, and so
        does this: if one prefix explains all the names that are missing."""
        found = {*self._state, *(kept for alias, kept in aliases.items() if alias in self._state)}
        missing = [name for name in wanted if name not in found]
        change = _prefix_for(missing, self._state) if missing else None
        if change is None:
            return self
        add, drop = change
        wanted_as_is = set(wanted)

        def renamed(name: str) -> str:
            if drop:
                return name.removeprefix(drop)
            return name if name in wanted_as_is else add + name

        log.info("the model's names are taken %s %r, as the first worker has them", *_said(add, drop))
        lent = {renamed(name): dtype for name, dtype in self._lent.items()}
        return ModelState({renamed(name): tensor for name, tensor in self._state.items()}, lent)

    def differing(self, saved: Mapping[str, Tensor], manifest: Manifest | None) -> list[str]:
        """The tensors of a saved state that show that it is of another model. Of tied tensors the files of a model hold
        one; a server of the older protocol has saved each by itself, so without a manifest a tensor that is not here is
        taken for the other name of one that has its shape."""
        aliases = manifest.aliases if manifest is not None else {}
        model = self.named_for([name for name in saved if name not in aliases], aliases)._state
        shapes = {tensor.shape for tensor in model.values()}
        odd = [name for name, tensor in model.items() if name in saved and saved[name].shape != tensor.shape]
        for name in [name for name in saved if name not in model and name not in aliases]:
            ties = {alias for alias, kept in aliases.items() if kept == name}
            if not ties & model.keys() and (manifest is not None or saved[name].shape not in shapes):
                odd.append(name)
        return odd

    def with_lent(self, trained: Mapping[str, Tensor], manifest: Manifest) -> ModelState:
        """The whole model again, with these values of what is trained, which stay where they are."""
        lent: dict[str, Tensor] = {}
        dtypes: dict[str, torch.dtype] = {}
        for spec in manifest.parameters:
            for name in self._names_of(spec.name, manifest):
                lent[name], dtypes[name] = trained[spec.name], getattr(torch, spec.dtype)
        whole = {**self._state, **lent}
        return ModelState(
            {name: whole[name] for name in dict.fromkeys([*self._names, *whole]) if name in whole}, dtypes
        )

    def check(self, manifest: Manifest, untrained: Collection[str] = ()) -> None:
        """Refuse a manifest that is not this model's: a parameter that the model does not have, or has in another shape
        or kind of number; or tensors called tied that are not one. Of tied tensors only one is kept. `untrained`: what
        an older server never moved, though it is tied to what it did."""
        wrong: list[str] = []
        if not manifest.parameters:
            wrong.append("it has no trainable parameters")
        for spec in manifest.parameters:
            found = self._find(spec.name, manifest)
            if found is None:
                wrong.append(f"{spec.name!r} is not in the server's model")
            elif not found.is_floating_point():
                wrong.append(f"{spec.name!r} is {_name(found.dtype)} in the server's model, which cannot be trained")
            elif tuple(found.shape) != spec.shape:
                wrong.append(f"{spec.name!r}: got {list(spec.shape)}, run has {list(found.shape)}")
            elif not _is_float(spec.dtype):
                wrong.append(f"{spec.name!r}: got {spec.dtype!r}, which is no floating-point dtype of torch")
        if len({spec.name for spec in manifest.parameters}) != len(manifest.parameters):
            wrong.append("a name appears twice")
        wrong += self._false_aliases(manifest, untrained)
        if wrong:
            more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            raise ManifestMismatch(
                f"this worker's model is not the server's: {'; '.join(wrong[:3])}{more}",
                hint="start the server with the model that the workers build, saved with its head if it has one",
            )

    def _false_aliases(self, manifest: Manifest, untrained: Collection[str]) -> Iterator[str]:
        """One tensor under several names has one shape, one dtype and the same values under each of them."""
        parameters = {spec.name for spec in manifest.parameters}
        for alias, kept in manifest.aliases.items():
            first, other = self._find(kept, manifest), self._state.get(alias)
            if alias in parameters:
                yield f"{alias!r} is both a parameter and an alias"
            elif kept not in parameters:
                yield f"{alias!r} is tied to {kept!r}, which is not among the parameters"
            elif first is None or other is None:
                continue  # the model has it under another name
            elif alias in untrained and first.shape == other.shape:
                continue
            elif first.shape != other.shape or first.dtype != other.dtype:
                yield (
                    f"{alias!r} cannot be {kept!r}: the server's model has them in shape {list(other.shape)} as "
                    f"{_name(other.dtype)}, and in {list(first.shape)} as {_name(first.dtype)}"
                )
            elif not _is_same(first, other):
                yield f"{alias!r} cannot be {kept!r}: they have other values in the server's model"

    def initial(self, manifest: Manifest) -> dict[str, Tensor]:
        """The starting values, under the names that the manifest keeps."""
        found = {spec.name: self._find(spec.name, manifest) for spec in manifest.parameters}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def forget_trained(self, manifest: Manifest) -> None:
        """The fragment stores hold these now; a second copy would only take room."""
        for spec in manifest.parameters:
            for name in self._names_of(spec.name, manifest):
                self._state.pop(name, None)
        copies: dict[int, Tensor] = {}  # what was tied stays tied
        for name in [name for name in self._lent if name in self._state]:
            tensor = self._state[name]
            self._state[name] = copies.setdefault(tensor.data_ptr(), tensor.to(self._lent[name], copy=True))
        self._lent.clear()

    def rest(self) -> dict[str, Tensor]:
        """What is not trained, as it was given (after `forget_trained`)."""
        return dict(self._state)

    def with_trained(self, trained: Mapping[str, Tensor], aliases: Mapping[str, str]) -> dict[str, Tensor]:
        """The whole state, fp32, with the trained values in place under every name they have."""
        by_name = {**trained, **{alias: trained[kept] for alias, kept in aliases.items() if kept in trained}}
        everything = {**self._state, **by_name}
        return {name: _as_fp32(everything[name]) for name in dict.fromkeys([*self._names, *everything])}

    def _dtype(self, name: str) -> torch.dtype:
        return self._lent.get(name, self._state[name].dtype)

    def _find(self, name: str, manifest: Manifest) -> Tensor | None:
        return next((self._state[n] for n in self._names_of(name, manifest) if n in self._state), None)

    @staticmethod
    def _names_of(name: str, manifest: Manifest) -> list[str]:
        """A tied parameter may be filed under any of its names."""
        return [name, *(alias for alias, kept in manifest.aliases.items() if kept == name)]


def _prefix_for(missing: Sequence[str], held: Collection[str]) -> tuple[str, str] | None:
    """What to put before the names that are held, or to drop from them, so that all of `missing` are among them."""
    first = missing[0]
    pieces = first.split(".")
    for i in range(1, len(pieces)):
        prefix = ".".join(pieces[:i]) + "."
        if all(name.startswith(prefix) and name.removeprefix(prefix) in held for name in missing):
            return prefix, ""
    for name in held:
        prefix = name.removesuffix(first)
        if name != first and name.endswith(f".{first}") and all(prefix + other in held for other in missing):
            return "", prefix
    return None


def _said(add: str, drop: str) -> tuple[str, str]:
    return ("with", add) if add else ("without", drop)


def _as_fp32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32) if tensor.is_floating_point() else tensor


def _is_same(first: Tensor, other: Tensor) -> bool:
    """Of tensors of one shape and dtype. Those in one place need not be read, and may hold NaN."""
    in_place = first.data_ptr() == other.data_ptr() and first.stride() == other.stride()
    return in_place or torch.equal(first, other)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _is_float(name: str) -> bool:
    dtype = getattr(torch, name, None)
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point
