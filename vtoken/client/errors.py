"""The errors of calls and streams; scripts, the CLI and the console share them.

VTokenError
├── RefusedError        an argument was refused by the client: nothing was sent
└── ProblemError        `problem` is the problem document
    ├── Unauthorized    the server needs a token, or another one (401)
    ├── Unreachable     no server answers, or not in time
    │   ├── TLSFailed       the certificate is not trusted, or one side does not speak TLS
    │   └── OutcomeUnknown  a change was sent, and no answer tells whether it was applied
    ├── NotApplied      a change was sent and looked up: it was not applied
    ├── NotVToken       the server is not vToken, or has another schema version
    └── StreamClosed    the stream ended, with the reason
        └── StreamGap   a message is missing, so the accumulated state is invalid

A plain ProblemError is the server's own problem document: `problem.status` is its HTTP status. In
the subclasses it is 0 if no server responded.
"""

from __future__ import annotations

from typing import Self

from vtoken import wire
from vtoken.base.errors import VTokenError


class ProblemError(VTokenError):
    """`problem` names field, value and bound, if there are any; nothing was changed, unless it is
    an OutcomeUnknown.
    """

    title = "Refused"

    def __init__(self, problem: wire.Problem) -> None:
        super().__init__(problem.detail)
        self.problem = problem

    @classmethod
    def of(cls, detail: str, *, status: int = 0, change: str | None = None) -> Self:
        """An error of this kind without a problem document from a server."""
        return cls(wire.Problem(status=status, title=cls.title, detail=detail, change=change))


class Unauthorized(ProblemError):  # noqa: N818 - named for what happened
    title = "Unauthorized"


class Unreachable(ProblemError):  # noqa: N818
    title = "No answer from the server"


class TLSFailed(Unreachable):
    title = "No connection over TLS"


class OutcomeUnknown(Unreachable):
    """`change_id`: for `wait_change`, which tells whether the change was applied."""

    title = "Outcome unknown"

    @property
    def change_id(self) -> str:
        return self.problem.change or ""


class NotApplied(ProblemError):  # noqa: N818
    title = "Not applied"


class NotVToken(ProblemError):  # noqa: N818
    title = "Not a vToken server"


class StreamClosed(ProblemError):  # noqa: N818
    title = "The stream ended"


class StreamGap(StreamClosed):
    title = "The stream has a gap"
