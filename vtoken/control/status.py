"""The status of one engine: what it does now and has done since it started.

Numbers are of this moment. What takes the planner may be older, if a reader says so. The sentence
is left to whoever shows the status (`vtoken.sentences.situation`), as is the health of the server.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec.structs import asdict, replace

from vtoken.base.arrays import Ints
from vtoken.control.diagnosis import Diagnosis, Finding
from vtoken.control.facts import EngineFacts
from vtoken.control.outlook import Outlook
from vtoken.control.parking import parking
from vtoken.control.scheduling import Scheduling
from vtoken.core.config.values import VTokenConfig
from vtoken.core.runtime.held_request import WASTED_WITHIN_STEPS
from vtoken.core.runtime.relocation.round_planner import NOTHING
from vtoken.core.runtime.runtime import Runtime
from vtoken.wire import (
    SCHEMA_VERSION,
    BlockCounts,
    CacheGroup,
    CanaryStatus,
    Fragmentation,
    Invariants,
    Reclamation,
    RequestCounts,
    RoundPrices,
    SignalLayers,
    Status,
    TokenCounts,
)

FINDING_S = 1.0  # between two questions to the planner, for frames and guards


def naive_blocks(facts: npt.NDArray[Any]) -> Ints:
    """What requests would hold if tokens never moved and slots were never reused [k], from the
    facts of their tables [k].
    """
    return np.where(facts["virtual"] != 0, facts["num_naive"], facts["num_blocks"])


@dataclass(frozen=True, slots=True)
class _Slow:
    """What takes the planner, or changes slowly: found under `config` in the state `version`, at
    `found_at` in monotonic seconds.
    """

    finding: Finding
    prices: RoundPrices
    step_ms: float
    config: VTokenConfig
    version: tuple[int, ...]
    found_at: float


class EngineStatus:
    """The status of one runtime, which `facts` describe further."""

    def __init__(self, runtime: Runtime, facts: EngineFacts) -> None:
        self.runtime = runtime
        self.facts = facts
        self.scheduling = Scheduling(runtime)
        self._diagnosis = Diagnosis(runtime)
        self._newest: _Slow | None = None

    def status(self, outlook: Outlook | None = None, *, max_age_s: float = 0.0) -> Status:
        """The status now. `outlook`: that of the configuration in force, if it exists already;
        `max_age_s`: how old what the planner found may be, unless the configuration has changed.
        """
        facts, runtime, config = self.facts, self.runtime, self.runtime.config
        outlook = outlook or Outlook(runtime, config)
        slow, now = self._slow(outlook, max_age_s), time.monotonic()
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
            blocks=self._blocks(),
            tokens=self._tokens(),
            fragmentation=self._fragmentation(outlook, slow.finding),
            reclamation=self._reclamation(),
            policy=config.values().policy,
            budget_tokens=0 if config.budget_ratio else config.budget_tokens,
            interval_tokens=config.interval_tokens if config.evict_when == "always" else 0,
            requests=self._requests(outlook),
            invariants=Invariants(
                **asdict(runtime.counters.invariants),
                strict=runtime.current.strict,
                check_every_step=runtime.check_every_step,
            ),
            config_revision=runtime.revision,
            step_ms=slow.step_ms,
            latency=runtime.latency.document(now),
            slo=runtime.latency.slo(now, config.objectives),
            shadow=None if config.shadow is None else runtime.shadow.document(),
            scheduling=self.scheduling.state,
            paused_since_ts=self.scheduling.since_ts,
            prices=slow.prices,
            calibration=self._signal_layers(),
            budget_ratio=config.budget_ratio,
            budget_floor_tokens=config.budget_floor_tokens if config.budget_ratio else 0,
            canary=self._canary(),
            pressure=outlook.pressure(),
            groups=self._groups(),
            evict_when=config.evict_when,
            serving=replace(runtime.counters.serving),
            relief=slow.finding.relief,
            parking=parking(runtime),
            drafts=runtime.drafts.document(),
        )

    def _slow(self, outlook: Outlook, max_age_s: float) -> _Slow:
        runtime, newest, now = self.runtime, self._newest, time.monotonic()
        if newest is not None and newest.config is runtime.config:
            is_young = now - newest.found_at < max_age_s
            is_young &= newest.finding.relief is not None or not outlook.is_tight
            if is_young or newest.version == runtime.version:
                return newest
        self._newest = _Slow(
            finding=self._diagnosis.find(outlook, self.facts.block_bytes),
            prices=self._prices(),
            step_ms=self.facts.step_times.median_ms,
            config=runtime.config,
            version=runtime.version,
            found_at=now,
        )
        return self._newest

    def _blocks(self) -> BlockCounts:
        runtime, pool = self.runtime, self.runtime.tables.pool
        free = runtime.store.num_free_blocks()
        return BlockCounts(
            total=runtime.geometry.num_blocks - 1,
            free=free,
            used=pool.num_used,
            partially_live=pool.num_partially_live(),
            low_utilization=pool.num_low_utilization(),
            shared=pool.num_shared,
            headroom=runtime.config.headroom_blocks,
            withheld=min(free, self.facts.withheld_blocks),
        )

    def _tokens(self) -> TokenCounts:
        runtime, tables = self.runtime, self.runtime.tables
        return TokenCounts(
            **asdict(runtime.counters.tokens),
            live=tables.pool.num_live,
            dead=int(tables.columns.facts["num_dead_slots"][tables.all_rows].sum()),
        )

    def _fragmentation(self, outlook: Outlook, finding: Finding) -> Fragmentation:
        runtime, config = self.runtime, self.runtime.config
        cause, held_s, held_for = self._diagnosis.cause(outlook, finding.freed_blocks)
        return Fragmentation(
            f=runtime.tables.pool.fragmentation,
            theta_f=config.theta_f,
            cause=cause,
            reclaimable_blocks=finding.freed_blocks,
            reclaim_moved_tokens=finding.moved_tokens,
            reclaim_moved_bytes=finding.moved_tokens * runtime.geometry.bytes_per_token,
            low_watermark_blocks=config.low_watermark_blocks,
            gates=finding.gates,
            held_s=held_s,
            held_for=held_for,
        )

    def _reclamation(self) -> Reclamation:
        runtime, counters = self.runtime, self.runtime.counters.reclamation
        tables = runtime.tables
        held = tables.columns.facts[tables.all_rows]
        return Reclamation(
            **asdict(counters) | {"deferrals": dict(counters.deferrals)},
            state=runtime.config.reclamation,
            in_flight=runtime.relocator.num_in_flight_tokens,
            moved_bytes=counters.moved_tokens * runtime.geometry.bytes_per_token,
            held_blocks=int(held["num_blocks"].sum()),
            blocks_without_reclaim=int(naive_blocks(held).sum()),
            packed_bound_blocks=int((-(-held["num_live"] // tables.block_size)).sum()),
            payback_steps=WASTED_WITHIN_STEPS,
            since_ts=self.facts.reclamation_since_ts,
            by=self.facts.reclamation_by,
        )

    def _requests(self, outlook: Outlook) -> RequestCounts:
        facts, requests = self.facts, self.runtime.requests
        sessions, blocks = requests.sessions()
        return RequestCounts(
            **asdict(self.runtime.counters.requests),
            running=facts.running,
            waiting=facts.waiting,
            oldest_wait_s=outlook.oldest_wait_s if facts.waiting else 0.0,
            idle=len(requests.idle),
            sessions=sessions,
            session_blocks=blocks,
            first=outlook.first_waiting(),
        )

    def _canary(self) -> CanaryStatus | None:
        canary = self.runtime.canary
        on = self.runtime.config.canary.share > 0 or canary.used
        return canary.document() if on else None

    def _groups(self) -> list[CacheGroup]:
        """All groups of layers, in vLLM's order; [] if there is one."""
        runtime, geometry = self.runtime, self.runtime.geometry
        if not runtime.other_groups:
            return []
        own, used = geometry.bytes_per_token * geometry.block_size, runtime.tables.pool.num_used
        found = [
            CacheGroup(
                index=self.facts.group_index,
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

    def _prices(self) -> RoundPrices:
        """The measured prices, and a round's cost and saving now.

        While holes have no price, a round saves nothing and the tables are not read.
        """
        runtime, prices = self.runtime, self.runtime.prices
        estimate = runtime.round_planner.estimate(runtime.config) if prices.hole_us else NOTHING
        worth = prices.worth(estimate)
        return RoundPrices(
            **prices.document(),
            saving_us=round(worth.saving_us, 1),
            cost_us=round(worth.cost_us, 1),
            loose_tokens=estimate.loose_tokens,
            moved_tokens=estimate.moved_tokens,
            requests=estimate.num_requests,
        )

    def _signal_layers(self) -> SignalLayers:
        """Which layers and heads the current policy's signal comes from."""
        config = self.runtime.config
        found = SignalLayers(source="configured" if config.probe.layers else "default depth")
        if config.policy.reads is not None:
            signal = self.runtime.ranking.resolve(config.policy.reads, config)
            found.signal = signal.kind
            found.layers, found.heads = [*signal.layers], [*signal.heads]
        return found
