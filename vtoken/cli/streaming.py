"""The commands that follow the stream: `watch`, `events --follow`, `record`.

Knows the link and how documents look. They end with the stream (1), or when interrupted.
"""

from __future__ import annotations

import time
from argparse import Namespace
from pathlib import Path

from vtoken import wire
from vtoken.cli.errors import CommandError, UsageError
from vtoken.cli.link import Link
from vtoken.cli.show import event_line, say, say_json, tinted, watch_line

MAX_PAGE = 1000
ALL_TOPICS = "blocks,requests,events,metrics"


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


def record(arguments: Namespace) -> int:
    """Everything the stream says, into a file, for `vtoken console --replay` and for scripts."""
    deadline = None if arguments.duration is None else time.monotonic() + arguments.duration
    path = Path(arguments.file)
    num_messages = 0
    messages = Link(arguments).stream(topics=ALL_TOPICS, fps=f"{arguments.fps:g}", format="json")
    try:
        with path.open("x") as file:
            for text, _ in messages:
                file.write(text + "\n")
                file.flush()
                num_messages += 1
                if deadline is not None and time.monotonic() >= deadline:
                    break
    except FileExistsError as error:
        raise UsageError(f"{path} exists already", "name another file, or remove it") from error
    except KeyboardInterrupt:
        pass
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error}") from error
    if arguments.json:
        say_json({"file": str(path), "messages": num_messages})
    else:
        say(f"{num_messages:,} messages in {path}")
    return 0
