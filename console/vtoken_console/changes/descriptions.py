"""What a change would come to, or has, in words: its what-if, its gates, what nobody can undo.

Knows no widget and no socket.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vtoken_console.changes.controls import applied_text, effective_text
from vtoken_console.look import palette, units
from vtoken_console.look.values import change_text

if TYPE_CHECKING:
    from vtoken import wire
    from vtoken_console.look.palette import Paragraph

EVICTION_RULES = frozenset(
    {
        "policy",
        "budget_tokens",
        "budget_ratio",
        "budget_floor_tokens",
        "interval_tokens",
        "evict_during",
        "protect",
    }
)


def may_evict(patch: Mapping[str, Any]) -> bool:
    """Whether a patch touches what decides which tokens live."""
    return bool(EVICTION_RULES & patch.keys())


def irreversible(
    changes: Mapping[str, list[Any]],
    policy: str,
    evicted_tokens: int,
    live_tokens: Iterable[int] = (),
) -> str | None:
    """Why a change needs a confirmation; None where undo brings everything back.

    `policy`: the one in force before; `live_tokens`: of each request. Evicted tokens never come
    back; blocks, moves, gates do.
    """
    old, new = changes.get("policy", [{"name": policy}, {"name": policy}])
    before, after = changes.get("budget_tokens", [0, 0])
    if new["name"] == "none" or not EVICTION_RULES & changes.keys():
        return None
    if evicted_tokens and after <= before:
        return f"It evicts {units.count(evicted_tokens)} tokens now."
    if old["name"] != new["name"]:
        return f"From now on {new['name']} chooses the tokens that die."
    if after < before:
        over = units.count(sum(max(0, live - after) for live in live_tokens))
        return f"Requests keep {units.count(after)} live tokens; they hold {over} more than that."
    return None


def what_if_paragraphs(
    result: wire.PatchResult, gates_now: Sequence[wire.Gate] = ()
) -> list[Paragraph]:
    """A validate_only answer: what it would evict, move and free now, its gates."""
    text, warn = palette.TEXT_STYLE, palette.WARN_STYLE
    said: list[Paragraph] = [
        (change_text(result.changes) or "This changes nothing.", palette.BOLD_STYLE)
    ]
    what = result.what_if
    if what is not None:
        # Otherwise they are due under the configuration in force as well.
        dying = bool(what.evicted_tokens or what.waiting_tokens)
        costs = dying and may_evict(result.changes)
        lost = ", which cannot come back" if costs else ""
        said += [
            (
                f"evicts now  {units.count(what.evicted_tokens, 9)} tokens{_later(what)}{lost}",
                warn if costs else text,
            ),
            (
                f"moves now   {units.count(what.moved_tokens, 9)} tokens "
                f"({units.data_size(what.moved_bytes)}){_between(what)}",
                text,
            ),
            (f"frees now   {units.count(what.freed_blocks, 9)} blocks", text),
        ]
        if what.deferred_reason:
            said.append((f"deferred: {what.deferred_reason}", warn))
        said += gate_paragraphs(what.gates, gates_now)
    said += [(note, warn) for note in result.notes]
    return said


def _later(what: wire.WhatIf) -> str:
    """How many more die once their scores have come."""
    return f", {units.count(what.waiting_tokens)} more once scored" if what.waiting_tokens else ""


def _between(what: wire.WhatIf) -> str:
    """How many blocks are emptied and how many are filled, where the server tells."""
    if not what.source_blocks:
        return ""
    into = f"{units.count(what.destination_blocks)} fresh ones"
    return f" out of {units.count(what.source_blocks)} blocks into {into}"


def gate_paragraphs(gates: Sequence[wire.Gate], gates_now: Sequence[wire.Gate]) -> list[Paragraph]:
    """Which gates of an automatic round would open, close or stay closed."""
    was_open = {gate.name: gate.open for gate in gates_now}
    opens = [g for g in gates if g.open and not was_open.get(g.name, True)]
    closes = [g for g in gates if not g.open and was_open.get(g.name, False)]
    shut = [g for g in gates if not g.open and not was_open.get(g.name, False)]
    said: list[Paragraph] = [
        (f"{verb} {', '.join(f'{g.name} ({g.detail})' for g in some)}", look)
        for verb, some, look in (
            ("opens:", opens, palette.GOOD_STYLE),
            ("closes:", closes, palette.WARN_STYLE),
            ("stays closed:", shut, palette.WARN_STYLE),
        )
        if some
    ]
    if gates and not closes and not shut:
        said.append(("Every gate is open: an automatic round would run.", palette.GOOD_STYLE))
    return said


def price_paragraphs(prices: wire.RoundPrices | None) -> list[Paragraph]:
    """What holes and copies cost on the server's machine, and what a round now is worth."""
    if prices is None:
        return []
    if not prices.hole.us:
        return [("Holes cost nothing here: no round runs to save time.", palette.MUTED_STYLE)]
    hole, copy = (
        f"{price.us:,.2f} µs a token ({price.source})" for price in (prices.hole, prices.copy)
    )
    told = (
        f"A hole costs {hole} and step, a copy {copy}: a round now saves "
        f"{prices.saving_us:,.0f} µs and costs {prices.cost_us:,.0f} µs."
    )
    return [(told, palette.MUTED_STYLE)]


