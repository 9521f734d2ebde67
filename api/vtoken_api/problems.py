"""Problem documents (RFC 9457): the format of every error under `/vtoken/v1`.

A `ProblemError` carries the `wire.Problem` that the client receives.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import msgspec
from starlette.responses import Response

from vtoken import wire
from vtoken.base.errors import MAX_DETAIL, shown

PROBLEM_JSON = "application/problem+json"


class ProblemError(Exception):
    """An error that is returned as a problem document, with `headers`."""

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
    """Make the error to raise; `title` defaults to the phrase of the HTTP status."""
    problem = wire.Problem(
        status=status,
        title=title or HTTPStatus(status).phrase,
        detail=shown(detail, MAX_DETAIL),
        field=shown(field),
        value=shown(value),
        bound=bound,
    )
    return ProblemError(problem, headers)


def fault() -> ProblemError:
    """500: a bug of this server."""
    return refuse(500, "internal server error; see the server's log")


def problem_response(error: ProblemError) -> Response:
    """The HTTP response for a problem."""
    return Response(
        msgspec.json.encode(error.problem),
        status_code=error.problem.status,
        media_type=PROBLEM_JSON,
        headers=error.headers,
    )
