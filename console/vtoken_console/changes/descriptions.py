"""Describes changes as paragraphs: what-if, gates, prices, outcome, irreversible effects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vtoken_console.changes.controls import applied_text, effective_text
from vtoken_console.style import palette, units
from vtoken_console.style.values import change_text

if TYPE_CHECKING:
    from vtoken import wire
    from vtoken_console.style.palette import Paragraph

EVICTION_RULES = frozenset(
    {
        "policy",
        "budget_tokens",
        "budget_ratio",
        "budget_floor_tokens",
        "interval_tokens",
        "evict_during",
        "evict_when",
        "evict_after_wait_ms",
        "protect",
    }
)


def may_evict(patch: Mapping[str, Any]) -> bool:
    """Whether a patch changes fields that decide which tokens are evicted."""
    return bool(EVICTION_RULES & patch.keys())


def irreversible(
    changes: Mapping[str, list[Any]],
    policy: str,
    evicted_tokens: int,
    live_tokens: Iterable[int] = (),
    evict_when: str = "always",
) -> str | None:
    """Why a change needs confirmation; None if undo restores everything.

    `policy`, `evict_when`: in force before the change; `live_tokens`: of each request. Only evicted
    tokens cannot be restored.
    """
    old, new = changes.get("policy", [{"name": policy}, {"name": policy}])
    before, after = changes.get("budget_tokens", [0, 0])
    was, when = changes.get("evict_when", [evict_when, evict_when])
    if new["name"] == "none" or not EVICTION_RULES & changes.keys():
        return None
    if evicted_tokens and after <= before:
        return f"It evicts {units.count(evicted_tokens)} tokens now."
    if old["name"] != new["name"]:
        return f"From now on {new['name']} chooses the tokens to evict."
    if was == "pressure" and when == "always":
        return "From now on tokens over the budget are evicted although nobody needs the memory."
    if after < before:
        over = units.count(sum(max(0, live - after) for live in live_tokens))
        if when == "pressure":
            keep = f"Requests may be cut down to {units.count(after)} live tokens"
            return f"{keep} while memory is short; they hold {over} more than that."
        return f"Requests keep {units.count(after)} live tokens; they hold {over} more than that."
    return None


def what_if_paragraphs(
    result: wire.PatchResult, gates_now: Sequence[wire.Gate] = ()
) -> list[Paragraph]:
    """Describes a validate_only result: what it would evict, move and free now, and its gates."""
    text, warn = palette.TEXT_STYLE, palette.WARN_STYLE
    paragraphs: list[Paragraph] = [
        (change_text(result.changes) or "This changes nothing.", palette.BOLD_STYLE)
    ]
    preview = result.what_if
    if preview is not None:
        evicts = bool(preview.evicted_tokens or preview.waiting_tokens)
        # If no eviction rule changes, these evictions are due without the change, too.
        is_lossy = evicts and may_evict(result.changes)
        lost = ", which cannot come back" if is_lossy else ""
        evicted = units.count(preview.evicted_tokens, 9)
        paragraphs += [
            (
                f"evicts now  {evicted} tokens{_later(preview)}{lost}",
                warn if is_lossy else text,
            ),
            (
                f"moves now   {units.count(preview.moved_tokens, 9)} tokens "
                f"({units.data_size(preview.moved_bytes)}){_between(preview)}",
                text,
            ),
            (f"frees now   {units.count(preview.freed_blocks, 9)} blocks", text),
            *((line, text) for line in _room(preview)),
        ]
        if preview.deferred_reason:
            paragraphs.append((f"deferred: {preview.deferred_reason}", warn))
        paragraphs += gate_paragraphs(preview.gates, gates_now)
    paragraphs += [(note, warn) for note in result.notes]
    return paragraphs


def _room(preview: wire.WhatIf) -> list[str]:
    """What running requests could give, and how many more would fit, if the server reports it."""
    lines = []
    if preview.givable_blocks or preview.short_blocks:
        short = f"; {units.count(preview.short_blocks)} blocks are short" * (
            preview.short_blocks > 0
        )
        given = f"{units.count(preview.givable_tokens, 9)} tokens"
        lines.append(f"can give    {given} in {units.count(preview.givable_blocks)} blocks{short}")
    if preview.more_requests is not None:
        fit = units.count(preview.more_requests, 9)
        lines.append(f"room for    {fit} more requests like the running ones")
    return lines


def _later(preview: wire.WhatIf) -> str:
    """How many more tokens are evicted once their scores are available."""
    return (
        f", {units.count(preview.waiting_tokens)} more once scored"
        if preview.waiting_tokens
        else ""
    )


def _between(preview: wire.WhatIf) -> str:
    """How many blocks are emptied and filled, if the server reports it."""
    if not preview.source_blocks:
        return ""
    into = f"{units.count(preview.destination_blocks)} fresh ones"
    return f" out of {units.count(preview.source_blocks)} blocks into {into}"


def gate_paragraphs(gates: Sequence[wire.Gate], gates_now: Sequence[wire.Gate]) -> list[Paragraph]:
    """The gates of an automatic round that would open, close or stay closed."""
    was_open = {gate.name: gate.open for gate in gates_now}
    opens = [g for g in gates if g.open and not was_open.get(g.name, True)]
    closes = [g for g in gates if not g.open and was_open.get(g.name, False)]
    stay_closed = [g for g in gates if not g.open and not was_open.get(g.name, False)]
    paragraphs: list[Paragraph] = [
        (f"{verb} {', '.join(f'{g.name} ({g.detail})' for g in changed)}", style)
        for verb, changed, style in (
            ("opens:", opens, palette.GOOD_STYLE),
            ("closes:", closes, palette.WARN_STYLE),
            ("stays closed:", stay_closed, palette.WARN_STYLE),
        )
        if changed
    ]
    if gates and not closes and not stay_closed:
        paragraphs.append(("Every gate is open: an automatic round would run.", palette.GOOD_STYLE))
    return paragraphs


def price_paragraphs(prices: wire.RoundPrices | None) -> list[Paragraph]:
    """The prices of holes and copies on the server, and saving and cost of a round now."""
    if prices is None:
        return []
    if not prices.hole.us:
        return [("Holes cost nothing here: no round runs to save time.", palette.MUTED_STYLE)]
    hole, copy = (
        f"{price.us:,.2f} µs a token ({price.source})" for price in (prices.hole, prices.copy)
    )
    text = (
        f"A hole costs {hole} and step, a copy {copy}: a round now saves "
        f"{prices.saving_us:,.0f} µs and costs {prices.cost_us:,.0f} µs."
    )
    return [(text, palette.MUTED_STYLE)]


def calibration_paragraphs(found: wire.Calibration | None) -> list[Paragraph]:
    """The layers and heads of the signal in force, and their source, as one sentence."""
    if found is None:
        return []
    if found.signal is None:
        return [("The policy in force reads no signal.", palette.MUTED_STYLE)]
    layers, heads = ", ".join(map(str, found.layers)), ", ".join(map(str, found.heads))
    where = f"layer{'s' * (len(found.layers) > 1)} {layers}"
    if heads:
        where += f", head{'s' * (len(found.heads) > 1)} {heads}"
    source = {
        "configured": "as configured",
        "profile": f"by the calibration profile {found.fingerprint[:12]}",
        "default depth": "the default depth"
        + ("; the profile found no better layer" if found.fingerprint else ""),
    }[found.source]
    text = f"Signal {found.signal} from {where}: {source}."
    if not found.fingerprint:
        text += f" No calibration profile: {found.detail}."
    return [(text, palette.MUTED_STYLE)]


def confirm_paragraphs(
    reason: str, host: str, model: str, result: wire.PatchResult
) -> list[Paragraph]:
    """The question before a change that undo cannot fully revert."""
    preview = result.what_if
    paragraphs: list[Paragraph] = [
        (f"On {host}, model {model}:", palette.BOLD_STYLE),
        (change_text(result.changes), palette.TEXT_STYLE),
        ("", palette.TEXT_STYLE),
        (reason, palette.WARN_STYLE),
        (
            "Evicted tokens cannot come back: undo restores the setting, not the tokens.",
            palette.TEXT_STYLE,
        ),
    ]
    if preview is not None:
        moved = f"{units.count(preview.moved_tokens)} ({units.data_size(preview.moved_bytes)})"
        text = (
            f"Now it would evict {units.count(preview.evicted_tokens)} tokens{_later(preview)}, "
            f"move {moved} and free {units.count(preview.freed_blocks)} blocks."
        )
        paragraphs.append((text, palette.TEXT_STYLE))
    return paragraphs


def applied_paragraphs(result: wire.PatchResult) -> list[Paragraph]:
    """The outcome of a change: accepted or in force, and the values in effect until then."""
    verb = "Accepted" if result.outcome == "accepted" else "Applied"
    paragraphs: list[Paragraph] = [(f"{verb}: {applied_text(result)}.", palette.GOOD_STYLE)]
    if result.trial is not None:
        text = "On trial: the engine reverts it automatically, even if this console closes."
        paragraphs.append((text, palette.WARN_STYLE))
    if result.changes:
        paragraphs.append((effective_text(result), palette.TEXT_STYLE))
    return [*paragraphs, ("esc closes, then u undoes.", palette.MUTED_STYLE)]
