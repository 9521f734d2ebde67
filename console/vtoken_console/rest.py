"""Calls to the server's REST interface, each answering a wire document or raising ProblemError.

Knows no screen and no stream. Every failure, a refusing server as well as an unreachable one,
becomes one ProblemError with a wire.Problem that can be shown as it is.
"""

from __future__ import annotations

from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import httpx
import msgspec

from vtoken import wire

PREFIX = "/vtoken/v1"
TIMEOUT_S = 10.0

T = TypeVar("T")


class ProblemError(Exception):
    """The server (or the way to it) refused; `problem` says what, field, value and bound."""

    def __init__(self, problem: wire.Problem) -> None:
        super().__init__(problem.detail)
        self.problem = problem


def is_loopback(url: str) -> bool:
    """Whether `url` names this machine, so that no proxy applies."""
    return urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1")


class Rest:
    """One HTTP client to one server. `token` goes into the Authorization header only."""

    def __init__(self, url: str, token: str | None) -> None:
        headers = {"Accept": "application/json"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        self._http = httpx.AsyncClient(
            base_url=url.rstrip("/"),
            headers=headers,
            timeout=TIMEOUT_S,
            trust_env=not is_loopback(url),
        )

    async def aclose(self) -> None:
        await self._http.aclose()

    async def _call(
        self,
        kind: type[T],
        method: str,
        path: str,
        *,
        body: Any = None,
        params: dict[str, str] | None = None,
        headers: dict[str, str] | None = None,
    ) -> T:
        content = None if body is None else msgspec.json.encode(body)
        sent = dict(headers or {})
        if content is not None:
            sent.setdefault("Content-Type", "application/json")
        try:
            response = await self._http.request(
                method, PREFIX + path, content=content, params=params, headers=sent
            )
        except httpx.HTTPError as error:
            raise ProblemError(
                wire.Problem(
                    status=0,
                    title="no answer from the server",
                    detail=f"{method} {PREFIX}{path}: {error or type(error).__name__}",
                )
            ) from None
        if response.status_code >= 400:
            raise ProblemError(_problem(response))
        try:
            return msgspec.json.decode(response.content, type=kind)
        except msgspec.MsgspecError as error:
            raise ProblemError(
                wire.Problem(
                    status=response.status_code,
                    title="the answer is not what the schema says",
                    detail=f"{method} {PREFIX}{path}: {error}",
                )
            ) from None

    async def patch_config(
        self, patch: dict[str, Any], *, revision: int | None = None, validate_only: bool = False
    ) -> wire.PatchResult:
        """Merge-patches the configuration; `revision` makes it refuse (412) when stale."""
        headers = {"Content-Type": "application/merge-patch+json"}
        if revision is not None:
            headers["If-Match"] = f'"{revision}"'
        params = {"validate_only": "true"} if validate_only else None
        return await self._call(
            wire.PatchResult, "PATCH", "/config", body=patch, params=params, headers=headers
        )

    async def undo(self) -> wire.PatchResult:
        """A new revision that restores the one before."""
        return await self._call(wire.PatchResult, "POST", "/undo")

    async def compact(
        self, *, request_id: str | None = None, dry_run: bool = False
    ) -> wire.Operation:
        """Starts one compaction round, of one request or of all."""
        body: dict[str, Any] = {"dry_run": dry_run}
        if request_id is not None:
            body["request_id"] = request_id
        return await self._call(wire.Operation, "POST", "/compactions", body=body)

    async def operation(self, operation_id: str) -> wire.Operation:
        return await self._call(
            wire.Operation, "GET", f"/operations/{quote(operation_id, safe='')}"
        )

    async def block(self, block_id: int) -> wire.BlockDetail:
        return await self._call(wire.BlockDetail, "GET", f"/blocks/{block_id}")

    async def request(self, request_id: str) -> wire.RequestDetail:
        return await self._call(
            wire.RequestDetail, "GET", f"/requests/{quote(request_id, safe='')}"
        )

    async def tokens(self, request_id: str, start: int, limit: int) -> wire.TokenPage:
        return await self._call(
            wire.TokenPage,
            "GET",
            f"/requests/{quote(request_id, safe='')}/tokens",
            params={"start": str(start), "limit": str(limit)},
        )

    async def events(self, after: int, limit: int) -> wire.EventPage:
        return await self._call(
            wire.EventPage, "GET", "/events", params={"after": str(after), "limit": str(limit)}
        )


def _problem(response: httpx.Response) -> wire.Problem:
    try:
        return msgspec.json.decode(response.content, type=wire.Problem)
    except msgspec.MsgspecError:
        text = response.text.strip().splitlines()
        return wire.Problem(
            status=response.status_code,
            title=response.reason_phrase or "error",
            detail=text[0][:300] if text else "the server gave no reason",
        )
