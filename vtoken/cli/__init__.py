"""The command line `vtoken`: parses, dispatches, maps every failure to a message and an exit code.

Heavy imports are deferred: `--help` and `--version` do not import httpx, numpy, textual or vLLM.
Exit codes: 0 done, 1 refused or failed, 2 usage, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    import click

    from vtoken.cli.printing import OutputError, writing_output

    arguments = list(sys.argv[1:] if argv is None else argv)
    if sys.stdout is None:  # the process was started with a closed stdout
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - open until the process ends
    try:
        try:
            return _run(arguments)
        finally:
            with writing_output():
                sys.stdout.flush()
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, `head` for instance, closed the pipe
        _discard_output()
        return 0
    except OutputError as error:
        _discard_output()
        print(f"vtoken: {error}", file=sys.stderr, flush=True)
        return 1


def _run(arguments: list[str]) -> int:
    from click.exceptions import Exit

    from vtoken.cli.commands import cli

    if "_VTOKEN_COMPLETE" in os.environ:
        from vtoken.cli.completion import answer_shell

        return answer_shell(cli)
    try:
        with cli.make_context("vtoken", arguments) as context:
            code: int | None = cli.invoke(context)
            return code or 0
    except Exit as end:  # `--help`, for instance
        return end.exit_code


def _discard_output() -> None:
    """Write what is left in the buffer of standard output nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
