"""TEST ONLY: the documents of the simulated engine: status, configuration, blocks, tokens."""

from __future__ import annotations

import time
from typing import Any

from tests.support.fake_console.fake_control import RefusedError, gates
from tests.support.fake_console.pool_simulation import SimRequest
from tests.support.fake_console.simulated_engine import BYTES_PER_TOKEN, SimulatedEngine
from vtoken import wire

POLICIES = [
    wire.PolicyInfo(
        name="none",
        summary="evict nothing",
        source="-",
        needs=[],
        params_schema={"type": "object", "properties": {}},
    ),
    wire.PolicyInfo(
        name="streaming_llm",
        summary="keep the sinks and the most recent tokens",
        source="arXiv 2309.17453",
        needs=[],
        params_schema={
            "type": "object",
            "properties": {
                "sinks": {
                    "type": "integer",
                    "minimum": 0,
                    "maximum": 1024,
                    "default": 4,
                    "description": "first positions, always kept",
                },
            },
        },
    ),
    wire.PolicyInfo(
        name="h2o",
        summary="keep the tokens with the highest accumulated attention",
        source="arXiv 2306.14048",
        needs=["attention"],
        params_schema={
            "type": "object",
            "properties": {
                "recent_ratio": {
                    "type": "number",
                    "minimum": 0,
                    "maximum": 1,
                    "default": 0.5,
                    "description": "share of the budget kept for the newest",
                },
                "sinks": {
                    "type": "integer",
                    "minimum": 0,
                    "maximum": 1024,
                    "default": 4,
                    "description": "first positions, always kept",
                },
                "normalize": {"type": "boolean", "default": False},
            },
        },
    ),
]


