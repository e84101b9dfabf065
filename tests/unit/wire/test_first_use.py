"""The first messages of a process may come in several threads at once."""

from __future__ import annotations

import subprocess
import sys

MANY_FIRSTS = """
import os, sys, threading
from outerstep.wire.messages import decode_json
from outerstep.wire.messages import Join
sys.setswitchinterval(1e-6)
said = (
    b'{"protocol": 1, "worker_id": "a", "instance": "aaaaaaaa", "manifest": '
    b'{"parameters": [{"name": "x", "shape": [1], "dtype": "float32"}]}}'
)
def read(together):
    together.wait()
    decode_json(said, Join)
for _ in range(60):
    child = os.fork()
    if child == 0:
        together = threading.Barrier(4)
        threads = [threading.Thread(target=read, args=(together,)) for _ in range(4)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, "it crashed"
"""


def test_threads_that_read_the_first_message_of_a_kind_together_do_not_crash_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", MANY_FIRSTS], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
