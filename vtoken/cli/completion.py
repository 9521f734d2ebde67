"""Completion of commands, flags, fields, policies and requests in bash, zsh and fish.

`vtoken completion SHELL` prints argcomplete's shell code, which runs this program on every TAB with
`_ARGCOMPLETE` in the environment. Policies and requests are queried from the server with a short
timeout; if it does not answer, there are no candidates.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import Any, get_args

import msgspec

from vtoken import wire
from vtoken.cli.parser import make_parser
from vtoken.cli.printing import print_text
from vtoken.client import Client, Server, VTokenError
from vtoken.wire.bounds import bound_of, bounds_of

TIMEOUT_S = 0.5  # the user is waiting for the TAB key


def completion(arguments: argparse.Namespace, client: Client) -> int:
    """Print the completion script of a shell."""
    from argcomplete.shell_integration import shellcode

    del client
    print_text(shellcode(["vtoken"], shell=arguments.shell))
    return 0


def answer_shell() -> None:
    """Complete once and exit the process."""
    import argcomplete

    parser = make_parser()
    _attach(parser)
    argcomplete.autocomplete(parser, always_complete_options=False)


def _attach(parser: argparse.ArgumentParser) -> None:
    """Set the completer of every argument that has a `complete` attribute, recursively."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in set(action.choices.values()):
                _attach(command)
        elif (name := getattr(action, "complete", None)) is not None:
            action.completer = COMPLETERS[name]  # type: ignore[attr-defined]


def settings() -> dict[str, wire.Bound]:
    """Every field that `config set` takes, nested ones dotted."""
    found: dict[str, wire.Bound] = {}
    for field in msgspec.structs.fields(wire.ConfigValues):
        name = field.encode_name
        if name in wire.Experiment.__struct_fields__:  # repeats `experiment`
            continue
        inner = {
            f"{name}.{part}": bound
            for kind in _structs(field.type)
            for part, bound in bounds_of(kind).items()
        }
        found |= inner or {name: bound_of(field.type)}
    return found


def _structs(kind: Any) -> list[Any]:
    if isinstance(kind, type):
        return [kind] if issubclass(kind, msgspec.Struct) else []
    return [found for part in get_args(kind) for found in _structs(part)]


def _fields(prefix: str, **_: Any) -> list[str]:
    del prefix
    return [*settings()]


def _assignments(prefix: str, parsed_args: argparse.Namespace, **_: Any) -> list[str]:
    """`KEY=`, or `KEY=VALUE` for each choice of the field."""
    name, equals, _text = prefix.partition("=")
    if not equals:
        return [f"{name}=" for name in settings()]
    if name.endswith("policy.name") or name == "shadow.name":
        return [f"{name}={policy}" for policy in _query(parsed_args, _policy_names)]
    bound = settings().get(name)
    if bound is None:
        return []
    choices = bound.choices or (["true", "false"] if bound.type == "bool" else [])
    return [f"{name}={choice}" for choice in choices]


def _policies(prefix: str, parsed_args: argparse.Namespace, **_: Any) -> list[str]:
    del prefix
    return list(_query(parsed_args, _policy_names))


def _requests(prefix: str, parsed_args: argparse.Namespace, **_: Any) -> list[str]:
    del prefix
    return list(_query(parsed_args, lambda client: [row.id for row in client.requests()]))


def _policy_names(client: Client) -> list[str]:
    return [policy.name for policy in client.policies() if policy.error is None]


def _query(parsed_args: argparse.Namespace, query: Callable[[Client], Iterable[Any]]) -> list[Any]:
    try:
        server = Server.from_environment(
            getattr(parsed_args, "url", None),
            token_file=getattr(parsed_args, "token_file", None),
            cafile=getattr(parsed_args, "cafile", None),
        )
        with Client(server, timeout_s=TIMEOUT_S) as client:
            return list(query(client))
    except VTokenError:
        return []


COMPLETERS: dict[str, Callable[..., list[str]]] = {
    "keys": _fields,
    "assignments": _assignments,
    "policies": _policies,
    "requests": _requests,
}
