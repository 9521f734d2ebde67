"""The state directory of one server: what must survive it, and who of its processes may lead.

Knows paths, modes and locks, not what is kept. Several API server processes of one server share
the directory; each may append to its files.

1. The directory is made with mode 0700; its files are for this user alone (0600).
2. At most one process at a time leads (`try_lead`): what must be written once, and not once a
   process, is its leader's to write. The kernel ends a leadership with its process.
3. A directory that cannot be used is no reason not to serve: `error` says why, and writers go on
   in memory.
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
    """`path` exists and can be written to, or `error` says why not."""

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
                "vtoken: the state directory cannot be used, the audit log is kept in memory "
                "only and is lost with this process: %s",
                error,
            )

    def try_lead(self) -> bool:
        """Whether this process leads, from now on or already; never waits."""
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
        """Let another process lead."""
        if self._lock is not None:
            with contextlib.suppress(OSError):
                os.close(self._lock)
            self._lock = None


def default_path(
    port: int, unix_socket: str | None, environment: Mapping[str, str] | None = None
) -> Path:
    """`$XDG_STATE_HOME/vtoken/PORT`, or of the socket's name; one server, one directory."""
    environment = os.environ if environment is None else environment
    home = Path(environment.get("XDG_STATE_HOME", ""))
    if not home.is_absolute():  # also when it is not set
        home = Path(environment.get("HOME") or "~").expanduser() / ".local" / "state"
    name = str(port) if unix_socket is None else _NOT_NAME.sub("_", unix_socket).strip("_.")
    return home / "vtoken" / (name or "socket")
