"""The arguments of `vtoken`: commands, flags and their help texts."""

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
    guard,
    interval_s,
    p95_guard,
    port,
    positive,
    size,
    whole_seconds,
)

SHELLS = ("bash", "zsh", "fish")
REQUEST = "its id, that of its answer, or your X-Request-Id"
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
    address, json, dry, trial = _server_flags(), _json_flag(), _dry_flag(), _trial_flags()
    server, every = _engine_flags(address), _all_flags()

    def add(name: str, *parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
        return _add(commands, name, server, json, *parents)

    add("status", every)
    add("engines")
    watch = add("watch")
    watch.add_argument("--interval", type=interval_s, default=1.0, metavar="T", help="time (1s)")
    watch.add_argument("--count", type=positive, metavar="N", help="stop after N lines")
    add("requests")
    request = add("request")
    _add_positional(request, "id", "REQUEST", help=REQUEST, complete="requests")
    request.add_argument("--tokens", action="store_true", help="its entire token table")
    _add_positional(add("block"), "id", "BLOCK", type=count, help="its number, from 0")
    events = add("events")
    events.add_argument(
        "-n", "--limit", type=positive, default=20, metavar="N", help="newest N (20)"
    )
    events.add_argument("-f", "--follow", action="store_true", help="continue until interrupted")
    events.add_argument(
        "--kind", action="append", choices=KINDS, metavar="KIND", help=", ".join(KINDS)
    )
    add("audit").add_argument(
        "-n", "--limit", type=positive, default=20, metavar="N", help="newest N (20)"
    )
    doctor = _add(commands, "doctor", address, json)  # of all engines
    doctor.add_argument(
        "--engine", action="store_true", help="check the installed vLLM against vToken (slow)"
    )
    _add_config(_add_actions(commands, "config"), [server, json], every, dry, trial)
    _add_policy(_add_actions(commands, "policy"), [server, json], every, dry, trial)
    _add_compact(add("compact", dry))
    _add_forget(add("forget"))
    _add_positional(add("end"), "id", "REQUEST", help=REQUEST, complete="requests")
    for name in ("pause", "resume"):
        add(name, every, dry, trial)
    for name in ("undo", "confirm"):
        _add_if_revision(add(name, every, dry))
    add("sync", dry)
    _add_console(_add(commands, "console", server))
    _add(commands, "mcp", server).set_defaults(json=False)
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
    """Add the command `title` (with its parent's name), its help text and its examples."""
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
        "--token-file", metavar="FILE", help="file with the bearer token (env VTOKEN_TOKEN)"
    )
    flags.add_argument(
        "--cafile",
        metavar="FILE",
        help="the server's certificate or its authority's, in PEM (env VTOKEN_CAFILE)",
    )
    return flags


