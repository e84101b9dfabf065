"""What is said at the end of a training command that never made a worker.

`outerstep worker` becomes the command (worker.py), so it is not there at the end. This small process is: it waits for
the command to end, and speaks only if the file that a worker removes (`outerstep.attach`) is still there. It is run by
itself, without the package, so that it costs little for as long as the training lasts:

    python -I -S last_word.py PID FILE MESSAGE
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile


def promise(message: str) -> str:
    """Have `message` printed to stderr when this process has ended, unless somebody removes the file before. Returns
    the file; "" where that cannot be had: the system must be able to wait for another process."""
    if not hasattr(os, "pidfd_open"):
        return ""
    try:
        handle, file = tempfile.mkstemp(prefix="outerstep-not-attached-")
    except OSError:
        return ""  # a disk that is full or read-only is no reason not to train
    os.close(handle)
    words = [sys.executable, "-I", "-S", os.path.abspath(__file__), str(os.getpid()), file, message]
    # Its own session: a Ctrl-C is for the command. It returns when its own child watches.
    started = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)
    if started.returncode != 0:
        os.unlink(file)
        return ""
    return file


def main(pid: int, file: str, message: str) -> None:
    watched = os.pidfd_open(pid)
    if os.fork():
        return  # nobody's child: the command may wait for its own
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    poll = select.poll()
    poll.register(watched, select.POLLIN)
    poll.poll()
    with contextlib.suppress(OSError):  # it is gone, or nobody listens
        os.unlink(file)
        print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
