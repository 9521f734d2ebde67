"""Fleet files: the servers that are watched and changed together, one a line.

    # production
    http://10.0.0.7:8000  name=gpu7  token-file=gpu7.token
    http://10.0.0.8:8000  name=gpu8

Empty lines and lines that begin with # are skipped. A token is in a file of its own, whose path is
relative to the fleet file.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from vtoken.base.errors import RefusedError
from vtoken.client.server import Server

MAX_SERVERS = 256
OPTIONS = ("name", "token-file")
EXPECTED = "URL [name=NAME] [token-file=FILE]"


def read_fleet(
    path: str | Path,
    *,
    token_file: str | Path | None = None,
    cafile: str | Path | None = None,
    engine: int | None = None,
) -> list[Server]:
    """The servers of a fleet file. Raises RefusedError with file, line and value.

    A server without `token-file` gets the token in `token_file`, else VTOKEN_TOKEN, as for one
    server; so does every server `cafile`. `engine`: the rank to address on each of them.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RefusedError(
            f"cannot read the fleet file: {error}",
            field="fleet",
            value=str(path),
            bound=f"a text file with {EXPECTED} on each line",
        ) from error
    servers: list[Server] = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if text and not text.startswith("#"):
            try:
                url, own = _server(text, path.parent)
                options = {"token_file": token_file, "cafile": cafile, "engine": engine} | own
                servers.append(Server.from_environment(url, **options))
                check_distinct(servers)
            except (RefusedError, ValueError) as error:
                bound = getattr(error, "bound", None) or EXPECTED
                _refuse(f"{path}, line {number}: {error}", bound)
    if not servers:
        _refuse(f"{path} names no server", EXPECTED)
    return servers


def check_distinct(servers: Iterable[Server]) -> None:
    """Raises RefusedError if two servers have one address or one name, or if there are too many."""
    seen: set[str] = set()
    for number, server in enumerate(servers, 1):
        for text in (server.url, server.label):
            if text in seen:
                _refuse(f"{text} is named twice", "every server once, each with its own name")
            seen.add(text)
        if number > MAX_SERVERS:
            _refuse("too many servers", f"at most {MAX_SERVERS}")


def _server(text: str, folder: Path) -> tuple[str, dict[str, Any]]:
    """The address in a line, and its own options of `Server.from_environment`."""
    url, *rest = shlex.split(text)
    options: dict[str, str] = {}
    for word in rest:
        key, equals, value = word.partition("=")
        if not equals or key not in OPTIONS or key in options or not value:
            _refuse(f"{word!r} is not an option, or is repeated", EXPECTED)
        options[key] = value
    own: dict[str, Any] = {"name": options.get("name", "")}
    if "token-file" in options:
        own["token_file"] = folder / os.path.expanduser(options["token-file"])
    return url, own


def _refuse(detail: str, bound: str) -> NoReturn:
    raise RefusedError(detail, field="fleet", bound=bound)
