"""A model's calibration profile, measured.

On one half of the prompts, layers and heads are chosen. On the other, recall is measured: of each
kind of signal at the place that was chosen for it, and of each policy with its default parameters,
that evicts once, right after the prompt. A kind whose recall is not better than chance there gets
no layers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from vtoken import __version__
from vtoken.arrays import Floats
from vtoken.calibration.layer_signals import SIGNALS, Reading, survey
from vtoken.calibration.observe import Observer
from vtoken.calibration.prompts import Prompt
from vtoken.calibration.ranking import KEEPS, Place, Surveyed, beats_chance, choose, worst_rank
from vtoken.config.calibration import (
    FORMAT,
    CalibrationProfile,
    SignalProfile,
    default_layer,
)
from vtoken.errors import ProfileError
from vtoken.policies import Policy, View, make_policy, policy_names
from vtoken.policies.signals import Kind, Signal
from vtoken.wire import Recall

Progress = Callable[[int], None]  # prompts that are done


def measure(
    observer: Observer,
    prompts: Sequence[Prompt],
    *,
    model: str,
    fingerprint: str,
    progress: Progress = lambda _: None,
) -> CalibrationProfile:
    """The profile of `observer`'s model.

    Raises ProfileError when no layer ranks needles better than chance, whatever the signal.
    """
    first, second = prompts[::2], prompts[1::2]
    default = {kind: Place((default_layer(observer.num_layers, kind),)) for kind in SIGNALS}
    places = _chosen(observer, first, progress)
    at = {
        kind: (_at(signal, places[kind]), _at(signal, default[kind]))
        for kind, signal in SIGNALS.items()
    }
    policies = list(_policies())
    # Which place a policy's signal gets depends on recalls, so it is read at both.
    signals = [signal for pair in at.values() for signal in pair]
    for policy in policies:
        if policy.reads is not None:
            kind = policy.reads.kind
            signals += _at(policy.reads, places[kind]), _at(policy.reads, default[kind])
    read = _read(observer, second, signals, lambda done: progress(len(first) + done))
    found: dict[str, SignalProfile] = {}
    for kind, (chosen, fallback) in at.items():
        worst, place = _worst(second, read, chosen), places[kind]
        if beats_chance(worst):
            found[kind] = SignalProfile([*place.layers], [*place.heads], _recalls(worst))
        else:
            found[kind] = SignalProfile([], [], _recalls(_worst(second, read, fallback)))
            places[kind] = default[kind]
    if not any(of_kind.layers for of_kind in found.values()):
        raise ProfileError(
            f"no layer of {model} ranks needles better than chance; nothing written. "
            "Try more --prompts or other --tokens"
        )
    return CalibrationProfile(
        format=FORMAT,
        model=model,
        fingerprint=fingerprint,
        num_layers=observer.num_layers,
        num_heads=observer.num_heads,
        vtoken_version=__version__,
        created_ts=time.time(),
        signals=found,
        policies={policy.name: _of_policy(policy, second, read, places) for policy in policies},
    )


def _at(signal: Signal, place: Place) -> Signal:
    return replace(signal, layers=place.layers, heads=place.heads)


def _chosen(observer: Observer, prompts: Sequence[Prompt], progress: Progress) -> dict[Kind, Place]:
    """Kind -> where it ranks the needles of `prompts` best.

    Raises ProfileError when the model itself does not find half of them: what its layers rank
    well would be no sign of what it needs.
    """
    answered = 0
    surveyed: dict[Kind, list[Surveyed]] = {kind: [] for kind in SIGNALS}
    for done, prompt in enumerate(prompts, 1):
        layers = observer.observe(prompt.token_ids, survey)
        for kind in SIGNALS:
            over_heads, each_head = zip(*(layer[kind] for layer in layers), strict=True)
            heads = None if each_head[0] is None else np.stack(each_head)
            surveyed[kind].append(Surveyed(np.stack(over_heads), heads, prompt.answer))
        choices = observer.choices(prompt.reply)
        answered += choices[prompt.sure - 1 :] == prompt.reply[prompt.sure :]
        progress(done)
    if 2 * answered < len(prompts):
        raise ProfileError(
            f"the model finds {answered} of {len(prompts)} needles with the whole cache, and so "
            "none of its layers can be judged by them; nothing written. An untrained model finds "
            "none; for a trained one, try other --tokens"
        )
    return {kind: choose(surveyed[kind]) for kind in SIGNALS}


def _read(
    observer: Observer, prompts: Sequence[Prompt], signals: Sequence[Signal], progress: Progress
) -> list[dict[Signal, Floats]]:
    """Of each of `prompts` the numbers [n] of each of `signals`."""
    reading, found = Reading(signals), []
    for done, prompt in enumerate(prompts, 1):
        found.append(reading.scores(observer.observe(prompt.token_ids, reading.look)))
        progress(done)
    return found


def _worst(
    prompts: Sequence[Prompt], read: Sequence[dict[Signal, Floats]], signal: Signal
) -> Floats:
    """The worst ranks [prompts] of the needles by `signal`."""
    pairs = zip(prompts, read, strict=True)
    return np.stack([worst_rank(scores[signal], prompt.answer) for prompt, scores in pairs])


def _recalls(worst: Floats) -> list[Recall]:
    return [
        Recall(keep=keep, recall=float((worst <= keep).mean()), samples=len(worst))
        for keep in KEEPS
    ]


# ---------------------------------------------------------------- policies


def _policies() -> Iterable[Policy]:
    """Those on offer that evict, without those that need the engine's vocabulary."""
    for name in policy_names():
        policy = make_policy(name, {})
        if name != "none" and "token_ids" not in policy.needs:
            yield policy


def _of_policy(
    policy: Policy,
    prompts: Sequence[Prompt],
    read: Sequence[dict[Signal, Floats]],
    places: dict[Kind, Place],
) -> list[Recall]:
    """The share of needles that `policy` leaves whole; nothing for a budget that it does not take.

    Another package's policy that fails is not measured: [].
    """
    reads = policy.reads
    signal = None if reads is None else _at(reads, places[reads.kind])
    recalls = []
    for keep in KEEPS:
        held = []
        for seed, (prompt, scores) in enumerate(zip(prompts, read, strict=True)):
            num_tokens = len(prompt.token_ids)
            budget = int(keep * num_tokens)
            if budget < policy.min_budget_tokens():
                break
            view = View(np.arange(num_tokens), num_tokens, num_tokens, budget, seed)
            if signal is not None:
                view.scores = scores[signal]
            try:
                victims = policy.select_victims(view)
                held.append(not np.isin(prompt.answer, victims).any())
            except Exception:  # other people's policies may raise anything
                return []
        if held:
            recalls.append(Recall(keep=keep, recall=float(np.mean(held)), samples=len(held)))
    return recalls
