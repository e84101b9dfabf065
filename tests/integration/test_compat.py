"""The compatibility port over real HTTP: old clients in a run, and what they send twice."""

from __future__ import annotations

import http.client
import socket
import struct
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from integration.old_clients import (
    Answered,
    OldClient,
    answer_of,
    begin_submit,
    like,
    loaded,
    minus,
    one_client,
    serving,
    two_clients,
    workers_of,
)
from outerstep.compat.client import CompatClient
from outerstep.core.manifest import describe
from outerstep.types import Wishes
from outerstep.worker import DiLoCoWorker
from support import assert_same, in_threads, memory_topology, params_of, tiny_model, train_steps, wait_until

# --- rounds -------------------------------------------------------------------------------------------------------


def test_two_old_clients_agree_round_after_round() -> None:
    with serving(num_workers=2) as (server, compat):
        clients = [OldClient(compat.address, name) for name in ("a", "b")]
        params = [client.register() for client in clients]
        assert_same(params[0], params_of(tiny_model()))
        assert_same(params[0], params[1])
        for round_ in range(1, 4):
            deltas = [like(params[0], 0.5, torch.bfloat16), like(params[1], 1.5)]
            params = in_threads(*(partial(c.submit, d) for c, d in zip(clients, deltas, strict=True)))
            assert_same(params[0], params[1])
            assert server.sync_round == round_
            if round_ == 1:
                assert_same(params[0], minus(params_of(tiny_model()), 1.0))  # the mean of both
        assert_same(params[0], server.get_global_params())
        assert_same(loaded(clients[0].call("GET", "/global_params")), params[0])


def test_a_client_that_sends_the_same_bytes_every_round_counts_every_time() -> None:
    with one_client() as (server, client, start):
        zero = {name: torch.zeros_like(tensor) for name, tensor in start.items()}
        ones = {**zero, "0.bias": torch.ones(5)}
        for round_ in range(1, 6):
            got = client.submit(ones)
            assert server.sync_round == round_
        expected = start["0.bias"]
        for _ in range(5):
            expected = expected - 1.0
        assert torch.equal(got["0.bias"], expected)


def test_the_same_bytes_count_again_on_a_connection_that_is_kept() -> None:
    with one_client() as (server, client, start):
        body = client.whole(like(start, 1.0))
        kept = http.client.HTTPConnection(client.host, client.port, timeout=60)
        for round_ in range(1, 4):
            kept.request("POST", "/submit_pseudograd", body=body)
            assert kept.getresponse().read()
            assert server.sync_round == round_
        kept.close()


def test_fragments_are_exchanged_one_at_a_time() -> None:
    with two_clients(num_fragments=2, sync_every=4) as (server, *clients, start):
        plan = server.service.coordinator.plan
        assert plan is not None
        for fragment, names in enumerate(plan.fragments):
            delta = like({name: start[name] for name in names}, 1.0)
            got = in_threads(*(partial(client.submit_fragment, fragment, delta) for client in clients))
            assert_same(got[0], {name: start[name] - 1.0 for name in names})
            assert_same(got[0], got[1])
        assert server.sync_round == 1
        # A forced sync of everything.
        whole = in_threads(*(partial(client.submit, like(start, 1.0)) for client in clients))
        assert_same(whole[0], minus(minus(start, 1.0), 1.0))
        assert server.sync_round == 2


@pytest.mark.parametrize("strategy", ["counted", "contiguous"])
def test_a_client_that_cuts_its_model_by_the_number_of_tensors_fits_a_run_that_does(strategy: str) -> None:
    names = list(params_of(tiny_model()))
    with serving(num_workers=2, num_fragments=4, sync_every=4, fragment_strategy=strategy, quorum=1) as (
        server,
        compat,
    ):
        memory_topology(server, "worker").join(describe(tiny_model())[1], Wishes())  # it brings the order, and the cut
        client = OldClient(compat.address, "a")
        start = client.register()
        first = {name: torch.ones_like(start[name]) for name in names[:2]}  # six tensors in four: 2, 2, 1, 1
        if strategy == "counted":
            assert_same(client.submit_fragment(0, first), {name: start[name] - 1.0 for name in first})
        else:
            with pytest.raises(Answered, match="fragment-strategy counted") as caught:
                client.submit_fragment(0, first)
            assert caught.value.status == 422


