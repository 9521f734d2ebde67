"""Why an engine did not start, told again where the server's log ends.

An engine refuses in a process of its own, and vLLM's tracebacks of three processes follow. `vtoken
serve` offers a file for the sentence; the server's process, which ends last, prints what it holds
behind everything else. Where nobody offers one (`vllm.LLM`) the exception says all.
"""

from __future__ import annotations

import atexit
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vtoken.errors import SelfTestError, UnsupportedError

PLACE = "VTOKEN_LAST_WORDS"  # "process id of the server:file"


def offer() -> None:
    """A file for the reason, for this process and those that it starts; it survives `exec`. Where
    none can be made, the reason stands in the log only once.
    """
    os.environ.pop(PLACE, None)  # another server's, if this one is started from one
    with suppress(OSError):
        handle, path = tempfile.mkstemp(prefix="vtoken-")
        os.close(handle)
        os.environ[PLACE] = f"{os.getpid()}:{path}"


@contextmanager
def kept() -> Iterator[None]:
    """What refuses to start within leaves its reason in the file, if there is one."""
    try:
        yield
    except (UnsupportedError, SelfTestError) as error:
        _, _, path = os.environ.get(PLACE, "").partition(":")
        if path:
            with suppress(OSError):
                Path(path).write_text(str(error))
        raise


def print_at_exit() -> None:
    """In the server's process: print what is in the file when the process ends, and remove it."""
    owner, _, path = os.environ.get(PLACE, "").partition(":")
    if owner == str(os.getpid()):
        atexit.register(_print, Path(path), os.getpid())


def _print(path: Path, owner: int) -> None:
    if os.getpid() != owner:
        return  # a fork inherits what is registered
    with suppress(OSError):
        reason = path.read_text()
        path.unlink()
        if reason:
            print(f"\nvtoken serve: {reason}", file=sys.stderr, flush=True)
