"""The arguments of `vtoken`: commands, flags and what they mean. Knows argparse only."""

from __future__ import annotations

import argparse

from vtoken import __version__

DEFAULT_URL = "http://127.0.0.1:8000"
MIN_FPS, MAX_FPS = 0.1, 30.0
MAX_DURATION_S = 7 * 24 * 3600

EPILOG = """\
environment:
  VTOKEN_URL    the server (default: http://127.0.0.1:8000)
  VTOKEN_TOKEN  bearer token, when the server wants one
  NO_COLOR      no colours

exit codes: 0 done, 1 refused or failed, 2 usage
"""


def make_parser() -> argparse.ArgumentParser:
    """The whole parser; the namespace has `command` and `json`."""
    parser = argparse.ArgumentParser(
        prog="vtoken",
        description="Token-level virtualization of vLLM's KV cache: serve, watch, control.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"vtoken {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    server = _server_flags()
    json = argparse.ArgumentParser(add_help=False)
    json.add_argument("--json", action="store_true", help="JSON, one document a line")
    dry = argparse.ArgumentParser(add_help=False)
    dry.add_argument("--dry-run", action="store_true", help="say what would happen, change nothing")

    commands.add_parser("serve", help="vLLM's server with vToken: every vLLM flag, and --vtoken-…")
    commands.add_parser("demo", help="a server, traffic and the console, ready to look at")
    _add_console(commands, server)

    def add(name: str, text: str, *parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
        return commands.add_parser(
            name, help=text, description=text, parents=[server, json, *parents]
        )

    add("status", "everything that matters now, once")
    watch = add("watch", "a status line every interval, until interrupted")
    watch.add_argument("--interval", type=_interval, default=1.0, metavar="S", help="seconds (1)")
    watch.add_argument("--count", type=_positive, metavar="N", help="stop after N lines")
    _add_config(commands, [server, json], dry)
    _add_policy(commands, [server, json], dry)
    compact = add("compact", "compact now, and wait for the result", dry)
    compact.add_argument("--request", metavar="ID", help="this request only")
    compact.add_argument("--batch-size", type=_positive, metavar="B", help="most source blocks")
    compact.add_argument(
        "--timeout", type=float, default=60.0, metavar="S", help="longest wait in seconds (60)"
    )
    add("pause", "stop planning relocations; those in flight finish")
    add("resume", "plan relocations again")
    add("undo", "restore the configuration before the last change")
    events = add("events", "what happened, oldest first")
    events.add_argument("-n", "--limit", type=_positive, default=20, metavar="N", help="newest N")
    events.add_argument("-f", "--follow", action="store_true", help="go on until interrupted")
    _add_record(add("record", "write the stream to a file, for `console --replay` and scripts"))
    doctor = add("doctor", "is it installed right, is the server there, has it done anything?")
    doctor.add_argument(
        "--engine", action="store_true", help="compare this vLLM with what vToken expects (slow)"
    )
    commands.add_parser("bench", help="measure: baselines, variants, micro-benchmarks")
    commands.add_parser("soak", help="real engines under random traffic, every check on")
    return parser


def _server_flags() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(add_help=False)
    flags.add_argument("--url", help=f"the server (env VTOKEN_URL, default {DEFAULT_URL})")
    flags.add_argument(
        "--token-file", metavar="FILE", help="file with the bearer token (or env VTOKEN_TOKEN)"
    )
    return flags


def _add_console(commands: argparse._SubParsersAction, server: argparse.ArgumentParser) -> None:  # type: ignore[type-arg]
    console = commands.add_parser(
        "console", help="the live console", description="the live console", parents=[server]
    )
    console.add_argument("--read-only", action="store_true", help="look, change nothing")
    console.add_argument("--fps", type=_fps, default=10.0, help="states a second, 0.1..30 (10)")
    console.add_argument("--ascii", action="store_true", help="no characters beyond ASCII")
    console.set_defaults(json=False)


def _add_record(record: argparse.ArgumentParser) -> None:
    record.add_argument("file", metavar="FILE", help="a new file; gzip where it ends in .gz")
    record.add_argument("--fps", type=_fps, default=5.0, help="states a second, 0.1..30 (5)")
    record.add_argument("--duration", type=_duration, metavar="T", help="stop after T: 90s, 5m, 1h")


def _add_config(
    commands: argparse._SubParsersAction,  # type: ignore[type-arg]
    parents: list[argparse.ArgumentParser],
    dry: argparse.ArgumentParser,
) -> None:
    text = "read or change the configuration"
    actions = commands.add_parser("config", help=text, description=text).add_subparsers(
        dest="action", metavar="ACTION", required=True
    )
    actions.add_parser("get", help="every field, its value and bound", parents=parents)
    change = actions.add_parser(
        "set",
        help="change fields, all or nothing",
        parents=[*parents, dry],
        epilog="A value is JSON, or else text. Nested: policy.name=h2o probe.every_steps=4",
    )
    change.add_argument("values", nargs="+", metavar="KEY=VALUE")
    change.add_argument(
        "--if-revision", type=int, metavar="N", help="only if this is still the revision"
    )


def _add_policy(
    commands: argparse._SubParsersAction,  # type: ignore[type-arg]
    parents: list[argparse.ArgumentParser],
    dry: argparse.ArgumentParser,
) -> None:
    text = "list eviction policies, or use one"
    actions = commands.add_parser("policy", help=text, description=text).add_subparsers(
        dest="action", metavar="ACTION", required=True
    )
    actions.add_parser("list", help="policies and their parameters", parents=parents)
    use = actions.add_parser("use", help="switch to a policy", parents=[*parents, dry])
    use.add_argument("name", metavar="NAME")
    use.add_argument("values", nargs="*", metavar="PARAM=VALUE")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def _fps(text: str) -> float:
    value = float(text)
    if not MIN_FPS <= value <= MAX_FPS:
        raise argparse.ArgumentTypeError(f"{value:g} is not in {MIN_FPS:g}..{MAX_FPS:g}")
    return value


def _duration(text: str) -> float:
    """Seconds of `90`, `90s`, `5m` or `1h`."""
    factor = {"s": 1, "m": 60, "h": 3600}.get(text[-1:])
    value = float(text[:-1] if factor else text) * (factor or 1)
    if not 0 < value <= MAX_DURATION_S:
        raise argparse.ArgumentTypeError(f"{text} is not in 0..{MAX_DURATION_S // 3600}h")
    return value


def _interval(text: str) -> float:
    value = float(text)
    if not 1 / MAX_FPS <= value <= 1 / MIN_FPS:
        raise argparse.ArgumentTypeError(f"{value:g} is not in 0.04..10")
    return value
