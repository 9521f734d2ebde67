"""Completion of commands, options, fields, policies and requests in bash, zsh and fish.

`vtoken completion SHELL` prints click's script of that shell, which runs this program on every TAB.
Policies and requests are queried from the server with a short timeout; if it does not answer, there
are no candidates.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import click
from click import shell_completion

from vtoken.cli.printing import Printer

if TYPE_CHECKING:
    from vtoken import wire
    from vtoken.client import Client

TIMEOUT_S = 0.5  # the user is waiting for the TAB key
COMPLETE = "_VTOKEN_COMPLETE"  # set by the scripts of the shells


def completion(shell: str) -> None:
    """Print the completion script of a shell."""
    cli = click.get_current_context().find_root().command
    made = shell_completion.get_completion_class(shell)
    assert made is not None
    Printer().line(made(cli, {}, "vtoken", COMPLETE).source())


def answer_shell(cli: click.Command) -> int:
    """Complete once, as the script of a shell asks in the environment; returns the exit code."""
    return shell_completion.shell_complete(cli, {}, "vtoken", COMPLETE, os.environ[COMPLETE])


@shell_completion.add_completion_class
class BashComplete(shell_completion.BashComplete):
    """For bash, `=` and `:` end words: it completes what is behind the last of them. It adds no
    space behind `KEY=`.
    """

    source_template = shell_completion.BashComplete.source_template.replace(
        'COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD=$COMP_CWORD',
        'COMP_WORDS="${COMP_LINE:0:COMP_POINT}"',
    ).replace(
        "COMPREPLY+=($value)", "COMPREPLY+=($value); [[ $value == *= ]] && compopt -o nospace"
    )

    def get_completion_args(self) -> tuple[list[str], str]:
        line = os.environ["COMP_WORDS"]
        words = shell_completion.split_arg_string(line)
        self._begun = "" if line[-1:].isspace() else words.pop()
        return words[1:], self._begun

    def format_completion(self, item: shell_completion.CompletionItem[str]) -> str:
        known = max(self._begun.rfind(end) for end in "=:") + 1
        return f"{item.type},{item.value[known:]}"


@shell_completion.add_completion_class
class ZshComplete(shell_completion.ZshComplete):
    """zsh adds no space behind what is completed, which may be `KEY=`."""

    source_template = shell_completion.ZshComplete.source_template.replace(
        "compadd -U", "compadd -S '' -U"
    )


# ---------------------------------------------------------------- what is offered


def requests(context: click.Context, _: str) -> list[str]:
    """The requests of the named server."""
    from vtoken.base.request_ids import short_id
    from vtoken.cli.remote import requests_by_engine

    def ids(client: Client) -> list[str]:
        return [short_id(row.id) for rows in requests_by_engine(client).values() for row in rows]

    return _query(context, ids)


def policies(context: click.Context, _: str) -> list[str]:
    return _query(context, _policy_names)


def keys(_: click.Context, __: str) -> list[str]:
    return [*settings()]


def assignments(context: click.Context, begun: str) -> list[str]:
    """`KEY=`, or `KEY=VALUE` for each choice of the field."""
    name, equals, _text = begun.partition("=")
    if not equals:
        return [f"{name}=" for name in settings()]
    if name in ("policy.name", "shadow.name"):
        choices = _query(context, _policy_names)
    elif (bound := settings().get(name)) is not None:
        choices = bound.choices or (["true", "false"] if bound.type == "bool" else [])
    else:
        choices = []
    return [f"{name}={choice}" for choice in choices]


def settings() -> dict[str, wire.Bound]:
    """Every field that `config set` takes, nested ones dotted."""
    from vtoken import wire
    from vtoken.wire.bounds import bound_of, fields_of

    found: dict[str, wire.Bound] = {}
    for name, kind in fields_of(wire.ConfigValues).items():
        inner = {f"{name}.{part}": bound_of(of) for part, of in fields_of(kind).items()}
        found |= inner or {name: bound_of(kind)}
    return found


def _policy_names(client: Client) -> list[str]:
    return [policy.name for policy in client.policies() if policy.error is None]


def _query(context: click.Context, query: Callable[[Client], list[str]]) -> list[str]:
    """The answer of the server that the command line names; [] if there is none in time."""
    from vtoken.client import Client, Server, VTokenError

    url, token_file, cafile = map(context.params.get, ("url", "token_file", "cafile"))
    try:
        server = Server.from_environment(url, token_file=token_file, cafile=cafile)
        with Client(server, timeout_s=TIMEOUT_S) as client:
            return query(client)
    except VTokenError:
        return []
