"""The commands that follow the stream: `watch`, `events`.

They exit with 1 when the stream ends, or when interrupted.
"""

from __future__ import annotations

from argparse import Namespace

import msgspec

from vtoken import wire
from vtoken.cli.errors import CommandError, warn_ignored_token
from vtoken.cli.printing import coloured, print_document, print_json, print_text
from vtoken.cli.show import event_line, silence_line, watch_line
from vtoken.client import Client

SILENT_S = 5.0  # without a step while requests wait
EVERY_EVENT = 2**31  # more than any engine holds


def watch(arguments: Namespace, client: Client) -> int:
    """One line for every state; with `--json`, every message of the stream as received."""
    num_lines = 0
    before: wire.Status | None = None
    printed_ts = 0.0  # when the last line was printed, by the server's clock
    with client.stream(["metrics"], fps=1 / arguments.interval, format="json") as stream:
        for message in stream:
            now = message.status if isinstance(message, wire.Snapshot | wire.Delta) else None
            if arguments.json:
                print_text(str(stream.raw))
            elif now is not None:
                print_text(watch_line(now, _tokens_per_s(before, now)))
            elif isinstance(message, wire.Hello):
                if stream.token_ignored:
                    warn_ignored_token(client.server)
                print_text(f"{message.model} on {message.device}, vLLM {message.vllm_version}")
                continue
            elif before is not None and (line := quiet_line(before, message.ts)):
                if message.ts - printed_ts < arguments.interval:
                    continue
                printed_ts = message.ts
                print_text(line)
            else:
                continue
            if now is not None:
                before, printed_ts = now, message.ts
            num_lines += 1
            if num_lines == arguments.count:
                return 0
    return 1


def quiet_line(last: wire.Status, now_ts: float) -> str:
    """The line at `now_ts` if no status after `last` arrived; empty if there is none to print."""
    idle = not (last.requests.running or last.requests.waiting)
    if idle or last.scheduling != "running":  # the status is unchanged
        return watch_line(msgspec.structs.replace(last, ts=now_ts), 0.0)
    return silence_line(last, now_ts) if now_ts - last.ts > SILENT_S else ""


def _tokens_per_s(before: wire.Status | None, now: wire.Status) -> float | None:
    if before is None or now.ts <= before.ts:
        return None
    return (now.tokens.generated - before.tokens.generated) / (now.ts - before.ts)


def events(arguments: Namespace, client: Client) -> int:
    """The newest events; with `--follow`, also new ones, without a gap between the two."""
    epoch = client.status().epoch
    newest = client.newest_events(EVERY_EVENT if arguments.kind else arguments.limit)
    for event in [event for event in newest if _matches(arguments, event)][-arguments.limit :]:
        _print_event(arguments, event)
    if not arguments.follow:
        return 0
    place = f"{epoch}:{newest[-1].seq if newest else 0}"
    with client.stream(["events"], format="json", resume=place) as stream:
        for message in stream:
            if isinstance(message, wire.EventMessage):
                if _matches(arguments, message.event):
                    _print_event(arguments, message.event)
            elif isinstance(message, wire.Dropped):
                _print_dropped(arguments, message)
            elif isinstance(message, wire.Hello) and not message.resumed:
                raise CommandError("the engine has restarted", "run the command again")
    return 1


def _matches(arguments: Namespace, event: wire.Event) -> bool:
    return not arguments.kind or event.kind in arguments.kind


def _print_event(arguments: Namespace, event: wire.Event) -> None:
    print_document(arguments, event, lambda event: [event_line(event)])


def _print_dropped(arguments: Namespace, message: wire.Dropped) -> None:
    if arguments.json:
        print_json(message)
    else:
        print_text(coloured(f"{message.n:,} events were dropped", "violation"))
