"""The status of one engine, part by part.

A part is built when it is first read, so a reader of one figure pays for its part alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cached_property
from typing import cast

from msgspec.structs import asdict

from vtoken.control.advice import paused_sentence
from vtoken.control.diagnosis import Diagnosis
from vtoken.control.facts import EngineFacts
from vtoken.control.memory_pressure import memory_pressure
from vtoken.control.outlook import Outlook
from vtoken.control.scheduling import Scheduling
from vtoken.core.runtime.relocation.pricing import NOTHING
from vtoken.core.runtime.runtime import Runtime
from vtoken.core.runtime.wasted_moves import WASTED_WITHIN_STEPS
from vtoken.policies import params_dict
from vtoken.wire import (
    SCHEMA_VERSION,
    BlockCounts,
    CacheGroup,
    Calibration,
    CanaryStatus,
    Fragmentation,
    Invariants,
    Latency,
    MemoryPressure,
    PolicyChoice,
    Reclamation,
    RequestCounts,
    RequestRow,
    RoundPrices,
    Shadow,
    Status,
    TokenCounts,
)


class StatusParts:
    """The parts of one status, under the names that they have in `Status`."""

    def __init__(
        self,
        runtime: Runtime,
        facts: EngineFacts,
        scheduling: Scheduling,
        diagnosis: Diagnosis,
        rows: Callable[[Outlook], list[RequestRow]],
    ) -> None:
        self._runtime = runtime
        self._facts = facts
        self._scheduling = scheduling
        self._diagnosis = diagnosis
        self._make_rows = rows

    @cached_property
    def rows(self) -> list[RequestRow]:
        """The rows of requests, of which some figures are sums."""
        return self._make_rows(self.outlook)

    @cached_property
    def blocks(self) -> BlockCounts:
        runtime, pool = self._runtime, self._runtime.tables.pool
        free = runtime.state.store.num_free_blocks()
        return BlockCounts(
            total=runtime.geometry.num_blocks - 1,
            free=free,
            used=pool.num_used,
            partially_live=pool.num_partially_live(),
            low_utilization=pool.num_low_utilization(),
            shared=pool.num_shared,
            headroom=runtime.config.headroom_blocks,
            withheld=min(free, self._facts.withheld_blocks),
        )

    @cached_property
    def groups(self) -> list[CacheGroup]:
        """All groups of layers, in vLLM's order; [] if there is one."""
        runtime, geometry = self._runtime, self._runtime.geometry
        if not runtime.other_groups:
            return []
        own, used = geometry.bytes_per_token * geometry.block_size, runtime.tables.pool.num_used
        found = [
            CacheGroup(
                index=self._facts.group_index,
                kind="full",
                managed=True,
                layers=geometry.num_layers,
                block_size=geometry.block_size,
                blocks=used,
                bytes=used * own,
            )
        ]
        for group in runtime.other_groups:
            held = len(set(group.block_ids()))
            found.append(
                CacheGroup(
                    index=group.index,
                    kind=group.kind,
                    managed=False,
                    layers=group.num_layers,
                    block_size=group.block_size,
                    blocks=held,
                    bytes=held * group.block_bytes,
                )
            )
        return sorted(found, key=lambda group: group.index)

    @cached_property
    def tokens(self) -> TokenCounts:
        runtime = self._runtime
        return TokenCounts(
            **asdict(runtime.counters.tokens),
            live=runtime.tables.pool.num_live,
            dead=sum(table.num_dead_slots() for table in runtime.tables),
        )

    @cached_property
    def fragmentation(self) -> Fragmentation:
        blocks, facts, scheduling = self.blocks, self._facts, self._scheduling
        found = self._diagnosis.fragmentation(blocks, self.outlook, self.pressure, self.groups)
        if scheduling.state != "running":
            found.sentence = paused_sentence(scheduling.state, facts.running, facts.waiting)
        return found

    @cached_property
    def reclamation(self) -> Reclamation:
        runtime, counters = self._runtime, self._runtime.counters.reclamation
        return Reclamation(
            **asdict(counters) | {"deferrals": dict(counters.deferrals)},
            state=runtime.config.reclamation,
            in_flight=runtime.relocator.num_in_flight_tokens,
            moved_bytes=counters.moved_tokens * runtime.geometry.bytes_per_token,
            held_blocks=sum(row.blocks for row in self.rows),
            blocks_without_reclaim=sum(row.naive_blocks for row in self.rows),
            packed_bound_blocks=sum(row.bound_blocks for row in self.rows),
            payback_steps=WASTED_WITHIN_STEPS,
            since_ts=self._facts.reclamation_since_ts,
            by=self._facts.reclamation_by,
        )

    @cached_property
    def requests(self) -> RequestCounts:
        facts = self._facts
        sessions, blocks = self._runtime.state.sessions()
        return RequestCounts(
            **asdict(self._runtime.counters.requests),
            running=facts.running,
            waiting=facts.waiting,
            oldest_wait_s=self.outlook.oldest_wait_s if facts.waiting else 0.0,
            idle=len(self._runtime.state.idle),
            sessions=sessions,
            session_blocks=blocks,
        )

    @cached_property
    def invariants(self) -> Invariants:
        runtime = self._runtime
        return Invariants(
            **asdict(runtime.counters.invariants),
            strict=runtime.state.strict,
            check_every_step=runtime.check_every_step,
        )

    @cached_property
    def latency(self) -> Latency:
        return self._runtime.latency.document(time.monotonic())

    @cached_property
    def shadow(self) -> Shadow | None:
        return self._runtime.state.shadow.document()

    @cached_property
    def outlook(self) -> Outlook:
        return Outlook(self._runtime, self._runtime.config)

    @cached_property
    def pressure(self) -> MemoryPressure | None:
        return memory_pressure(self._runtime, self.outlook)

    @cached_property
    def step_ms(self) -> float:
        return self._facts.step_times.median_ms

    @cached_property
    def calibration(self) -> Calibration:
        """Which layers and heads the current policy's signal uses, and why those."""
        runtime, facts = self._runtime, self._facts
        config, profile = runtime.config, runtime.state.calibration
        document = Calibration(source="default depth", detail=facts.calibration_detail)
        if profile is not None:
            document = Calibration(
                source="default depth",
                file=facts.calibration_file,
                fingerprint=profile.fingerprint,
                model=profile.model,
                created_ts=profile.created_ts,
            )
        reads = config.policy.reads
        if config.probe.layers:
            document.source = "configured"
        elif reads is not None and profile is not None:
            of_kind = profile.of(reads.kind)
            document.source = "profile" if of_kind and of_kind.layers else "default depth"
        if reads is not None:
            signal = runtime.scoring.resolve(reads, config)
            document.signal = signal.kind
            document.layers, document.heads = [*signal.layers], [*signal.heads]
        return document

    @cached_property
    def canary(self) -> CanaryStatus | None:
        canary = self._runtime.canary
        on = self._runtime.config.canary.share > 0 or canary.used
        return canary.document() if on else None

    @cached_property
    def prices(self) -> RoundPrices:
        """The measured prices, and a round's cost and saving now.

        While holes have no price, a round saves nothing and the tables are not read.
        """
        runtime = self._runtime
        prices = runtime.prices
        estimate = runtime.pricer.estimate(runtime.config) if prices.hole_us else NOTHING
        worth = prices.worth(estimate)
        return RoundPrices(
            **prices.document(),
            saving_us=round(worth.saving_us, 1),
            cost_us=round(worth.cost_us, 1),
            loose_tokens=estimate.loose_tokens,
            moved_tokens=estimate.moved_tokens,
            requests=estimate.num_requests,
        )

    def as_status(self) -> Status:
        """These parts, for the metrics table, which reads nothing but parts."""
        return cast(Status, self)

    @property
    def budget_tokens(self) -> int:
        config = self._runtime.config
        return 0 if config.budget_ratio else config.budget_tokens

    @property
    def budget_ratio(self) -> float:
        return self._runtime.config.budget_ratio

    @property
    def budget_floor_tokens(self) -> int:
        config = self._runtime.config
        return config.budget_floor_tokens if config.budget_ratio else 0

    @property
    def config_revision(self) -> int:
        return self._runtime.state.revision

    def document(self) -> Status:
        """All parts as one document."""
        facts, runtime, config = self._facts, self._runtime, self._runtime.config
        return Status(
            schema=SCHEMA_VERSION,
            vtoken_version=facts.vtoken_version,
            vllm_version=facts.vllm_version,
            model=facts.model,
            device=facts.device,
            epoch=facts.epoch,
            step=runtime.step,
            ts=time.time(),
            block_size=runtime.geometry.block_size,
            blocks=self.blocks,
            tokens=self.tokens,
            fragmentation=self.fragmentation,
            reclamation=self.reclamation,
            policy=PolicyChoice(name=config.policy.name, params=params_dict(config.policy)),
            budget_tokens=self.budget_tokens,
            interval_tokens=config.interval_tokens if config.evict_when == "always" else 0,
            requests=self.requests,
            invariants=self.invariants,
            config_revision=self.config_revision,
            step_ms=self.step_ms,
            latency=self.latency,
            shadow=self.shadow,
            scheduling=self._scheduling.state,
            paused_since_ts=self._scheduling.since_ts,
            prices=self.prices,
            budget_ratio=self.budget_ratio,
            budget_floor_tokens=self.budget_floor_tokens,
            calibration=self.calibration,
            canary=self.canary,
            pressure=self.pressure,
            groups=self.groups,
            evict_when=config.evict_when,
        )
