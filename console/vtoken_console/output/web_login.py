"""Login of browsers to a web console that can act: a one-time key, then a cookie.

1. A key admits one browser and is then replaced.
2. The key is printed on the terminal, or written to a file that only this user can read. It is
   never in a URL, on a command line or in a log.
3. Only hashes of cookies are stored, at most MAX_BROWSERS, in this process's memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path

MAX_BROWSERS = 16
LETTERS = "abcdefghjkmnpqrstuvwxyz23456789"  # without look-alikes
GROUPS, GROUP = 4, 4  # 79 bits


class LoginGate:
    """`on_new_key` is called with every new key."""

    def __init__(self, on_new_key: Callable[[str], None]) -> None:
        self._on_new_key = on_new_key
        self._key = ""
        self._cookies: deque[bytes] = deque(maxlen=MAX_BROWSERS)
        self._renew()

    def _renew(self) -> None:
        groups = ("".join(secrets.choice(LETTERS) for _ in range(GROUP)) for _ in range(GROUPS))
        self._key = "-".join(groups)
        self._on_new_key(self._key)

    def open_with(self, typed: str) -> str | None:
        """Uses up the key and returns a cookie; None if `typed` is not the key."""
        plain = typed.strip().lower().replace("-", "").replace(" ", "")
        if not secrets.compare_digest(_digest(plain), _digest(self._key.replace("-", ""))):
            return None
        self._renew()
        cookie = secrets.token_urlsafe(32)
        self._cookies.append(_digest(cookie))
        return cookie

    def admits(self, cookie: str) -> bool:
        """Whether the cookie belongs to a browser that has logged in."""
        return _digest(cookie) in self._cookies  # of hashes: comparison time reveals no cookie


class PageKeyError(OSError):
    """The page key cannot be stored; the message names its file."""


class KeyFile:
    """Stores the key at `path`, mode 0600, if there is no terminal; `close` removes it."""

    def __init__(self, port: int) -> None:
        base = os.environ.get("XDG_RUNTIME_DIR", "")
        folder = Path(base) if os.path.isabs(base) else Path.home() / ".local" / "state"
        self.path = folder / "vtoken" / f"console-{port}-{os.getpid()}.key"

    def write(self, key: str) -> None:
        """Replaces the file atomically; raises PageKeyError and leaves no partial file."""
        new = self.path.with_suffix(".new")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            new.unlink(missing_ok=True)
            try:
                with os.fdopen(os.open(new, flags, 0o600), "w") as file:
                    file.write(key + "\n")
                new.replace(self.path)
            except OSError:
                new.unlink(missing_ok=True)
                raise
        except OSError as error:
            raise PageKeyError(
                f"the page key cannot be written to {self.path}: {error.strerror}; "
                "set XDG_RUNTIME_DIR to a folder that can be written"
            ) from error

    def close(self) -> None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # it was never written
            self.path.unlink()


def print_key(key: str) -> None:
    """Prints the key on the terminal."""
    print(f"page key, for one browser: {key}", flush=True)


def has_terminal() -> bool:
    """Whether stdout is a terminal, so that nothing stores what is printed."""
    return sys.stdout.isatty()


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="surrogateescape")).digest()
