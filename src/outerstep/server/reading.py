"""The newest agreed model, for those who only read it: an evaluation loop, an export, a person with curl.

    GET /v1/model                    all of it, as one safetensors file (wire/model_file.py)
    GET /v1/model?fragment=2         one fragment
    GET /v1/model/files              the small files beside it: configuration and tokenizer, with sizes and hashes
    GET /v1/model/files?name=NAME    one of them

A reader registers nobody, and no round waits for it. The weights are sent from where they lie (publish.py): as long as
a reader is in the middle of a version, that version does not change, and the next one is made in other memory. So what
readers may cost is bounded: so many at a time, of one token at one address fewer, and all together they hold back one
older model when another begins. A reader that has had `TURN_S` makes way for the next.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl

import torch
from torch import Tensor

from ..core.state import bytes_of
from ..digest import data_hash, file_hash
from ..errors import BadRequest, Busy, NotFound, ServerError
from ..model_folder import without_ties
from ..types import Agreement, Manifest
from ..wire.http_request import HttpRequest
from ..wire.messages import BYTES_TYPE, HASH_HEADER, encode_json
from ..wire.model_file import (
    DTYPES,
    FileEntry,
    FileList,
    ModelFacts,
    StoredTensor,
    write_header,
)
from ..wire.routes import Reply
from .publish import Published
from .run import Run
from .saved.folder import files_beside, kept_dtypes
from .store import FragmentStore

MOST_READERS = 16
MOST_OF_ONE = 4
OLDER_MODELS = 1  # that readers may be in the middle of when another begins with the newest
TURN_S = 600.0  # a reader that has had so long makes way, if another wants its place
RETRY_S = 5.0

ROUND_HEADER = "Outerstep-Round"
VERSIONS_HEADER = "Outerstep-Versions"

# The files beside the model that a stranger with a read token may have. The folder may contain others.
SHARED_FILES = frozenset(
    {
        *("config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json"),
        *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
        *("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
        *("chat_template.jinja", "chat_template.json"),
    }
)

_NAMES = {torch_name: name for name, torch_name in DTYPES.items()}


@dataclass(frozen=True)
class _NewestModel:
    """The newest model, as the coordinator knows it. Before the first join it is the initial model."""

    run_id: str
    round: int
    agreements: tuple[Agreement, ...]
    manifest: Manifest | None
    stores: Sequence[FragmentStore]
    rest: Mapping[str, Tensor]


@dataclass(eq=False)
class _ModelReader:
    """`who`: token and address. `holds`: (fragment, version) → bytes. `abort` ends its connection."""

    who: tuple[str, str]
    since: float
    abort: Callable[[], None]
    holds: Mapping[tuple[int, int], int]


@dataclass
class ModelReaders:
    """`lock` guards the coordinator. `files`: where the small files lie, if anywhere."""

    run: Run
    lock: threading.Condition
    clock: Callable[[], float]
    files: Callable[[], Path | None]
    _readers: list[_ModelReader] = field(default_factory=list)
    _own_lock: threading.Lock = field(default_factory=threading.Lock)
    _rest_hash: tuple[tuple[str, ...], str] = ((), "")  # of which tensors, and their hash

    @property
    def count(self) -> int:
        return len(self._readers)

    # --- the model --------------------------------------------------------------------------------------------------

    def model(self, request: HttpRequest) -> Reply:
        fragment = _asked_fragment(request.query)
        newest = self._newest()
        _check_fragment(fragment, newest)
        rest, aliases = without_ties(newest.rest) if fragment is None else ({}, {})
        rest = dict(sorted(rest.items(), key=lambda item: -item[1].element_size()))
        rest_hash = self._hash_of(rest) if rest else None
        facts = _facts(newest, newest.agreements, fragment, rest, rest_hash, aliases)
        if is_known(request.headers.get("if-none-match", ""), etag_of(facts)):
            return Reply(b"", status=304, headers=_headers(facts))
        chosen = newest.stores if fragment is None else [newest.stores[fragment]]
        with ExitStack() as stack:  # what is lent in here stays lent for as long as its views live
            published = [p for p in (stack.enter_context(s.down.reading()) for s in chosen) if p is not None]
            facts = _facts(newest, [p.agreement for p in published], fragment, rest, rest_hash, aliases)
            tensors, pieces = _laid_out(chosen, published, rest)
        head = write_header(facts, tensors)
        reader = _ModelReader(
            (request.token, request.body.peer),
            self.clock(),
            request.body.abort,
            {(s.index, p.version): p.size_bytes for s, p in zip(chosen, published, strict=True)},
        )
        self._admit(reader)
        return Reply(head, headers=_headers(facts), rest=pieces, over=lambda: self._leave(reader))

    def _newest(self) -> _NewestModel:
        with self.lock:
            coordinator = self.run.coordinator
            return _NewestModel(
                coordinator.run_id,
                coordinator.sync_round,
                tuple(fragment.published for fragment in coordinator.fragments),
                coordinator.manifest,
                list(self.run.stores),
                self.run.model.rest(),
            )

    def _hash_of(self, rest: Mapping[str, Tensor]) -> str:
        """Once: what is not trained does not change, except that those who join say what is."""
        names, known = self._rest_hash
        if names != tuple(rest):
            known = data_hash(bytes_of(tensor) for tensor in rest.values())
            self._rest_hash = tuple(rest), known
        return known

    # --- who may read -----------------------------------------------------------------------------------------------

    def _admit(self, reader: _ModelReader) -> None:
        with self._own_lock:
            while refusal := self._in_the_way(reader):
                why, others = refusal
                done = [other for other in others if reader.since - other.since >= TURN_S]
                if not done:
                    raise Busy(why, hint="ask again", retry_after_s=RETRY_S)
                first = min(done, key=lambda other: other.since)
                self._readers.remove(first)
                first.abort()
            self._readers.append(reader)

    def _in_the_way(self, reader: _ModelReader) -> tuple[str, Sequence[_ModelReader]] | None:
        """Why there is no room for it, and which of the others would have to go."""
        same = [other for other in self._readers if other.who == reader.who]
        if len(same) >= MOST_OF_ONE:
            return f"{MOST_OF_ONE} readers from one address with one token at a time", same
        if len(self._readers) >= MOST_READERS:
            return f"{MOST_READERS} readers at a time", self._readers
        older = {key: size for other in self._readers for key, size in other.holds.items() if key not in reader.holds}
        whole = sum(store.down.full.size_bytes for store in self.run.stores)
        if sum(older.values()) > OLDER_MODELS * whole:
            holding = [other for other in self._readers if other.holds.keys() - reader.holds.keys()]
            return "others are still reading earlier versions, which take as much memory as may be", holding
        return None

    def _leave(self, reader: _ModelReader) -> None:
        with self._own_lock:
            if reader in self._readers:
                self._readers.remove(reader)

    def revoke(self, valid: Collection[str]) -> None:
        """End what is read with a token that is none of these any more."""
        with self._own_lock:
            for reader in self._readers:
                if reader.who[0] not in valid:
                    reader.abort()

    # --- the files beside it ----------------------------------------------------------------------------------------

    def file(self, request: HttpRequest) -> Reply:
        """They may lie in a saved state, which is deleted when a newer one has taken its place: then they are looked
        for once more, there."""
        folder = self._folder()
        try:
            reply = self._file(request, folder)
        except (NotFound, ServerError):
            if self._folder() == folder:
                raise
        else:
            if self._folder() == folder:
                return reply
        return self._file(request, self._folder())

    def _folder(self) -> Path | None:
        folder = self.files()
        return folder.resolve() if folder is not None else None

    def _file(self, request: HttpRequest, folder: Path | None) -> Reply:
        asked = dict(parse_qsl(request.query, keep_blank_values=True))
        try:
            found = {one.name: one for one in files_beside(folder) if one.name in SHARED_FILES} if folder else {}
            if not request.query:
                entries = (
                    FileEntry(name=name, size_bytes=file.stat().st_size, hash=file_hash(file))
                    for name, file in found.items()
                )
                return Reply(encode_json(FileList(files=tuple(entries))))
            if asked.keys() != {"name"} or asked["name"] not in found:
                names = ", ".join(found) or "none"
                raise NotFound(
                    f"there is no such file beside the model: {request.query[:80]!r}", hint=f"these: {names}"
                )
            data = found[asked["name"]].read_bytes()
        except OSError as error:
            raise ServerError(f"the files beside the model cannot be read: {error.strerror}") from error
        return Reply(data, headers=(("Content-Type", BYTES_TYPE), (HASH_HEADER, data_hash([data]))))


def etag_of(facts: ModelFacts) -> str:
    """Other for another version, even if it has the same values."""
    return f'"{data_hash([f"{facts.run_id} {facts.versions} {facts.hash}".encode()])}"'


def is_known(if_none_match: str, etag: str) -> bool:
    return any(one.strip().removeprefix("W/") in ("*", etag) for one in if_none_match.split(","))


def _headers(facts: ModelFacts) -> tuple[tuple[str, str], ...]:
    return (
        ("Content-Type", BYTES_TYPE),
        ("ETag", etag_of(facts)),
        (HASH_HEADER, facts.hash),
        (ROUND_HEADER, str(facts.round)),
        (VERSIONS_HEADER, ",".join(map(str, facts.versions))),
    )


def _asked_fragment(query: str) -> int | None:
    if not query:
        return None
    asked = re.fullmatch(r"fragment=([0-9]{1,9})", query)
    if asked is None:
        raise BadRequest(f"GET of the model takes ?fragment=N or nothing, got {query[:80]!r}")
    return int(asked[1])


def _check_fragment(fragment: int | None, newest: _NewestModel) -> None:
    if fragment is not None and fragment >= len(newest.agreements):
        count = len(newest.agreements)
        raise NotFound(
            f"fragment {fragment} does not exist: "
            + (f"the plan has {count}" if count else "nobody has joined yet, so there is no plan")
        )


def _facts(
    newest: _NewestModel,
    agreements: Sequence[Agreement],
    fragment: int | None,
    rest: Mapping[str, Tensor],
    rest_hash: str | None,
    tied: Mapping[str, str],
) -> ModelFacts:
    chosen = [a for a in agreements if fragment is None or a.fragment == fragment]
    names = [tuple(newest.stores[a.fragment].state.roles) for a in chosen]
    trained = {name for each in names for name in each}
    manifest = newest.manifest
    aliases = {alias: kept for alias, kept in (manifest.aliases if manifest else {}).items() if kept in trained}
    return ModelFacts(
        run_id=newest.run_id,
        round=min((a.version for a in agreements), default=0) if fragment is None else newest.round,
        versions=tuple(a.version for a in chosen),
        hashes=tuple(a.anchor_hash for a in chosen),
        fragments=tuple(names),
        rest=tuple(rest),
        rest_hash=rest_hash,
        dtypes={name: kind for name, kind in kept_dtypes(manifest).items() if name in trained},
        aliases={**tied, **aliases},
    )


def _laid_out(
    stores: Sequence[FragmentStore], published: Sequence[Published], rest: Mapping[str, Tensor]
) -> tuple[list[StoredTensor], list[memoryview]]:
    """The tensors in the order of their bytes, and those bytes: of values with 8 bytes first, so that each begins at a
    multiple of its own."""
    tensors: list[StoredTensor] = []
    pieces: list[memoryview] = []

    def put(wide: bool) -> None:
        for name, tensor in rest.items():
            if (tensor.element_size() == 8) is wide:
                tensors.append(StoredTensor(name, _name_of(name, tensor.dtype), tuple(tensor.shape)))
                pieces.append(bytes_of(tensor))

    put(wide=True)
    for store, one in zip(stores, published, strict=True):
        full = store.down.full
        lent = one.frame.lend(full.data_begin, full.size_bytes)
        begin = end = 0
        for entry in full.entries:
            tensors.append(StoredTensor(entry.name, "F32", entry.shape))
            if entry.begin != end:  # a gap, which safetensors has none of
                pieces.append(lent[begin:end])
                begin = entry.begin
            end = entry.end
        pieces.append(lent[begin:end])
    put(wide=False)
    return tensors, [piece for piece in pieces if piece]


def _name_of(name: str, dtype: torch.dtype) -> str:
    known = _NAMES.get(str(dtype).removeprefix("torch."))
    if known is None:
        raise ServerError(f"tensor {name!r} has the type {dtype}, which safetensors has no name for")
    return known
