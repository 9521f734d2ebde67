"""The state directory of one server: files that survive a restart.

1. The directory has mode 0700, its files 0600.
2. One process at a time owns the directory (`acquire`), and only the owner writes its files. The
   kernel releases the lock when the process ends.
3. The server runs without a usable directory: writers get an OSError, keep what they can in memory
   and try again.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Mapping
from pathlib import Path

from vtoken_api.state.lock import FileLock

DIRECTORY_MODE = 0o700
LOCK_NAME = "leader.lock"  # locked by earlier versions too
_NOT_NAME = re.compile(r"[^\w.-]+")


class StateDir:
    """The directory at `path`, made when it is first acquired. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = FileLock(path / LOCK_NAME)
        self._closed = False
        self._acquiring = threading.Lock()

    def acquire(self) -> None:
        """Own the directory until `close`. Raises OSError if it cannot be made or used, or if
        another process owns it, or after `close`. Never waits."""
        with self._acquiring:
            if self._lock.held:
                return
            if self._closed:
                raise OSError(f"this process has given up {self.path}")
            self.path.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
            if not self._lock.acquire():
                raise BlockingIOError(
                    f"another server uses {self.path}; give each server a folder of its own with "
                    "--vtoken-state-dir"
                )

    def close(self) -> None:
        """Let another process own the directory, for good."""
        with self._acquiring:
            self._closed = True
            self._lock.release()


def default_path(
    port: int, unix_socket: str | None, environment: Mapping[str, str] | None = None
) -> Path:
    """`$XDG_STATE_HOME/vtoken/PORT`, or with the socket's name instead of the port."""
    environment = os.environ if environment is None else environment
    home = Path(environment.get("XDG_STATE_HOME", ""))
    if not home.is_absolute():  # also when it is not set
        home = Path(environment.get("HOME") or "~").expanduser() / ".local" / "state"
    name = str(port) if unix_socket is None else _NOT_NAME.sub("_", unix_socket).strip("_.")
    return home / "vtoken" / (name or "socket")
