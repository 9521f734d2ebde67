"""Keys of one's own: read from a file, checked against the table of keys, put into it.

Knows no widget. The file is `vtoken/console.toml` in `$XDG_CONFIG_HOME` (or `~/.config`):

    [keys]
    pause = "f5"
    compact = ["c", "f6"]

`vtoken console --keys` prints every action with its keys. Whatever is wrong is a KeyFileError that
names file, line and value; nothing of such a file is used.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from textual.binding import Binding
from textual.keys import Keys

from vtoken_console.frame.keys import KEYS, Key, shown_key

MODIFIERS = ("ctrl+", "shift+", "alt+")
NAMED = {key.value for key in Keys}
MOVING = frozenset(
    ("up", "down", "left", "right", "pageup", "pagedown", "home", "end", "tab", "shift+tab")
)
EVERYWHERE = frozenset({"quit", "help", "command-palette", "skip-guide"})


class KeyFileError(ValueError):
    """The file cannot be used; the message names file, line and value."""


def default_path(environ: Mapping[str, str] = os.environ) -> Path:
    """Where the file lies, whether it is there or not."""
    base = environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(base).expanduser() / "vtoken" / "console.toml"


def load(path: Path) -> tuple[Key, ...]:
    """The table of keys with those of the file at `path`; KEYS where there is no file."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return KEYS
    except (OSError, UnicodeDecodeError) as error:
        raise KeyFileError(f"{path}: {error}") from None
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise KeyFileError(f"{path}: {error}") from None
    return remapped(document, _Lines(path, text))


class _Lines:
    """Which line of the file a name stands in, for messages."""

    def __init__(self, path: Path, text: str) -> None:
        self._path = path
        self._lines = text.splitlines()

    def error(self, name: str, what: str) -> KeyFileError:
        pattern = re.compile(rf"^\s*\[?\s*[\"']?{re.escape(name)}\b")
        found = (n for n, line in enumerate(self._lines, 1) if pattern.search(line))
        line = next(found, None)
        where = f"{self._path}, line {line}" if line is not None else str(self._path)
        return KeyFileError(f"{where}: {what}")


def remapped(document: dict[str, Any], lines: _Lines) -> tuple[Key, ...]:
    """KEYS with what the document asks for; raises KeyFileError."""
    for section in document:
        if section != "keys":
            raise lines.error(section, f"{section!r} is no section; there is [keys]")
    wanted = document.get("keys", {})
    if not isinstance(wanted, dict):
        raise lines.error("keys", "keys is not a section; write [keys]")
    known = {key.id: key for key in KEYS}
    chosen: dict[str, str] = {}
    for action, value in wanted.items():
        if action not in known:
            raise lines.error(
                action, f"{action!r} is no action; there are {', '.join(sorted(known))}"
            )
        given = value if isinstance(value, list) else [value]
        if not given or not all(isinstance(one, str) and one for one in given):
            raise lines.error(action, f"{action} = {value!r} is not a key or a list of keys")
        chosen[action] = ",".join(_normal(action, one, lines) for one in given)
    table = tuple(
        replace(key, keys=chosen[key.id], shown=shown_key(chosen[key.id]))
        if key.id in chosen
        else key
        for key in KEYS
    )
    _check_conflicts(table, chosen, lines)
    return table


def _normal(action: str, text: str, lines: _Lines) -> str:
    """A key as Textual names it: / is slash."""
    if len(text) == 1 and text.isprintable() and text != " ":
        return next(iter(Binding.make_bindings([(text, action)]))).key
    bare = text
    while bare.startswith(MODIFIERS):
        bare = bare.partition("+")[2]
    if bare == text and text not in NAMED:
        raise lines.error(action, f"{text!r} is no key; write one like p, f5, ctrl+k or slash")
    if bare not in NAMED and len(bare) != 1:
        raise lines.error(action, f"{text!r} is no key; {bare!r} is not known")
    if text in MOVING or text == "escape":
        raise lines.error(action, f"{text!r} moves the cursor or closes pages, on every page")
    return text


def _check_conflicts(table: tuple[Key, ...], chosen: dict[str, str], lines: _Lines) -> None:
    taken: dict[tuple[str, str], Key] = {}
    # Those that the file names come last, so that the message names a line of it.
    for key in sorted(table, key=lambda key: key.id in chosen):
        for page in ("", "settings") if key.id in EVERYWHERE else (key.page,):
            for one in key.keys.split(","):
                other = taken.setdefault((page, one), key)
                if other.id != key.id:
                    raise lines.error(
                        key.id,
                        f"{shown_key(one)!r} is the key of both {other.id} and {key.id}; "
                        "give one of them another key",
                    )


def keymap(keys: tuple[Key, ...]) -> dict[str, str]:
    """What differs from KEYS, for Textual: binding id -> comma-separated keys."""
    before = {key.id: key.keys for key in KEYS}
    return {key.id: key.keys for key in keys if key.keys != before[key.id]}


def listing(keys: tuple[Key, ...]) -> str:
    """Every action with its keys and what it does, as lines of text."""
    width = max(len(key.id) for key in keys)
    return "\n".join(f"{key.id:<{width}}  {key.keys:<18}  {key.help}" for key in keys)
