"""TEST SERVER: speaks the console's wire over real HTTP and websockets, on simulated bookkeeping.

Not vToken: run it to look at the console (`python tests/console/fake_server.py --port 8000`) or
start it in a test with `FakeServer`. It records every change that clients ask for.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
import time
from typing import Any

import msgspec
import numpy as np
import uvicorn
from fake_control import Control, RefusedError, gates
from pool_simulation import Pool, SimRequest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from vtoken import wire

BYTES_PER_TOKEN = 4608
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


class FakeServer:
    """`start()` binds, `stop()` closes; `patches`, `compactions`, `undos` record the calls."""

    def __init__(
        self,
        *,
        num_blocks: int = 800,
        block_size: int = 16,
        num_requests: int = 12,
        can_control: bool = True,
        token: str | None = None,
        seed: int = 1,
        port: int = 0,
        step_s: float = 0.05,
        prompt: int = 180,
        limit: int = 900,
        epoch: str = "epoch-1",
    ) -> None:
        self.pool = Pool(num_blocks, block_size, seed)
        self.num_requests, self.can_control, self.token = num_requests, can_control, token
        self.port, self.step_s, self.prompt, self.limit = port, step_s, prompt, limit
        self.epoch = epoch
        self.step = self.serial = 0
        self.frozen = False  # no steps, so that a picture stands still
        self.config = wire.ConfigValues(
            policy=wire.PolicyChoice(name="h2o", params={"recent_ratio": 0.5, "sinks": 4}),
            theta_f=0.25,
            batch_size=32,
            low_watermark_blocks=num_blocks // 8,
            headroom_blocks=8,
            planner="plug",
            reclamation="auto",
            recycle=False,
            budget_tokens=256,
            interval_tokens=64,
            probe=wire.Probe(layers=[], every_steps=4),
        )
        self.revision = 1
        self.history: list[wire.ConfigValues] = []
        self.control = Control(self)
        self.config_version = 0  # rises where the document changes and its revision does not
        self.events: list[wire.Event] = []
        self.operations: dict[str, wire.Operation] = {}
        self.patches: list[tuple[dict[str, Any], bool, str | None]] = []
        self.compactions: list[dict[str, Any]] = []
        self.undos = 0
        self.skip_seq = 0  # the next message of every stream skips this many numbers
        self.event_storm = 0  # events sent before each delta
        self._tasks: list[asyncio.Task[Any]] = []
        self._server: uvicorn.Server | None = None
        self.event("server", "test server started")

    # ------------------------------------------------------------ life

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        app = Starlette(
            routes=[
                WebSocketRoute("/vtoken/v1/stream", self.stream),
                Route("/vtoken/v1/{path:path}", self.rest, methods=["GET", "POST", "PATCH"]),
            ]
        )
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        self.port = listener.getsockname()[1]
        self._listener = listener
        config = uvicorn.Config(
            app,
            log_level="error",
            ws="websockets-sansio",
            lifespan="off",
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
        self._fill()
        self._tasks = [
            asyncio.create_task(self._server.serve(sockets=[listener])),
            asyncio.create_task(self._run()),
        ]
        while not self._server.started:
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        assert self._server is not None
        self._tasks[1].cancel()
        self._server.should_exit = True
        self._server.force_exit = True
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._listener.close()

    # ------------------------------------------------------------ dynamics

    def event(self, kind: wire.EventKind, summary: str, **data: Any) -> None:
        seq = self.events[-1].seq + 1 if self.events else 1
        self.events.append(
            wire.Event(
                seq=seq, ts=time.time(), step=self.step, kind=kind, summary=summary, data=data
            )
        )

    def _fill(self) -> None:
        rng = self.pool.rng
        while len(self.pool.requests) < self.num_requests:
            self.serial += 1
            name = f"cmpl-{rng.integers(1 << 32):08x}"
            prompt = int(rng.integers(self.prompt // 2, self.prompt * 2))
            if not self.pool.add(name, prompt, int(rng.integers(self.limit // 2, self.limit * 2))):
                break
        self.pool.refresh()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self.step_s)
            if not self.frozen:
                self.tick()

    def tick(self) -> None:
        self.step += 1
        self.pool.step(1)
        if self.step % 7 == 0:
            self._fill()
        if self.config.policy.name != "none":
            evicted = self.pool.evict(self.config.budget_tokens, self.config.interval_tokens)
            if evicted:
                self.event(
                    "eviction",
                    f"evicted {evicted} tokens",
                    tokens=evicted,
                    requests=1,
                    policy=self.config.policy.name,
                )
        if self.config.reclamation == "auto" and self.f() > self.config.theta_f:
            request = max(self.pool.requests.values(), key=lambda r: self.pool.plan(r)[1])
            if self.pool.plan(request)[1] > 0:
                self.relocate(request, "auto")
        self.pool.refresh()
        self.control.tick()

    def relocate(self, request: SimRequest, reason: str) -> tuple[int, int]:
        before = len(self.pool.free)
        sources, into, moved = self.pool.compact(request, self.config.batch_size)
        freed = len(self.pool.free) - before
        data = wire.Relocation(
            request_id=request.id,
            moved_tokens=moved,
            moved_bytes=moved * BYTES_PER_TOKEN,
            source_blocks=sources,
            destination_blocks=into,
            freed_blocks=freed,
            reason=reason,
            planner=self.config.planner,
            plan_us=84,
            copy_us=210,
        )
        self.event(
            "relocation",
            f"moved {moved} tok of {request.id}, freed {freed} blocks, 210 µs ({reason})",
            **msgspec.to_builtins(data),
        )
        return moved, freed

    def f(self) -> float:
        used = int((self.pool.flags & 1).sum())
        return 1 - int(self.pool.live.sum()) / (used * self.pool.block_size) if used else 0.0

    # ------------------------------------------------------------ documents

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

    # ------------------------------------------------------------ stream

    async def stream(self, socket: WebSocket) -> None:
        if self.token and socket.headers.get("authorization") != f"Bearer {self.token}":
            await socket.send_denial_response(Response(status_code=401))
            return
        await socket.accept()
        fps = float(socket.query_params.get("fps", "10"))
        seq = 0

        async def send(kind: Any, **fields: Any) -> None:
            nonlocal seq
            message = kind(
                epoch=self.epoch, seq=seq + self.skip_seq, step=self.step, ts=time.time(), **fields
            )
            self.skip_seq = 0
            seq += 1
            await socket.send_bytes(msgspec.msgpack.encode(message))

        pool = self.pool
        with contextlib.suppress(WebSocketDisconnect):
            await send(
                wire.Hello,
                schema=1,
                vtoken_version="0.0-test",
                vllm_version="0.32.0",
                model="demo/test-llama",
                device="cpu",
                geometry=wire.Geometry(
                    num_blocks=pool.num_blocks,
                    block_size=pool.block_size,
                    num_layers=4,
                    num_kv_heads=2,
                    head_size=64,
                    bytes_per_token=BYTES_PER_TOKEN,
                ),
                policies=POLICIES,
                topics=["blocks", "requests", "events", "metrics"],
                fps=fps,
                can_control=self.can_control,
            )
            live, flags = pool.live.copy(), pool.flags.copy()
            rows = {r.id: self.row(r) for r in pool.requests.values()}
            sent_event = self.events[-1].seq
            revision = (self.revision, self.config_version)
            await send(
                wire.Snapshot,
                status=self.status(),
                config=self.config_document(),
                live=live.tobytes(),
                flags=flags.tobytes(),
                requests=list(rows.values()),
            )
            while True:
                await asyncio.sleep(1 / fps)
                for event in [e for e in self.events if e.seq > sent_event]:
                    sent_event = event.seq
                    await send(wire.EventMessage, event=event)
                for _ in range(self.event_storm):
                    await send(wire.Heartbeat)
                changed = np.flatnonzero((pool.live != live) | (pool.flags != flags))
                now = {r.id: self.row(r) for r in pool.requests.values()}
                await send(
                    wire.Delta,
                    block_ids=changed.astype("<u4").tobytes(),
                    block_live=pool.live[changed].astype("<u2").tobytes(),
                    block_flags=pool.flags[changed].tobytes(),
                    requests_changed=[r for k, r in now.items() if rows.get(k) != r],
                    requests_removed=[k for k in rows if k not in now],
                    status=self.status(),
                    config=self.config_document()
                    if revision != (self.revision, self.config_version)
                    else None,
                )
                live, flags, rows = pool.live.copy(), pool.flags.copy(), now
                revision = (self.revision, self.config_version)

    # ------------------------------------------------------------ REST

    async def rest(self, request: Request) -> Response:
        body = await request.body()
        try:
            if self.token and request.headers.get("authorization") != f"Bearer {self.token}":
                raise RefusedError(status=401, title="Unauthorized", detail="a token is required")
            value, status = self.answer(request, msgspec.json.decode(body) if body else None)
        except RefusedError as refusal:
            return Response(
                msgspec.json.encode(refusal.problem),
                refusal.problem.status,
                media_type="application/problem+json",
            )
        return Response(msgspec.json.encode(value), status, media_type="application/json")

    def answer(self, request: Request, body: Any) -> tuple[Any, int]:
        path, query = request.path_params["path"].split("/"), request.query_params
        match [request.method, *path]:
            case ["GET", "status"]:
                return self.status(), 200
            case ["GET", "config"]:
                return self.config_document(), 200
            case ["GET", "policies"]:
                return POLICIES, 200
            case ["GET", "events"]:
                after, limit = int(query.get("after", 0)), int(query.get("limit", 100))
                found = [e for e in self.events if e.seq > after][:limit]
                return wire.EventPage(
                    events=found, first_seq=self.events[0].seq, last_seq=self.events[-1].seq
                ), 200
            case ["PATCH", "config"]:
                dry = query.get("validate_only") == "true"
                done = self.patch(body, dry, request.headers.get("if-match"))
                return done if dry else self.control.start(query, done), 200
            case ["POST", "confirm"]:
                return self.control.confirm(), 200
            case ["POST", "undo"]:
                return self.undo(), 200
            case ["POST", "compactions"]:
                return self.compaction(body or {}), 202
            case ["GET", "operations", name] if name in self.operations:
                return self.operations[name], 200
            case ["GET", "blocks", name]:
                return self.block(int(name)), 200
            case ["GET", "requests", name, *rest] if name in self.pool.requests:
                sim = self.pool.requests[name]
                if rest:
                    return self.tokens(sim, int(query["start"]), int(query["limit"])), 200
                by_block = self.pool._block_live(sim)
                row = msgspec.structs.asdict(self.row(sim))
                return wire.RequestDetail(
                    **row, block_table=sim.table, block_live=[len(by_block[b]) for b in sim.table]
                ), 200
        raise RefusedError(status=404, title="Not found", detail=f"no {'/'.join(path)} here")

    def patch(self, patch: dict[str, Any], dry: bool, if_match: str | None) -> wire.PatchResult:
        self.patches.append((patch, dry, if_match))
        if if_match is not None and if_match != f'"{self.revision}"':
            raise RefusedError(
                status=412,
                title="Precondition failed",
                field="If-Match",
                value=if_match,
                bound=f'"{self.revision}"',
                detail=f"the configuration is at revision {self.revision}",
            )
        bounds = self.config_document().bounds
        for name, value in patch.items():
            bound = bounds.get(name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if (
                bound is not None
                and bound.minimum is not None
                and bound.maximum is not None
                and (not number or not bound.minimum <= value <= bound.maximum)
            ):
                text = f"a number in {bound.minimum:g}..{bound.maximum:g}"
                raise RefusedError(
                    status=422,
                    title="Unprocessable",
                    field=name,
                    value=value,
                    bound=text,
                    detail=f"{name} = {value!r} is not {text}",
                )
        old = msgspec.to_builtins(self.config)
        merged = old | patch
        if "policy" in patch:
            name = patch["policy"].get("name", old["policy"]["name"])
            kept = old["policy"]["params"] if name == old["policy"]["name"] else {}
            merged["policy"] = {"name": name, "params": kept | patch["policy"].get("params", {})}
        changes = {k: [old[k], v] for k, v in merged.items() if old[k] != v}
        previous, new = self.config, msgspec.convert(merged, wire.ConfigValues)
        if dry:
            plans = [self.pool.plan(r) for r in self.pool.requests.values()]
            moved, freed = sum(p[0] for p in plans), sum(p[1] for p in plans)
            acts = new.reclamation == "auto" and self.f() > new.theta_f
            return wire.PatchResult(
                revision=self.revision,
                applied_at_step=None,
                previous=previous,
                effective=new,
                changes=changes,
                what_if=wire.WhatIf(
                    freed_blocks=freed if acts else 0,
                    moved_tokens=moved if acts else 0,
                    moved_bytes=moved * BYTES_PER_TOKEN if acts else 0,
                    evicted_tokens=sum(
                        max(0, r.live_count() - new.budget_tokens)
                        for r in self.pool.requests.values()
                    )
                    if new.policy.name != "none"
                    else 0,
                    source_blocks=freed if acts else 0,
                    gates=gates(self, new),
                ),
            )
        self.control.require_no_trial()
        self.history.append(previous)
        return self.commit(new, changes)

    def commit(
        self, new: wire.ConfigValues, changes: dict[str, Any], actor: str = "local", **more: Any
    ) -> wire.PatchResult:
        previous, self.config = self.config, new
        self.revision += 1
        words = ", ".join(f"{k} {a} → {b}" for k, (a, b) in changes.items())
        self.event(
            "config",
            f"{words} by {actor} (rev {self.revision})",
            revision=self.revision,
            actor=actor,
            changes=changes,
            **more,
        )
        return wire.PatchResult(
            revision=self.revision,
            applied_at_step=self.step,
            previous=previous,
            effective=new,
            changes=changes,
        )

    def undo(self) -> wire.PatchResult:
        self.undos += 1
        if not self.history:
            raise RefusedError(status=409, title="Conflict", detail="there is nothing to undo")
        old, new = msgspec.to_builtins(self.config), self.history.pop()
        fresh = msgspec.to_builtins(new)
        self.control.trial = None
        return self.commit(new, {k: [old[k], v] for k, v in fresh.items() if old[k] != v})

    def compaction(self, body: dict[str, Any]) -> wire.Operation:
        self.compactions.append(body)
        requests = list(self.pool.requests.values())
        plans = [self.pool.plan(r) for r in requests]
        dry = bool(body.get("dry_run"))
        plan = wire.OperationPlan(
            requests=len(requests),
            source_blocks=sum(p[1] for p in plans),
            destination_blocks=0,
            moved_tokens=sum(p[0] for p in plans),
            freed_blocks=sum(p[1] for p in plans),
            moved_bytes=sum(p[0] for p in plans) * BYTES_PER_TOKEN,
        )
        done = [self.relocate(r, "manual") for r in requests] if not dry else []
        self.pool.refresh()
        moved, freed = sum(d[0] for d in done), sum(d[1] for d in done)
        operation = wire.Operation(
            id=f"op-{len(self.operations) + 1}",
            state="done",
            actor="local",
            request_id=None,
            batch_size=self.config.batch_size,
            dry_run=dry,
            created_ts=time.time(),
            plan=plan,
            result=None
            if dry
            else wire.OperationResult(
                moved_tokens=moved,
                moved_bytes=moved * BYTES_PER_TOKEN,
                freed_blocks=freed,
                duration_ms=3.2,
            ),
        )
        self.operations[operation.id] = operation
        return msgspec.structs.replace(operation, state="done" if dry else "running")

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


async def main() -> None:
    parser = argparse.ArgumentParser(description="test server for the console; not vToken")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--blocks", type=int, default=5427)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--step", type=float, default=0.05)
    parser.add_argument("--warm", type=int, default=400, help="steps taken before it listens")
    parser.add_argument("--read-only", action="store_true")
    args = parser.parse_args()
    server = FakeServer(
        num_blocks=args.blocks,
        num_requests=args.requests,
        port=args.port,
        step_s=args.step,
        can_control=not args.read_only,
        limit=1500,
        prompt=400,
    )
    server._fill()
    for _ in range(args.warm):
        server.tick()
    await server.start()
    print(f"TEST SERVER (simulated bookkeeping, no model) on {server.url}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main())