class Documents(SimulatedEngine):
    """What GET answers, and how the stream opens."""

    def hello_fields(self, fps: float, *, can_control: bool) -> dict[str, Any]:
        """Of `wire.Hello`, beside those of every message."""
        return {
            "schema": 1,
            "vtoken_version": "0.0-test",
            "vllm_version": "0.32.0",
            "model": "demo/test-llama",
            "device": "cpu",
            "geometry": wire.Geometry(
                num_blocks=self.pool.num_blocks,
                block_size=self.pool.block_size,
                num_layers=4,
                num_kv_heads=2,
                head_size=64,
                bytes_per_token=BYTES_PER_TOKEN,
            ),
            "policies": POLICIES,
            "topics": ["blocks", "requests", "events", "metrics"],
            "fps": fps,
            "can_control": can_control,
        }

    def row(self, r: SimRequest) -> wire.RequestRow:
        size, live = self.pool.block_size, r.live_count()
        return wire.RequestRow(
            id=r.id,
            state="running",
            live=live,
            dead=len(r.live) - live,
            prompt_tokens=r.prompt,
            output_tokens=len(r.live) - r.prompt,
            blocks=len(r.table),
            bound_blocks=-(-live // size),
            naive_blocks=max(len(r.table), -(-len(r.live) * 8 // 10 // size)),
            policy=self.config.policy.name,
            budget_tokens=self.config.budget_tokens,
            dense=False,
            moved_tokens=r.moved,
            number=r.number if self.tells_owners else 0,
        )

    def status(self) -> wire.Status:
        pool, size = self.pool, self.pool.block_size
        used = (pool.flags & 1) != 0
        rows = [self.row(r) for r in pool.requests.values()]
        plans = [pool.plan(r) for r in pool.requests.values()]
        moved, freed = sum(p[0] for p in plans), sum(p[1] for p in plans)
        f, free = self.f(), len(pool.free)
        fragmented = f > self.config.theta_f
        held = int(used.sum())
        holes = held * size - int(pool.live.sum())
        if not rows:
            sentence = "Idle: no request holds a block."
        elif fragmented:
            size_mb = moved * BYTES_PER_TOKEN / 1e6
            sentence = (
                f"Fragmented: {holes:,} free slots sit in {held:,} used blocks; "
                f"compacting now would free {freed:,} blocks ({size_mb:.1f} MB moved)."
            )
        else:
            sentence = f"Memory is not the limit: {free:,} of {pool.num_blocks:,} blocks free."
        return wire.Status(
            schema=1,
            vtoken_version="0.0-test",
            vllm_version="0.32.0",
            model="demo/test-llama",
            device="cpu",
            epoch=self.epoch,
            step=self.step,
            ts=time.time(),
            block_size=size,
            health=self.health,
            blocks=wire.BlockCounts(
                total=pool.num_blocks - 1,
                free=free,
                used=held,
                partially_live=int((used & (pool.live < size)).sum()),
                low_utilization=int((used & (pool.live <= size // 2)).sum()),
                shared=len(pool.shared),
                headroom=8,
            ),
            tokens=wire.TokenCounts(
                live=int(pool.live.sum()),
                dead=holes,
                evicted=pool.evicted,
                generated=pool.generated,
            ),
            fragmentation=wire.Fragmentation(
                f=f,
                theta_f=self.config.theta_f,
                cause="fragmented" if fragmented else ("ok" if free > 8 else "full"),
                sentence=sentence,
                reclaimable_blocks=freed,
                reclaim_moved_tokens=moved,
                reclaim_moved_bytes=moved * BYTES_PER_TOKEN,
                low_watermark_blocks=self.config.low_watermark_blocks,
                gates=gates(self, self.config),
            ),
            reclamation=wire.Reclamation(
                state=self.config.reclamation,
                in_flight=0,
                relocations=pool.relocations,
                moved_tokens=pool.moved_tokens,
                moved_bytes=pool.moved_tokens * BYTES_PER_TOKEN,
                reclaimed_blocks=pool.reclaimed,
                recycled_slots=0,
                held_blocks=sum(r.blocks for r in rows),
                blocks_without_reclaim=sum(r.naive_blocks for r in rows),
                packed_bound_blocks=sum(r.bound_blocks for r in rows),
                **self.control.payback(),
            ),
            policy=self.config.policy,
            budget_tokens=self.config.budget_tokens,
            interval_tokens=self.config.interval_tokens,
            requests=wire.RequestCounts(
                running=len(rows),
                waiting=0,
                preempted=self.control.preempted,
                finished=pool.finished,
            ),
            invariants=wire.Invariants(checked=self.step, violations=0),
            config_revision=self.revision,
            step_ms=self.step_s * 1000,
            latency=self.control.latency(),
        )

    def config_document(self) -> wire.ConfigDocument:
        def whole(low: float, high: float, text: str) -> wire.Bound:
            return wire.Bound(type="int", summary=text, minimum=low, maximum=high)

        blocks = self.pool.num_blocks
        return wire.ConfigDocument(
            revision=self.revision,
            desired=self.config,
            effective=self.config,
            effective_revision=self.revision,
            trial=self.control.trial,
            bounds={
                "policy": wire.Bound(
                    type="object", summary="{name, params}", choices=[p.name for p in POLICIES]
                ),
                "theta_f": wire.Bound(
                    type="float", summary="reclaim when F exceeds this", minimum=0.0, maximum=1.0
                ),
                "batch_size": whole(1, blocks, "B: most source blocks in one round"),
                "low_watermark_blocks": whole(0, blocks, "reclaim when this few are free"),
                "headroom_blocks": whole(0, blocks // 2, "fresh blocks a round may take"),
                "planner": wire.Bound(
                    type="enum", summary="plug or pack", choices=["plug", "pack"]
                ),
                "reclamation": wire.Bound(
                    type="enum", summary="auto, paused, off", choices=["auto", "paused", "off"]
                ),
                "recycle": wire.Bound(type="bool", summary="write new tokens into dead slots"),
                "budget_tokens": whole(5, 1 << 24, "live tokens that a request may keep"),
                "interval_tokens": whole(0, 1 << 24, "evict when live exceeds budget by this"),
            },
        )

    def block(self, number: int) -> wire.BlockDetail:
        if not 0 <= number < self.pool.num_blocks:
            raise RefusedError(
                status=404,
                title="Not found",
                field="id",
                value=number,
                bound=f"0..{self.pool.num_blocks - 1}",
                detail=f"no block {number}",
            )
        size, flags = self.pool.block_size, int(self.pool.flags[number])
        slots = [wire.BlockSlot(offset=o, state="free") for o in range(size)]
        owners = []
        for r in self.pool.requests.values():
            if number not in r.table:
                continue
            here = [t for t, b in enumerate(r.block) if b == number]
            for t in here:
                slots[r.offset[t]] = wire.BlockSlot(
                    offset=r.offset[t],
                    state="live" if r.live[t] else "dead",
                    token_id=t,
                    request_id=r.id,
                )
            owners.append(
                wire.BlockOwner(
                    request_id=r.id, live=sum(r.live[t] for t in here), index=r.table.index(number)
                )
            )
        pinned = "shared prefix" if flags & 2 else "hashed" if flags & 4 else "none"
        return wire.BlockDetail(
            id=number,
            live=int(self.pool.live[number]),
            ref_cnt=len(owners),
            flags=flags,
            pinned=pinned,
            owners=owners,
            slots=slots,
        )

    def tokens(self, r: SimRequest, start: int, limit: int) -> wire.TokenPage:
        rows = []
        for t in range(start, min(start + limit, len(r.live))):
            held = r.block[t] >= 0
            score = float(1 / (1 + (t * 2654435761 % 97)) + 1 / (1 + len(r.live) - t))
            rows.append(
                wire.TokenRow(
                    token_id=t,
                    position=t,
                    block=r.block[t] if held else None,
                    offset=r.offset[t] if held else None,
                    live=r.live[t],
                    score=score if r.live[t] else None,
                )
            )
        return wire.TokenPage(
            request_id=r.id, step=self.step, start=start, total=len(r.live), rows=rows
        )
