"""The errors of commands: messages and exit codes.

CommandError        1: the server refused, did not answer, or did not finish in time
└── UsageError      2: the command line is wrong; nothing was sent

`failure_of` converts the errors of `vtoken.client`.
"""

from __future__ import annotations

import re
import sys

import msgspec

from vtoken import wire
from vtoken.cli.usage import did_you_mean
from vtoken.client import (
    NotVToken,
    OutcomeUnknown,
    ProblemError,
    RefusedError,
    Server,
    TLSFailed,
    Unauthorized,
    Unreachable,
)

_WORD = re.compile(r"[\w.-]+")
_LIST = re.compile(r"(?:^one of |: )(?P<words>[\w.-]+(?:, [\w.-]+)+)$")  # of a bound


class CommandError(Exception):
    """A failed command; `hint` has the fix."""

    exit_code = 1

    def __init__(
        self, message: str, hint: str | None = None, problem: wire.Problem | None = None
    ) -> None:
        super().__init__(message)
        self.hint = hint
        # For `--json`; status 0: not from a server.
        self.problem = problem or wire.Problem(status=0, title="Failed", detail=message)

    def text(self, *, as_json: bool = False) -> str:
        """The text for standard error."""
        if as_json:
            return msgspec.json.encode(self.problem).decode()
        return "\n  ".join([f"vtoken: {self}", *(self.hint or "").splitlines()])


class UsageError(CommandError):
    """The command line is wrong; nothing was sent."""

    exit_code = 2


def warn_ignored_token(server: Server) -> None:
    """Tell that a server has no tokens, so that a wrong one would do as well."""
    source = server.token_source or "the client"
    print(
        f"vtoken: {server.url} has no tokens; it did not check the one of {source}",
        file=sys.stderr,
        flush=True,
    )


def failure_of(error: ProblemError | RefusedError) -> CommandError:
    """The command-line error for a failed call."""
    if isinstance(error, RefusedError):
        return UsageError(error.detail, error.bound and f"expected: {error.bound}")
    problem = error.problem
    hint: str | None
    if isinstance(error, OutcomeUnknown | TLSFailed | Unauthorized):  # they name the remedy
        return CommandError(problem.detail, None, problem)
    if isinstance(error, Unreachable):
        hint = "start a server with: vtoken serve MODEL\nor name another with --url or VTOKEN_URL"
        return CommandError(problem.detail, hint, problem)
    if isinstance(error, NotVToken):
        hint = "start the server with: vtoken serve MODEL" if problem.status == 404 else None
        return CommandError(problem.detail, hint, problem)
    if not problem.status:
        return CommandError(problem.detail, None, problem)
    summary = f"{problem.detail} ({problem.status} {problem.title})"
    return CommandError(summary, "\n".join(_details(problem)), problem)


def names_no_engine(problem: wire.Problem) -> bool:
    """Whether a call was refused because the server has several engines and it named none."""
    return (problem.status, problem.field, problem.value) == (422, "engine", None)


def _details(problem: wire.Problem) -> list[str]:
    """Field, value and bound of a refusal, one line each, unless its detail says them; and a
    suggestion.
    """
    lines = []
    if f"{problem.field} = {problem.value!r}" not in problem.detail:
        lines = [f"field: {problem.field}"] if problem.field else []
        if problem.value is not None:
            lines.append(f"value: {msgspec.json.encode(problem.value).decode()}")
    if problem.bound and problem.bound not in problem.detail:
        lines.append(f"bound: {problem.bound}")
    if names_no_engine(problem):
        return [*lines, "name one with --engine N; see: vtoken engines"]
    named = _LIST.search(problem.bound or "")
    known = _WORD.findall(named["words"]) if named is not None else []
    for word in (problem.value, (problem.field or "").rpartition(".")[2]):
        if isinstance(word, str) and word not in known and (meant := did_you_mean(word, known)):
            return [*lines, meant]
    return lines
