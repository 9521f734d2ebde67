"""What would happen: dry runs by the code path of the real plan, each computed once for a state of
the runtime.

A dry run of many requests with long contexts takes the engine's thread for a tenth of a second, and
every reader may ask for it. Its result is kept until something changes that it depends on, so that
asking again costs nothing. What different dry runs cost is limited by the API process, from the
time that the engine measured (`Reply.engine_s`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

import msgspec
import numpy as np
import numpy.typing as npt

from vtoken.base.arrays import Ints
from vtoken.control.outlook import Outlook
from vtoken.core.config.values import VTokenConfig
from vtoken.core.planning.gates import Pressure, describe_gates, headroom_gate
from vtoken.core.planning.round import Round
from vtoken.core.runtime.relocation.operations import describe_round
from vtoken.core.runtime.runtime import Runtime
from vtoken.core.tables.token_tables import ONE
from vtoken.wire import WhatIf

MAX_KEPT = 32

T = TypeVar("T")


class DryRuns:
    """The newest MAX_KEPT dry runs of the runtime's current state. Do not write to a result."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._config = runtime.config
        self._version = runtime.version
        self._kept: OrderedDict[Any, WhatIf | Round] = OrderedDict()

    def what_if(self, config: VTokenConfig) -> WhatIf:
        """What `config` would do now, and what happens without it.

        Its victims are those that `config` would choose now; its round is the one after that. Under
        `pressure` the victims are those that would be given for the shortage of this moment; the
        share of a request without scores waits for them. The round bypasses the gates like a manual
        trigger; `gates` reports whether an automatic round would run. With reclamation `off` only
        all-dead blocks count as freed. Raises RefusedError when the policy fails on a request; the
        failure has no other effect.
        """
        found = self._alone(config)
        if found.without_change is None:
            found.without_change = msgspec.structs.replace(self._alone(self._runtime.config))
        return found

    def _alone(self, config: VTokenConfig) -> WhatIf:
        key = msgspec.msgpack.encode(config.values())
        return self._once(key, lambda: self._what_if(config))

    def compaction(self, request_id: str | None, batch_size: int) -> Round:
        """The round of a compaction now, over one request or, for None, over all."""
        planner, config = self._runtime.round_planner, self._runtime.config
        ids = None if request_id is None else [request_id]
        return self._once(
            (request_id, batch_size),
            lambda: planner.preview(config, request_ids=ids, batch_size=batch_size).round,
        )

    def _once(self, key: Any, compute: Callable[[], T]) -> T:
        runtime = self._runtime
        if self._version != runtime.version or self._config is not runtime.config:
            self._version, self._config = runtime.version, runtime.config
            self._kept.clear()
        if key not in self._kept:
            self._kept[key] = cast(Any, compute())
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return cast(T, self._kept[key])

    def _what_if(self, config: VTokenConfig) -> WhatIf:
        runtime, outlook = self._runtime, Outlook(self._runtime, config)
        victims, waiting = self._victims(config, outlook.keeping())
        preview = runtime.round_planner.preview_after(config, victims)
        missing = preview.round.missing_blocks
        plan = describe_round(preview.round, runtime.geometry.bytes_per_token)
        pressure = replace(
            self._pressure_after(victims, preview.holders),
            short_blocks=outlook.shortage.blocks,
            ask_worth=partial(runtime.round_planner.worth_after, config, preview.layouts),
        )
        gates = describe_gates(config, pressure)
        gates.append(headroom_gate(preview.available_blocks, missing, gains=plan.freed_blocks > 0))
        lost = runtime.parking.lost_by(config.park_bytes)
        left = runtime.parking.num_parked - lost
        return WhatIf(
            freed_blocks=preview.emptied_blocks + plan.freed_blocks,
            moved_tokens=plan.moved_tokens,
            moved_bytes=plan.moved_bytes,
            evicted_tokens=sum(map(len, victims.values())),
            deferred_reason=plan.deferred_reason,
            waiting_tokens=waiting,
            source_blocks=plan.source_blocks,
            destination_blocks=plan.destination_blocks,
            gates=gates,
            short_blocks=outlook.standing.blocks,
            givable_tokens=outlook.givable_tokens,
            givable_blocks=outlook.givable_blocks,
            more_requests=outlook.more_requests(),
            waiting_requests=len(outlook.waiting),
            startable_requests=outlook.startable_requests,
            restored_tokens=min(runtime.restorer.plan(config).num_tokens, left),
            dropped_tokens=lost,
        )

    def _victims(
        self, config: VTokenConfig, keeps: Mapping[str, int]
    ) -> tuple[dict[str, Ints], int]:
        """The victims of `config` by request, and how many tokens die once their scores are there.

        `keeps`: the live tokens that requests which give for a shortage keep.
        """
        runtime, waiting = self._runtime, 0
        victims: dict[str, Ints] = {}
        for table in runtime.tables:
            rules = runtime.requests.rules(table.request_id, config)
            target = keeps.get(table.request_id)
            if runtime.evictor.is_due(table, config):
                target = rules.budget_tokens
            if target is None:
                continue
            chosen = runtime.ranking.preview(table, config, target)
            if chosen is not None:
                victims[table.request_id] = chosen
            elif not runtime.ranking.is_suspended(rules.policy):
                waiting += table.num_live - target
        return victims, waiting

    def _pressure_after(
        self, victims: Mapping[str, Ints], holders: npt.NDArray[np.uint16]
    ) -> Pressure:
        """The gates' input in the next step, once the tokens `victims`, by request, are dead.

        `holders` [N]: how many requests hold each block then. Blocks without a holder return to the
        pool only after the step's round is planned, so the number of free blocks is that of now.
        """
        tables = self._runtime.tables
        pool, size = tables.pool, tables.block_size
        pressure = self._runtime.relocator.pressure(ahead=1)
        if not victims:
            return pressure
        dying = [tables[request_id].slots_of(ids) for request_id, ids in victims.items()]
        readers = pool.readers.copy()
        np.subtract.at(readers, np.concatenate(dying), ONE)
        live = np.count_nonzero(readers.reshape(pool.num_blocks, size), axis=1)
        used = holders > 0
        num_slots = int(np.count_nonzero(used)) * size
        return replace(
            pressure,
            f=1.0 - int(live.sum()) / num_slots if num_slots else 0.0,
            last_round_empty=False,
            count_low_utilization=lambda: int(np.count_nonzero(used & (live <= size // 2))),
        )
