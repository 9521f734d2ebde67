"""Repeats the reason why an engine did not start as the last line of the server's log.

The engine raises in its own process, and tracebacks of three vLLM processes follow. `vtoken serve`
creates a file for the reason. The server's process, which ends last, prints the file's content at
exit. Without the file (`vllm.LLM`), the exception is the only report.
"""

from __future__ import annotations

import atexit
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vtoken.base.errors import SelfTestError, UnsupportedError

PLACE = "VTOKEN_LAST_WORDS"  # "process id of the server:file"


def offer() -> None:
    """Create the file for the reason, for this process and its children; it survives `exec`.

    If this fails, the log contains the reason only once.
    """
    os.environ.pop(PLACE, None)  # set if another `vtoken serve` started this one
    with suppress(OSError):
        handle, path = tempfile.mkstemp(prefix="vtoken-")
        os.close(handle)
        os.environ[PLACE] = f"{os.getpid()}:{path}"


@contextmanager
def kept() -> Iterator[None]:
    """Write the reason of a refusal raised in the context to the file, if there is one."""
    try:
        yield
    except (UnsupportedError, SelfTestError) as error:
        _, _, path = os.environ.get(PLACE, "").partition(":")
        if path:
            with suppress(OSError):
                Path(path).write_text(str(error))
        raise


def print_at_exit() -> None:
    """In the server's process: print the file's content at exit and remove the file."""
    owner, _, path = os.environ.get(PLACE, "").partition(":")
    if owner == str(os.getpid()):
        atexit.register(_print, Path(path), os.getpid())


def _print(path: Path, owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked child inherits the registration
    with suppress(OSError):
        reason = path.read_text()
        path.unlink()
        if reason:
            print(f"\nvtoken serve: {reason}", file=sys.stderr, flush=True)
