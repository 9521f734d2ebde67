"""The commands that follow the stream: `watch`, `events --follow`.

Knows the link and how documents look. They end with the stream (1), or when interrupted.
"""

from __future__ import annotations

from argparse import Namespace

from vtoken import wire
from vtoken.cli.errors import CommandError
from vtoken.cli.link import Link
from vtoken.cli.show import event_line, say, say_json, tinted, watch_line

MAX_PAGE = 1000


def watch(arguments: Namespace) -> int:
    """A line for every state; with `--json`, every message of the stream."""
    messages = Link(arguments).stream(
        topics="metrics", fps=f"{1 / arguments.interval:g}", format="json"
    )
    num_lines = 0
    before: wire.Status | None = None
    for text, message in messages:
        now = message.status if isinstance(message, wire.Snapshot | wire.Delta) else None
        if arguments.json:
            say(text)
        elif now is not None:
            say(watch_line(now, _tokens_per_s(before, now)))
        elif isinstance(message, wire.Hello):
            say(f"{message.model} on {message.device}, vLLM {message.vllm_version}")
            continue
        else:
            continue
        before = now or before
        num_lines += 1
        if num_lines == arguments.count:
            return 0
    return 1


def _tokens_per_s(before: wire.Status | None, now: wire.Status) -> float:
    if before is None or now.ts <= before.ts:
        return 0.0
    return (now.tokens.generated - before.tokens.generated) / (now.ts - before.ts)


def events(arguments: Namespace) -> int:
    """The newest events; with `--follow`, those that come, without a gap between the two."""
    link = Link(arguments)
    status = link.call(wire.Status, "GET", "/status")
    newest = link.call(wire.EventPage, "GET", "/events", params={"limit": "1"}).last_seq
    seq = max(0, newest - arguments.limit)
    while seq < newest:
        params = {"after": str(seq), "limit": str(MAX_PAGE)}
        page = link.call(wire.EventPage, "GET", "/events", params=params)
        for event in page.events:
            _say_event(arguments, event)
        seq = page.events[-1].seq if page.events else newest
    if not arguments.follow:
        return 0
    for _, message in link.stream(topics="events", format="json", resume=f"{status.epoch}:{seq}"):
        if isinstance(message, wire.EventMessage):
            _say_event(arguments, message.event)
        elif isinstance(message, wire.Dropped):
            if arguments.json:
                say_json(message)
            else:
                say(tinted(f"{message.n:,} events were lost on the way here", "violation"))
        elif isinstance(message, wire.Hello) and not message.resumed:
            raise CommandError("the engine has restarted meanwhile", "call the command again")
    return 1


def _say_event(arguments: Namespace, event: wire.Event) -> None:
    if arguments.json:
        say_json(event)
    else:
        say(event_line(event))
