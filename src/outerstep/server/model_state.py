"""The state dict that the server was given, and how a worker's manifest fits it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ..core.manifest import block_of, check_dense, check_name
from ..errors import ManifestMismatch, ModelError
from ..types import Manifest, ParameterSpec


class ModelState:
    """Everything the model file held. What workers train lives in the fragment stores; the rest stays as it is here."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self._state = {name: tensor.detach() for name, tensor in state.items()}
        self._names = list(self._state)
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
            shape, dtype = tuple(tensor.shape), _name(tensor.dtype)
            parameters.append(ParameterSpec(name=name, shape=shape, dtype=dtype, block=block_of(name)))
        return Manifest(parameters=tuple(parameters), aliases=aliases)

    def check(self, manifest: Manifest) -> None:
        """Refuse a manifest that is not this model's: a parameter that the model does not have, or has in another shape
        or kind of number; or tensors called tied that are not one. Of tied tensors only one is kept."""
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
        wrong += self._false_aliases(manifest)
        if wrong:
            more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            raise ManifestMismatch(
                f"this worker's model is not the server's: {'; '.join(wrong[:3])}{more}",
                hint="start the server with the model that the workers build",
            )

    def _false_aliases(self, manifest: Manifest) -> Iterator[str]:
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

    def rest(self) -> dict[str, Tensor]:
        """What is not trained, as it was given (after `forget_trained`)."""
        return dict(self._state)

    def with_trained(self, trained: Mapping[str, Tensor], aliases: Mapping[str, str]) -> dict[str, Tensor]:
        """A copy of the whole state, fp32, with the trained values in place under every name they have."""
        by_name = {**trained, **{alias: trained[kept] for alias, kept in aliases.items() if kept in trained}}
        everything = {**self._state, **by_name}
        return {name: _as_fp32(everything[name]).clone() for name in dict.fromkeys([*self._names, *everything])}

    def _find(self, name: str, manifest: Manifest) -> Tensor | None:
        return next((self._state[n] for n in self._names_of(name, manifest) if n in self._state), None)

    @staticmethod
    def _names_of(name: str, manifest: Manifest) -> list[str]:
        """A tied parameter may be filed under any of its names."""
        return [name, *(alias for alias, kept in manifest.aliases.items() if kept == name)]


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
