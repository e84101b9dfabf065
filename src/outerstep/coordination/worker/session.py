"""Who a worker is to the server."""

from __future__ import annotations

from typing import TypedDict

from msgspec.structs import replace

from ...types import Join, JoinAnswer


class Session:
    """Who we are to the server. A re-join may change the incarnation for everybody who holds the session."""

    def __init__(self, join: Join) -> None:
        self._join = join
        self.answer: JoinAnswer | None = None

    @property
    def worker_id(self) -> str:
        return self._join.worker_id

    @property
    def joined(self) -> JoinAnswer:
        assert self.answer is not None, "not joined yet"
        return self.answer

    @property
    def join_request(self) -> Join:
        """A re-join names the run, so that a server which holds another one refuses it."""
        return self._join if self.answer is None else replace(self._join, run_id=self.answer.run_id)

    @property
    def head(self) -> Head:
        return Head(run_id=self.joined.run_id, worker_id=self.worker_id, incarnation=self.joined.incarnation)


class Head(TypedDict):
    """The fields of `FromMember`."""

    run_id: str
    worker_id: str
    incarnation: int
