"""Notes on a change of the configuration: values without effect, what a mode means, and scores."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container

from vtoken.core.config.values import VTokenConfig
from vtoken.policies import Policy
from vtoken.policies.signals import Signal
from vtoken.wire import void_settings

Resolve = Callable[[Signal, VTokenConfig], Signal]


def inactive_notes(changed: Container[str], new: VTokenConfig) -> list[str]:
    """One note for each group of `changed` values that another setting keeps without effect."""
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for name, why in void_settings(new).items():
        if name in changed:
            groups[why].append(name)
    return [f"{' and '.join(names)}: {why}" for why, names in groups.items()]


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
            "lost comes back if it is parked"
        )
    changed = (old.evict_when, old.reclamation) != (new.evict_when, new.reclamation)
    if changed and new.evict_when == "pressure" and new.reclamation != "auto":
        notes.append(
            f"pressure: while reclamation is {new.reclamation}, nobody gives tokens, and a request "
            "that grows may preempt another"
        )
    return notes


def swap_notes(old: VTokenConfig, new: VTokenConfig, resolve: Resolve) -> list[str]:
    """Notes on what a change of policy, shadow, parameters or probe settings means for scores."""

    def read(policy: Policy | None, config: VTokenConfig) -> Signal | None:
        reads = None if policy is None else policy.reads
        return None if reads is None else resolve(reads, config)

    held = {read(old.policy, old): old.policy.name}
    if old.shadow is not None and old.evicts:
        held.setdefault(read(old.shadow, old), f"shadow {old.shadow.name}")
    notes = []
    before, after = read(old.policy, old), read(new.policy, new)
    if after is not None and (old.policy != new.policy or before != after):
        if after in held:
            notes.append(f"scores carry over: {held[after]} and {new.policy.name} read {after}")
        else:
            notes.append(
                f"scores start anew: {new.policy.name} reads {after}, until now it was "
                f"{before or 'no scores'}; nothing of a running request is evicted before "
                f"{after.first_report}"
            )
        known = (old.policy, old.shadow)
        if new.policy.profiles and new.policy not in known:
            notes.append(f"{new.policy.name} profiles running requests on what it sees from now on")
    return notes + _shadow_notes(old, new, read(new.shadow, new), held)


def _shadow_notes(
    old: VTokenConfig, new: VTokenConfig, reads: Signal | None, held: Container[Signal | None]
) -> list[str]:
    shadow = new.shadow
    if shadow is None or (shadow == old.shadow and new.evicts == old.evicts):
        return []
    if not new.evicts:
        return [f"policy none evicts nothing that shadow {shadow.name} could be compared with"]
    if reads is None or reads in held:
        return []
    return [f"shadow {shadow.name} is compared on a running request after {reads.first_report}"]
