"""Describes changes as paragraphs: what-if, gates, prices, outcome, irreversible effects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vtoken.sentences import calibration_text, effects, prices_text
from vtoken_console.changes.controls import applied_text, effective_text
from vtoken_console.style import palette, units
from vtoken_console.style.units import change_text

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
        found = effects(preview)
        paragraphs += [
            (
                f"{effect.label:<11} {effect.figure:>9}{effect.rest}",
                warn if effect.is_loss else text,
            )
            for effect in found
        ]
        if result.changes and not found:
            paragraphs.append(("It makes no difference now.", text))
        if preview.deferred_reason:
            paragraphs.append((f"deferred: {preview.deferred_reason}", warn))
        paragraphs += gate_paragraphs(preview.gates, gates_now)
    paragraphs += [(note, warn) for note in result.notes]
    return paragraphs


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


def measured_paragraphs(status: wire.Status | None) -> list[Paragraph]:
    """Prices and calibration of the server, if it reports them."""
    found = [] if status is None or status.prices is None else [prices_text(status.prices)]
    if status is not None and status.calibration is not None:
        found.append(calibration_text(status.calibration))
    return [(f"{text[0].upper()}{text[1:]}.", palette.MUTED_STYLE) for text in found]


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
        found = "; ".join(map(str, effects(preview)))
        paragraphs.append((f"It {found or 'makes no difference now'}.", palette.TEXT_STYLE))
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
