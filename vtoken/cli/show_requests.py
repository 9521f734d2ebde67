"""Documents formatted as text: requests, tokens, blocks and the audit log."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vtoken import wire
from vtoken.base.request_ids import short_id
from vtoken.cli.printing import Part, Table, coloured, facts
from vtoken.sentences import (
    audit_text,
    clock,
    counted,
    duration_text,
    flag_words,
    span,
    state_text,
    when,
)
from vtoken.sentences.request import given_words, gives, live_share, wait_words, waited_s

SLOT_MARKS = {"live": "#", "dead": "x", "free": "."}
Cell = Callable[[wire.RequestRow, float], str]  # of a row, now

COLUMNS: dict[str, Cell] = {
    "REQUEST": lambda row, _: short_id(row.id),
    "STATE": lambda row, _: _state(row),
    "AGE": lambda row, now: span(now - row.arrived_ts) if row.arrived_ts else "-",
    "WAITED": lambda row, now: duration_text(waited_s(row, now)),
    "PROMPT+OUT": lambda row, _: f"{row.prompt_tokens:,}+{row.output_tokens:,}",
    "KEPT": lambda row, _: "-" if live_share(row) is None else f"{live_share(row):.0%}",
    "CAN GIVE": lambda row, _: f"{row.givable_tokens:,}" if gives(row) and row.blocks else "-",
    "GAVE UP": lambda row, _: f"{row.given_tokens:,}" if gives(row) or row.given_tokens else "-",
    "BLOCKS": lambda row, _: f"{row.blocks:,}" if row.blocks else f"need {row.needed_blocks:,}",
}
PRESSURE = ("CAN GIVE", "GAVE UP")  # shown if a request gives under pressure
WIDE: dict[str, Cell] = {
    "COULD BE": lambda row, _: f"{row.bound_blocks:,}",
    "LIVE": lambda row, _: f"{row.live:,}",
    "DEAD": lambda row, _: f"{row.dead:,}",
    "PARKED": lambda row, _: f"{row.parked_tokens:,}",
    "PREEMPTED": lambda row, _: f"{row.preemptions:,}",
    "POLICY": lambda row, _: row.policy,
    "BUDGET": lambda row, _: f"{row.budget_tokens:,}",
    "ID": lambda row, _: row.id,
}
ORDERS: dict[str, Callable[[wire.RequestRow, float], Any]] = {  # largest first
    "wait": lambda row, now: (row.waiting_since_ts is not None, waited_s(row, now), row.blocks),
    "age": lambda row, _: -row.arrived_ts,
    "length": lambda row, _: row.prompt_tokens + row.output_tokens,
    "kept": lambda row, _: -(live_share(row) or 1.0),
    "give": lambda row, _: row.givable_tokens,
    "gave": lambda row, _: row.given_tokens,
    "blocks": lambda row, _: row.blocks,
}


def request_parts(
    rows: Sequence[wire.RequestRow],
    *,
    sort: str,
    wide: bool,
    now: float,
    engines: Mapping[str, int],
) -> list[Part]:
    """A row for each request, in the order `sort`, and the sum of all. `engines`: by request."""
    if not rows:
        return ["no request holds or waits for blocks"]
    columns = {**COLUMNS, **(WIDE if wide else {})}
    if len(set(engines.values())) > 1:
        columns = {"ENGINE": lambda row, _: f"{engines[row.id]}", **columns}
    if not any(gives(row) for row in rows):
        columns = {head: cell for head, cell in columns.items() if head not in PRESSURE}
    ordered = sorted(rows, key=lambda row: ORDERS[sort](row, now), reverse=True)
    cells = [[cell(row, now) for cell in columns.values()] for row in ordered]
    return [Table(cells, [*columns]), _sum(rows, now)]


def _sum(rows: Sequence[wire.RequestRow], now: float) -> str:
    """What all requests have in common: who waits for what, who gave and can give."""
    waiting = [row for row in rows if row.waiting_since_ts is not None]
    needed = sum(row.needed_blocks for row in waiting)
    waits = f"{len(waiting) or 'none'} of {counted(len(rows), 'request')}"
    waits += " wait" if len(waiting) > 1 else " waits"
    if waiting:
        longest = duration_text(max(waited_s(row, now) for row in waiting))
        waits += f", the longest for {longest}, for {counted(needed, 'block')} in all"
    held = f"{counted(sum(row.blocks for row in rows), 'block')} held"
    gave = sum(row.given_tokens for row in rows)
    can_give = sum(row.givable_tokens for row in rows)
    given = f"{gave:,} tokens given up, {can_give:,} more can be" if gave or can_give else ""
    parked = sum(row.parked_tokens for row in rows)
    return "; ".join(filter(None, (waits, held, given, f"{parked:,} parked" if parked else "")))


def _state(row: wire.RequestRow) -> str:
    return coloured(state_text(row), "fragmented" if row.waiting_since_ts is not None else "")


def _parked(row: wire.RequestRow) -> str:
    return f" ({row.parked_tokens:,} of them parked)" if row.parked_tokens else ""


def request_detail_parts(detail: wire.RequestDetail, now: float) -> list[Part]:
    """One request, and its block table as block:live pairs; of a finished one, what it kept."""
    ended = "" if detail.ended_ts is None else f" at {when(detail.ended_ts)}"
    state = f"{detail.id}, {state_text(detail)}{ended}"
    about = [
        ("request", ", ".join(filter(None, [state, wait_words(detail, now)]))),
        ("tokens", f"{detail.live:,} live, {detail.dead:,} dead{_parked(detail)}"),
        ("pressure", given_words(detail)),
        ("preempted", f"{detail.preemptions:,} times" if detail.preemptions else ""),
        ("length", _length(detail)),
        ("policy", _policy(detail)),
        *_protection(detail),
    ]
    held = zip(detail.block_table, detail.block_live, strict=False)
    blocks = [
        (
            "blocks",
            f"{detail.blocks:,} held, could be {detail.bound_blocks:,}, "
            f"{detail.naive_blocks:,} without vToken",
        ),
        ("layout", "dense: stock attention path" if detail.dense else "has holes"),
        (
            "so far",
            f"{detail.moved_tokens:,} tokens moved, {detail.recycled_slots:,} slots recycled",
        ),
        ("block:live", " ".join(f"{block}:{live}" for block, live in held)),
    ]
    return [facts(*about, *([] if detail.state == "finished" else blocks))]


def _policy(detail: wire.RequestDetail) -> str:
    budget = "floor" if detail.evict_when == "pressure" else "budget"
    line = f"{detail.policy}, {budget} {detail.budget_tokens:,} tokens"
    if detail.asked_budget_tokens is None:
        return line
    return f"{line}, the fewest that it takes; the request asked for {detail.asked_budget_tokens:,}"


def _length(detail: wire.RequestDetail) -> str:
    left = detail.prompt_tokens + detail.output_tokens - detail.live - detail.dead
    length = f"{detail.prompt_tokens:,} prompt, {detail.output_tokens:,} output"
    return f"{length}; {counted(left, 'token')} not in the cache" if left > 0 else length


def _protection(detail: wire.RequestDetail) -> list[tuple[str, str]]:
    cut = ", ".join(detail.protection_cut)
    return [
        ("protected", _spans(detail.protected)),
        ("cut", f"budget too small to protect all of: {cut}" if cut else ""),
        ("forgotten", _spans(detail.forgotten)),
    ]


def _spans(spans: list[tuple[int, int]]) -> str:
    """`tokens 3-8, 60-98`; "" for none."""
    listed = ", ".join(f"{start:,}-{end - 1:,}" for start, end in spans)
    return f"tokens {listed}" if listed else ""


def forgotten_lines(forgotten: wire.Forgotten) -> list[str]:
    """What a call to forget tokens has added, and what is forgotten now."""
    return [
        f"{forgotten.new_tokens:,} more tokens of {forgotten.request_id} die first",
        f"forgotten: {_spans(forgotten.spans)}, {forgotten.live_tokens:,} of them live",
        *forgotten.notes,
    ]


def ended_lines(ended: wire.Ended) -> list[str]:
    """What the end of a session frees."""
    freed = counted(ended.freed_blocks, "block")
    return [f"session {ended.request_id} has ended and frees {freed}", *ended.notes]


def restored_lines(restored: wire.Restored, *, dry_run: bool) -> list[str]:
    """What comes back of a request's parked tokens, or would, and why the others do not."""
    back, parked = restored.restorable_tokens, restored.parked_tokens
    verb = "would come back now" if dry_run else "come back now"
    line = f"{restored.request_id}: {back:,} of {counted(parked, 'parked token')} {verb}"
    line += f", in {counted(restored.blocks, 'block')}" if restored.blocks else ""
    return [line, *restored.notes]


