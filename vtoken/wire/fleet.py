"""Several engines compared: the configuration that most of them have, and who differs in what."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping
from typing import Any, TypeVar

import msgspec

from vtoken.wire import ConfigDocument, ConfigValues, Status, config_changes, pool_limits

K = TypeVar("K", bound=Hashable)


def common(configs: Mapping[K, ConfigDocument]) -> ConfigValues | None:
    """The desired configuration of most engines, of two equally common ones the newer."""
    ranked = _ranked(configs)
    return ranked[0][1] if ranked else None


def differences(configs: Mapping[K, ConfigDocument]) -> dict[K, dict[str, list[Any]]]:
    """Field -> [here, in most engines] of each engine's desired configuration; {}: as most have it.

    If as many have another one, nobody is most: field -> [here, there] on both sides.
    """
    ranked = _ranked(configs)
    if not ranked:
        return {}
    (num, usual), (num_other, other) = ranked[0], (ranked[1:] or ranked)[0]
    found: dict[K, dict[str, list[Any]]] = {}
    for key, config in configs.items():
        changes = config_changes(config.desired, usual)
        if not changes and num == num_other:
            changes = config_changes(config.desired, other)
        found[key] = changes
    return found


def _ranked(configs: Mapping[K, ConfigDocument]) -> list[tuple[int, ConfigValues]]:
    """How many engines have each configuration: the most common first, of two the newer."""
    by_key: defaultdict[bytes, list[ConfigDocument]] = defaultdict(list)
    for config in configs.values():
        by_key[msgspec.json.encode(config.desired, order="deterministic")].append(config)
    ranked = sorted(
        (len(alike), max(c.revision for c in alike), key) for key, alike in by_key.items()
    )
    return [(num, by_key[key][0].desired) for num, _, key in reversed(ranked)]


def drifts(engines: Mapping[K, tuple[Status, ConfigDocument]]) -> dict[K, dict[str, list[Any]]]:
    """`differences` of engines of one model each.

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
        of_pool = pool_limits(1) if len(pools[model]) > 1 else {}
        for key, changes in differences(configs).items():
            found[key] = {name: pair for name, pair in changes.items() if name not in of_pool}
    return found
