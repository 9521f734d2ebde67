"""Measures a model's calibration profile.

One half of the prompts chooses layers and heads. The other half measures recall: of each kind of
signal at its chosen layers and heads, and of each policy, which evicts once after the prompt with
its default parameters. A kind whose recall there is not better than chance gets no layers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from vtoken import __version__
from vtoken.base.arrays import Floats
from vtoken.base.errors import ProfileError
from vtoken.calibration.layer_signals import Reading, measured_signals, survey
from vtoken.calibration.observe import Observer
from vtoken.calibration.prompts import Prompt
from vtoken.calibration.ranking import KEEPS, Selection, Surveyed, beats_chance, choose, worst_rank
from vtoken.core.config.calibration import (
    FORMAT,
    CalibrationProfile,
    SignalProfile,
    default_layer,
)
from vtoken.policies import Policy, View, make_policy, policy_names
from vtoken.policies.signals import Signal
from vtoken.wire import Recall

Progress = Callable[[int], None]  # called with the number of finished prompts


def measure(
    observer: Observer,
    prompts: Sequence[Prompt],
    *,
    model: str,
    fingerprint: str,
    progress: Progress = lambda _: None,
) -> CalibrationProfile:
    """The profile of `observer`'s model.

    Raises ProfileError if no signal of any layer ranks needles better than chance.
    """
    first, second = prompts[::2], prompts[1::2]
    measured = measured_signals()
    default = {kind: Selection((default_layer(observer.num_layers, kind),)) for kind in measured}
    selections = _select(observer, first, measured, progress)
    at = {
        kind: (_at(signal, selections[kind]), _at(signal, default[kind]))
        for kind, signal in measured.items()
    }
    policies = list(_policies())
    # The recall decides between the chosen and the default selection, so signals are read at both.
    signals = [signal for pair in at.values() for signal in pair]
    for policy in policies:
        if policy.reads is not None:
            kind = policy.reads.kind
            signals += _at(policy.reads, selections[kind]), _at(policy.reads, default[kind])
    read = _read(observer, second, signals, lambda done: progress(len(first) + done))
    found: dict[str, SignalProfile] = {}
    for kind, (chosen, fallback) in at.items():
        worst, selection = _worst_ranks(second, read, chosen), selections[kind]
        if beats_chance(worst):
            found[kind] = SignalProfile([*selection.layers], [*selection.heads], _recalls(worst))
        else:
            found[kind] = SignalProfile([], [], _recalls(_worst_ranks(second, read, fallback)))
            selections[kind] = default[kind]
    if not any(of_kind.layers for of_kind in found.values()):
        raise ProfileError(
            f"no layer of {model} ranks needles better than chance; nothing was written. "
            "Try more --prompts or another number of --tokens"
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
        policies={policy.name: _of_policy(policy, second, read, selections) for policy in policies},
    )


def _at(signal: Signal, selection: Selection) -> Signal:
    return replace(signal, layers=selection.layers, heads=selection.heads)


def _select(
    observer: Observer,
    prompts: Sequence[Prompt],
    signals: Mapping[str, Signal],
    progress: Progress,
) -> dict[str, Selection]:
    """Kind -> the layers and heads where it ranks the needles of `prompts` best.

    Raises ProfileError if the model itself finds less than half of the needles: then the rankings
    of its layers do not show which tokens it needs.
    """
    answered = 0
    surveyed: dict[str, list[Surveyed]] = {kind: [] for kind in signals}
    for done, prompt in enumerate(prompts, 1):
        layers = observer.observe(prompt.token_ids, lambda _, *seen: survey(signals, *seen))
        for kind in signals:
            over_heads, each_head = zip(*(layer[kind] for layer in layers), strict=True)
            heads = None if each_head[0] is None else np.stack(each_head)
            surveyed[kind].append(Surveyed(np.stack(over_heads), heads, prompt.answer))
        choices = observer.choices(prompt.reply)
        answered += choices[prompt.sure - 1 :] == prompt.reply[prompt.sure :]
        progress(done)
    if 2 * answered < len(prompts):
        raise ProfileError(
            f"the model finds {answered} of {len(prompts)} needles with the full cache, so they "
            "cannot rank its layers; nothing was written. An untrained model finds none; for a "
            "trained one, try another number of --tokens"
        )
    return {kind: choose(surveyed[kind]) for kind in signals}


def _read(
    observer: Observer, prompts: Sequence[Prompt], signals: Sequence[Signal], progress: Progress
) -> list[dict[Signal, Floats]]:
    """For each of `prompts`, the numbers [n] of each of `signals`."""
    reading, found = Reading(signals), []
    for done, prompt in enumerate(prompts, 1):
        found.append(reading.scores(observer.observe(prompt.token_ids, reading.look)))
        progress(done)
    return found


def _worst_ranks(
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
    """The available policies that evict, without those that need the engine's vocabulary."""
    for name in policy_names():
        policy = make_policy(name, {})
        if name != "none" and "token_ids" not in policy.needs:
            yield policy


def _of_policy(
    policy: Policy,
    prompts: Sequence[Prompt],
    read: Sequence[dict[Signal, Floats]],
    selections: dict[str, Selection],
) -> list[Recall]:
    """The share of needles that `policy` keeps complete, for every budget that it accepts.

    A policy of another package that fails is not measured: [].
    """
    reads = policy.reads
    signal = None if reads is None else _at(reads, selections[reads.kind])
    recalls = []
    for keep in KEEPS:
        complete = []
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
                complete.append(not np.isin(prompt.answer, victims).any())
            except Exception:  # policies of other packages may raise anything
                return []
        if complete:
            recall = float(np.mean(complete))
            recalls.append(Recall(keep=keep, recall=recall, samples=len(complete)))
    return recalls
