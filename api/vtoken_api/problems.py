"""Problem documents (RFC 9457): the one shape of every error under `/vtoken/v1`.

Knows nothing of the engine or of routes. A `ProblemError` carries the `wire.Problem` that the
client gets; raising it before a command is sent means that nothing was changed.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import msgspec
from starlette.responses import Response

from vtoken import wire

PROBLEM_JSON = "application/problem+json"


class ProblemError(Exception):
    """An error whose problem document is the answer; `headers` go out with it."""

    def __init__(self, problem: wire.Problem, headers: dict[str, str] | None = None) -> None:
        super().__init__(problem.detail)
        self.problem = problem
        self.headers = headers


def refuse(
    status: int,
    detail: str,
    *,
    title: str | None = None,
    field: str | None = None,
    value: Any = None,
    bound: str | None = None,
    headers: dict[str, str] | None = None,
) -> ProblemError:
    """The error to raise; `title` defaults to the phrase of the HTTP status."""
    problem = wire.Problem(
        status=status,
        title=title or HTTPStatus(status).phrase,
        detail=detail,
        field=field,
        value=value,
        bound=bound,
    )
    return ProblemError(problem, headers)


def problem_response(error: ProblemError) -> Response:
    """The HTTP answer of a problem."""
    return Response(
        msgspec.json.encode(error.problem),
        status_code=error.problem.status,
        media_type=PROBLEM_JSON,
        headers=error.headers,
    )
