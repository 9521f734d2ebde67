"""A status as one sentence: what limits admission now, and what would help.

A pure function of the status, so that the sentence names the numbers that are shown beside it. The
engine does not write it: whoever shows the status does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vtoken.sentences import counted, data_size, kinds_text, sessions_text, when

if TYPE_CHECKING:
    from vtoken.wire import FirstWaiting, MemoryPressure, Status

MAX_LENGTH = 180


def situation(status: Status) -> str:
    """The sentence, of at most `MAX_LENGTH` characters."""
    found, memory = status.fragmentation, status.pressure
    if status.scheduling != "running":
        return _paused(status)
    if status.reclamation.held_blocks == 0:
        return _idle(status.requests.waiting)
    if found.cause != "ok" and memory is not None:
        return _under_pressure(status, memory)
    if found.cause == "fragmented":
        return f"Fragmented: {_queue(status)}{_gain(status)}; {found.advice}."
    if found.cause == "full":
        return f"Full: {_queue(status)}{_full(status)}."
    free = f"{counted(status.blocks.free, 'block')} free of {status.blocks.total:,}"
    nobody_gives = f"; reclamation {_nobody_gives(status)}" if memory and _stopped(status) else ""
    if found.reclaimable_blocks:
        closed = next((gate.detail for gate in found.gates if not gate.open), "")
        held = f"; held back: {closed}" if closed else ""
        return f"OK: {free}; {_gain(status)}{held}{_spared(memory)}{nobody_gives}."
    waiting, first = "", status.requests.first
    if status.requests.waiting:
        why = "not for blocks" if first is None else "the first has its blocks free"
        waiting = f"; {_wait(status.requests.waiting)}, {why}"
    return f"OK: {free}; {_holes(status)}{waiting}{_spared(memory)}{nobody_gives}."


def _paused(status: Status) -> str:
    """The engine is paused, or paused for new requests."""
    running, waiting = status.requests.running, _wait(status.requests.waiting)
    if status.scheduling == "paused":
        requests = "request is" if running == 1 else "requests are"
        effect = f"vLLM schedules nothing until it is resumed; {running:,} {requests} suspended"
    else:
        effect = f"vLLM starts no new request until it is resumed; {running:,} running"
    return f"Paused: {effect}, {waiting}."


def _idle(num_waiting: int) -> str:
    if num_waiting:
        requests = "request waits" if num_waiting == 1 else "requests wait"
        return f"Idle: {num_waiting:,} {requests} for a first step."
    return "Idle: no request is running; the whole pool is free."


def _wait(n: int) -> str:
    return "1 waits" if n == 1 else f"{n:,} wait"


def _queue(status: Status) -> str:
    first = status.requests.first
    if first is None or not first.short_blocks:
        return ""
    lacking = counted(first.short_blocks, "block")
    waiting = _wait(status.requests.waiting)
    return f"{waiting}, the first lacks {lacking}{_reread(first)}{_withheld(first)}; "


def _reread(first: FirstWaiting) -> str:
    if not first.reread_tokens:
        return ""
    return f" to read {counted(first.reread_tokens, 'token')} again"


def _withheld(first: FirstWaiting) -> str:
    return f" ({first.withheld_blocks:,} withheld by --watermark)" if first.withheld_blocks else ""


def _gain(status: Status) -> str:
    """What one compaction would free, and what it would move while nobody waits for that."""
    found, first = status.fragmentation, status.requests.first
    blocks = counted(found.reclaimable_blocks, "block")
    is_short = first is not None and first.short_blocks > 0
    moved = "" if is_short else f" ({data_size(found.reclaim_moved_bytes)} moved)"
    return f"compacting now would free {blocks}{moved}"


def _full(status: Status) -> str:
    """Why compaction does not free enough, and what would."""
    found, first = status.fragmentation, status.requests.first
    if others := _other_groups(status):
        return others
    if found.reclaimable_blocks:
        return f"compacting now would free {found.reclaimable_blocks:,} of them"
    if sessions := _sessions(status):
        return sessions
    is_short = first is not None and first.short_blocks > 0
    holes = "" if is_short or not status.tokens.dead else f"{_holes(status)}; "
    return f"{holes}{found.advice}"


def _holes(status: Status) -> str:
    slots = status.blocks.used * status.block_size
    return f"{slots - status.tokens.live:,} of {slots:,} held slots carry no live token"


def _spared(memory: MemoryPressure | None) -> str:
    """How many tokens live because memory is not short."""
    if memory is None or not memory.spared_tokens:
        return ""
    return f"; {counted(memory.spared_tokens, 'token')} live above the floors"


def _other_groups(status: Status) -> str:
    """Which groups of layers fill the pool, if evicting does not free most of it."""
    others = [group for group in status.groups if not group.managed]
    held, total = (sum(group.blocks for group in of) for of in (others, status.groups))
    if 2 * held <= total:
        return ""
    return (
        f"{kinds_text(others)} hold {held:,} of {total:,} used blocks, which evicting does not "
        "free: fewer requests"
    )


def _sessions(status: Status) -> str:
    requests = status.requests
    return sessions_text(requests.sessions, requests.session_blocks, status.blocks.total)


def _stopped(status: Status) -> str:
    """Who stopped reclamation and when; "" while it is auto."""
    done = status.reclamation
    if done.state == "auto":
        return ""
    by = f" by {done.by}" if done.by else " since the start"
    return f"{done.state}{by}" + ("" if done.since_ts is None else f" at {when(done.since_ts)}")


def _nobody_gives(status: Status) -> str:
    return f"{_stopped(status)}, nobody gives"


# ---------------------------------------------------------------- under pressure


def _under_pressure(status: Status, memory: MemoryPressure) -> str:
    """What is short where requests give: for whom, what is free, what can be given, what ends it.

    The numbers are the terms of `MemoryPressure.short_blocks`. The last clauses are left out if
    the sentence is too long.
    """
    free = f"{status.blocks.free:,} free"
    gave = (
        f"{memory.recent_givers:,} gave {counted(memory.recent_tokens, 'token')} in "
        f"{memory.window_s:g} s"
        if memory.recent_tokens
        else ""
    )
    head = "Giving" if memory.waits_for == "giving" else status.fragmentation.cause.capitalize()
    is_stopped = status.reclamation.state != "auto"
    can_give = f"{counted(memory.givable_blocks, 'block')} can be given"
    if is_stopped:
        can_give = ""
    elif not memory.givable_blocks:
        can_give = _sessions(status) or "every request is at its floor"
    elif memory.waits_for == "end":
        can_give += ", not enough until one ends"
    if not memory.short_blocks:
        since = f"{head} until {status.fragmentation.held_s:.1f} s ago: {free}"
        nobody_gives = f"reclamation {_nobody_gives(status)}" if is_stopped else ""
        return _joined(since, nobody_gives or can_give, gave)
    if is_stopped:
        head = f"Reclamation {_nobody_gives(status)}"
    clauses = [f"{free}, {memory.short_blocks:,} short", can_give, _ending(status, memory), gave]
    return _joined(f"{head}: {_needs(status, memory)}", *clauses)


def _needs(status: Status, memory: MemoryPressure) -> str:
    """Who needs how many blocks, until the running requests have ended if nothing less helps."""
    kept = f", {memory.headroom_blocks:,} headroom" if memory.headroom_blocks else ""
    first, requests = status.requests.first, status.requests
    if first is None:
        return f"running requests take {counted(memory.growth_blocks, 'block')} next{kept}"
    waiting = f"{_wait(requests.waiting)} ({requests.oldest_wait_s:,.0f} s)"
    needed = f"{counted(first.needed_blocks, 'block')} for the first"
    others = f"{memory.growth_blocks:,} for running ones{kept}"
    if memory.waits_for == "end":
        others = f"{memory.future_blocks:,} that running ones still take"
    return f"{waiting}, {needed}{_reread(first)}{_withheld(first)}, {others}"


def _ending(status: Status, memory: MemoryPressure) -> str:
    """What ends the shortage."""
    found, first = status.fragmentation, status.requests.first
    if found.reclaimable_blocks:
        compacting = f"compacting now would free {found.reclaimable_blocks:,}"
        if found.cause == "fragmented":
            return f"{compacting}; {found.advice}"
        if status.reclamation.state != "auto":
            return compacting
    if memory.waits_for == "patience" and first is not None:
        return f"others give in {first.patience_s:.1f} s"
    if memory.waits_for == "end":
        until = "end a session" if status.requests.sessions else ""
        return _other_groups(status) or memory.advice or until
    return memory.advice if memory.waits_for == "resume" else ""


def _joined(head: str, *clauses: str) -> str:
    """One sentence of `head` and as many of the `clauses` as fit."""
    text = head
    for clause in clauses:
        if clause and len(text) + len(clause) + 3 <= MAX_LENGTH:
            text += f"; {clause}"
    return f"{text}."