def test_an_old_client_and_a_modern_worker_hold_the_same_bits() -> None:
    with serving(num_workers=2, outer_lr=0.7, outer_momentum=0.9, codec="bf16") as (server, compat):
        old, finished = OldClient(compat.address, "old"), threading.Event()

        def modern() -> dict[str, Tensor]:
            model = tiny_model()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            with DiLoCoWorker(model, optimizer, server.address, worker_id="modern", sync_every=3):
                train_steps(model, optimizer, 9, seed=1)
                finished.wait(60)
                return params_of(model)

        def ancient() -> dict[str, Tensor]:
            wait_until(lambda: server.status()["plan"] is not None)  # the modern worker says what H is
            model = tiny_model()
            held = old.register()
            for round_ in range(3):
                model.load_state_dict(held)
                train_steps(model, torch.optim.SGD(model.parameters(), lr=0.05), 3, seed=10 + round_)
                local = params_of(model)
                held = old.submit({name: (held[name] - local[name]).bfloat16() for name in held})
            finished.set()
            return held

        got = in_threads(modern, ancient)
        assert server.sync_round == 3
        assert_same(got[0], got[1])
        assert not torch.equal(got[1]["0.weight"], tiny_model().state_dict()["0.weight"])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 3, bias=False)
        self.last = nn.Linear(3, 3, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("count", torch.tensor(7))


def test_tied_names_and_counters_travel_but_are_not_contributed() -> None:
    with one_client(Tied()) as (server, client, start):
        assert list(start) == ["count", "first.weight", "last.weight"]
        assert torch.equal(start["first.weight"], start["last.weight"])
        assert int(start["count"]) == 7
        got = client.submit({name: torch.ones_like(tensor) for name, tensor in start.items()})
        assert torch.equal(got["first.weight"], start["first.weight"] - 1.0)
        assert torch.equal(got["last.weight"], got["first.weight"])
        assert int(got["count"]) == 7
        client.submit({"first.weight": torch.ones(3, 3)})  # nor need they
        assert server.sync_round == 2


# --- retries ------------------------------------------------------------------------------------------------------


def test_a_submit_repeated_while_the_first_waits_is_counted_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []
    take = CompatClient.take

    def note(seat: CompatClient, *submitted: Any) -> Any:
        pieces = take(seat, *submitted)
        taken.append(seat.worker_id)
        return pieces

    monkeypatch.setattr(CompatClient, "take", note)
    with two_clients() as (server, a, b, start):
        body = a.whole(like(start, 1.0))
        waiting = [begin_submit(server, a, body)]
        waiting += [a.begin(body), a.begin(a.whole(like(start, 9.0)))]
        wait_until(lambda: taken == ["a"] * 3)  # a repeat that comes after the round has closed is the next one's
        assert "the second time with other values; the first counts" in caplog.text
        result = b.submit(like(start, 1.0))
        assert_same(result, minus(start, 1.0))
        for sock in waiting:
            assert_same(answer_of(sock), result)
        assert server.status()["total_submissions"] == 2
        assert server.sync_round == 1


@pytest.mark.parametrize("lose", ["reset", "closed unread", "closed too early"])
def test_a_submit_whose_answer_was_lost_is_answered_again_and_counted_once(lose: str) -> None:
    with two_clients() as (server, a, b, start):
        body = a.whole(like(start, 1.0))
        lost = begin_submit(server, a, body)
        if lose == "closed too early":
            lost.close()
        result = b.submit(like(start, 1.0))
        if lose == "closed unread":
            assert lost.recv(1)  # the answer is here, or on its way, and nobody will read it to the end
            lost.close()
        elif lose == "reset":
            lost.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            lost.close()
        assert_same(loaded(a.call("POST", "/submit_pseudograd", body)), result)
        assert server.status()["total_submissions"] == 2
        assert server.sync_round == 1


def test_a_submit_cut_off_before_its_round_closed_is_taken_up_again() -> None:
    with two_clients() as (server, a, b, start):
        body = a.whole(like(start, 1.0))
        begin_submit(server, a, body).close()
        assert_same(a.register(), start)  # what old clients do next: the round is still open, so nothing is new
        results = in_threads(
            lambda: loaded(a.call("POST", "/submit_pseudograd", body)), lambda: b.submit(like(start, 1.0))
        )
        assert_same(results[0], results[1])
        assert_same(results[0], minus(start, 1.0))
        assert server.status()["total_submissions"] == 2


def test_who_registers_again_after_the_round_closed_contributes_to_the_next() -> None:
    with two_clients() as (server, a, b, start):
        begin_submit(server, a, a.whole(like(start, 1.0))).close()
        assert_same(b.submit(like(start, 1.0)), minus(start, 1.0))
        assert_same(a.register(), minus(start, 1.0))
        results = in_threads(lambda: a.submit(like(start, 3.0)), lambda: b.submit(like(start, 3.0)))
        assert_same(results[0], minus(minus(start, 1.0), 3.0))
        assert server.status()["total_submissions"] == 4


# --- the example --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_example_client_trains_reports_and_leaves() -> None:
    script = Path(__file__).parents[2] / "examples" / "compat_client.py"
    with serving(num_workers=2, num_fragments=2, sync_every=10) as (server, compat):
        server_side = OldClient(compat.address, "b")
        server_side.register()
        command = [sys.executable, str(script), "--server", compat.address, "--rounds", "2", "--worker-id", "old-1"]
        part = [name for name in params_of(tiny_model()) if name.startswith("0.")]
        with subprocess.Popen([*command, "--fragment", "0", *part], stdout=subprocess.PIPE, text=True) as example:
            wait_until(lambda: "old-1" in workers_of(server))
            names = server.service.coordinator.plan.fragments[0]  # type: ignore[union-attr]
            assert list(names) == part
            params = like(params_of(tiny_model()), 0.0)
            server_side.submit(params)
            server_side.submit(params)
            last = server_side.submit_fragment(0, {name: params[name] for name in part})
            out, _ = example.communicate(timeout=60)
        assert example.returncode == 0, out
        assert "registered old-1: 6 tensors" in out
        assert out.count("heartbeat: ok, round ") == 2
        assert out.count("submitted, norm") == 2
        assert "submitted fragment 0" in out
        assert "status: round 2" in out
        assert out.rstrip().endswith("deregistered")
        assert list(workers_of(server)) == ["b"]
        assert_same(last, {name: server.get_global_params()[name] for name in part})
        assert float(last["0.weight"].norm()) < float(tiny_model().state_dict()["0.weight"].norm())
