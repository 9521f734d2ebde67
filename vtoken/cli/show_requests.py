"""Documents formatted as text: requests, tokens, blocks and the audit log."""

from __future__ import annotations

from vtoken import wire
from vtoken.cli.text import clock, plain, table

SLOT_MARKS = {"live": "#", "dead": "x", "free": "."}
FLAG_WORDS = {
    wire.FLAG_USED: "used",
    wire.FLAG_SHARED: "shared",
    wire.FLAG_HASHED: "hashed",
    wire.FLAG_IN_FLIGHT: "in flight",
    wire.FLAG_TAIL: "tail",
}
BLOCKS_A_LINE = 16


def request_lines(rows: list[wire.RequestRow]) -> list[str]:
    """One line for each request, ordered by blocks held."""
    if not rows:
        return ["no request holds or waits for blocks"]
    head = ("REQUEST", "STATE", "LIVE", "DEAD", "BLOCKS/BOUND", "POLICY", "BUDGET")
    ordered = sorted(rows, key=lambda row: -row.blocks)
    return table([head, *(_request_row(row) for row in ordered)])


def _request_row(row: wire.RequestRow) -> tuple[str, ...]:
    return (
        row.id,
        row.state,
        f"{row.live:,}",
        f"{row.dead:,}",
        f"{row.blocks:,}/{row.bound_blocks:,}",
        row.policy,
        f"{row.budget_tokens:,}",
    )


def request_detail_lines(detail: wire.RequestDetail) -> list[str]:
    """One request, and its block table as block:live pairs."""
    rows = [
        ("request", f"{detail.id}, {detail.state}"),
        ("tokens", f"{detail.live:,} live, {detail.dead:,} dead"),
        ("length", f"{detail.prompt_tokens:,} prompt, {detail.output_tokens:,} output"),
        ("policy", f"{detail.policy}, budget {detail.budget_tokens:,} tokens"),
        (
            "blocks",
            f"{detail.blocks:,} held, {detail.bound_blocks:,} at least, "
            f"{detail.naive_blocks:,} under naive eviction",
        ),
        *_protection(detail),
        ("layout", "dense: stock attention path" if detail.dense else "has holes"),
        (
            "so far",
            f"{detail.moved_tokens:,} tokens moved, {detail.recycled_slots:,} slots recycled, "
            f"{detail.preemptions:,} preemptions",
        ),
    ]
    pairs = [
        f"{block}:{live}"
        for block, live in zip(detail.block_table, detail.block_live, strict=False)
    ]
    lines = [
        " ".join(pairs[start : start + BLOCKS_A_LINE])
        for start in range(0, len(pairs), BLOCKS_A_LINE)
    ]
    return [*table(rows), "block table, as block:live", *(f"  {line}" for line in lines)]


def _protection(detail: wire.RequestDetail) -> list[tuple[str, str]]:
    spans = ", ".join(f"{start:,}-{end - 1:,}" for start, end in detail.protected)
    fields = [("protected", f"tokens {spans}")] if spans else []
    if detail.protection_cut:
        fields.append(
            ("cut", f"budget too small to protect all of: {', '.join(detail.protection_cut)}")
        )
    return fields


def token_line(row: wire.TokenRow) -> str:
    """One token, in fixed columns."""
    slot = "-" if row.block is None else f"{row.block}:{row.offset}"
    score = "" if row.score is None else f"  {row.score:.6g}"
    protected = "  protected" if row.protected else ""
    state = "live" if row.live else "dead"
    return f"{row.token_id:>8}  {state}  {slot:<12}{score}{protected}".rstrip()


def block_lines(block: wire.BlockDetail) -> list[str]:
    """One block with its owners and one mark for each slot."""
    flags = [word for flag, word in FLAG_WORDS.items() if block.flags & flag]
    marks = "".join(SLOT_MARKS[slot.state] for slot in block.slots)
    rows = [
        ("block", f"{block.id}, {', '.join(flags) or 'free'}"),
        ("live", f"{block.live:,} of {len(block.slots):,} slots"),
        ("pinned", block.pinned),
        ("slots", f"{marks}  (# live, x dead, . free)"),
    ]
    rows += [
        ("owner", f"{owner.request_id}: {owner.live:,} live, logical block {owner.index:,}")
        for owner in block.owners
    ]
    return table(rows)


def audit_lines(page: wire.AuditPage) -> list[str]:
    """One line for each entry, oldest first."""
    lines = [audit_line(entry) for entry in page.entries] or ["no changes so far"]
    if page.dropped:
        lines.insert(0, f"{page.dropped:,} older entries are no longer held")
    return lines


def audit_line(entry: wire.AuditEntry) -> str:
    changes = ", ".join(
        f"{name} {plain(old)} -> {plain(new)}" for name, (old, new) in entry.changes.items()
    )
    action = f"{entry.action} (dry run)" if entry.dry_run else entry.action
    line = f"{clock(entry.ts)}  {entry.actor}  {action}  revision {entry.revision}"
    return f"{line}: {changes}" if changes else line
