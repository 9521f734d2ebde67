"""The commands that act on requests: compact, forget or restore tokens, end a session."""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from typing import Any

from vtoken.cli.errors import CommandError, UsageError
from vtoken.cli.remote import Remote
from vtoken.cli.show import operation_lines
from vtoken.cli.show_requests import ended_lines, forgotten_lines, restored_lines
from vtoken.client import Client, RequestText


def compact(remote: Remote, timeout_s: float, **what: Any) -> int:
    """Start a compaction and wait for its end."""
    operation = remote.client.compact(**what)
    if operation.state in ("pending", "running"):
        operation = remote.client.wait_operation(operation.id, timeout_s=timeout_s)
    if operation.state in ("pending", "running"):
        raise CommandError(
            f"operation {operation.id} is still {operation.state} after {timeout_s:g} s",
            "it continues on the server; an engine without requests takes no steps",
        )
    remote.out.show(operation, operation_lines)
    return 0 if operation.state == "done" else 1


def forget(remote: Remote, request_id: str, positions: tuple[int, ...], text: str | None) -> None:
    """Forget spans that are given as positions, or the tokens of a text."""
    if len(positions) % 2 or (not positions) == (text is None):
        raise UsageError("name either START END, one pair for each span, or --text TEXT")
    spans = list(zip(positions[::2], positions[1::2], strict=True))
    if text is not None:
        spans = [_span_of(text, request_id, remote.client)]
    remote.out.show(remote.client.forget(request_id, spans), forgotten_lines)


def _span_of(text: str, request_id: str, client: Client) -> tuple[int, int]:
    """The tokens that lie entirely in the only occurrence of `text`.

    A token without a piece of its own begins a character of the next one.
    """
    shown = RequestText(request_id)
    client.refresh_text(shown, 0, 0)
    pieces = ["\0" if token.text is None else token.text for token in shown.tokens]
    whole = "".join(pieces)
    found = whole.count(text) if text else 0
    if found != 1:
        raise CommandError(
            f"the text occurs {found:,} times in {request_id}",
            "name a text that occurs once, or the positions of its tokens",
        )
    first = whole.index(text)
    ends = [0, *accumulate(map(len, pieces))]
    inside = [i for i in range(len(pieces)) if first <= ends[i] < ends[i + 1] <= first + len(text)]
    if not inside:
        raise CommandError(f"no token of {request_id} lies entirely in the text")
    start = inside[0]
    while start and not pieces[start - 1]:
        start -= 1
    return start, inside[-1] + 1


def end(remote: Remote, request_id: str) -> None:
    remote.out.show(remote.client.end(request_id), ended_lines)


def restore(remote: Remote, request_id: str, dry_run: bool) -> None:
    answer = remote.client.restore(request_id, validate_only=dry_run)
    remote.out.show(answer, partial(restored_lines, dry_run=dry_run))
