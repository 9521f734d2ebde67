"""The command line `vtoken`: parses, dispatches, maps every failure to a message and an exit code.

Heavy imports are deferred: `--help` and `--version` do not import httpx, numpy, textual or vLLM.
Exit codes: 0 done, 1 refused or failed, 2 usage, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from vtoken.cli.output import OutputError, writing_output

# Commands with their own parser, which gets all arguments after the name.
OWN_PARSERS = {
    "serve": "vtoken.vllm.serve",
    "calibrate": "vtoken.cli.calibrate",
    "demo": "vtoken.demo.run",
    "bench": "vtoken_bench",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if sys.stdout is None:  # the process was started with a closed stdout
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - open until the process ends
    try:
        try:
            if arguments and arguments[0] in OWN_PARSERS:
                return _pass_through(arguments[0], arguments[1:])
            return _run(arguments)
        finally:
            with writing_output():
                sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, `head` for instance, closed the pipe
        _discard_output()
        return 0
    except OutputError as error:
        _discard_output()
        print(f"vtoken: {error}", file=sys.stderr, flush=True)
        return 1


def _discard_output() -> None:
    """Write what is left in the buffer of standard output nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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
    from importlib.util import find_spec

    if command == "bench" and find_spec(OWN_PARSERS[command]) is None:
        return _no_benchmarks()
    asks_for_help = bool({"-h", "--help"} & set(arguments))
    if find_spec("vllm") is None and not asks_for_help:
        return _missing_module(command, "vllm")
    try:
        code: int | None = import_module(OWN_PARSERS[command]).main(arguments)
    except ModuleNotFoundError as error:
        if find_spec("vllm") is not None:
            raise  # the full package is installed, so this is a bug: show the traceback
        return _missing_module(command, error.name)
    return code or 0


def _no_benchmarks() -> int:
    print(
        "vtoken bench: the benchmarks are not part of the installed package\n"
        "  run them in a checkout of the repository: make setup, then .venv/bin/vtoken bench",
        file=sys.stderr,
    )
    return 1


def _missing_module(command: str, module: str | None) -> int:
    print(
        f"vtoken {command}: the module {module!r} is not installed\n"
        "  install the engine with: make setup, or pip install '.[cpu]' or '.[cuda]' in a checkout",
        file=sys.stderr,
    )
    return 1