def token_line(row: wire.TokenRow) -> str:
    """One token, in fixed columns."""
    slot = "-" if row.block is None else f"{row.block}:{row.offset}"
    score = "" if row.score is None else f"  {row.score:.6g}"
    mark = "  protected" if row.protected else "  forgotten" if row.forgotten else ""
    state = "live" if row.live else "dead"
    return f"{row.token_id:>8}  {state}  {slot:<12}{score}{mark}".rstrip()


def block_parts(block: wire.BlockDetail) -> list[Part]:
    """One block with its owners and one mark for each slot."""
    state = ", ".join(flag_words(block.flags)) or ("used" if block.flags else "free")
    named = ("block", f"{block.id}, {state}")
    if not block.slots:
        return [facts(named)]
    marks = "".join(SLOT_MARKS[slot.state] for slot in block.slots)
    rows = facts(
        named,
        ("live", f"{block.live:,} of {len(block.slots):,} slots"),
        ("pinned", block.pinned),
        ("slots", f"{marks}  (# live, x dead, . free)"),
        *(
            ("owner", f"{owner.request_id}: {owner.live:,} live, logical block {owner.index:,}")
            for owner in block.owners
        ),
    )
    return [rows]


def audit_lines(page: wire.AuditPage) -> list[str]:
    """One line for each entry, oldest first."""
    lines = [audit_line(entry) for entry in page.entries] or ["no changes so far"]
    if page.dropped:
        lines.insert(0, f"{page.dropped:,} entries were lost while they could not be written")
    return lines


def audit_line(entry: wire.AuditEntry) -> str:
    action = f"{entry.action} (dry run)" if entry.dry_run else entry.action
    line = f"{clock(entry.ts)}  {entry.actor}  {action}  revision {entry.revision}"
    text = audit_text(entry)
    return f"{line}: {text}" if text else line
