"""The calibration profile of a model: which layers and heads rank tokens best, for each signal.

Knows neither how it is measured nor where it is stored. A profile belongs to one set of weights:
`fingerprint` names them, and a profile of other weights is refused.
"""

from __future__ import annotations

import msgspec

from vtoken.wire import Recall

FORMAT = 1


def default_layer(num_layers: int, kind: str) -> int:
    """The layer that signals of `kind` are taken from where nothing was measured: at 0.7 of the
    depth, where attention retrieves in the model that was looked at; 0.6 for the norms of keys.
    """
    return num_layers * (6 if kind == "key_norm" else 7) // 10


class SignalProfile(msgspec.Struct, frozen=True):
    """Where one kind of signal is taken from, and how well it ranks needles there.

    `layers` []: no layer ranks them better than chance, so the default one. `heads`: query heads,
    of each of the layers; []: all.
    """

    layers: list[int]
    heads: list[int] = []
    recall: list[Recall] = []


class CalibrationProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `vtoken calibrate` measured on one model.

    `signals` by `Signal.kind`. `policies`: by name, the share of needles that a policy leaves whole
    with its default parameters, its signal from here, and `keep` of the prompt as its budget.
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
        """Where signals of `kind` are taken from, None: not measured."""
        return self.signals.get(kind)
