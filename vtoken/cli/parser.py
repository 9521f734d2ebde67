"""The arguments of `vtoken`: commands, flags and what they mean. Knows argparse only."""

from __future__ import annotations

import argparse
from typing import Any

from vtoken import __version__
from vtoken.cli.pages import EPILOG, EXAMPLES, GROUPS
from vtoken.cli.usage import FrontPage, Parser
from vtoken.cli.values import (
    count,
    duration_s,
    fps,
    interval_s,
    latency_ms,
    number,
    port,
    positive,
    size,
    whole_seconds,
)

SHELLS = ("bash", "zsh", "fish")
KINDS = (
    "relocation",
    "eviction",
    "reclaimed",
    "config",
    "deferred",
    "preemption",
    "operation",
    "violation",
    "server",
    "canary",
)


def make_parser() -> Parser:
    """The whole parser; the namespace has `command`, `json` and `parser`."""
    parser = FrontPage(
        GROUPS,
        prog="vtoken",
        description="Token-level virtualization of vLLM's KV cache: serve, watch, control.",
        epilog=EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"vtoken {__version__}")
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=Parser
    )
    server, json, dry, trial = _server_flags(), _json_flag(), _dry_flag(), _trial_flags()

    def add(name: str, *parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
        return _add(commands, name, server, json, *parents)

    add("status")
    watch = add("watch")
    watch.add_argument("--interval", type=interval_s, default=1.0, metavar="T", help="time (1s)")
    watch.add_argument("--count", type=positive, metavar="N", help="stop after N lines")
    add("requests")
    request = add("request")
    _named(request, "id", "REQUEST", help="an id, see `vtoken requests`", complete="requests")
    request.add_argument("--tokens", action="store_true", help="its token table, all of it")
    _named(add("block"), "id", "BLOCK", type=count, help="its number, from 0")
    events = add("events")
    events.add_argument(
        "-n", "--limit", type=positive, default=20, metavar="N", help="newest N (20)"
    )
    events.add_argument("-f", "--follow", action="store_true", help="go on until interrupted")
    events.add_argument(
        "--kind", action="append", choices=KINDS, metavar="KIND", help=", ".join(KINDS)
    )
    add("audit").add_argument(
        "-n", "--limit", type=positive, default=20, metavar="N", help="newest N (20)"
    )
    doctor = add("doctor")
    doctor.add_argument(
        "--engine", action="store_true", help="compare this vLLM with what vToken expects (slow)"
    )
    _add_config(_add_actions(commands, "config"), [server, json], dry, trial)
    _add_policy(_add_actions(commands, "policy"), [server, json], dry, trial)
    _add_compact(add("compact", dry))
    for name in ("pause", "resume"):
        add(name, dry, trial)
    for name in ("undo", "confirm"):
        add(name, dry)
    _add_console(_add(commands, "console", server))
    _add_record(add("record"))
    for name in ("serve", "calibrate", "demo", "bench"):  # with parsers of their own
        commands.add_parser(name, help=GROUPS["Run"][name], add_help=False)
    shell = _add(commands, "completion")
    shell.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))
    shell.set_defaults(json=False)
    return parser


def _add(
    commands: Any, title: str, *parents: argparse.ArgumentParser, text: str = ""
) -> argparse.ArgumentParser:
    """A command, `title` with those before it, with the text of its group and its examples."""
    for group in GROUPS.values():
        text = text or group.get(title, "")
    examples = EXAMPLES.get(title, [])
    added: argparse.ArgumentParser = commands.add_parser(
        title.rpartition(" ")[2],
        help=text,
        description=text,
        parents=parents,
        epilog="\n  ".join(["examples:", *examples]) if examples else None,
    )
    return added


def _add_actions(commands: Any, name: str) -> Any:
    command = _add(commands, name)
    return command.add_subparsers(dest="action", metavar="ACTION", required=True)


def _server_flags() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(add_help=False)
    flags.add_argument("--url", help="the server (env VTOKEN_URL, default http://127.0.0.1:8000)")
    flags.add_argument(
        "--token-file", metavar="FILE", help="file with the bearer token (or env VTOKEN_TOKEN)"
    )
    return flags


def _json_flag() -> argparse.ArgumentParser:
    flag = argparse.ArgumentParser(add_help=False)
    flag.add_argument("--json", action="store_true", help="JSON, one document a line")
    return flag


def _dry_flag() -> argparse.ArgumentParser:
    flag = argparse.ArgumentParser(add_help=False)
    flag.add_argument(
        "--dry-run",
        action="store_true",
        help="say what would happen, change nothing; a token that reads is enough",
    )
    return flag


