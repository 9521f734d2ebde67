"""Documents formatted as text: requests, tokens, blocks and the audit log."""

from __future__ import annotations

from vtoken import wire
from vtoken.cli.printing import Part, Table, facts, plain
from vtoken.sentences import clock, counted, no_change_text, state_text, when
from vtoken.wire.request_names import short_id

SLOT_MARKS = {"live": "#", "dead": "x", "free": "."}
FLAG_WORDS = {
    wire.FLAG_USED: "used",
    wire.FLAG_SHARED: "shared",
    wire.FLAG_HASHED: "hashed",
    wire.FLAG_IN_FLIGHT: "in flight",
    wire.FLAG_TAIL: "tail",
    wire.FLAG_OTHER: "held by another group of layers",
    wire.FLAG_NULL: "vLLM's null block",
}


def request_parts(rows: list[wire.RequestRow]) -> list[Part]:
    """One line for each request, ordered by blocks held."""
    if not rows:
        return ["no request holds or waits for blocks"]
    head: tuple[str, ...] = ("REQUEST", "STATE", "LIVE", "DEAD", "BLOCKS/BOUND", "POLICY", "BUDGET")
    ordered = sorted(rows, key=lambda row: -row.blocks)
    cells = [_request_row(row) for row in ordered]
    if any(_gives(row) for row in rows):
        head += ("CAN GIVE", "GAVE")
        cells = [cell + _pressure_cells(row) for row, cell in zip(ordered, cells, strict=True)]
    return [Table([head, *cells])]


def _gives(row: wire.RequestRow) -> bool:
    """Whether it loses tokens only where memory is short."""
    return row.evict_when == "pressure" and row.policy != "none"


def _pressure_cells(row: wire.RequestRow) -> tuple[str, ...]:
    can_give = f"{row.givable_tokens:,}" if _gives(row) else "-"
    return can_give, f"{row.given_tokens:,}" if _gives(row) or row.given_tokens else "-"


def _request_row(row: wire.RequestRow) -> tuple[str, ...]:
    return (
        short_id(row.id),
        state_text(row),
        f"{row.live:,}",
        f"{row.dead:,}",
        f"{row.blocks:,}/{row.bound_blocks:,}",
        row.policy,
        f"{row.budget_tokens:,}",
    )


def request_detail_parts(detail: wire.RequestDetail) -> list[Part]:
    """One request, and its block table as block:live pairs; of a finished one, what it kept."""
    if detail.state == "finished":
        return [_finished(detail)]
    held = zip(detail.block_table, detail.block_live, strict=False)
    rows = facts(
        ("request", f"{detail.id}, {state_text(detail)}"),
        ("tokens", f"{detail.live:,} live, {detail.dead:,} dead"),
        ("length", _length(detail)),
        ("policy", _policy(detail)),
        (
            "blocks",
            f"{detail.blocks:,} held, {detail.bound_blocks:,} at least, "
            f"{detail.naive_blocks:,} under naive eviction",
        ),
        ("pressure", _pressure(detail)),
        *_protection(detail),
        ("layout", "dense: stock attention path" if detail.dense else "has holes"),
        (
            "so far",
            f"{detail.moved_tokens:,} tokens moved, {detail.recycled_slots:,} slots recycled, "
            f"{detail.preemptions:,} preemptions",
        ),
        ("block:live", " ".join(f"{block}:{live}" for block, live in held)),
    )
    return [rows]


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


def _pressure(detail: wire.RequestDetail) -> str:
    """What a running request that gives under pressure gave, and what is left to give."""
    if not _gives(detail) or not detail.block_table:
        return ""
    gave = f"gave {detail.given_tokens:,} tokens because memory was short, "
    return f"{gave}can give {detail.givable_tokens:,} more in whole blocks"


def _finished(detail: wire.RequestDetail) -> Table:
    num_tokens = detail.live + detail.dead
    share = f"{detail.live / num_tokens:.1%}" if num_tokens else "-"
    ended = "" if detail.ended_ts is None else f" at {when(detail.ended_ts)}"
    return facts(
        ("request", f"{detail.id}, finished{ended}"),
        ("kept", f"{share}: {detail.live:,} of {num_tokens:,} tokens"),
        ("lost", _lost(detail)),
        ("length", _length(detail)),
        ("policy", _policy(detail)),
        *_protection(detail),
        ("preempted", f"{detail.preemptions:,} times"),
    )


def _lost(detail: wire.RequestDetail) -> str:
    """Why the dead tokens of a finished request died."""
    reasons = [
        f"{number:,} {why}"
        for number, why in (
            (detail.given_tokens, "gave way because memory was short"),
            (detail.dead - detail.given_tokens, "were beyond its budget"),
        )
        if number
    ]
    return ", ".join(reasons) or "nothing"


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


def token_line(row: wire.TokenRow) -> str:
    """One token, in fixed columns."""
    slot = "-" if row.block is None else f"{row.block}:{row.offset}"
    score = "" if row.score is None else f"  {row.score:.6g}"
    mark = "  protected" if row.protected else "  forgotten" if row.forgotten else ""
    state = "live" if row.live else "dead"
    return f"{row.token_id:>8}  {state}  {slot:<12}{score}{mark}".rstrip()


def block_parts(block: wire.BlockDetail) -> list[Part]:
    """One block with its owners and one mark for each slot."""
    flags = [word for flag, word in FLAG_WORDS.items() if block.flags & flag]
    named = ("block", f"{block.id}, {', '.join(flags) or 'free'}")
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
    changes = ", ".join(
        f"{name} {plain(old)} -> {plain(new)}" for name, (old, new) in entry.changes.items()
    )
    action = f"{entry.action} (dry run)" if entry.dry_run else entry.action
    line = f"{clock(entry.ts)}  {entry.actor}  {action}  revision {entry.revision}"
    changes = changes or no_change_text(entry)
    return f"{line}: {changes}" if changes else line
