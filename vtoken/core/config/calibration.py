"""The calibration profile of a model: which layers and heads rank tokens best, for each signal.

A profile belongs to the weights that `fingerprint` identifies; a profile of other weights is
refused. `vtoken.calibration` measures and stores profiles.
"""

from __future__ import annotations

import msgspec

from vtoken.policies.signals import kind_of
from vtoken.wire import Recall

FORMAT = 1


def default_layer(num_layers: int, kind: str) -> int:
    """The layer for signals of `kind` without a profile: a share of the depth.

    The shares of built-in kinds are those that kept the most facts in the one model that was
    examined (docs/quality.md).
    """
    return num_layers * kind_of(kind).depth_percent // 100


class SignalProfile(msgspec.Struct, frozen=True):
    """The layers and heads for one kind of signal, and how well it ranks needles there.

    `layers` []: no layer ranks needles better than chance, so the default layer is used. `heads`:
    query heads of each of the layers; []: all.
    """

    layers: list[int]
    heads: list[int] = []
    recall: list[Recall] = []


class CalibrationProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The result of `vtoken calibrate` for one model.

    `signals` by `Signal.kind`. `policies` by name: the share of needles that a policy keeps
    complete, with its default parameters, its signal at this profile's layers and heads, and a
    budget of `keep` of the prompt.
    """

    format: int
    model: str
    fingerprint: str
    num_layers: int
    num_heads: int
    vtoken_version: str
    created_ts: float
    signals: dict[str, SignalProfile]
    policies: dict[str, list[Recall]] = {}

    def of(self, kind: str) -> SignalProfile | None:
        """The profile of signals of `kind`; None if it was not measured."""
        return self.signals.get(kind)
