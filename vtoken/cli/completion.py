"""Completion of commands, flags, fields, policies and requests, in bash, zsh and fish.

`vtoken completion SHELL` prints the shell's part (argcomplete's); it calls this program back on
every TAB, with `_ARGCOMPLETE` in the environment. What only a server knows is asked of it, briefly;
a server that is not there offers nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import Any, get_args

import msgspec

from vtoken import wire
from vtoken.cli.parser import make_parser
from vtoken.cli.text import say
from vtoken.client import Client, Server, VTokenError

PATIENCE_S = 0.5  # a key was pressed: somebody waits


def completion(arguments: argparse.Namespace, client: Client) -> int:
    """Print the script that makes the shell complete `vtoken`."""
    from argcomplete.shell_integration import shellcode

    del client
    say(shellcode(["vtoken"], shell=arguments.shell))
    return 0


def answer_shell() -> None:
    """Answer one TAB, and end the process."""
    import argcomplete

    parser = make_parser()
    _attach(parser)
    argcomplete.autocomplete(parser, always_complete_options=False)


def _attach(parser: argparse.ArgumentParser) -> None:
    """Give every argument that is marked with `complete` its completer, at any depth."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in set(action.choices.values()):
                _attach(command)
        elif (name := getattr(action, "complete", None)) is not None:
            action.completer = COMPLETERS[name]  # type: ignore[attr-defined]


def field_names() -> list[str]:
    """Every field that `config set` takes, dotted where there are fields in it."""
    names: list[str] = []
    for field in msgspec.structs.fields(wire.ConfigValues):
        inner = [
            f"{field.encode_name}.{part.encode_name}"
            for kind in _structs(field.type)
            for part in msgspec.structs.fields(kind)
        ]
        names += inner or [field.encode_name]
    return names


def _structs(kind: Any) -> list[Any]:
    if isinstance(kind, type):
        return [kind] if issubclass(kind, msgspec.Struct) else []
    return [found for part in get_args(kind) for found in _structs(part)]


def _fields(prefix: str, **_: Any) -> list[str]:
    del prefix
    return field_names()


def _assignments(prefix: str, parsed_args: argparse.Namespace, **_: Any) -> list[str]:
    """`KEY=`, and behind it the choices of a field that has some."""
    name, equals, _text = prefix.partition("=")
    if not equals:
        return [f"{name}=" for name in field_names()]
    if name.endswith("policy.name") or name == "shadow.name":
        return [f"{name}={policy}" for policy in _ask(parsed_args, _policy_names)]
    bounds = dict(_ask(parsed_args, lambda client: client.config().bounds.items()))
    if name not in bounds:
        return []
    choices = bounds[name].choices or (["true", "false"] if bounds[name].type == "bool" else [])
    return [f"{name}={choice}" for choice in choices]


def _policies(prefix: str, parsed_args: argparse.Namespace, **_: Any) -> list[str]:
    del prefix
    return list(_ask(parsed_args, _policy_names))


def _requests(prefix: str, parsed_args: argparse.Namespace, **_: Any) -> list[str]:
    del prefix
    return list(_ask(parsed_args, lambda client: [row.id for row in client.requests()]))


def _policy_names(client: Client) -> list[str]:
    return [policy.name for policy in client.policies() if policy.error is None]


def _ask(parsed_args: argparse.Namespace, question: Callable[[Client], Iterable[Any]]) -> list[Any]:
    try:
        server = Server.from_environment(
            getattr(parsed_args, "url", None), token_file=getattr(parsed_args, "token_file", None)
        )
        with Client(server, timeout_s=PATIENCE_S) as client:
            return list(question(client))
    except VTokenError:
        return []


COMPLETERS: dict[str, Callable[..., list[str]]] = {
    "keys": _fields,
    "assignments": _assignments,
    "policies": _policies,
    "requests": _requests,
}