def _trial_flags() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(add_help=False)
    trial = flags.add_argument_group("on trial", "the engine takes the change back by itself")
    trial.add_argument(
        "--confirm-within",
        type=whole_seconds,
        metavar="T",
        help="unless `vtoken confirm` comes within T: 90s, 5m",
    )
    trial.add_argument(
        "--guard-p95",
        type=latency_ms,
        metavar="T",
        help="when p95 of the time between two tokens passes T: 40ms",
    )
    trial.add_argument(
        "--guard-preemptions", type=count, metavar="N", help="when more than N are preempted"
    )
    trial.add_argument(
        "--guard-agreement",
        type=number,
        metavar="R",
        help="when the canary's agreement is below R: 0.9",
    )
    trial.add_argument(
        "--guard-logprob-lost",
        type=number,
        metavar="X",
        help="when the canary's log-probability lost, in nats a token, is above X",
    )
    trial.add_argument(
        "--guard-canaries",
        type=positive,
        metavar="N",
        help="checked requests that these two rest on at least (default: 20)",
    )
    trial.add_argument(
        "--guard-for", type=whole_seconds, metavar="T", help="how long the guard holds"
    )
    return flags


def _named(parser: argparse.ArgumentParser, name: str, metavar: str, **options: Any) -> None:
    """A positional argument; `complete` names what the shell completes it with."""
    complete = options.pop("complete", None)
    action = parser.add_argument(name, metavar=metavar, **options)
    if complete is not None:
        action.complete = complete  # type: ignore[attr-defined]


def _add_config(actions: Any, parents: list[Any], dry: Any, trial: Any) -> None:
    get = _add(
        actions, "config get", *parents, text="every field, its value and bound; or one value"
    )
    _named(get, "key", "KEY", nargs="?", help="field, for instance policy.name", complete="keys")
    change = _add(
        actions,
        "config set",
        *parents,
        dry,
        trial,
        text="change fields between two steps, all or nothing",
    )
    _named(
        change,
        "values",
        "KEY=VALUE",
        nargs="+",
        help="a value is JSON, or else text; null takes an optional one away",
        complete="assignments",
    )
    change.add_argument(
        "--if-revision", type=count, metavar="N", help="only if this is still the revision"
    )


def _add_policy(actions: Any, parents: list[Any], dry: Any, trial: Any) -> None:
    _add(actions, "policy list", *parents, text="policies and their parameters")
    use = _add(actions, "policy use", *parents, dry, trial, text="switch to a policy")
    _named(use, "name", "NAME", help="see `vtoken policy list`", complete="policies")
    use.add_argument("values", nargs="*", metavar="PARAM=VALUE", help="its parameters")


def _add_compact(compact: argparse.ArgumentParser) -> None:
    _named(compact, "--request", "ID", help="this request only", complete="requests")
    compact.add_argument("--batch-size", type=positive, metavar="B", help="most source blocks")
    compact.add_argument(
        "--timeout", type=duration_s, default=60.0, metavar="T", help="longest wait (60s)"
    )


def _add_console(console: argparse.ArgumentParser) -> None:
    console.add_argument("--read-only", action="store_true", help="look, change nothing")
    console.add_argument("--fps", type=fps, default=10.0, help="states a second, 0.1..30 (10)")
    console.add_argument("--replay", metavar="FILE", help="look at a recording, without a server")
    console.add_argument(
        "--at", metavar="TIME", help="of a recording: HH:MM:SS, or seconds from its start"
    )
    console.add_argument(
        "--export", metavar="FILE", help="write .svg, .png, .csv or .json without a terminal, leave"
    )
    console.add_argument("--size", type=size, default=(120, 36), metavar="WxH", help="(120x36)")
    console.add_argument("--web", action="store_true", help="serve the console to a browser")
    console.add_argument("--host", default="127.0.0.1", help="with --web: a loopback address")
    console.add_argument("--port", type=port, default=8001, help="with --web (8001)")
    console.add_argument("--ascii", action="store_true", help="no characters beyond ASCII")
    console.add_argument(
        "--theme", choices=("auto", "dark", "light"), default="auto", help="colours (auto)"
    )
    console.add_argument(
        "--colors",
        choices=("auto", "16", "256", "truecolor"),
        default="auto",
        help="how many the terminal shows (auto: by COLORTERM and TERM)",
    )
    console.add_argument("--no-motion", action="store_true", help="do not draw moving tokens")
    console.add_argument("--keys", action="store_true", help="print every action and its keys")
    console.add_argument(
        "--guide",
        nargs="?",
        const="always",
        choices=("once", "always"),
        help="explain itself step by step; once: unless it was seen before",
    )
    console.set_defaults(json=False)


def _add_record(record: argparse.ArgumentParser) -> None:
    record.add_argument("file", metavar="FILE", help="a new file; gzip where it ends in .gz")
    record.add_argument("--fps", type=fps, default=5.0, help="states a second, 0.1..30 (5)")
    span = record.add_mutually_exclusive_group()
    span.add_argument("--duration", type=duration_s, metavar="T", help="stop after T: 90s, 5m")
    span.add_argument(
        "--last", type=duration_s, metavar="T", help="what the flight recorder has of the last T"
    )
    record.add_argument(
        "--with-text",
        action="store_true",
        help="the text of the requests too; the server must show it, and the file is mode 0600",
    )
