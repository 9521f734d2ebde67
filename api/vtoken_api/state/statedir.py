"""The state directory of one server: files that survive a restart, and leader election.

The API processes of one server share the directory; each may append to its files.

1. The directory has mode 0700, its files 0600.
2. At most one process at a time is the leader (`try_lead`), which writes what must be written only
   once. The kernel releases the lock when the process ends.
3. The server runs without a usable directory: `error` has the reason, and writers use memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Mapping
from pathlib import Path

from vtoken_api.log import logger

FILE_MODE = 0o600
DIRECTORY_MODE = 0o700
LOCK_NAME = "leader.lock"
_NOT_NAME = re.compile(r"[^\w.-]+")


class StateDir:
    """`path` exists and is writable, or `error` has the reason why not."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.error = ""
        self._lock: int | None = None
        try:
            path.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
            if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
                raise PermissionError(f"{path} is not writable by this user")
        except OSError as error:
            self.error = str(error)
            logger.warning(
                "vtoken: cannot use the state directory; the audit log is kept in memory only, "
                "until this process ends: %s",
                error,
            )

    def try_lead(self) -> bool:
        """Become the leader if no other process is; returns whether this one leads. Never waits."""
        if self._lock is not None:
            return True
        try:
            lock = os.open(self.path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        except OSError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            return False
        self._lock = lock
        return True

    def close(self) -> None:
        """Give up leadership."""
        if self._lock is not None:
            with contextlib.suppress(OSError):
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
