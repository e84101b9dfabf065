"""What must not be done by half is not."""

from __future__ import annotations

import signal
import threading

import pytest
import torch

from outerstep.server import DiLoCoServer
from outerstep.worker import replica
from outerstep.worker.replica import AnchorBlock
from outerstep.worker.signals import deferred
from support import TwoLedgers, count, in_threads, memory_worker


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_answered_when_it_is_over(number: int) -> None:
    done = []

    def handler(number: int, frame: object) -> None:
        assert done
        raise KeyboardInterrupt

    def work() -> None:
        with deferred():
            signal.raise_signal(number)
            done.append("all of it")

    before = signal.signal(number, handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            work()
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, before)


def test_what_goes_wrong_inside_is_not_hidden() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ValueError, match="inside"), deferred():
        raise ValueError("inside")
    assert signal.getsignal(signal.SIGINT) is before


def test_in_another_thread_there_is_nothing_to_defer() -> None:
    def job() -> str:
        with deferred():
            return threading.current_thread().name

    assert in_threads(job)


def test_ctrl_c_in_the_middle_of_a_take_over_leaves_it_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tensors of one fragment; it comes when the first has been moved. What was sent is not sent again."""
    settings = {"outer_lr": 1.0, "outer_momentum": 0.0, "codec": "fp32", "sync_every": 2}
    server = DiLoCoServer(TwoLedgers().state_dict(), num_workers=1, port=0, **settings)  # type: ignore[arg-type]
    server.service.start()
    model = TwoLedgers()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    worker = memory_worker(server, "w", model, optimizer, heartbeat_interval=0.0, handle_signals=False).start()
    adopt, moved = replica._adopt, []

    def interrupted(block: AnchorBlock) -> None:
        adopt(block)
        moved.append(block.name)
        if len(moved) == 1:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(replica, "_adopt", interrupted)
    with pytest.raises(KeyboardInterrupt):
        count(model, optimizer, 0, 2)
    assert moved == ["first", "second"]
    assert not worker._started.machine.in_flight
    count(model, optimizer, 0, 2)
    worker.stop()
    assert server.get_global_params()["first"].tolist() == server.get_global_params()["second"].tolist() == [4.0, 0.0]
