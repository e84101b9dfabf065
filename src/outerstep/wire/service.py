"""What a transport calls at the server, and what it hands over: the seam between bytes and decisions."""

from __future__ import annotations

from typing import Protocol

from ..types import GetPart, GetPartAnswer, PutPart, PutPartAnswer
from .messages import AnyAnswer, AnyRequest
from .peers import GetHeld, HeldAnswer


class Body(Protocol):
    """A request body that has not been read yet."""

    @property
    def length(self) -> int: ...

    def read_into(self, view: memoryview) -> None:
        """Fill `view` with the next bytes, straight from the wire; raises BadRequest if the sender stops short."""

    def abort(self) -> None:
        """Make a `read_into` that is under way in another thread fail soon."""


class Service(Protocol):
    @property
    def failure(self) -> str:
        """Why it cannot go on; "" while it can."""

    @property
    def trouble(self) -> str:
        """Why it has to wait, and goes on by itself when it need not; "" while nothing is wrong."""

    def answer(self, request: AnyRequest) -> AnyAnswer:
        """Everything that travels without a body of bytes."""

    def put_part(self, request: PutPart, body: Body) -> PutPartAnswer: ...

    def get_part(self, request: GetPart | GetHeld) -> tuple[GetPartAnswer | HeldAnswer, memoryview]: ...

    def status(self) -> dict[str, object]: ...