def _engine_flags(address: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The flags of a server, and which of its engines."""
    flags = argparse.ArgumentParser(add_help=False, parents=[address])
    flags.add_argument(
        "--engine",
        type=count,
        metavar="N",
        dest="rank",
        help="one engine of a server with several (changes: all)",
    )
    return flags


def _all_flags() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(add_help=False)
    flags.add_argument(
        "--all",
        action="store_true",
        help="every engine of every server, as a table; exit code 1 if they differ or one fails",
    )
    _add_fleet(flags)
    return flags


def _add_fleet(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--fleet", metavar="FILE", help="the servers: URL [name=NAME] [token-file=FILE] a line"
    )


def _json_flag() -> argparse.ArgumentParser:
    flag = argparse.ArgumentParser(add_help=False)
    flag.add_argument("--json", action="store_true", help="JSON, one document a line")
    return flag


def _dry_flag() -> argparse.ArgumentParser:
    flag = argparse.ArgumentParser(add_help=False)
    flag.add_argument(
        "--dry-run",
        action="store_true",
        help="report the effect and change nothing; needs a read token only",
    )
    return flag


def _trial_flags() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(add_help=False)
    trial = flags.add_argument_group("trial", "the engine reverts the change automatically")
    trial.add_argument(
        "--confirm-within",
        type=whole_seconds,
        metavar="T",
        help="unless it is confirmed with `vtoken confirm` within T: 90s, 5m",
    )
    trial.add_argument(
        "--guard",
        type=guard,
        action="append",
        default=[],
        dest="guards",
        metavar="GUARD",
        help="if a metric crosses a limit: 'preemptions>0', "
        "'canary_agreement{group=evicting}<0.9 over 30', 'rate(generated_tokens)<100'; "
        "metrics: docs/metrics.md",
    )
    trial.add_argument(
        "--guard-p95",
        type=p95_guard,
        action="append",
        dest="guards",
        metavar="T",
        help="if the p95 inter-token latency exceeds T: 40ms",
    )
    trial.add_argument(
        "--guard-for", type=whole_seconds, metavar="T", help="how long the guards are active"
    )
    trial.add_argument(
        "--canary-engine",
        type=count,
        metavar="N",
        help="change engine N first; the others follow when its guards have held",
    )
    return flags


def _add_positional(
    parser: argparse.ArgumentParser, name: str, metavar: str, **options: Any
) -> None:
    """Add an argument; `complete` is its key in `completion.COMPLETERS`."""
    complete = options.pop("complete", None)
    action = parser.add_argument(name, metavar=metavar, **options)
    if complete is not None:
        action.complete = complete  # type: ignore[attr-defined]


def _add_config(actions: Any, parents: list[Any], every: Any, dry: Any, trial: Any) -> None:
    get = _add(
        actions, "config get", *parents, text="every field, its value and bound; or one value"
    )
    _add_positional(
        get, "key", "KEY", nargs="?", help="field, for instance policy.name", complete="keys"
    )
    change = _add(
        actions,
        "config set",
        *parents,
        every,
        dry,
        trial,
        text="change fields atomically between two steps",
    )
    _add_positional(
        change,
        "values",
        "KEY=VALUE",
        nargs="+",
        help="a value is JSON, else text; null removes an optional one",
        complete="assignments",
    )
    _add_if_revision(change)


def _add_if_revision(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--if-revision", type=count, metavar="N", help="only if N is still the revision"
    )


def _add_policy(actions: Any, parents: list[Any], every: Any, dry: Any, trial: Any) -> None:
    _add(actions, "policy list", *parents, text="policies and their parameters")
    use = _add(actions, "policy use", *parents, every, dry, trial, text="switch to a policy")
    _add_positional(use, "name", "NAME", help="see `vtoken policy list`", complete="policies")
    use.add_argument("values", nargs="*", metavar="PARAM=VALUE", help="its parameters")


def _add_compact(compact: argparse.ArgumentParser) -> None:
    _add_positional(compact, "--request", "ID", help="this request only", complete="requests")
    compact.add_argument("--batch-size", type=positive, metavar="B", help="most source blocks")
    compact.add_argument(
        "--timeout", type=duration_s, default=60.0, metavar="T", help="longest wait (60s)"
    )


def _add_forget(forget: argparse.ArgumentParser) -> None:
    _add_positional(forget, "id", "REQUEST", help=REQUEST, complete="requests")
    forget.add_argument(
        "positions",
        type=count,
        nargs="*",
        metavar="START END",
        help="spans [START, END) of token ids, see `vtoken request REQUEST --tokens`",
    )
    forget.add_argument(
        "--text", metavar="TEXT", help="the tokens of TEXT, if the server shows the request's text"
    )


def _add_console(console: argparse.ArgumentParser) -> None:
    console.add_argument("urls", nargs="*", metavar="URL", help="several servers (one: --url)")
    _add_fleet(console)
    console.add_argument("--read-only", action="store_true", help="disable all changes")
    console.add_argument("--fps", type=fps, default=10.0, help="states a second, 0.1..30 (10)")
    console.add_argument("--replay", metavar="FILE", help="play a recording, without a server")
    console.add_argument(
        "--at", metavar="TIME", help="start of the replay: HH:MM:SS, or seconds from its start"
    )
    console.add_argument(
        "--export", metavar="FILE", help="write .svg, .png, .csv or .json and exit; no terminal"
    )
    console.add_argument("--size", type=size, default=(120, 36), metavar="WxH", help="(120x36)")
    console.add_argument("--web", action="store_true", help="serve the console to a browser")
    console.add_argument("--host", default="127.0.0.1", help="with --web: a loopback address")
    console.add_argument("--port", type=port, default=8001, help="with --web (8001)")
    console.add_argument("--ascii", action="store_true", help="ASCII characters only")
    console.add_argument(
        "--theme", choices=("auto", "dark", "light"), default="auto", help="colours (auto)"
    )
    console.add_argument(
        "--colors",
        choices=("auto", "16", "256", "truecolor"),
        default="auto",
        help="colour depth of the terminal (auto: from COLORTERM and TERM)",
    )
    console.add_argument("--no-motion", action="store_true", help="do not animate moving tokens")
    console.add_argument("--keys", action="store_true", help="print every action and its keys")
    console.add_argument(
        "--guide",
        nargs="?",
        const="always",
        choices=("once", "always"),
        help="explain the console step by step; once: unless already seen",
    )
    console.set_defaults(json=False)


def _add_record(record: argparse.ArgumentParser) -> None:
    record.add_argument("file", metavar="FILE", help="a new file; gzip if it ends in .gz")
    record.add_argument("--fps", type=fps, default=5.0, help="states a second, 0.1..30 (5)")
    span = record.add_mutually_exclusive_group()
    span.add_argument("--duration", type=duration_s, metavar="T", help="stop after T: 90s, 5m")
    span.add_argument(
        "--last", type=duration_s, metavar="T", help="download the flight recorder's last T"
    )
