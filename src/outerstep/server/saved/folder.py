"""One saved state as a folder.

    model.safetensors    the whole model as its users know it: tied tensors once, dtypes as in the manifest
    state.safetensors    fp32 values of the trained tensors that the model keeps in another dtype, if there are any
    target.safetensors   where the outer optimizer is, if the workers hold that only as far as their codec carried it
    statistics.safetensors   averaged buffers of earlier versions, if there are any
    centre.safetensors   the last round's aggregate, if the run's rule begins the next one there
    outer.safetensors    the outer optimizer's tensors, if it has any
    state.json           everything else, and size and hash of every other file; it is written last
    config.json, …       what was beside the weights in the model folder, so that `from_pretrained` takes this one

In the files of our own a tensor's name is only a label; state.json says whose it is. So no name of a parameter, however
odd, can be taken for another. state.json guards itself with a hash over the bytes of its "state".
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from ...digest import data_hash, file_hash
from ...durable.disk import sync, write_synced
from ...durable.run_folder import RUN_FILE
from ...errors import ModelError
from ...model_folder import STATE, STATE_FORMAT, WEIGHTS, read_tensors, without_ties, write_tensors
from ...types import Count, Hash, Manifest, Plain, Plan, Positive, RunId, WorkerId
from .state import OptimizerState, ServerState, WorkerRecord

log = logging.getLogger(__name__)

EXACT = "state.safetensors"
TARGET = "target.safetensors"
STATISTICS = "statistics.safetensors"
CENTRE = "centre.safetensors"
OUTER = "outer.safetensors"
FORMAT_VERSION = 1
COPIED = (".json", ".txt", ".model", ".jinja")
COPIED_BYTES = 64 << 20  # a tokenizer has up to 35 MB; what is larger is no setting

_FLOATS = ("float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
_WHOLE = ("int64", "int32", "int16", "int8", "uint8", "bool")  # counters among the buffers
_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in (*_FLOATS, *_WHOLE)}
"""What a model may have for its tensors beside float32; what is not listed is saved as float32."""

Scalar = bool | int | float | str | None


class FileFacts(Plain, frozen=True):
    size_bytes: Count
    hash: Hash


class OptimizerFacts(Plain, frozen=True):
    """`tensors` and `values`: parameter → key → label in outer.safetensors, or the value itself."""

    kind: str
    tensors: dict[str, dict[str, str]]
    values: dict[str, dict[str, Scalar]]
    facts: dict[str, Any]


class StateFacts(Plain, frozen=True):
    """The "state" of state.json. `serial` grows from save to save in a folder; `tied` and `exact` say where a tensor is
    that is not in model.safetensors under its own name, `targets` where its target is, `centre` its last aggregate;
    `statistics`: version → name → label."""

    outerstep: str
    serial: Positive
    run_id: RunId
    versions: tuple[Count, ...]
    manifest: Manifest | None
    plan: Plan | None
    params: tuple[str, ...]
    rest: tuple[str, ...]
    tied: dict[str, str]
    exact: dict[str, str]
    optimizer: OptimizerFacts
    ledger: dict[WorkerId, WorkerRecord]
    totals: dict[str, int | float]
    facts: dict[str, Any]
    files: dict[str, FileFacts]
    targets: dict[str, str] = msgspec.field(default_factory=dict)  # states from before there were any have none
    statistics: dict[Count, dict[str, str]] = msgspec.field(default_factory=dict)  # likewise
    centre: dict[str, str] = msgspec.field(default_factory=dict)  # likewise


class Envelope(Plain, frozen=True):
    format: str
    version: Positive
    hash: Hash
    state: msgspec.Raw


# --- writing ------------------------------------------------------------------------------------------------------


def write_folder(state: ServerState, place: Path, *, serial: int, model_files: Path | None) -> None:
    """Fill the empty folder `place`. When this returns, all of it is on the disk."""
    tied = _write_model(state, place / WEIGHTS)
    exact = _write_by_name(place / EXACT, {name: state.params[name] for name in _dtypes(state)})
    targets = _write_by_name(place / TARGET, state.targets)
    statistics = {v: {name: f"{v} {name}" for name in values} for v, values in state.statistics.items()}
    _write_labelled(
        place / STATISTICS, {statistics[v][n]: t for v, values in state.statistics.items() for n, t in values.items()}
    )
    centre = _write_by_name(place / CENTRE, state.centre)
    optimizer, tensors = _split(state.optimizer)
    _write_labelled(place / OUTER, tensors)
    if model_files is not None:
        copy_model_files(model_files, place)
    facts = StateFacts(
        outerstep=_own_version(),
        serial=serial,
        run_id=state.run_id,
        versions=state.versions,
        manifest=state.manifest,
        plan=state.plan,
        params=tuple(state.params),
        rest=tuple(state.rest),
        tied=tied,
        exact=exact,
        targets=targets,
        statistics=statistics,
        centre=centre,
        optimizer=optimizer,
        ledger=state.ledger,
        totals=state.totals,
        facts=state.facts,
        files={
            file.name: FileFacts(size_bytes=file.stat().st_size, hash=file_hash(file))
            for file in sorted(place.iterdir())
        },
    )
    data = _encode(facts)
    for name in facts.files:
        (place / name).chmod(0o600)  # the folder's owner is the only reader; a copy of a file should be no other
        sync(place / name)
    write_synced(place / STATE, data)
    sync(place)


def _write_model(state: ServerState, file: Path) -> dict[str, str]:
    """The model, and which of its names are filed under another."""
    dtypes = _dtypes(state)
    model = {name: as_kept(tensor, dtypes.get(name, torch.float32)) for name, tensor in state.params.items()}
    kept, tied = without_ties({**model, **state.rest})
    write_tensors(file, kept, names={**tied, **(state.manifest.aliases if state.manifest else {})})
    return tied


def _encode(facts: StateFacts) -> bytes:
    """As it will be read again: what would come back as something else is refused now, while there is still a server
    that has it."""
    try:
        data = msgspec.json.format(msgspec.json.encode(facts), indent=1)
        again = msgspec.json.decode(data, type=StateFacts)
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
        raise ModelError(f"this state does not fit into JSON: {error}; {_PLAIN}") from error
    changed = [name for name in facts.__struct_fields__ if getattr(facts, name) != getattr(again, name)]
    if changed:
        raise ModelError(f"this state does not fit into JSON: {', '.join(changed)} would come back changed; {_PLAIN}")
    raw = msgspec.Raw(data)
    return msgspec.json.encode(Envelope(format=STATE_FORMAT, version=FORMAT_VERSION, hash=data_hash([data]), state=raw))


def _split(optimizer: OptimizerState) -> tuple[OptimizerFacts, dict[str, Tensor]]:
    labels: dict[str, dict[str, str]] = {}
    values: dict[str, dict[str, Scalar]] = {}
    tensors: dict[str, Tensor] = {}
    for name, entry in optimizer.by_name.items():
        labels[name], values[name] = {}, {}
        for key, value in entry.items():
            if isinstance(value, Tensor):
                labels[name][key] = f"{len(tensors)} {name} {key}"
                tensors[labels[name][key]] = value
            else:
                values[name][key] = value
    return OptimizerFacts(kind=optimizer.kind, tensors=labels, values=values, facts=optimizer.facts), tensors


def _write_by_name(file: Path, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Returns the label of each."""
    labels = {name: f"{i} {name}" for i, name in enumerate(tensors)}
    _write_labelled(file, {labels[name]: tensor for name, tensor in tensors.items()})
    return labels


