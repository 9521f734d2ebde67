"""Describes changes as paragraphs: what-if, outcome, irreversible effects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vtoken.sentences.what_if import NO_DIFFERENCE, difference, notes_beside
from vtoken.wire import OF_EVICTION, config_changes
from vtoken_console.changes.controls import applied_text, effective_text
from vtoken_console.style import palette, units
from vtoken_console.style.units import change_text

if TYPE_CHECKING:
    from vtoken import wire
    from vtoken_console.style.palette import Paragraph

EVICTION_RULES = frozenset({"policy", *OF_EVICTION})
FULL = 0.9  # of the host memory for parked tokens
PROMPTS = (64, 1 << 10, 1 << 14)  # lengths to compare floors at, beside those of the requests


def may_evict(patch: Mapping[str, Any]) -> bool:
    """Whether a patch changes fields that decide which tokens are evicted, or are parked."""
    return bool((EVICTION_RULES | {"park_bytes"}) & patch.keys())


def irreversible(
    before: wire.ConfigValues,
    after: wire.ConfigValues,
    evicted_tokens: int = 0,
    requests: Sequence[wire.RequestRow] = (),
    parking: wire.Parking | None = None,
) -> str | None:
    """Why the change from `before` to `after` needs confirmation; None if undo restores everything.

    Only evicted tokens without a copy cannot be restored. `evicted_tokens`: now, because of the
    change. `parking`: the copies of now.
    """
    if parking is not None and parking.used_bytes > after.park_bytes:
        used, most = units.data_size(parking.used_bytes), units.data_size(after.park_bytes)
        return f"Copies fill {used} of host memory; those beyond {most} are given up."
    if _is_parked(after, parking):
        return None
    if after.policy.name == "none" or not EVICTION_RULES & config_changes(before, after).keys():
        return None
    prompts = [*PROMPTS, *(row.prompt_tokens for row in requests)]
    floors = [(_floor(before, prompt), _floor(after, prompt)) for prompt in prompts]
    raised, lowered = any(new > old for old, new in floors), any(new < old for old, new in floors)
    if evicted_tokens and not raised:
        return f"It evicts {units.count(evicted_tokens)} tokens now."
    if before.policy.name != after.policy.name:
        return f"From now on {after.policy.name} chooses the tokens to evict."
    if before.evict_when == "pressure" and after.evict_when == "always":
        return "From now on tokens over the budget are evicted although nobody needs the memory."
    if not lowered:
        return None
    over = units.count(sum(max(0, r.live - _floor(after, r.prompt_tokens)) for r in requests))
    kept = f"{units.count(after.budget_tokens)} live tokens"
    if after.budget_ratio:
        least = units.count(after.budget_floor_tokens)
        kept = f"{after.budget_ratio * 100:g}% of their prompt, at least {least} tokens,"
    if after.evict_when == "pressure":
        keep = f"Requests may be cut down to {kept} while memory is short"
    else:
        keep = f"Requests keep {kept}".removesuffix(",")
    return f"{keep}; they hold {over} tokens more than that."


def _is_parked(config: wire.ConfigValues, parking: wire.Parking | None) -> bool:
    """Whether host memory has room for the tokens that are evicted."""
    if parking is None:
        return config.park_bytes > 0
    return not parking.fault and parking.used_bytes < FULL * config.park_bytes


def _floor(config: wire.ConfigValues, prompt_tokens: int) -> int:
    """The live tokens that a request without rules of its own keeps."""
    if not config.budget_ratio:
        return config.budget_tokens
    return max(config.budget_floor_tokens, int(config.budget_ratio * prompt_tokens))


def what_if_paragraphs(result: wire.PatchResult) -> list[Paragraph]:
    """Describes a validate_only result: what it changes now, and the engine's notes."""
    changes = change_text(result.changes) or "This changes nothing."
    notes = [(note, palette.WARN_STYLE) for note in notes_beside(result)]
    return [(changes, palette.BOLD_STYLE), *_difference(result), *notes]


def _difference(result: wire.PatchResult) -> list[Paragraph]:
    return [
        (line.text, palette.WARN_STYLE if line.is_loss else palette.TEXT_STYLE)
        for line in difference(result)
    ]


def confirm_paragraphs(
    reason: str, host: str, model: str, result: wire.PatchResult
) -> list[Paragraph]:
    """The question before a change that undo cannot fully revert."""
    return [
        (f"On {host}, model {model}:", palette.BOLD_STYLE),
        (change_text(result.changes), palette.TEXT_STYLE),
        ("", palette.TEXT_STYLE),
        (reason, palette.WARN_STYLE),
        (
            "Tokens without a copy cannot come back: undo restores the setting, not the tokens.",
            palette.TEXT_STYLE,
        ),
        *(line for line in _difference(result) if line[0] != NO_DIFFERENCE),
    ]


def applied_paragraphs(result: wire.PatchResult) -> list[Paragraph]:
    """The outcome of a change: accepted or in force, and the values in effect until then."""
    verb = "Accepted" if result.outcome == "accepted" else "Applied"
    paragraphs: list[Paragraph] = [(f"{verb}: {applied_text(result)}.", palette.GOOD_STYLE)]
    if result.changes:
        paragraphs.append((effective_text(result), palette.TEXT_STYLE))
    return [*paragraphs, ("esc closes, then u undoes.", palette.MUTED_STYLE)]
