"""The test server's control side: gates, payback, latency, changes on trial.

Simulated like the rest of it: figures that move with the pool, and a trial that is reverted by the
server when its time is over or its guard is passed.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec

from vtoken import wire

if TYPE_CHECKING:
    from tests.support.fake_console.fake_server import FakeServer


class RefusedError(Exception):
    def __init__(self, **fields: Any) -> None:
        self.problem = wire.Problem(**fields)


def gates(server: FakeServer, config: wire.ConfigValues) -> list[wire.Gate]:
    """The conditions of an automatic round under `config`."""
    f, free = server.f(), len(server.pool.free)
    above = f > config.theta_f
    low = free <= config.low_watermark_blocks
    return [
        wire.Gate(
            name="reclamation",
            open=config.reclamation == "auto",
            detail=f"reclamation {config.reclamation}",
        ),
        wire.Gate(
            name="theta_f",
            open=above,
            detail=f"F {f:.2f} {'>' if above else '<='} theta_F {config.theta_f:.2f}",
        ),
        wire.Gate(
            name="watermark",
            open=low,
            detail=f"free {free} {'<=' if low else '>'} {config.low_watermark_blocks}",
        ),
    ]


def percentiles(middle: float, count: int) -> wire.Percentiles:
    return wire.Percentiles(count=count, p50_ms=middle, p95_ms=middle * 1.6, p99_ms=middle * 2.3)


class Control:
    """What `FakeServer` answers beyond its pool. Tests set `inter_token_ms` and `preempted`."""

    def __init__(self, server: FakeServer) -> None:
        self.server = server
        self.trial: wire.Trial | None = None
        self.inter_token_ms = 20.0
        self.preempted = 0
        self._before: wire.ConfigValues | None = None
        self._preempted_then = 0

    def latency(self) -> wire.Latency:
        rows = len(self.server.pool.requests)
        middle = self.inter_token_ms + self.server.step % 7
        return wire.Latency(
            window_s=60.0,
            ttft=percentiles(middle * 12, rows),
            inter_token=percentiles(middle, 60 * rows),
        )

    def payback(self) -> dict[str, Any]:
        pool = self.server.pool
        return {
            "relocation_freed_blocks": pool.reclaimed,
            "moved_then_evicted_tokens": pool.moved_tokens // 9,
            "payback_steps": 64,
            "deferrals": {"watermark": self.server.step // 3, "headroom": self.server.step // 20},
            "copy_us": pool.relocations * 210,
            "plan_us": self.server.step * 60,
        }

    # ------------------------------------------------------------ trials

    def start(self, query: Any, result: wire.PatchResult) -> wire.PatchResult:
        """Puts the change of `result` on trial, when its query asks for that."""
        seconds = query.get("confirm_within_s")
        p95, preemptions = query.get("guard_inter_token_p95_ms"), query.get("guard_preemptions")
        if seconds is None and p95 is None and preemptions is None:
            self.trial = None
            return result
        now = time.time()
        guard = wire.Guard(
            inter_token_p95_ms=float(p95) if p95 is not None else None,
            preemptions=int(preemptions) if preemptions is not None else None,
        )
        self.trial = wire.Trial(
            revision=result.revision,
            actor="local",
            started_ts=now,
            expires_ts=now + float(seconds) if seconds is not None else None,
            guard=guard if p95 is not None or preemptions is not None else None,
            guard_until_ts=now + float(query.get("guard_for_s", 300)),
            changes=result.changes,
        )
        self._before, self._preempted_then = result.previous, self.preempted
        return msgspec.structs.replace(result, trial=self.trial)

    def require_no_trial(self) -> None:
        if self.trial is not None:
            raise RefusedError(
                status=409,
                title="On trial",
                field="trial",
                value=self.trial.revision,
                bound="one change on trial at a time",
                detail=f"revision {self.trial.revision} by {self.trial.actor} is on trial",
            )

    def confirm(self) -> wire.PatchResult:
        trial, self.trial = self.trial, None
        if trial is None:
            raise RefusedError(status=409, title="Nothing on trial", detail="no change is on trial")
        server = self.server
        server.event(
            "config",
            f"rev {trial.revision} confirmed by local",
            revision=server.revision,
            actor="local",
            changes={},
            confirmed=trial.revision,
        )
        server.config_version += 1
        return wire.PatchResult(
            revision=server.revision,
            applied_at_step=server.step,
            previous=server.config,
            effective=server.config,
            changes={},
        )

    def tick(self) -> None:
        """Reverts a trial whose time is over or whose guard is passed."""
        trial = self.trial
        if trial is None:
            return
        why, guard = "", trial.guard
        if trial.expires_ts is not None and time.time() > trial.expires_ts:
            why = "nobody confirmed it in time"
        p95 = self.latency().inter_token.p95_ms or 0.0
        if guard and guard.inter_token_p95_ms is not None and p95 > guard.inter_token_p95_ms:
            why = f"inter-token p95 {p95:.1f} ms passed its guard {guard.inter_token_p95_ms:g} ms"
        came = self.preempted - self._preempted_then
        if guard and guard.preemptions is not None and came > guard.preemptions:
            why = f"{came} preemptions passed the guard {guard.preemptions}"
        if why:
            self.revert(why)

    def revert(self, why: str) -> None:
        trial, self.trial = self.trial, None
        assert trial is not None
        assert self._before is not None
        server = self.server
        changes = {name: [new, old] for name, (old, new) in trial.changes.items()}
        server.commit(self._before, changes, actor="guard", reverted=trial.revision, reason=why)
