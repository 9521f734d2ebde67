"""The errors of commands: messages and exit codes.

CommandError        1: the server refused, did not answer, or did not finish in time
└── UsageError      2: the command line is wrong; nothing was sent

click raises its own usage errors for what it parses. `failure_of` converts the errors of
`vtoken.client`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from vtoken import wire
    from vtoken.client import ProblemError, RefusedError

BAD_INPUT = (400, 422)  # the statuses of a call that can be put right
_WORD = re.compile(r"[\w.-]+")
_LIST = re.compile(r"(?:^one of |: )(?P<words>[\w.-]+(?:, [\w.-]+)+)$")  # of a bound


class CommandError(click.ClickException):
    """A failed command; `hint` has the fix, `problem` what the server said."""

    def __init__(
        self, message: str, hint: str | None = None, problem: wire.Problem | None = None
    ) -> None:
        super().__init__(message)
        self.hint = hint or ""
        self.problem = problem
        self.as_json = False

    def __str__(self) -> str:
        return "\n  ".join([self.message, *self.hint.splitlines()])

    def show(self, file: IO[Any] | None = None) -> None:
        """Print it: with `as_json` as a problem document, of status 0 if no server made it."""
        if not self.as_json:
            click.echo(f"vtoken: {self}", file, err=True)
            return
        import msgspec

        from vtoken import wire

        problem = self.problem or wire.Problem(status=0, title="Failed", detail=self.message)
        click.echo(msgspec.json.encode(problem).decode(), file, err=True)


class UsageError(CommandError):
    """The command line is wrong; nothing was sent."""

    exit_code = 2


@contextmanager
def engine_modules() -> Iterator[None]:
    """Tell how to install the engine, where a module that it brings is missing."""
    from importlib.util import find_spec

    try:
        yield
    except ModuleNotFoundError as error:
        if find_spec("vllm") is not None:
            raise  # the full package is installed, so this is a bug: show the traceback
        raise CommandError(
            f"the module {error.name!r} is not installed",
            "install the engine with: make setup, or pip install '.[cpu]' or '.[cuda]' in a "
            "checkout",
        ) from error


def failure_of(error: ProblemError | RefusedError, *, verbose: bool = False) -> CommandError:
    """The command-line error for a failed call; `verbose`: with all parts of a refusal."""
    from vtoken.client import (
        NotVToken,
        OutcomeUnknown,
        RefusedError,
        TLSFailed,
        Unauthorized,
        Unreachable,
    )

    if isinstance(error, RefusedError):
        return UsageError(error.detail, error.bound and f"expected: {error.bound}")
    problem, hint = error.problem, ""
    if isinstance(error, OutcomeUnknown | TLSFailed | Unauthorized):
        pass  # they name the remedy
    elif isinstance(error, Unreachable):
        hint = "start a server with: vtoken serve MODEL\nor name another with --url or VTOKEN_URL"
    elif isinstance(error, NotVToken):
        hint = "start the server with: vtoken serve MODEL" if problem.status == 404 else ""
    elif problem.status:
        return CommandError(*_refusal(problem, verbose), problem)
    return CommandError(problem.detail, hint, problem)


def names_no_engine(problem: wire.Problem) -> bool:
    """Whether a call was refused because the server has several engines and it named none."""
    return (problem.status, problem.field, problem.value) == (422, "engine", None)


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """`did you mean X?`, or nothing."""
    from difflib import get_close_matches

    close = get_close_matches(word, known, n=1)
    return f"did you mean {close[0]}?" if close else ""


def _refusal(problem: wire.Problem, verbose: bool) -> tuple[str, str]:
    """What the server says, and the line that helps: a suggestion, else what it expects.

    `verbose`: also its status, field, value and bound.
    """
    import msgspec

    detail, bound, hint = problem.detail, problem.bound or "", ""
    named = _LIST.search(bound)
    words = "" if named is None else named["words"]
    if names_no_engine(problem):
        hint = "name one with --engine N; see: vtoken engines"
    elif meant := _suggestion(problem, _WORD.findall(words)):
        hint, detail = meant, detail.replace(f": {words}", "")
    elif problem.status in BAD_INPUT and bound and bound not in detail:
        hint = f"expected: {bound}"
    if not verbose:
        return detail, hint
    value = "" if problem.value is None else msgspec.json.encode(problem.value).decode()
    parts = {"field": problem.field, "value": value, "bound": bound}
    lines = [f"{name}: {text}" for name, text in parts.items() if text]
    return f"{problem.detail} ({problem.status} {problem.title})", "\n".join([*lines, hint])


def _suggestion(problem: wire.Problem, known: Sequence[str]) -> str:
    for word in (problem.value, (problem.field or "").rpartition(".")[2]):
        if isinstance(word, str) and word not in known and (meant := did_you_mean(word, known)):
            return meant
    return ""
