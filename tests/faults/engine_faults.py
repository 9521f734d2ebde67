"""Faults in the worker's half: injected into a real vLLM engine in this process.

Violations are collected instead of raised, so that one engine serves many faults. When no check
notices anything, the sampled tokens are judged by the masked reference of the soak.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from tests import reference
from tests.faults.catalogue import REPORTERS, Catalogue, Fault, Hit, Noticed, noticed
from vtoken.config import merge_patch
from vtoken.errors import InvariantViolation
from vtoken.soak.oracle import Oracle

ENGINE = Catalogue()
ENGINE_ARGUMENTS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "kv_cache_memory_bytes": 64 << 20,
    "seed": 0,
    "enable_prefix_caching": True,
    "num_gpu_blocks_override": 96,
    "max_model_len": 512,
    "block_size": 16,
}
CONFIG: dict[str, Any] = {
    "policy": {"name": "random", "params": {"recent": 4, "sinks": 2}},
    "budget_tokens": 48,
    "interval_tokens": 12,
    "theta_f": 0.0,
    "low_watermark_blocks": 96,
    "headroom_blocks": 8,
    "recycle": False,
    "verify_ratio": 1.0,
}
NUM_NEW = 48
PREFIX = reference.random_prompt(70, 7)
PROMPTS = [PREFIX + reference.random_prompt(20 + 9 * i, i)[1:] for i in range(4)]
TOLERANCE = 1e-3


class EngineUnderFaults:
    """A running engine; `heal` undoes a fault and everything that it did."""

    def __init__(self, llm: Any, model: Path) -> None:
        from vtoken.vllm.soak_worker import Watch

        self.llm = llm
        self.core = llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.runtime = self.scheduler.vtoken
        self.manager = self.scheduler.kv_cache_manager.coordinator.single_type_managers[0]
        self.runner = self.core.model_executor.driver_worker.worker.model_runner
        self.watch = Watch(self.scheduler)
        self.oracle = Oracle(model)
        self.stack = ExitStack()
        self.broken = False
        self._runs = 0

    def run(self, fault: Fault) -> Noticed | None:
        """Inject `fault` under traffic; None when neither a check nor the oracle notices."""
        found: list[Noticed] = []
        hit = Hit(lambda: self.runtime.step)

        def violated(violation: Any) -> None:
            if violation.__traceback__ is not None:  # raised deeper down
                found.append(noticed(violation, hit))
                return
            frame = sys._getframe(1)
            while frame.f_code.co_name in REPORTERS and frame.f_back is not None:
                frame = frame.f_back
            place = frame.f_code.co_qualname
            steps = self.runtime.step - (hit.at or self.runtime.step)
            found.append(Noticed(f"{violation.invariant}, `{place}`", violation.detail, steps))

        self._configure(CONFIG | fault.options.get("config", {}))
        with self.stack:
            self.stack.enter_context(patch.object(self.runtime, "violated", violated))
            self._runs += 1
            outputs = self._traffic(fault, hit, found)
        assert hit.times, f"{fault.name}: never injected"
        if not found and not self.broken:
            found = self._judge(outputs)
        self.heal()
        return found[0] if found else None

    def _configure(self, values: dict[str, Any]) -> None:
        geometry = self.runtime.geometry
        self.runtime.config = merge_patch(
            self.runtime.config,
            values,
            num_blocks=geometry.num_blocks,
            num_layers=geometry.num_layers,
        )

    def _traffic(self, fault: Fault, hit: Hit, found: list[Noticed]) -> dict[str, list[int]]:
        """Two waves over one prefix: the second one hits what the first one left in the cache."""
        outputs: dict[str, list[int]] = {}
        for wave in range(2):
            for number, prompt in enumerate(PROMPTS):
                self._submit(f"f{self._runs}w{wave}n{number}", prompt)
            for step in range(10_000):
                if wave == 0 and step == 6:
                    fault.inject(self, hit)
                if found or not self.llm.llm_engine.has_unfinished_requests():
                    break
                try:
                    for output in self.llm.llm_engine.step():
                        outputs[output.request_id] = list(output.outputs[0].token_ids)
                except Exception as error:
                    found.append(noticed(error, hit))
                    self.broken = True
        return outputs

    def _submit(self, name: str, prompt: list[int]) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0,
            max_tokens=NUM_NEW,
            ignore_eos=True,
            output_kind=RequestOutputKind.CUMULATIVE,
        )
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params)

    def _judge(self, outputs: dict[str, list[int]]) -> list[Noticed]:
        wrong = judged = 0
        for name, output in outputs.items():
            prompt = PROMPTS[int(name.rpartition("n")[2])]
            verdict = self.oracle.judge(prompt, output, self.watch.stretches[name])
            judged += len(verdict.gaps)
            wrong += verdict.num_worse_than(TOLERANCE)
        detail = f"{wrong} of {judged} tokens differ from the reference"
        return [Noticed("wrong tokens", detail, 0)] if wrong else []

    def heal(self) -> None:
        """Everything is aborted and forgotten, the prefix cache too."""
        self.stack.close()
        if self.broken:
            return
        running = [r.request_id for r in (*self.scheduler.running, *self.scheduler.waiting)]
        self.llm.llm_engine.abort_request(running, internal=True)
        self.llm.llm_engine.step()  # the worker forgets them too
        assert self.scheduler.reset_prefix_cache()
        try:
            self.runtime.check()
        except InvariantViolation:  # nothing can undo that one
            self.broken = True

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Until the fault is healed."""
        self.stack.enter_context(patch.object(owner, name, value))

    def each_plan(self, change: Callable[[Any], bool], hit: Hit) -> None:
        """Every step plan on its way to the worker; `change` says whether it did damage."""
        commit = self.runtime.commit_step

        def commit_step(grown: Any) -> Any:
            plan = commit(grown)
            if change(plan):
                hit()
            return plan

        self.replace(self.runtime, "commit_step", commit_step)


