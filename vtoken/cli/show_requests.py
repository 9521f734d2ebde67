"""How requests, their tokens, blocks and the audit log look as text.

Knows the wire; says nothing itself.
"""

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
    """A line a request, those that hold most blocks first."""
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
        ("layout", "dense: the stock attention path" if detail.dense else "has holes"),
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
    said = [("protected", f"tokens {spans}")] if spans else []
    if detail.protection_cut:
        said.append(("no room", f"to protect all of: {', '.join(detail.protection_cut)}"))
    return said


def token_line(row: wire.TokenRow) -> str:
    """One token; columns never change their width."""
    where = "-" if row.block is None else f"{row.block}:{row.offset}"
    score = "" if row.score is None else f"  {row.score:.6g}"
    spared = "  protected" if row.protected else ""
    life = "live" if row.live else "dead"
    return f"{row.token_id:>8}  {life}  {where:<12}{score}{spared}".rstrip()


def block_lines(block: wire.BlockDetail) -> list[str]:
    """One block, its owners, and a mark a slot."""
    flags = [word for flag, word in FLAG_WORDS.items() if block.flags & flag]
    marks = "".join(SLOT_MARKS[slot.state] for slot in block.slots)
    rows = [
        ("block", f"{block.id}, {', '.join(flags) or 'free'}"),
        ("live", f"{block.live:,} of {len(block.slots):,} slots"),
        ("pinned", block.pinned),
        ("slots", f"{marks}  (# live, x dead, . free)"),
    ]
    rows += [
        ("owner", f"{owner.request_id}: {owner.live:,} live, block {owner.index:,} of its own")
        for owner in block.owners
    ]
    return table(rows)


def audit_lines(page: wire.AuditPage) -> list[str]:
    """A line an entry, oldest first."""
    lines = [audit_line(entry) for entry in page.entries] or ["nobody has changed anything"]
    if page.dropped:
        lines.insert(0, f"{page.dropped:,} older entries are no longer held")
    return lines


def audit_line(entry: wire.AuditEntry) -> str:
    changes = ", ".join(
        f"{name} {plain(old)} -> {plain(new)}" for name, (old, new) in entry.changes.items()
    )
    action = f"{entry.action} (dry run)" if entry.dry_run else entry.action
    said = f"{clock(entry.ts)}  {entry.actor}  {action}  revision {entry.revision}"
    return f"{said}: {changes}" if changes else said
