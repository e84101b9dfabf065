"""What old clients read: the status, the answer to a heartbeat, and errors, by their names and in their form.

Everything that the main port says is there too: an old client looks its fields up by name and passes over the others.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from ..coordination.server.membership import KnownWorker
from ..errors import Refused
from ..printable import printable
from ..server import DiLoCoServer
from ..wire.http_server import error_reply
from ..wire.messages import encode_json
from ..wire.routes import Reply
from .client import CompatClient

MOST_REASON_BYTES = 240


class StatusPage:
    """Times are seconds since 1970, as the old servers gave them. The run's clock counts from anywhere, and never goes
    back; what lies between the two is measured once."""

    def __init__(self, server: DiLoCoServer) -> None:
        self._server = server
        self._epoch_s = time.time() - server.service.clock()

    def status(self, clients: Iterable[CompatClient]) -> dict[str, object]:
        service = self._server.service
        with service.changed:
            status = self._server.status()
            dated = {worker.worker_id: self._worker(worker) for worker in service.coordinator.members if worker.live}
            num_workers, fragments = service.coordinator.num_workers, len(service.coordinator.fragments)
            now = service.clock()
        known = status["workers"]
        assert isinstance(known, dict)
        said = {client.worker_id: client.shown for client in clients}
        return {
            **status,
            "status": "failed" if status["failure"] else "running",
            "mode": "async" if status["mode"] == "async" else "sync",
            "started_at": service.started_at + self._epoch_s,
            "uptime_seconds": now - service.started_at,
            "num_workers": num_workers,
            "num_registered": len(dated),
            "fragment_submissions": status["total_submissions"] if fragments > 1 else 0,
            "workers": {
                said.get(worker_id, worker_id): {**facts, **dated[worker_id]} for worker_id, facts in known.items()
            },
        }

    def _worker(self, worker: KnownWorker) -> dict[str, object]:
        """`sync_round`: how often it has contributed the model; `last_sync_server_round`: the round that made what it
        contributed last."""
        fragments = max(len(self._server.service.coordinator.fragments), 1)
        return {
            "registered_at": worker.joined_at + self._epoch_s,
            "last_heartbeat": worker.last_seen + self._epoch_s,
            "sync_round": worker.contributions // fragments,
            "last_sync_server_round": min((entry.version for entry in worker.accepted.values()), default=0),
        }

    def heartbeat(self, recommended: int | None) -> dict[str, object]:
        coordinator = self._server.service.coordinator
        with self._server.service.changed:
            answer: dict[str, object] = {
                "status": "ok",
                "sync_round": coordinator.sync_round,
                "num_workers": coordinator.num_workers,
                "num_registered": len(coordinator.members.live_ids),
            }
        return answer if recommended is None else {**answer, "recommended_sync_every": recommended}


def old_error_reply(refusal: Refused, request_id: str, protocol: int) -> Reply:
    """Old clients print what stands under `error`, and of a refused registration or heartbeat nothing but the words
    after the status. The rest is as on the main port."""
    usual = error_reply(refusal, request_id, protocol)
    body = {
        "error": str(refusal),
        "code": refusal.code,
        "message": refusal.message,
        "hint": refusal.hint,
        "request_id": request_id,
        "retry_after_s": refusal.retry_after_s,
    }
    reason = printable(f"{refusal.code}: {refusal}").encode("ascii", "replace")[:MOST_REASON_BYTES]
    return Reply(encode_json(body), usual.status, usual.headers, reason=reason)
