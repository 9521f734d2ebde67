"""The commands that follow the stream: `watch`, `events`.

They exit with 1 when the stream ends, or when interrupted.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from vtoken import wire
from vtoken.cli.errors import CommandError
from vtoken.cli.printing import coloured
from vtoken.cli.remote import Remote
from vtoken.cli.show import event_line, silence_line, watch_line

SILENT_S = 5.0  # without a step while requests wait
EVERY_EVENT = 2**31  # more than any engine holds


def watch(remote: Remote, interval: float, count: int | None) -> int:
    """One line for every state; with `--json`, every message of the stream as received."""
    out, num_lines = remote.out, 0
    before: wire.Status | None = None
    printed_ts = 0.0  # when the last line was printed, by the server's clock
    with remote.client.stream(["metrics"], fps=1 / interval, format="json") as stream:
        for message in stream:
            now = message.status if isinstance(message, wire.Snapshot | wire.Delta) else None
            if out.as_json:
                out.line(str(stream.raw))
            elif now is not None:
                out.part(watch_line(now, _tokens_per_s(before, now)))
            elif isinstance(message, wire.Hello):
                if stream.token_ignored:
                    remote.tell_ignored_token(remote.client.server)
                out.part(f"{message.model} on {message.device}, vLLM {message.vllm_version}")
                continue
            elif before is not None and (line := quiet_line(before, message.ts)):
                if message.ts - printed_ts < interval:
                    continue
                printed_ts = message.ts
                out.part(line)
            else:
                continue
            if now is not None:
                before, printed_ts = now, message.ts
            num_lines += 1
            if num_lines == count:
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


def events(remote: Remote, limit: int, follow: bool, kinds: Sequence[str]) -> int:
    """The newest events; with `--follow`, also new ones, without a gap between the two."""

    def matches(event: wire.Event) -> bool:
        return not kinds or event.kind in kinds

    def show(event: wire.Event) -> None:
        remote.out.show(event, lambda event: [event_line(event)])

    epoch = remote.client.status().epoch
    newest = remote.client.newest_events(EVERY_EVENT if kinds else limit)
    for event in [*filter(matches, newest)][-limit:]:
        show(event)
    if not follow:
        return 0
    place = f"{epoch}:{newest[-1].seq if newest else 0}"
    with remote.client.stream(["events"], format="json", resume=place) as stream:
        for message in stream:
            if isinstance(message, wire.EventMessage):
                if matches(message.event):
                    show(message.event)
            elif isinstance(message, wire.Dropped):
                remote.out.show(message, _dropped_lines)
            elif isinstance(message, wire.Hello) and not message.resumed:
                raise CommandError("the engine has restarted", "run the command again")
    return 1


def _dropped_lines(message: wire.Dropped) -> list[str]:
    return [coloured(f"{message.n:,} events were dropped", "violation")]
