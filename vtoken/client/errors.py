"""How a call or a stream fails: one tree, which scripts, the CLI and the console share.

VTokenError
├── RefusedError        an argument that was refused here: nothing was sent
└── ProblemError        `problem` says what went wrong, as a document
    ├── Unauthorized    the server wants a token, or another one (401)
    ├── Unreachable     nothing answers there, or not in time
    ├── NotVToken       something answers, but it is not vToken, or not of this schema
    └── StreamClosed    the stream has ended, and why
        └── StreamGap   a message is missing: what is held is not the server's state any more

A plain ProblemError is the server's own problem document: `problem.status` is its HTTP status. In
the others it is 0 where no server has said anything.
"""

from __future__ import annotations

from typing import Self

from vtoken import wire
from vtoken.errors import RefusedError, VTokenError

__all__ = [
    "NotVToken",
    "ProblemError",
    "RefusedError",
    "StreamClosed",
    "StreamGap",
    "Unauthorized",
    "Unreachable",
    "VTokenError",
]


class ProblemError(VTokenError):
    """`problem` names field, value and bound, where there are any; nothing was changed."""

    title = "Refused"

    def __init__(self, problem: wire.Problem) -> None:
        super().__init__(problem.detail)
        self.problem = problem

    @classmethod
    def of(cls, detail: str, *, status: int = 0) -> Self:
        """An error of this kind that no problem document came with."""
        return cls(wire.Problem(status=status, title=cls.title, detail=detail))


class Unauthorized(ProblemError):  # noqa: N818 - named for what happened
    title = "Unauthorized"


class Unreachable(ProblemError):  # noqa: N818
    title = "No answer from the server"


class NotVToken(ProblemError):  # noqa: N818
    title = "Not a vToken server"


class StreamClosed(ProblemError):  # noqa: N818
    title = "The stream has ended"


class StreamGap(StreamClosed):
    title = "The stream has a gap"
