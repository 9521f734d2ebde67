"""How commands fail: what the user sees, and the exit code.

CommandError
├── UsageError      2: the command line is wrong
└── ProblemError    1: the server refused; shows the problem document
"""

from __future__ import annotations

import msgspec

from vtoken import wire


class CommandError(Exception):
    """A command that did not work; `hint` says what to do."""

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint

    def problem(self) -> wire.Problem:
        """The failure as a document, for `--json`; status 0: no server has said it."""
        return wire.Problem(status=0, title="Failed", detail=str(self))

    def text(self, *, as_json: bool = False) -> str:
        """What goes to standard error."""
        if as_json:
            return msgspec.json.encode(self.problem()).decode()
        return "\n  ".join([f"vtoken: {self}", *(self.hint or "").splitlines()])


class UsageError(CommandError):
    """The command line is wrong; nothing was sent."""

    exit_code = 2


class ProblemError(CommandError):
    """The server's problem document."""

    def __init__(self, problem: wire.Problem) -> None:
        lines = [f"field: {problem.field}"] if problem.field else []
        if problem.value is not None:
            lines.append(f"value: {msgspec.json.encode(problem.value).decode()}")
        if problem.bound:
            lines.append(f"bound: {problem.bound}")
        super().__init__(f"{problem.detail} ({problem.status} {problem.title})", "\n".join(lines))
        self._problem = problem

    def problem(self) -> wire.Problem:
        return self._problem