Engine = EngineUnderFaults


def _damage_copies(engine: Engine, hit: Hit, copy: Callable[[Any, Any, Any], int]) -> None:
    """`copy(copies, source, destination)` instead of the copy engine's."""
    copies = engine.runner.vtoken_copies

    def damaged(source: Any, destination: Any) -> int:
        hit()
        return copy(copies, source, destination)

    engine.replace(copies, "copy", damaged)


def _half(copies: Any, source: Any, destination: Any) -> int:
    (sb, so), (db, do) = copies._split(source), copies._split(destination)
    for key, value in copies._views[:-1]:
        key[db, do], value[db, do] = key[sb, so], value[sb, so]
    return 0


@ENGINE.fault("I1 content", "I1, `Runtime.finish_step`")
def skip_the_last_layer(engine: Engine, hit: Hit) -> None:
    """The copy engine leaves out the last layer."""
    _damage_copies(engine, hit, _half)


@ENGINE.fault("I1 content", "wrong tokens", config={"verify_ratio": 0.0})
def skip_the_last_layer_unverified(engine: Engine, hit: Hit) -> None:
    """The same with `verify_ratio` 0."""
    _damage_copies(engine, hit, _half)


@ENGINE.fault("I1 content", "I1, `Runtime.finish_step`")
def copy_to_the_neighbour(engine: Engine, hit: Hit) -> None:
    """Every copy lands one slot further."""
    honest = engine.runner.vtoken_copies.copy
    _damage_copies(engine, hit, lambda _, a, b: honest(a, b // 16 * 16 + (b + 1) % 16))


@ENGINE.fault("I1 content", "I1, `Runtime.finish_step`")
def flip_a_bit(engine: Engine, hit: Hit) -> None:
    """One bit of one retained token's V, in one layer, flips during the copies."""
    import torch

    honest = engine.runner.vtoken_copies.copy

    def flip(copies: Any, source: Any, destination: Any) -> int:
        honest(source, destination)
        (block,), (offset,) = copies._split(destination[:1])
        _, value = copies._views[2]
        token = value[block, offset].clone()
        token.view(torch.int32)[0, 3] ^= 1
        value[block, offset] = token
        return 0

    _damage_copies(engine, hit, flip)


def _copy_late(engine: Engine, hit: Hit) -> None:
    honest = engine.runner.vtoken_copies.copy
    execute = engine.runner.execute_model
    held: list[Any] = []
    _damage_copies(engine, hit, lambda _, a, b: held.append((a, b)) or 0)

    def execute_and_copy(*args: Any, **kwargs: Any) -> Any:
        output = execute(*args, **kwargs)
        while held:
            honest(*held.pop())
        return output

    engine.replace(engine.runner, "execute_model", execute_and_copy)


@ENGINE.fault("I3 visibility", "I1, `Runtime.finish_step`")
def copy_after_the_forward(engine: Engine, hit: Hit) -> None:
    """The copies run after the attention that reads their result."""
    _copy_late(engine, hit)


@ENGINE.fault("I3 visibility", "wrong tokens", config={"verify_ratio": 0.0})
def copy_after_the_forward_unverified(engine: Engine, hit: Hit) -> None:
    """The same with `verify_ratio` 0."""
    _copy_late(engine, hit)


@ENGINE.fault("I1 content", "I1, `Runtime.finish_step`")
def zero_a_block_in_use(engine: Engine, hit: Hit) -> None:
    """A block with live tokens is zeroed as if it were new."""
    honest = engine.runner.vtoken_copies.copy

    def zero(copies: Any, source: Any, destination: Any) -> int:
        honest(source, destination)
        engine.runner._zero_block_ids([int(destination[0]) // 16])
        return 0

    _damage_copies(engine, hit, zero)


@ENGINE.fault("reports always arrive", "I1, `Runtime.finish_step`")
def damage_in_a_step_without_tokens(engine: Engine, hit: Hit) -> None:
    """The last layer is left out in a step that schedules no token."""
    honest, schedule = engine.runner.vtoken_copies.copy, engine.scheduler.schedule
    due = engine.scheduler.max_num_scheduled_tokens

    def copy(copies: Any, source: Any, destination: Any) -> int:
        return honest(source, destination) if due_again() else _half(copies, source, destination)

    def due_again() -> bool:
        return bool(engine.scheduler.max_num_scheduled_tokens == due)

    def schedule_nothing(*args: Any, **kwargs: Any) -> Any:
        empty = engine.runtime.step % 3 == 0
        engine.scheduler.max_num_scheduled_tokens = 0 if empty else due
        output = schedule(*args, **kwargs)
        assert (output.total_num_scheduled_tokens == 0) == empty
        return output

    copies = engine.runner.vtoken_copies

    def damaged(source: Any, destination: Any) -> int:
        if not due_again():
            hit()
        return copy(copies, source, destination)

    engine.replace(copies, "copy", damaged)
    engine.replace(engine.scheduler, "schedule", schedule_nothing)
    engine.stack.callback(setattr, engine.scheduler, "max_num_scheduled_tokens", due)


@ENGINE.fault("mirror", "I1, `Runtime.finish_step`")
def exchange_in_the_mirror(engine: Engine, hit: Hit) -> None:
    """The worker is told two moved tokens' places the wrong way round."""

    def change(plan: Any) -> bool:
        parts = [part for part in plan.requests.values() if len(part.moved_ids) > 1]
        for part in parts:
            part.moved_slots = part.moved_slots.copy()
            part.moved_slots[[0, 1]] = part.moved_slots[[1, 0]]
        return bool(parts)

    engine.each_plan(change, hit)


HOLES = {"reclamation": "off"}


@ENGINE.fault("eviction is exact", "wrong tokens", config=HOLES)
def read_dead_tokens(engine: Engine, hit: Hit) -> None:
    """Holes are taken for dense: attention reads dead tokens instead of live ones."""

    def change(plan: Any) -> bool:
        parts = [part for part in plan.requests.values() if not part.dense]
        for part in parts:
            part.dense, part.scratch = True, []
        return bool(parts)

    engine.each_plan(change, hit)


@ENGINE.fault("eviction is exact", "wrong tokens", config=HOLES)
def forget_a_loose_token(engine: Engine, hit: Hit) -> None:
    """One loose token is not packed."""

    def change(plan: Any) -> bool:
        parts = [part for part in plan.requests.values() if len(part.loose_slots)]
        for part in parts:
            part.loose_slots = np.append(part.loose_slots[1:], part.loose_slots[-1])
        return bool(parts)

    engine.each_plan(change, hit)


@ENGINE.fault(
    "write private blocks", "wrong tokens", config={"recycle": True, "reclamation": "paused"}
)
def believe_every_block_writable(engine: Engine, hit: Hit) -> None:
    """`is_writable` always says yes: shared and cached blocks are recycled into."""
    honest = engine.runtime.store.is_writable

    def is_writable(block: int) -> bool:
        if not honest(block):
            hit()
        return True

    engine.replace(engine.runtime.store, "is_writable", is_writable)


@ENGINE.fault("never hash again", "I4, `Grower.", config={"recycle": True})
def hash_after_an_eviction(engine: Engine, hit: Hit) -> None:
    """Blocks are hashed although the request has evicted."""
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

    manager = engine.manager

    def cache_blocks(request: Any, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        table = engine.runtime.tables.get(request.request_id)
        if table is not None and table.virtual:
            hit()
            num_tokens = min(num_tokens, len(table.blocks) * 16)
        FullAttentionManager.cache_blocks(manager, request, num_tokens, *args, **kwargs)

    engine.replace(manager, "cache_blocks", cache_blocks)


@ENGINE.fault("mirror", "mirror, `Mirror.apply`")
def lose_an_eviction(engine: Engine, hit: Hit) -> None:
    """The worker is not told of one victim."""

    def change(plan: Any) -> bool:
        parts = [part for part in plan.requests.values() if len(part.evicted)]
        for part in parts:
            part.evicted = part.evicted[1:]
        return bool(parts)

    engine.each_plan(change, hit)


@ENGINE.fault("engine's books", "I4, `Runtime.check`")
def free_twice(engine: Engine, hit: Hit) -> None:
    """vLLM's pool is given back a block once more than it was taken."""
    shared = next(iter(engine.runtime.tables)).blocks[0]
    engine.runtime.store.give_back([shared])
    hit()
