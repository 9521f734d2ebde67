"""Several engines compared: the configuration that most of them have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from typing import TypeVar

import msgspec

from vtoken.wire import ConfigDocument, ConfigValues

K = TypeVar("K", bound=Hashable)


def common(configs: Mapping[K, ConfigDocument]) -> ConfigValues | None:
    """The desired configuration of most engines, of two equally common ones the newer."""
    if not configs:
        return None
    keys = {key: _key(config.desired) for key, config in configs.items()}
    counts = Counter(keys.values())
    chosen = max(configs, key=lambda key: (counts[keys[key]], configs[key].revision))
    return configs[chosen].desired


def _key(values: ConfigValues) -> bytes:
    return msgspec.json.encode(values, order="deterministic")
