"""The application of `/vtoken/v1` in each API process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.types import Receive, Send

from vtoken_api.auth.check import AccessCheck, deny
from vtoken_api.problems import ProblemError
from vtoken_api.processes.member import Member


class Front:
    """Answers calls, or has the owner do so.

    `member`: None while the engine is not ready, and on a server with one API process.
    """

    def __init__(self, check: AccessCheck, member: Callable[[], Member | None]) -> None:
        self._check = check
        self._member = member

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        member = self._member()
        if member is None or member.owns:
            await self._check(scope, receive, send)
            return
        try:
            self._check.refuse_url_tokens(scope)  # before the server writes its access log
            if scope["type"] == "http":
                await member.answer(scope, receive, send)
                return
            await member.admit(scope)
        except ProblemError as error:
            await deny(error, scope, receive, send)
            return
        await self._check(scope, receive, send)
