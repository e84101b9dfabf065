"""What CI does with tests that failed in a full run: a few are run again, alone and three times each.

Thousands of tests share two noisy cores with each other. One that fails there and passes alone, three times of three,
is named as unsteady, which is a fault to be mended, but no reason to refuse what it was run for. More than a few, or
one that fails again, is.

    python tests/unsteady.py       # after pytest, in the same folder: reads what it remembers in .pytest_cache
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

REMEMBERED = Path(".pytest_cache/v/cache/lastfailed")
MOST = 3
TIMES = 3


def failed() -> list[str]:
    return list(json.loads(REMEMBERED.read_text())) if REMEMBERED.exists() else []


def main() -> int:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as the Makefile does
    names = failed()
    if not names:
        print("the tests did not run to their end: nothing to run again")
        return 1
    if len(names) > MOST:
        print(f"{len(names)} tests failed: too many to be called unsteady (at most {MOST})")
        return 1
    for turn in range(1, TIMES + 1):
        print(f"run again, alone, {turn} of {TIMES}: {', '.join(names)}", flush=True)
        # Without the cache: it keeps saying what failed in the full run.
        done = subprocess.run([sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *names], check=False)
        if done.returncode:
            return 1
    print(f"UNSTEADY, failed in the full run and passed alone {TIMES} times of {TIMES}: {', '.join(names)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
