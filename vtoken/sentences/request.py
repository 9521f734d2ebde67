"""How long a request waited, what it gave up because memory was short, and what it still can give,
in words.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vtoken.sentences import counted, duration_text, span

if TYPE_CHECKING:
    from vtoken.wire import RequestRow

REASON = " because memory was short"


def gives(row: RequestRow) -> bool:
    """Whether the request loses tokens only for blocks that somebody needs."""
    return row.evict_when == "pressure" and row.policy != "none"


def live_share(row: RequestRow) -> float | None:
    """The share of its tokens that live; None if it has none."""
    total = row.live + row.dead
    return row.live / total if total else None


def waited_s(row: RequestRow, now: float) -> float:
    """All its waits at server time `now`, with the one that has not ended [s]."""
    since = now if row.waiting_since_ts is None else row.waiting_since_ts
    return row.waited_s + max(0.0, now - since)


def given_words(row: RequestRow, width: int | None = None) -> str:
    """What the request gave and can give, or kept at its end; empty if there is nothing to say.

    Without the reason, and without what it can give above, if it does not fit `width` columns.
    """
    words = _words(row)
    for part in (REASON, " above its floor"):
        if width is not None and len(words) > width:
            words = words.replace(part, "")
    return words


def _words(row: RequestRow) -> str:
    if row.state == "finished":
        return _kept(row)
    if not gives(row):
        return ""
    if row.live == 0:
        return f"has nothing to give while it is {row.state}"
    above, total = row.live - row.budget_tokens, row.live + row.dead
    kept = f"kept {row.live / total:.1%} of {total:,} tokens"
    if row.given_tokens:
        kept += f", gave up {row.given_tokens:,}{REASON}{_of_these(row)}"
    if row.givable_tokens:
        return f"{kept}; can give {row.givable_tokens:,} above its floor"
    place = f"{above:,} above" if above > 0 else "at" if above == 0 else "below"
    return f"{kept}; {place} its floor, can give nothing"


def _of_these(row: RequestRow) -> str:
    """` (1,200 parked, 240 back)`: of the tokens that it gave; "" if none is."""
    parts = ((row.parked_tokens, "parked"), (row.restored_tokens, "back"))
    named = ", ".join(f"{count:,} {what}" for count, what in parts if count)
    return f" ({named})" if named else ""


def wait_words(row: RequestRow, now: float) -> str:
    """The request's age, how long it waits and how long it waited, at server time `now`; of one
    that has finished, only the last.
    """
    words = []
    if row.arrived_ts and row.state != "finished":
        words.append(f"{span(now - row.arrived_ts)} old")
    if row.waiting_since_ts is not None:
        waits = span(now - row.waiting_since_ts)
        words.append(f"waits {waits} for {counted(row.needed_blocks, 'block')}")
    if row.waited_s >= 0.1:
        words.append(f"waited {duration_text(row.waited_s)} for memory")
    return ", ".join(words)


def _kept(row: RequestRow) -> str:
    """What a finished request kept, and why it lost the rest."""
    total = row.live + row.dead
    if not row.dead and not row.restored_tokens:
        return f"kept all of its {total:,} tokens"
    kept = f"kept {row.live:,} of {total:,} tokens"
    kept += f" ({row.live / total:.1%})"
    lost = []
    if row.given_tokens:
        lost.append(f"gave up {row.given_tokens:,}{REASON}")
    if others := row.dead + row.restored_tokens - row.given_tokens:
        lost.append(f"lost {others:,} over budget")
    if row.restored_tokens:
        lost.append(f"{row.restored_tokens:,} came back")
    return "; ".join([kept, *lost])
