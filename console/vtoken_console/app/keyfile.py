"""User-defined keys: read from a file, validated, merged into the table of keys.

The file is `vtoken/console.toml` in `$XDG_CONFIG_HOME` (or `~/.config`):

    [keys]
    pause = "f5"
    compact = ["c", "f6"]

`vtoken console --keys` prints every action with its keys. Any error raises a KeyFileError with
file, line and value; the file is then ignored as a whole.
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

from vtoken_console.frame.keys import KEYS, Key, pages, shown_key

MODIFIERS = ("ctrl+", "shift+", "alt+")
NAMED = {key.value for key in Keys}
NAVIGATION = frozenset(
    ("up", "down", "left", "right", "pageup", "pagedown", "home", "end", "tab", "shift+tab")
)


class KeyFileError(ValueError):
    """The key file is invalid; the message names file, line and value."""


def default_path(environ: Mapping[str, str] = os.environ) -> Path:
    """The path of the key file, whether or not it exists."""
    base = environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(base).expanduser() / "vtoken" / "console.toml"


def load(path: Path) -> tuple[Key, ...]:
    """The table of keys with the keys of the file at `path`; KEYS if there is no file."""
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
    except RecursionError:
        raise KeyFileError(f"{path}: it nests too deep") from None
    return remapped(document, _Lines(path, text))


class _Lines:
    """Finds the line of a name in the file, for error messages."""

    def __init__(self, path: Path, text: str) -> None:
        self._path = path
        self._lines = text.splitlines()

    def error(self, name: str, text: str) -> KeyFileError:
        pattern = re.compile(rf"^\s*\[?\s*[\"']?{re.escape(name)}\b")
        found = (n for n, line in enumerate(self._lines, 1) if pattern.search(line))
        line = next(found, None)
        where = f"{self._path}, line {line}" if line is not None else str(self._path)
        return KeyFileError(f"{where}: {text}")


def remapped(document: dict[str, Any], lines: _Lines) -> tuple[Key, ...]:
    """KEYS with the document's keys; raises KeyFileError."""
    for section in document:
        if section != "keys":
            raise lines.error(section, f"unknown section {section!r}; known: [keys]")
    mapping = document.get("keys", {})
    if not isinstance(mapping, dict):
        raise lines.error("keys", "keys is not a section; write [keys]")
    known = {key.id: key for key in KEYS}
    chosen: dict[str, str] = {}
    for action, value in mapping.items():
        if action not in known:
            raise lines.error(
                action, f"unknown action {action!r}; known: {', '.join(sorted(known))}"
            )
        keys = value if isinstance(value, list) else [value]
        if not keys or not all(isinstance(key, str) and key for key in keys):
            raise lines.error(action, f"{action} = {value!r} is not a key or a list of keys")
        chosen[action] = ",".join(_normalize(action, key, lines) for key in keys)
    table = tuple(replace(key, keys=chosen[key.id]) if key.id in chosen else key for key in KEYS)
    _check_conflicts(table, chosen, lines)
    return table


def _normalize(action: str, text: str, lines: _Lines) -> str:
    """A key's Textual name: / is slash."""
    if len(text) == 1 and text.isprintable() and text != " ":
        return next(iter(Binding.make_bindings([(text, action)]))).key
    bare = text
    while bare.startswith(MODIFIERS):
        bare = bare.partition("+")[2]
    if bare == text and text not in NAMED:
        raise lines.error(action, f"{text!r} is not a key; examples: p, f5, ctrl+k, slash")
    if bare not in NAMED and len(bare) != 1:
        raise lines.error(action, f"{text!r} is not a key; {bare!r} is unknown")
    if text in NAVIGATION or text == "escape":
        raise lines.error(action, f"{text!r} is reserved: it moves the cursor or closes pages")
    return text


def _check_conflicts(table: tuple[Key, ...], chosen: dict[str, str], lines: _Lines) -> None:
    taken: dict[tuple[str, str], Key] = {}
    # Actions in the file come last, so that the error names a line of the file.
    for key in sorted(table, key=lambda key: key.id in chosen):
        for page in pages(key):
            for name in key.keys.split(","):
                other = taken.setdefault((page, name), key)
                if other.id != key.id:
                    raise lines.error(
                        key.id,
                        f"{shown_key(name)!r} is bound to both {other.id} and {key.id}; "
                        "give one of them another key",
                    )


def keymap(keys: tuple[Key, ...]) -> dict[str, str]:
    """Textual's keymap of the bindings that differ from KEYS: id -> comma-separated keys."""
    before = {key.id: key.keys for key in KEYS}
    return {key.id: key.keys for key in keys if key.keys != before[key.id]}


def listing(keys: tuple[Key, ...]) -> str:
    """A text line for every action: id, keys, help."""
    width = max(len(key.id) for key in keys)
    return "\n".join(f"{key.id:<{width}}  {key.keys:<18}  {key.help}" for key in keys)
