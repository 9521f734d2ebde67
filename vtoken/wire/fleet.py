"""Several engines compared: the configuration that most of them have, and who differs in what."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping
from typing import Any, TypeVar

import msgspec

from vtoken.wire import ConfigDocument, ConfigValues, Status, config_changes, pool_limits

K = TypeVar("K", bound=Hashable)


def common(configs: Mapping[K, ConfigDocument]) -> ConfigValues | None:
    """The desired configuration of most engines, of two equally common ones the newer."""
    if not configs:
        return None
    keys = {key: _key(config.desired) for key, config in configs.items()}
    counts = Counter(keys.values())
    chosen = max(configs, key=lambda key: (counts[keys[key]], configs[key].revision))
    return configs[chosen].desired


def drifts(engines: Mapping[K, tuple[Status, ConfigDocument]]) -> dict[K, dict[str, list[Any]]]:
    """Field -> [here, in most engines] of each engine's desired configuration; {}: as most have it.

    Engines of different models are not compared. Settings in blocks, whose defaults are shares of
    the pool, are compared if the pools are equal.
    """
    by_model: defaultdict[str, dict[K, ConfigDocument]] = defaultdict(dict)
    pools: defaultdict[str, set[int]] = defaultdict(set)
    for key, (status, config) in engines.items():
        by_model[status.model][key] = config
        pools[status.model].add(status.blocks.total)
    found: dict[K, dict[str, list[Any]]] = {}
    for model, configs in by_model.items():
        usual = common(configs)
        assert usual is not None
        of_pool = pool_limits(1) if len(pools[model]) > 1 else {}
        for key, config in configs.items():
            changes = {} if config.desired == usual else config_changes(config.desired, usual)
            found[key] = {name: pair for name, pair in changes.items() if name not in of_pool}
    return found


def _key(values: ConfigValues) -> bytes:
    return msgspec.json.encode(values, order="deterministic")
