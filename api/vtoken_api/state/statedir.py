"""The state directory of one server: files that survive a restart.

1. The directory has mode 0700, its files 0600.
2. One process at a time owns the directory (`acquire`), and only the owner writes its files. The
   kernel releases the lock when the process ends.
3. The server runs without a usable directory: writers get an OSError, keep what they can in memory
   and try again.
"""

from __future__ import annotations

import fcntl
import os
import re
import threading
from collections.abc import Mapping
from pathlib import Path

DIRECTORY_MODE = 0o700
FILE_MODE = 0o600
LOCK_NAME = "leader.lock"  # locked by earlier versions too
_NOT_NAME = re.compile(r"[^\w.-]+")


class StateDir:
    """The directory at `path`, made when it is first acquired. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None  # the descriptor of the locked file
        self._closed = False
        self._acquiring = threading.Lock()

    def acquire(self) -> None:
        """Own the directory until `close`. Raises OSError if it cannot be made or used, or if
        another process owns it, or after `close`. Never waits."""
        with self._acquiring:
            if self._lock is not None:
                return
            if self._closed:
                raise OSError(f"this process has given up {self.path}")
            self.path.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            file = os.open(self.path / LOCK_NAME, flags, FILE_MODE)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(file)
                if not isinstance(error, BlockingIOError):
                    raise
                raise BlockingIOError(
                    f"another server uses {self.path}; give each server a folder of its own with "
                    "--vtoken-state-dir"
                ) from None
            self._lock = file

    def close(self) -> None:
        """Let another process own the directory, for good."""
        with self._acquiring:
            self._closed = True
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None


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
