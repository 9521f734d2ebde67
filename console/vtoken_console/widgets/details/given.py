"""What a request gave because memory was short, and what it still can, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vtoken_console.style import units

if TYPE_CHECKING:
    from vtoken.wire import RequestRow

REASON = " because memory was short"


def gives(row: RequestRow) -> bool:
    """Whether the request loses tokens only for blocks that somebody needs."""
    return row.evict_when == "pressure" and row.policy != "none"


def given_words(row: RequestRow, width: int | None = None) -> str:
    """What the request gave and can give, or kept at its end; empty if there is nothing to say.

    Without the reason if that makes it fit `width` columns.
    """
    words = _words(row)
    return words if width is None or len(words) <= width else words.replace(REASON, "")


def _words(row: RequestRow) -> str:
    if row.state == "finished":
        return _kept(row)
    if not gives(row):
        return ""
    floor = f"its floor of {units.count(row.budget_tokens)}"
    if row.live == 0:
        return f"has nothing to give while it is {row.state}; {floor} tokens"
    above = row.live - row.budget_tokens
    place = f"{units.count(above)} tokens above {floor}"
    if row.givable_tokens:
        place += f", can give {units.count(row.givable_tokens)}"
    if above <= 0:
        place = f"{'at' if above == 0 else 'below'} {floor} tokens, gives nothing"
    if not row.given_tokens:
        return f"{place}; gave nothing so far"
    return f"{place}; gave {units.count(row.given_tokens)}{REASON}"


def _kept(row: RequestRow) -> str:
    """What a finished request kept, and why it lost the rest."""
    total = row.live + row.dead
    if not row.dead:
        return f"kept all of its {units.count(total)} tokens"
    kept = f"kept {units.count(row.live)} of {units.count(total)} tokens"
    kept += f" ({units.percent(row.live / total, 0)})"
    lost = []
    if row.given_tokens:
        lost.append(f"gave {units.count(row.given_tokens)}{REASON}")
    if row.dead > row.given_tokens:
        lost.append(f"lost {units.count(row.dead - row.given_tokens)} over budget")
    return "; ".join([kept, *lost])
