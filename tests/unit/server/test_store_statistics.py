"""Averaged buffers: means of values, however old the contribution that brings them."""

from __future__ import annotations

import pytest
import torch

from outerstep.core.codecs.recipe import WHOLE
from outerstep.core.delayed import DelayedNesterov
from outerstep.core.outer import Nesterov
from outerstep.server.store import Addend, FragmentStore
from outerstep.types import ParameterSpec, Participant
from support import make_frame

EVERYBODY = (Participant(worker_id="w", sequence=1, weight=1.0),)


def make_store(variance: float = 1.0, max_staleness: int = 4) -> FragmentStore:
    spec = ParameterSpec(name="var", shape=(1,), dtype="float32", role="average")
    return FragmentStore(0, [spec], {"var": torch.tensor([variance])}, WHOLE, WHOLE, 64, max_staleness=max_staleness)


def delta(anchor: float, local: float) -> memoryview:
    return make_frame({"var": torch.tensor([anchor - local])})


def test_pushes_never_leave_the_range_of_the_values_they_bring() -> None:
    """Two workers whose variance is really 0.01, each computing from what it saw last."""
    store, rule = make_store(), DelayedNesterov(2)
    seen = [(0, 1.0), (0, 1.0)]  # the version each worker holds, and the value in it
    values = []
    for version in range(1, 20):
        worker = version % 2
        base, anchor = seen[worker]
        store.publish(store.close(version, rule, [Addend(delta(anchor, 0.01), 1.0, base)]), EVERYBODY)
        values.append(float(store.params()["var"]))
        seen[worker] = (version, values[-1])
    assert all(0.01 - 1e-6 <= value <= 1.0 for value in values)
    assert values[-1] == pytest.approx(0.01, abs=1e-5)
    assert values == sorted(values, reverse=True)


def test_a_late_contribution_counts_with_its_value_not_with_its_old_difference() -> None:
    store = make_store()
    store.accumulate(1, [Addend(delta(1.0, 0.2), 1.0, 0)])
    store.publish(store.close(1, Nesterov()), EVERYBODY)
    assert float(store.params()["var"]) == pytest.approx(0.2)
    store.accumulate(2, [Addend(delta(1.0, 0.4), 1.0, 0)])  # late: computed from version 0
    store.accumulate(2, [Addend(delta(0.2, 0.6), 1.0, 1)])
    store.publish(store.close(2, Nesterov()), EVERYBODY)
    assert float(store.params()["var"]) == pytest.approx(0.5)


def test_what_is_older_than_anything_remembered_says_nothing() -> None:
    store, rule = make_store(max_staleness=0), DelayedNesterov(1)
    for version in range(1, 5):
        store.publish(store.close(version, rule, [Addend(delta(1.0, 1.0), 1.0, version - 1)]), EVERYBODY)
    store.publish(store.close(5, rule, [Addend(delta(1.0, 0.0), 1.0, 0)]), EVERYBODY)
    assert float(store.params()["var"]) == 1.0
