"""TEST ONLY: what clients may change on the simulated engine, and how it refuses."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from tests.support.fake_console.fake_control import RefusedError, gates
from tests.support.fake_console.simulated_documents import Documents
from tests.support.fake_console.simulated_engine import BYTES_PER_TOKEN
from vtoken import wire


class Controls(Documents):
    """What PATCH and POST do."""

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
