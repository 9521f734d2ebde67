"""Routes of the path as the client wrote it, so that an id may contain a slash, quoted as `%2F`."""

from __future__ import annotations

from urllib.parse import quote, unquote

from fastapi.routing import APIRoute
from starlette.routing import Match
from starlette.types import Scope


class RawRoute(APIRoute):
    """Matches the quoted path and unquotes its parameters."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, matched = super().matches({**scope, "path": _raw_path(scope)})
        if match != Match.NONE:
            params = matched["path_params"]
            matched["path_params"] = {name: unquote(value) for name, value in params.items()}
        return match, matched


def _raw_path(scope: Scope) -> str:
    """The scope's path, quoted below `root_path`."""
    root: str = scope.get("root_path", "")
    path: str = scope["path"].removeprefix(root)
    raw: str = (scope.get("raw_path") or b"").decode("latin-1")
    at = raw.find("/")
    while at >= 0 and unquote(raw[at:]) != path:
        at = raw.find("/", at + 1)
    return root + (raw[at:] if at >= 0 else quote(path))
