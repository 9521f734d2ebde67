"""Who may open a console in a browser that can act: a key typed into a page, then a cookie.

Knows keys and cookies, neither pages nor consoles.

1. A key opens one browser, and is then replaced by another one.
2. It is told to who started the server: on the terminal, else in a file for this user alone. It is
   in no address, on no command line and in no log.
3. Of cookies only hashes are held, MAX_BROWSERS at most; all end with this process.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path

MAX_BROWSERS = 16
LETTERS = "abcdefghjkmnpqrstuvwxyz23456789"  # none that looks like another
GROUPS, GROUP = 4, 4  # 79 bits


class LoginGate:
    """`tell` is given every new key."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._key = ""
        self._cookies: deque[bytes] = deque(maxlen=MAX_BROWSERS)
        self._renew()

    def _renew(self) -> None:
        groups = ("".join(secrets.choice(LETTERS) for _ in range(GROUP)) for _ in range(GROUPS))
        self._key = "-".join(groups)
        self._tell(self._key)

    def open_with(self, typed: str) -> str | None:
        """The cookie of a browser that was given the key, which is used up by that; else None."""
        plain = typed.strip().lower().replace("-", "").replace(" ", "")
        if not secrets.compare_digest(_digest(plain), _digest(self._key.replace("-", ""))):
            return None
        self._renew()
        cookie = secrets.token_urlsafe(32)
        self._cookies.append(_digest(cookie))
        return cookie

    def admits(self, cookie: str) -> bool:
        """Whether this is the cookie of a browser that was given a key."""
        shown = _digest(cookie)
        return shown in self._cookies  # hashes: how long it takes tells nothing of a cookie


class KeyFile:
    """Where a key is told when there is no terminal: `path`, mode 0600, gone with `close`."""

    def __init__(self, port: int) -> None:
        base = os.environ.get("XDG_RUNTIME_DIR", "")
        folder = Path(base) if os.path.isabs(base) else Path.home() / ".local" / "state"
        self.path = folder / "vtoken" / f"console-{port}-{os.getpid()}.key"

    def write(self, key: str) -> None:
        """Replace what stands there; raises OSError."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = self.path.with_suffix(".new")
        new.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with os.fdopen(os.open(new, flags, 0o600), "w") as file:
            file.write(key + "\n")
        new.replace(self.path)

    def close(self) -> None:
        self.path.unlink(missing_ok=True)


def say_on_terminal(key: str) -> None:
    """Tell the key to who looks at this terminal."""
    print(f"page key, for one browser: {key}", flush=True)


def has_terminal() -> bool:
    """Whether somebody looks at what is printed, and nothing keeps it."""
    return sys.stdout.isatty()


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="surrogateescape")).digest()
