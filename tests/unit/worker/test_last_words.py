"""What a script says at its end if nobody answers."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import torch, outerstep
model = torch.nn.Linear(1, 1)
with outerstep.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), server_addr="127.0.0.1:9", join_timeout_s=0):
    pass
"""


def test_a_script_whose_server_never_answers_ends_with_one_line_and_no_traceback() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: no answer from the server for ")
    assert last.endswith("is the server running, and is its address right?")
