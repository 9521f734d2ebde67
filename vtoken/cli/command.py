"""How a command runs: the module of its function is imported when the command does.

So `--help` loads no more than click and the declarations of `commands`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import click

from vtoken.cli.errors import CommandError, engine_modules
from vtoken.cli.options import ENGINE, JSON, SERVER


class Command(click.Command):
    """A command that is a `function` of this package: `see.status` is `status` in `see.py`.

    The function gets the values of `params` by name, and returns the exit code; None is 0.
    """

    def __init__(
        self,
        name: str,
        function: str,
        summary: str,
        *params: click.Parameter,
        examples: Sequence[str] = (),
    ) -> None:
        epilog = "\n  ".join(["\b\nexamples:", *examples]) if examples else None
        super().__init__(name, params=[*params], help=summary, short_help=summary, epilog=epilog)
        self._function = function

    def load(self) -> Callable[..., int | None]:
        module, _, name = self._function.partition(".")
        function: Callable[..., int | None] = getattr(import_module(f"vtoken.cli.{module}"), name)
        return function

    def invoke(self, ctx: click.Context) -> int:
        return self.load()(**ctx.params) or 0


class ServerCommand(Command):
    """A command that asks servers: its function gets a `Remote` in front of the values."""

    def __init__(
        self,
        *declared: Any,
        common: Sequence[click.Option] = (ENGINE, *SERVER, JSON),
        examples: Sequence[str] = (),
    ) -> None:
        super().__init__(*declared, *common, examples=examples)

    def invoke(self, ctx: click.Context) -> int:
        from vtoken.cli.remote import answered

        return answered(self.load(), **ctx.params)


class Program(click.Command):
    """A module of another package whose `main` has a parser of its own: it gets all arguments."""

    def __init__(self, name: str, module: str, summary: str) -> None:
        super().__init__(name, help=summary, short_help=summary)
        self._module = module

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.args = args
        return args

    def invoke(self, ctx: click.Context) -> int:
        from importlib.util import find_spec

        if self.name == "bench" and find_spec(self._module) is None:
            raise CommandError(
                "the benchmarks are not part of the installed package",
                "run them in a checkout of the repository: make setup, then .venv/bin/vtoken bench",
            )
        with engine_modules():
            if find_spec("vllm") is None and not {"-h", "--help"} & set(ctx.args):
                raise ModuleNotFoundError(name="vllm")
            code: int | None = import_module(self._module).main(ctx.args)
        return code or 0
