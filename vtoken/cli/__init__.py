"""The command line `vtoken`: parses, dispatches, turns every failure into a message and exit code.

Imports nothing heavy: `--help` and `--version` answer before httpx, numpy, textual or vLLM are
touched. Exit codes: 0 done, 1 refused or failed, 2 usage, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

# Commands with a parser of their own: everything behind the name is theirs.
PASSED_THROUGH = {
    "serve": "vtoken.vllm.serve",
    "demo": "vtoken.demo.run",
    "bench": "vtoken.bench",
    "soak": "vtoken.soak",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            if arguments and arguments[0] in PASSED_THROUGH:
                return _pass_through(arguments[0], arguments[1:])
            return _run(arguments)
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, `head` for instance, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(arguments: list[str]) -> int:
    if "_ARGCOMPLETE" in os.environ:
        from vtoken.cli.completion import answer_shell

        answer_shell()  # ends the process
    from vtoken.cli.parser import make_parser

    parsed = make_parser().parse_args(arguments)
    from vtoken.cli.commands import run
    from vtoken.cli.errors import CommandError, failure_of
    from vtoken.client import ProblemError, RefusedError

    try:
        return run(parsed)
    except (CommandError, ProblemError, RefusedError) as error:
        failure = error if isinstance(error, CommandError) else failure_of(error)
        print(failure.text(as_json=parsed.json), file=sys.stderr, flush=True)
        return failure.exit_code


def _pass_through(command: str, arguments: list[str]) -> int:
    from importlib import import_module

    module = PASSED_THROUGH[command]
    try:
        run = import_module(module).main
    except ModuleNotFoundError as error:
        print(
            f"vtoken {command}: this installation lacks the module {error.name!r}\n"
            "  install the engine with: pip install 'vtoken[cpu]' or 'vtoken[cuda]'",
            file=sys.stderr,
        )
        return 1
    code: int | None = run(arguments)
    return code or 0
