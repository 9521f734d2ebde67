"""Notes on a change of the configuration: values without effect, and what a mode means."""

from __future__ import annotations

from vtoken.core.config.values import VTokenConfig
from vtoken.wire import config_changes


def inactive_notes(old: VTokenConfig, new: VTokenConfig) -> list[str]:
    """One note for each group of changed values that another setting keeps without effect."""
    changed = config_changes(old.values(), new.values())
    notes = []
    gates = [name for name in ("theta_f", "low_watermark_blocks") if name in changed]
    if gates and new.reclamation != "auto":
        names = " and ".join(gates)
        notes.append(f"{names}: without effect while reclamation is {new.reclamation}")
    unused = "budget_tokens" if new.budget_ratio > 0 else "budget_floor_tokens"
    if unused in changed:
        notes.append(f"{unused}: without effect while budget_ratio is {new.budget_ratio:g}")
    if "evict_after_wait_ms" in changed and new.evict_when == "always":
        notes.append(
            "evict_after_wait_ms: only for requests with vtoken_evict_when=pressure, while "
            "evict_when is always"
        )
    rules = (
        "budget_tokens",
        "budget_ratio",
        "interval_tokens",
        "evict_during",
        "evict_when",
        "protect",
    )
    limits = [n for n in rules if n in changed and n != unused]
    if limits and not new.evicts:
        names = " and ".join(limits)
        notes.append(f"{names}: only for requests with a policy of their own, while policy is none")
    return notes


def mode_notes(old: VTokenConfig, new: VTokenConfig) -> list[str]:
    """What a change of `evict_when` means for running requests."""
    if not new.evicts:
        return []
    notes = []
    if old.evict_when != new.evict_when and old.evicts:
        notes.append(
            "always: running requests beyond their budget and interval lose tokens from the next "
            "step on, whether a block is short or not"
            if new.evict_when == "always"
            else "pressure: running requests lose nothing more until a block is short; what they "
            "lost stays lost"
        )
    changed = (old.evict_when, old.reclamation) != (new.evict_when, new.reclamation)
    if changed and new.evict_when == "pressure" and new.reclamation != "auto":
        notes.append(
            f"pressure: while reclamation is {new.reclamation}, nobody gives tokens, and a request "
            "that grows may preempt another"
        )
    return notes