def _write_labelled(file: Path, tensors: Mapping[str, Tensor]) -> None:
    if tensors:
        kept, tied = without_ties(tensors)
        kept.update({name: kept[first].clone() for name, first in tied.items()})
        write_tensors(file, kept)


def kept_dtypes(manifest: Manifest | None) -> dict[str, str]:
    """The trained tensors that the model keeps in another dtype than fp32, and in which."""
    return {spec.name: spec.dtype for spec in (manifest.parameters if manifest else ()) if spec.dtype in _DTYPES}


def as_dtypes(named: Mapping[str, str]) -> dict[str, torch.dtype]:
    """Those that a model may have; any other name says nothing."""
    return {name: _DTYPES[dtype] for name, dtype in named.items() if dtype in _DTYPES}


def _dtypes(state: ServerState) -> dict[str, torch.dtype]:
    return as_dtypes(kept_dtypes(state.manifest))


def as_kept(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A buffer that counts is trained in fp32 too, and whole in the model."""
    return tensor.to(dtype) if dtype.is_floating_point else tensor.round().to(dtype)


def copy_model_files(source: Path, place: Path) -> None:
    """The small files beside the weights. Nothing that is here already; and that one of them cannot be read must not
    cost the state."""
    try:
        candidates = list(files_beside(source))
    except OSError as error:
        log.warning("the files beside the model are not saved: %s", error)
        return
    for file in candidates:
        try:
            if not (place / file.name).exists():
                (place / file.name).write_bytes(file.read_bytes())
        except OSError as error:
            log.warning("%s is not saved: %s", file, error)


def files_beside(source: Path) -> Iterator[Path]:
    """Configuration and tokenizer of the model in this folder. Never code, and no link that leads out of it."""
    for file in sorted(source.iterdir()):
        wanted = file.suffix in COPIED and not file.name.endswith(".index.json") and not file.name.startswith(".")
        if not wanted or file.name in (STATE, RUN_FILE):
            continue
        if file.is_file() and _belongs(file, source) and file.stat().st_size <= COPIED_BYTES:
            yield file


def _belongs(file: Path, folder: Path) -> bool:
    """Not a link to elsewhere: a folder from a stranger must not choose which of our files are copied. In a cache of
    Hugging Face every file is a link into the `blobs` beside the `snapshots`."""
    target, home = file.resolve(), folder.resolve()
    if target.parent == home:
        return True
    return home.parent.name == "snapshots" and target.parent == home.parent.parent / "blobs"


def _own_version() -> str:
    try:
        return version("outerstep")
    except PackageNotFoundError:  # run from a source tree
        return "unknown"


# --- reading ------------------------------------------------------------------------------------------------------


def read_facts(place: Path) -> StateFacts:
    """state.json, checked against its own hash."""
    file = place / STATE
    if not file.is_file():
        raise ModelError(f"{file} is missing; {_REMEDY}")
    try:
        envelope = msgspec.json.decode(file.read_bytes(), type=Envelope)
    except (OSError, ValueError, msgspec.MsgspecError, RecursionError) as error:  # ValueError: not UTF-8
        raise ModelError(f"{file} cannot be read: {error}; {_REMEDY}") from error
    if envelope.format != STATE_FORMAT:
        raise ModelError(f"{file} must have the format {STATE_FORMAT!r}, got {envelope.format[:80]!r}; {_REMEDY}")
    if envelope.version != FORMAT_VERSION:
        raise ModelError(
            f"{file} has format version {envelope.version}, this outerstep reads {FORMAT_VERSION}; "
            "use the version of outerstep that wrote it, or a newer one"
        )
    if data_hash([bytes(envelope.state)]) != envelope.hash:
        raise ModelError(f"{file} is damaged: its content does not have the hash written in it; {_REMEDY}")
    try:
        return msgspec.json.decode(envelope.state, type=StateFacts)
    except (ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise ModelError(f"{file} does not hold what this version of outerstep expects: {error}") from error


def read_folder(place: Path) -> ServerState:
    """The state, every file checked against its size and hash first."""
    facts = read_facts(place)
    for name in facts.files:
        check_file(place, name, facts.files[name], content=True)
    model, exact, target, outer = (_tensors(place, name, facts) for name in (WEIGHTS, EXACT, TARGET, OUTER))
    earlier, last = _tensors(place, STATISTICS, facts), _tensors(place, CENTRE, facts)
    try:
        params = {
            name: exact[facts.exact[name]] if name in facts.exact else model[facts.tied.get(name, name)]
            for name in facts.params
        }
        targets = {name: target[label] for name, label in facts.targets.items()}
        statistics = {v: {n: earlier[label] for n, label in labels.items()} for v, labels in facts.statistics.items()}
        centre = {name: last[label] for name, label in facts.centre.items()}
        rest = {name: model[facts.tied.get(name, name)] for name in facts.rest}
        by_name = {
            name: {**{key: outer[label] for key, label in labels.items()}, **facts.optimizer.values[name]}
            for name, labels in facts.optimizer.tensors.items()
        }
    except KeyError as error:
        raise ModelError(f"{place / STATE} names tensor {error}, which is in none of its files; {_REMEDY}") from error
    state = ServerState(
        run_id=facts.run_id,
        params=params,
        targets=targets,
        statistics=statistics,
        centre=centre,
        rest=rest,
        manifest=facts.manifest,
        plan=facts.plan,
        versions=facts.versions,
        optimizer=OptimizerState(facts.optimizer.kind, by_name, facts.optimizer.facts),
        ledger=facts.ledger,
        totals=facts.totals,
        facts=facts.facts,
        place=place,
    )
    try:
        state.check()
        _check_kept(state, model)
    except ModelError as error:
        raise ModelError(f"{place}: {error}; {_REMEDY}") from error
    return state


def looks_whole(place: Path, facts: StateFacts) -> bool:
    """All its files are there in their sizes. (Reading them all takes long; load_state does.)"""
    try:
        for name, expected in facts.files.items():
            check_file(place, name, expected, content=False)
    except ModelError:
        return False
    return True


def check_file(place: Path, name: str, expected: FileFacts, *, content: bool) -> None:
    if Path(name).name != name or name in ("", "..") or "\0" in name:
        raise ModelError(f"{place / STATE} points outside its folder: {name[:80]!r}; {_REMEDY}")
    file = place / name
    try:
        if not file.is_file():
            raise ModelError(f"{file} is missing; {_REMEDY}")
        size = file.stat().st_size
        if size != expected.size_bytes:
            raise ModelError(f"{file} must have {expected.size_bytes} bytes, got {size}; {_REMEDY}")
        if content and file_hash(file) != expected.hash:
            raise ModelError(f"{file} is damaged: its hash is not the one in {STATE}; {_REMEDY}")
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error}; {_REMEDY}") from error


def _tensors(place: Path, name: str, facts: StateFacts) -> dict[str, Tensor]:
    return read_tensors(place / name) if name in facts.files else {}


def _check_kept(state: ServerState, model: Mapping[str, Tensor]) -> None:
    """The model is in the dtypes that the manifest says."""
    for name, dtype in _dtypes(state).items():
        if name in model and model[name].dtype != dtype:
            raise ModelError(f"{name!r}: {WEIGHTS} has {model[name].dtype}, the manifest {dtype}")


_PLAIN = "numbers must be finite, keys text, and lists lists"
_REMEDY = "resume from another saved state"
