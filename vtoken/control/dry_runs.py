"""Dry runs by the code path of the real plan, each computed once for a state of the runtime.

A dry run of many requests with long contexts takes the engine's thread for a tenth of a second, and
every reader may ask for it. Its result is kept until something changes that it depends on, so that
asking again costs nothing. What different dry runs cost is limited by the API process, from the
time that the engine measured (`Reply.engine_s`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

import msgspec

from vtoken.control.whatif import what_if
from vtoken.core.config.values import VTokenConfig
from vtoken.core.planning.round import Round
from vtoken.core.runtime.runtime import Runtime
from vtoken.wire import WhatIf

MAX_KEPT = 32

T = TypeVar("T")


class DryRuns:
    """The newest MAX_KEPT dry runs of the runtime's current state. Do not write to a result."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._config = runtime.config
        self._version = runtime.version
        self._kept: OrderedDict[bytes, WhatIf | Round] = OrderedDict()

    def what_if(self, config: VTokenConfig) -> WhatIf:
        """What `config` would do now, and what happens without it; raises RefusedError, see
        `vtoken.control.whatif`.
        """
        found = self._alone(config)
        if found.without_change is None:
            found.without_change = msgspec.structs.replace(self._alone(self._runtime.config))
        return found

    def _alone(self, config: VTokenConfig) -> WhatIf:
        key = msgspec.msgpack.encode(config.values())
        return self._once(key, lambda: what_if(self._runtime, config))

    def compaction(self, request_id: str | None, batch_size: int) -> Round:
        """The round of a compaction now, over one request or, for None, over all."""
        ids = None if request_id is None else [request_id]
        planner, config = self._runtime.round_planner, self._runtime.config
        return self._once(
            msgspec.msgpack.encode((request_id, batch_size)),
            lambda: planner.preview(config, request_ids=ids, batch_size=batch_size).round,
        )

    def _once(self, key: bytes, compute: Callable[[], T]) -> T:
        runtime = self._runtime
        if self._version != runtime.version or self._config is not runtime.config:
            self._version, self._config = runtime.version, runtime.config
            self._kept.clear()
        if key not in self._kept:
            self._kept[key] = compute()  # type: ignore[assignment]
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return self._kept[key]  # type: ignore[return-value]
