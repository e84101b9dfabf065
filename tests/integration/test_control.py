"""An operator's orders over HTTP: who may give them, and what comes of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from outerstep.errors import Forbidden
from outerstep.security import is_loopback
from outerstep.server import DiLoCoServer
from outerstep.types import Control, ControlAnswer, Wishes
from outerstep.wire.http_request import HttpBody
from outerstep.wire.http_transport import HttpTransport
from outerstep.worker import DiLoCoWorker
from support import tiny_model


@pytest.fixture
def server() -> Iterator[DiLoCoServer]:
    with DiLoCoServer(tiny_model().state_dict(), num_workers=1, port=0, sync_every=50) as made:
        yield made


def order(server: DiLoCoServer, **facts: Any) -> str:
    address = f"http://{server.address}" if server.config.insecure else server.address
    answer = HttpTransport(address).call(Control(**facts))
    assert isinstance(answer, ControlAnswer)
    return answer.done


@pytest.fixture
def _from_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HttpBody, "peer", "192.168.1.7")


def test_an_order_from_this_machine_is_carried_out(server: DiLoCoServer) -> None:
    model = tiny_model()
    worker = DiLoCoWorker(model, torch.optim.SGD(model.parameters(), lr=0.1), server.address, worker_id="left").start()
    assert "plan revision 1" in order(server, kind="plan", changes=Wishes(sync_every=20))
    assert "left is out of the run" in order(server, kind="kick", worker_id="left", reason="a test")
    assert server.status()["workers"] == {}
    worker.abandon("over")


@pytest.mark.usefixtures("_from_elsewhere")
def test_an_order_from_another_machine_is_refused_with_the_remedy(server: DiLoCoServer) -> None:
    with pytest.raises(
        Forbidden, match=r"from the server's own machine only; this comes from 192\.168\.1\.7"
    ) as refused:
        order(server, kind="budget", tokens=5)
    assert "--remote-control" in refused.value.hint
    assert server.service.coordinator.budget.limit is None


@pytest.mark.usefixtures("_from_elsewhere")
def test_what_else_is_insecure_does_not_open_it() -> None:
    with (
        DiLoCoServer(tiny_model().state_dict(), num_workers=1, port=0, insecure=True) as server,
        pytest.raises(Forbidden, match="own machine only"),
    ):
        order(server, kind="budget", tokens=5)


@pytest.mark.usefixtures("_from_elsewhere")
def test_it_is_taken_where_the_operator_allowed_it() -> None:
    with DiLoCoServer(tiny_model().state_dict(), num_workers=1, port=0, remote_control=True) as open_server:
        assert "ends at 5 tokens" in order(open_server, kind="budget", tokens=5)


def test_a_web_page_cannot_give_orders(server: DiLoCoServer) -> None:
    """A form in a browser on the server's machine posts text/plain without asking."""
    token = server._identity.tokens.load().admin  # type: ignore[union-attr]
    headers = {"Content-Type": "text/plain", "Authorization": f"Bearer {token}"}
    connection = HttpTransport(server.address)._new_connection(20.0)
    connection.request("POST", "/v1/control", b'{"kind":"budget","tokens":5}', headers)
    assert connection.getresponse().status == 415
    connection.close()
    assert server.service.coordinator.budget.limit is None


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("10.0.0.1", False),
        ("::ffff:10.0.0.1", False),
        ("fe80::1%eth0", False),
    ],
)
def test_which_addresses_are_this_machines(address: str, loopback: bool) -> None:
    assert is_loopback(address) is loopback
