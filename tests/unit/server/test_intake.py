"""Where contributions arrive: who looks at them."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from outerstep.errors import NotFinite
from outerstep.server import DiLoCoServer
from outerstep.server.decoding import Findings
from outerstep.wire.memory import MemoryTransport
from support import HandClient, in_threads, make_frame, params_of, tiny_model

WORKERS = 3 * (os.cpu_count() or 1)


def joined(server: DiLoCoServer, name: str) -> HandClient:
    client = HandClient(MemoryTransport(server.service), name)
    client.join()
    return client


def test_not_every_connection_gets_a_thread_that_works_on_tensors() -> None:
    server = DiLoCoServer(tiny_model().state_dict(), num_workers=WORKERS, codec="fp32")
    clients = [joined(server, f"w{i}") for i in range(WORKERS)]
    callers, lookers = set[str](), set[str]()
    decoder = server.service.stores[0].decoder(1)
    look = decoder.look

    def note(payload: memoryview, blocks: range) -> Findings:
        lookers.add(threading.current_thread().name)
        return look(payload, blocks)

    def contribute(client: HandClient) -> None:
        callers.add(threading.current_thread().name)
        client.contribute(frame)

    decoder.look = note  # type: ignore[method-assign]
    frame = make_frame(params_of(tiny_model()))
    in_threads(*(lambda client=client: contribute(client) for client in clients))  # type: ignore[misc]
    assert server.status()["total_submissions"] == WORKERS
    assert 1 <= len(lookers) <= (os.cpu_count() or 1)
    assert not lookers & callers


def test_what_a_looker_refuses_is_refused_to_the_sender() -> None:
    server = DiLoCoServer(tiny_model().state_dict(), num_workers=1, codec="fp32")
    frame = make_frame({name: torch.full_like(p, torch.nan) for name, p in params_of(tiny_model()).items()})
    with pytest.raises(NotFinite, match="holds NaN or Inf"):
        joined(server, "w").contribute(frame)
