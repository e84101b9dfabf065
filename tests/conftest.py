"""One torch thread per test process: several on few cores stall each other, and sums keep one order. And one folder for
the credentials of all servers of a session: they make their certificate once, and their clients find it there, as those
of one user on one machine do. And drawn cases that are the same each time, unless a profile says otherwise."""

import os
import tempfile
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)

settings.register_profile("ci", derandomize=True, print_blob=True)
settings.register_profile("deep", max_examples=10_000, print_blob=True)  # by hand: --hypothesis-profile deep
settings.load_profile("ci")


@pytest.fixture(scope="session", autouse=True)
def _credentials() -> Iterator[None]:
    """By the standard variable, which the tests that clear ours for their processes leave alone."""
    before = os.environ.get("XDG_CONFIG_HOME")
    with tempfile.TemporaryDirectory(prefix="outerstep-credentials-") as folder:
        os.environ["XDG_CONFIG_HOME"] = folder
        yield
    if before is None:
        del os.environ["XDG_CONFIG_HOME"]
    else:
        os.environ["XDG_CONFIG_HOME"] = before
