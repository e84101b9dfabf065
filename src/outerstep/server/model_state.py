"""The state dict that the server was given, and how a worker's manifest fits it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..core.manifest import block_of
from ..errors import ManifestMismatch, ModelError
from ..types import Manifest, ParameterSpec


class ModelState:
    """Everything the model file held. What workers train lives in the fragment stores; the rest stays as it is here."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self._state = {name: tensor.detach() for name, tensor in state.items()}
        self._names = list(self._state)
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
            dtype = str(tensor.dtype).removeprefix("torch.")
            parameters.append(ParameterSpec(name=name, shape=tuple(tensor.shape), dtype=dtype, block=block_of(name)))
        return Manifest(parameters=tuple(parameters), aliases=aliases)

    def check(self, manifest: Manifest) -> None:
        """Refuse a manifest with a parameter that the model does not have, or has in another shape."""
        wrong: list[str] = []
        if not manifest.parameters:
            wrong.append("it has no trainable parameters")
        for spec in manifest.parameters:
            found = self._find(spec.name, manifest)
            if found is None:
                wrong.append(f"{spec.name!r} is not in the server's model")
            elif tuple(found.shape) != spec.shape:
                wrong.append(f"{spec.name!r}: got {list(spec.shape)}, run has {list(found.shape)}")
        if len({spec.name for spec in manifest.parameters}) != len(manifest.parameters):
            wrong.append("a name appears twice")
        if wrong:
            more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            raise ManifestMismatch(
                f"this worker's model is not the server's: {'; '.join(wrong[:3])}{more}",
                hint="start the server with the model that the workers build",
            )

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