def calibration_paragraphs(found: wire.Calibration | None) -> list[Paragraph]:
    """Where the policy in force takes its signal from, in one sentence."""
    if found is None:
        return []
    if found.signal is None:
        return [("The policy in force reads no signal.", palette.MUTED_STYLE)]
    layers, heads = ", ".join(map(str, found.layers)), ", ".join(map(str, found.heads))
    where = f"layer{'s' * (len(found.layers) > 1)} {layers}"
    if heads:
        where += f", head{'s' * (len(found.heads) > 1)} {heads}"
    why = {
        "configured": "as configured",
        "profile": f"by the calibration profile {found.fingerprint[:12]}",
        "default depth": "the default depth"
        + (", which the profile found no better layer than" if found.fingerprint else ""),
    }[found.source]
    told = f"Signal {found.signal} from {where}: {why}."
    if not found.fingerprint:
        told += f" No calibration profile: {found.detail}."
    return [(told, palette.MUTED_STYLE)]


def confirm_paragraphs(
    why: str, host: str, model: str, result: wire.PatchResult
) -> list[Paragraph]:
    """The question before a change that undo does not bring back."""
    what = result.what_if
    said: list[Paragraph] = [
        (f"On {host}, model {model}:", palette.BOLD_STYLE),
        (change_text(result.changes), palette.TEXT_STYLE),
        ("", palette.TEXT_STYLE),
        (why, palette.WARN_STYLE),
        (
            "Evicted tokens cannot come back: undo restores the setting, not the tokens.",
            palette.TEXT_STYLE,
        ),
    ]
    if what is not None:
        said.append(
            (
                f"Now it would evict {units.count(what.evicted_tokens)} tokens{_later(what)}, move "
                f"{units.count(what.moved_tokens)} ({units.data_size(what.moved_bytes)}) and free "
                f"{units.count(what.freed_blocks)} blocks.",
                palette.TEXT_STYLE,
            )
        )
    return said


def applied_paragraphs(result: wire.PatchResult) -> list[Paragraph]:
    """What became of a change: accepted or in force, and what the engine runs with until then."""
    verb = "Accepted" if result.outcome == "accepted" else "Applied"
    said: list[Paragraph] = [(f"{verb}: {applied_text(result)}.", palette.GOOD_STYLE)]
    if result.trial is not None:
        text = "On trial: the engine takes it back by itself, also when this console is gone."
        said.append((text, palette.WARN_STYLE))
    if result.changes:
        said.append((effective_text(result), palette.TEXT_STYLE))
    return [*said, ("esc closes, then u undoes.", palette.MUTED_STYLE)]
