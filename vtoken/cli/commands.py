"""The commands: their names, what each does, what it takes, and the module of its function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click
from click import Choice, Option

from vtoken import __version__
from vtoken.cli.command import Command, Program, ServerCommand
from vtoken.cli.options import (
    CHANGES,
    COUNT,
    DRY_RUN,
    ENGINE,
    EVERY,
    FLEET,
    IF_REVISION,
    NEWEST,
    POSITIVE,
    SERVER,
    argument,
    duration_s,
    flag,
    fps,
    interval_s,
    option,
    size,
)

SHELLS = ("bash", "zsh", "fish")
SORTS = ("wait", "age", "length", "kept", "give", "gave", "blocks")  # of requests
KINDS = (
    "relocation",
    "eviction",
    "reclaimed",
    "restored",
    "parking",
    "config",
    "deferred",
    "preemption",
    "operation",
    "violation",
    "server",
    "canary",
    "weights",
)


def _completed(name: str) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """For `shell_complete`: what `completion.NAME` offers and begins as the word that is typed."""

    def complete(context: click.Context, _: click.Parameter, begun: str) -> list[str]:
        from vtoken.cli import completion

        offered = getattr(completion, name)(context, begun)
        return [word for word in offered if word.startswith(begun)]

    return complete


REQUEST = argument(
    "request_id",
    "REQUEST",
    "its id, that of its answer, or your X-Request-Id",
    shell_complete=_completed("requests"),
)

INSPECT = [
    ServerCommand(
        "console",
        "console.console",
        "the live console",
        argument("urls", "[URL]...", "several servers (one: --url)", nargs=-1),
        FLEET,
        flag("--read-only", "disable all changes"),
        option("--fps", "X", "states a second, 0.1..30 (10)", type=fps, default="10"),
        option("--request", "ID", "begin with the page of a request"),
        option("--replay recording", "FILE", "play a recording, without a server"),
        flag("--sample", "play a recorded incident that comes with vToken, with the guide"),
        option("--at moment", "TIME", "start of the replay: HH:MM:SS, or seconds from its start"),
        option("--export", "FILE", "write .svg, .png, .csv or .json and exit; no terminal"),
        option("--size", "WxH", "(120x36)", type=size, default="120x36"),
        flag("--web", "serve the console to a browser"),
        option("--host", "HOST", "with --web: a loopback address", default="127.0.0.1"),
        option("--port", "N", "with --web (8001)", type=click.IntRange(1, 65535), default=8001),
        flag("--ascii ascii_only", "ASCII characters only"),
        Option(
            ["--theme"],
            type=Choice(("auto", "dark", "light")),
            default="auto",
            help="colours (auto)",
        ),
        Option(
            ["--colors"],
            type=Choice(("auto", "16", "256", "truecolor")),
            default="auto",
            help="colour depth of the terminal (auto: from COLORTERM and TERM)",
        ),
        flag("--no-motion", "do not animate moving tokens"),
        flag("--keys", "print every action and its keys"),
        Option(
            ["--guide"],
            is_flag=False,
            flag_value="always",
            type=Choice(("once", "always")),
            help="explain the console step by step; once: unless already seen",
        ),
        common=(ENGINE, *SERVER),
        examples=(
            "vtoken console --url http://gpu7:8000 --read-only",
            "vtoken console http://gpu7:8000 http://gpu8:8000",
            "vtoken console --fleet production.fleet",
            "vtoken console --sample",
            "vtoken console --replay incident.jsonl.gz --at 14:02:11",
            "vtoken console --export pool.svg",
        ),
    ),
    ServerCommand(
        "status",
        "see.status",
        "the state of the KV cache, once",
        flag("--check", "one line on the worst engine; exit code 2 if it is short, 1 near, 0 ok"),
        *EVERY,
        examples=(
            "vtoken status --json | jq .fragmentation.f",
            "vtoken status --check || page-somebody",
            "vtoken status --all --fleet production.fleet",
        ),
    ),
    ServerCommand(
        "engines",
        "see.engines",
        "every engine of the server, and whether they agree; exit code 1 if not",
        examples=["vtoken engines --json | jq -r .sentence"],
    ),
    ServerCommand(
        "watch",
        "streaming.watch",
        "a status line every interval, until interrupted",
        option("--interval", "T", "time between lines (1s)", type=interval_s, default="1s"),
        option("--count", "N", "stop after N lines", type=POSITIVE),
        examples=(
            "vtoken watch --interval 500ms",
            "vtoken watch --json | jq 'select(.status).status.blocks.free'",
        ),
    ),
    ServerCommand(
        "requests",
        "see.requests",
        "every request that holds or waits for blocks",
        Option(
            ["--sort"],
            type=Choice(SORTS),
            default="wait",
            help="first: the largest, of `kept` the smallest (wait)",
        ),
        Option(["-o", "--output"], type=Choice(["wide"]), help="wide: more columns, whole ids"),
        examples=(
            "vtoken requests --sort gave -o wide",
            "vtoken requests --json | jq -r '.[].id'",
        ),
    ),
    ServerCommand(
        "request",
        "see.request",
        "one request and its block table, or its tokens",
        REQUEST,
        flag("--tokens", "its entire token table"),
        examples=["vtoken request cmpl-7 --tokens"],
    ),
    ServerCommand(
        "block",
        "see.block",
        "one block: its owners, its slots, why it is pinned",
        argument("block_id", "BLOCK", "its number, from 0", type=COUNT),
    ),
    ServerCommand(
        "events",
        "streaming.events",
        "events of the engine, oldest first",
        NEWEST,
        flag("-f --follow", "continue until interrupted"),
        option("--kind kinds", "KIND", ", ".join(KINDS), type=Choice(KINDS), multiple=True),
        examples=("vtoken events -n 100 --kind config --kind violation", "vtoken events --follow"),
    ),
    ServerCommand(
        "audit", "see.audit", "the audit log: changes and dry runs with their callers", NEWEST
    ),
    ServerCommand(
        "doctor",
        "doctor.doctor",
        "check the installation, the server and what it has done so far",
        flag("--thorough", "also check the installed vLLM against vToken (slow)"),
        examples=["vtoken doctor --url http://gpu7:8000"],
    ),
    ServerCommand(
        "mcp",
        "mcp.mcp",
        "serve the Model Context Protocol on standard input, for agents",
        common=(ENGINE, *SERVER),
        examples=["vtoken mcp --token-file control.token"],
    ),
]

CONFIG = [
    ServerCommand(
        "get",
        "configuration.config_get",
        "every field, its value and bound; or one value",
        argument(
            "key",
            "[KEY]",
            "field, for instance policy.name",
            required=False,
            shell_complete=_completed("keys"),
        ),
        examples=["vtoken config get policy.name"],
    ),
    ServerCommand(
        "set",
        "configuration.config_set",
        "change fields atomically between two steps",
        argument(
            "pairs",
            "KEY=VALUE...",
            "a value is JSON, else text; null removes an optional one",
            nargs=-1,
            required=True,
            shell_complete=_completed("assignments"),
        ),
        IF_REVISION,
        *CHANGES,
        examples=(
            "vtoken config set theta_f=0.1 batch_size=64",
            "vtoken config set budget_ratio=0.33 --dry-run",
            "vtoken config set theta_f=0.1 --guard-p95 40ms --guard 'preemptions>0'",
            "vtoken config set policy.name=h2o probe.every_steps=4",
            "vtoken config set theta_f=0.1 --all --fleet production.fleet",
        ),
    ),
]

POLICY = [
    ServerCommand(
        "list",
        "configuration.policy_list",
        "policies, with * the one in force; or one with its parameters",
        argument(
            "name",
            "[NAME]",
            "a policy",
            required=False,
            shell_complete=_completed("policies"),
        ),
    ),
    ServerCommand(
        "use",
        "configuration.policy_use",
        "switch to a policy",
        argument("name", "NAME", "see `vtoken policy list`", shell_complete=_completed("policies")),
        argument("pairs", "[PARAM=VALUE]...", "its parameters", nargs=-1),
        *CHANGES,
        examples=["vtoken policy use streaming_llm sinks=4"],
    ),
]

CHANGE = [
    click.Group("config", help="read or change the configuration", commands=CONFIG),
    click.Group("policy", help="list eviction policies, or use one", commands=POLICY),
    ServerCommand(
        "compact",
        "act.compact",
        "compact now, and wait for the result",
        option(
            "--request request_id",
            "ID",
            "this request only",
            shell_complete=_completed("requests"),
        ),
        option("--batch-size", "B", "most source blocks", type=POSITIVE),
        option("--timeout timeout_s", "T", "longest wait (60s)", type=duration_s, default="60s"),
        DRY_RUN,
        examples=["vtoken compact --request cmpl-7 --batch-size 64"],
    ),
    ServerCommand(
        "forget",
        "act.forget",
        "let tokens of a request die before all its others",
        REQUEST,
        argument(
            "positions",
            "[START END]...",
            "spans [START, END) of token ids, see `vtoken request REQUEST --tokens`",
            type=COUNT,
            nargs=-1,
        ),
        option("--text", "TEXT", "the tokens of TEXT, if the server shows the request's text"),
        examples=(
            "vtoken forget cmpl-7 120 900 1024 1400",
            "vtoken forget cmpl-7 --text 'the output of a tool'",
        ),
    ),
    ServerCommand("end", "act.end", "end a streaming-input session for its client", REQUEST),
    ServerCommand(
        "restore", "act.restore", "bring parked tokens of a request back now", REQUEST, DRY_RUN
    ),
    ServerCommand(
        "pause",
        "configuration.pause",
        "stop planning relocations; those in flight finish",
        *CHANGES,
    ),
    ServerCommand("resume", "configuration.resume", "plan relocations again", *CHANGES),
    ServerCommand(
        "confirm",
        "configuration.confirm",
        "keep the change that is on trial",
        *(IF_REVISION, *EVERY, DRY_RUN),
    ),
    ServerCommand(
        "undo",
        "configuration.undo",
        "restore the configuration before the last change",
        *(IF_REVISION, *EVERY, DRY_RUN),
    ),
    ServerCommand(
        "sync",
        "configuration.sync",
        "give all engines one configuration: that of --engine, else the most common",
        DRY_RUN,
    ),
]

RECORD = [
    ServerCommand(
        "record",
        "record.record",
        "write the stream to a file, for `console --replay` and scripts",
        argument("file", "FILE", "a new file; gzip if it ends in .gz"),
        option("--fps", "X", "states a second, 0.1..30 (5)", type=fps, default="5"),
        option("--duration", "T", "stop after T: 90s, 5m", type=duration_s),
        option("--last", "T", "download the flight recorder's last T", type=duration_s),
        examples=(
            "vtoken record incident.jsonl.gz --last 10m",
            "vtoken record incident.jsonl.gz --duration 5m",
        ),
    ),
]

RUN = [
    Program(
        "serve", "vtoken.vllm.serve", "vLLM's server with vToken: every vLLM flag, and --vtoken-…"
    ),
    Program("demo", "vtoken.demo.run", "start a server, traffic and the console"),
    Program("bench", "vtoken_bench", "run benchmarks, in a checkout of the repository"),
    Command(
        "completion",
        "completion.completion",
        "print a completion script for your shell",
        argument("shell", "SHELL", ", ".join(SHELLS), type=Choice(SHELLS)),
        examples=(
            "bash:  vtoken completion bash > ~/.local/share/bash-completion/completions/vtoken",
            "zsh:   vtoken completion zsh > ~/.zfunc/_vtoken      # with ~/.zfunc in fpath",
            "fish:  vtoken completion fish > ~/.config/fish/completions/vtoken.fish",
        ),
    ),
]

SECTIONS: dict[str, Sequence[click.Command]] = {
    "Inspect": INSPECT,
    "Change": CHANGE,
    "Record": RECORD,
    "Run": RUN,
}

EPILOG = """\b
environment:
  VTOKEN_URL     the server (default: http://127.0.0.1:8000)
  VTOKEN_TOKEN   bearer token, if the server needs one
  VTOKEN_CAFILE  certificate of an https:// server, or of its authority
  NO_COLOR       no colours

\b
exit codes: 0 done, 1 refused or failed, 2 usage
more: vtoken help COMMAND"""


class FrontPage(click.Group):
    """All commands; the help page has them in sections."""

    def __init__(self, **more: Any) -> None:
        commands = [command for section in SECTIONS.values() for command in section]
        settings = {"help_option_names": ["-h", "--help"]}
        super().__init__("vtoken", commands=commands, context_settings=settings, **more)

    def format_commands(self, _: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, commands in SECTIONS.items():
            with formatter.section(heading):
                formatter.write_dl([(str(one.name), str(one.help)) for one in commands])

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args[:1] == ["help"]:
            args = [*args[1:], "--help"]
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            option = error.option_name
            params = [param for command in self.commands.values() for param in command.params]
            if not any(option in param.opts for param in params):
                raise
            message = f"put {option} after the command: vtoken COMMAND {option}"
            raise click.UsageError(message, ctx) from None


cli = click.version_option(__version__, message="vtoken %(version)s")(
    FrontPage(
        help="Token-level virtualization of vLLM's KV cache: serve, watch, control.", epilog=EPILOG
    )
)
