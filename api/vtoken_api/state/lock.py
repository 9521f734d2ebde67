"""A file that one process locks at a time. The kernel unlocks it when the process ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

FILE_MODE = 0o600


class FileLock:
    """The lock of the file at `path`, whose folder exists."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._held: int | None = None  # the descriptor

    @property
    def held(self) -> bool:
        """Whether this object holds the lock."""
        return self._held is not None

    def acquire(self) -> bool:
        """Lock the file until `release`, without waiting; False while another one holds it.

        Raises OSError if the file cannot be made.
        """
        if self._held is None:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(file)
                return False
            except OSError:
                os.close(file)
                raise
            self._held = file
        return True

    def release(self) -> None:
        if self._held is not None:
            os.close(self._held)
            self._held = None

    @staticmethod
    def is_held(path: Path) -> bool:
        """Whether somebody, of this process too, holds the lock of the file at `path`."""
        with contextlib.suppress(FileNotFoundError):
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            finally:
                os.close(file)
        return False
