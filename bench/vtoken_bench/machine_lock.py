"""One measurement at a time on a machine: others would take its cores and caches.

The lock is a file in the temporary folder, so it holds over all checkouts of a user. It ends with
its process, whatever ends that.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class MachineBusyError(RuntimeError):
    """Another benchmark runs; the message names it."""


def lock_path() -> Path:
    return Path(tempfile.gettempdir()) / f"vtoken-bench-{os.getuid()}.lock"


@contextmanager
def machine_held(name: str, *, measures: bool) -> Iterator[None]:
    """Hold the machine for the benchmark `name`, if it measures.

    Raises MachineBusyError if another process has it.
    """
    if not measures:
        yield
        return
    with lock_path().open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise MachineBusyError(
                f"{file.read().strip()} runs on this machine, and two would disturb each other: "
                f"wait for its end, or end it ({lock_path()})"
            ) from None
        file.truncate(0)
        file.write(f"`vtoken bench {name}`, process {os.getpid()},")
        file.flush()
        yield
