"""Faults in the worker's half: copies, mirrors, reading, and vLLM's own blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.faults.catalogue import Catalogue, Hit
from tests.faults.core import without_firsts
from tests.faults.engine import EngineUnderFaults as Engine
from vtoken.base.arrays import Ragged
from vtoken.core.runtime.prices import WINDOW

ENGINE = Catalogue()


def _damage_copies(engine: Engine, hit: Hit, copy: Callable[[Any, Any, Any], int]) -> None:
    """Call `copy(copies, source, destination)` instead of the copy engine's."""
    copies = engine.runner.vtoken_host.model.copies

    def damaged(source: Any, destination: Any) -> int:
        hit()
        return copy(copies, source, destination)

    engine.replace(copies, "copy", damaged)


def _copy_without_last_layer(copies: Any, source: Any, destination: Any) -> int:
    layers, copies.layers = copies.layers, copies.layers[:-1]
    try:
        return int(type(copies).copy(copies, source, destination))
    finally:
        copies.layers = layers


@ENGINE.fault("I1 content", "I1, `Runtime.finish_step`")
def skip_the_last_layer(engine: Engine, hit: Hit) -> None:
    """The copy engine leaves out the last layer."""
    _damage_copies(engine, hit, _copy_without_last_layer)


@ENGINE.fault("I1 content", "wrong tokens", config={"verify_ratio": 0.0})
def skip_the_last_layer_unverified(engine: Engine, hit: Hit) -> None:
    """The same with `verify_ratio` 0."""
    _damage_copies(engine, hit, _copy_without_last_layer)


@ENGINE.fault("I1 content", "I1, `Runtime.finish_step`")
def copy_to_the_neighbour(engine: Engine, hit: Hit) -> None:
    """Every copy lands one slot further."""
    original = engine.runner.vtoken_host.model.copies.copy
    _damage_copies(engine, hit, lambda _, a, b: original(a, b // 16 * 16 + (b + 1) % 16))


@ENGINE.fault("I1 content", "I1, `Runtime.finish_step`")
def flip_a_bit(engine: Engine, hit: Hit) -> None:
    """One bit of one retained token's V, in one layer, flips during the copies."""
    import torch

    original = engine.runner.vtoken_host.model.copies.copy

    def flip(_: Any, source: Any, destination: Any) -> int:
        original(source, destination)
        runner = engine.runner
        _, value = runner.vtoken_host.model.layout.views(runner.kv_caches[2])
        block, offset = divmod(int(destination[0]), value.shape[1])
        token = value[block, offset].clone()
        token.view(torch.int32)[0, 3] ^= 1
        value[block, offset] = token
        return 0

    _damage_copies(engine, hit, flip)


def _copy_late(engine: Engine, hit: Hit) -> None:
    original = engine.runner.vtoken_host.model.copies.copy
    execute = engine.runner.execute_model
    held: list[Any] = []
    _damage_copies(engine, hit, lambda _, a, b: held.append((a, b)) or 0)

    def execute_and_copy(*args: Any, **kwargs: Any) -> Any:
        output = execute(*args, **kwargs)
        while held:
            original(*held.pop())
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
    original = engine.runner.vtoken_host.model.copies.copy

    def zero(copies: Any, source: Any, destination: Any) -> int:
        original(source, destination)
        engine.runner._zero_block_ids([int(destination[0]) // 16])
        return 0

    _damage_copies(engine, hit, zero)


@ENGINE.fault("reports always arrive", "I1, `Runtime.finish_step`")
def damage_in_a_step_without_tokens(engine: Engine, hit: Hit) -> None:
    """The last layer is left out in a step that schedules no token."""
    original, schedule = engine.runner.vtoken_host.model.copies.copy, engine.scheduler.schedule
    limit = engine.scheduler.max_num_scheduled_tokens

    def copy(copies: Any, source: Any, destination: Any) -> int:
        if tokens_scheduled():
            return int(original(source, destination))
        return _copy_without_last_layer(copies, source, destination)

    def tokens_scheduled() -> bool:
        return bool(engine.scheduler.max_num_scheduled_tokens == limit)

    def schedule_nothing(*args: Any, **kwargs: Any) -> Any:
        empty = engine.runtime.step % 3 == 0
        engine.scheduler.max_num_scheduled_tokens = 0 if empty else limit
        output = schedule(*args, **kwargs)
        assert (output.total_num_scheduled_tokens == 0) == empty
        return output

    copies = engine.runner.vtoken_host.model.copies

    def damaged(source: Any, destination: Any) -> int:
        if not tokens_scheduled():
            hit()
        return copy(copies, source, destination)

    engine.replace(copies, "copy", damaged)
    engine.replace(engine.scheduler, "schedule", schedule_nothing)
    engine.stack.callback(setattr, engine.scheduler, "max_num_scheduled_tokens", limit)


@ENGINE.fault("mirror", "I1, `Runtime.finish_step`")
def exchange_in_the_mirror(engine: Engine, hit: Hit) -> None:
    """The plan to the worker swaps the places of two moved tokens."""

    def change(plan: Any) -> bool:
        moved = plan.requests.moved_slots
        firsts = moved.starts[:-1][moved.counts > 1]
        values = moved.values.copy()
        values[firsts], values[firsts + 1] = moved.values[firsts + 1], moved.values[firsts]
        plan.requests.moved_slots = Ragged(values, moved.starts)
        return len(firsts) > 0

    engine.each_plan(change, hit)


HOLES = {"reclamation": "off"}


@ENGINE.fault("eviction is exact", "wrong tokens", config=HOLES)
def read_dead_tokens(engine: Engine, hit: Hit) -> None:
    """Requests with holes are marked dense: attention reads dead tokens instead of live ones."""

    def change(plan: Any) -> bool:
        requests = plan.requests
        any_holes = not requests.dense.all()
        requests.dense = np.ones(len(requests), dtype=np.bool_)
        requests.scratch = Ragged.empty(len(requests))
        return any_holes

    engine.each_plan(change, hit)


@ENGINE.fault("eviction is exact", "wrong tokens", config=HOLES)
def forget_a_token_of_a_partial_block(engine: Engine, hit: Hit) -> None:
    """One token of a partial block is not packed."""
    mirrors = engine.runner.executor.mirrors
    split = mirrors.split

    def split_wrong(*args: Any) -> Any:
        full, packed = split(*args)
        firsts = packed.starts[:-1][packed.counts > 1]
        if len(firsts):
            hit()
            packed.values[firsts] = packed.values[firsts + 1]
        return full, packed

    engine.replace(mirrors, "split", split_wrong)


@ENGINE.fault(
    "write private blocks", "wrong tokens", config={"recycle": True, "reclamation": "paused"}
)
def treat_every_block_as_writable(engine: Engine, hit: Hit) -> None:
    """`is_writable` always returns true: slots of shared and cached blocks are recycled."""
    store = engine.runtime.store
    original = store.is_writable

    def is_writable(block: int) -> bool:
        if not original(block):
            hit()
        return True

    engine.replace(store, "is_writable", is_writable)
    engine.replace(store, "first_not_writable", lambda _: None)


@ENGINE.fault("never hash again", "I4, `TokenAppender.", config={"recycle": True})
def hash_after_an_eviction(engine: Engine, hit: Hit) -> None:
    """Blocks are hashed although the request has evicted."""
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator

    coordinator = engine.scheduler.kv_cache_manager.coordinator

    def cache_blocks(request: Any, num_computed_tokens: int) -> None:
        table = engine.runtime.tables.get(request.request_id)
        if table is not None and table.virtual:
            hit()
            num_computed_tokens = min(num_computed_tokens, len(table.blocks) * 16)
        KVCacheCoordinator.cache_blocks(coordinator, request, num_computed_tokens)

    engine.replace(coordinator, "cache_blocks", cache_blocks)


@ENGINE.fault("mirror", "mirror, `Mirrors._change`")
def lose_an_eviction(engine: Engine, hit: Hit) -> None:
    """The plan to the worker omits one victim."""

    def change(plan: Any) -> bool:
        plan.requests.evicted, changed = without_firsts(plan.requests.evicted)
        return changed

    engine.each_plan(change, hit)


@ENGINE.fault("engine's books", "I4, `Runtime.check`")
def free_twice(engine: Engine, hit: Hit) -> None:
    """A block is freed to vLLM's pool once more than it was allocated."""
    shared = next(iter(engine.runtime.tables)).blocks[0]
    engine.runtime.store.give_back([shared])
    hit()


# The budget rises and falls, so that tokens are parked and come back all the time.
SWINGS: dict[str, Any] = {
    "budgets": (48, 150),
    "config": {"park_bytes": 1 << 26, "restore_after_ms": 0, "low_watermark_blocks": 4},
}
UNVERIFIED = SWINGS | {"config": SWINGS["config"] | {"verify_ratio": 0.0}}


def _host_copies(engine: Engine) -> Any:
    return engine.runner.vtoken_host.model.host_copies


def _park_nothing(engine: Engine, hit: Hit) -> None:
    def park(slots: Any, hosts: Any) -> int:
        hit()
        _host_copies(engine)._take(int(hosts.max()) + 1)
        return 0

    engine.replace(_host_copies(engine), "park", park)


@ENGINE.fault("I1 restored", "I1, `Runtime.finish_step`", **SWINGS)
def skip_the_gather(engine: Engine, hit: Hit) -> None:
    """Victims count as parked, but host memory gets nothing."""
    _park_nothing(engine, hit)


@ENGINE.fault("I1 restored", "wrong tokens", **UNVERIFIED)
def skip_the_gather_unverified(engine: Engine, hit: Hit) -> None:
    """That, with `verify_ratio` 0."""
    _park_nothing(engine, hit)


@ENGINE.fault("I1 restored", "I1, `Runtime.finish_step`", **SWINGS)
def restore_from_another_host_slot(engine: Engine, hit: Hit) -> None:
    """Tokens come back from each other's host slot."""
    restore = _host_copies(engine).restore

    def exchanged(hosts: Any, slots: Any) -> int:
        if len(hosts) > 1:
            hit()
        return int(restore(np.roll(hosts, 1), slots))

    engine.replace(_host_copies(engine), "restore", exchanged)


@ENGINE.fault("I1 restored", "I1, `Runtime.finish_step`", **SWINGS)
def restore_another_token(engine: Engine, hit: Hit) -> None:
    """The plan exchanges host slots."""
    _exchange_host_slots(engine, hit)


@ENGINE.fault("I1 restored", "wrong tokens", **UNVERIFIED)
def restore_another_token_unverified(engine: Engine, hit: Hit) -> None:
    """The plan exchanges host slots, with `verify_ratio` 0."""
    _exchange_host_slots(engine, hit)


def _exchange_host_slots(engine: Engine, hit: Hit) -> None:
    def change(plan: Any) -> bool:
        if len(plan.restore_hosts) < 2:
            return False
        plan.restore_hosts = np.roll(plan.restore_hosts, 1)
        return True

    engine.each_plan(change, hit)


@ENGINE.fault("I1 restored", "I1, `Runtime.finish_step`", **SWINGS)
def forget_the_last_layer_of_a_copy(engine: Engine, hit: Hit) -> None:
    """Tokens come back without their last layer."""
    copies = _host_copies(engine)
    restore = copies.restore

    def without_last_layer(hosts: Any, slots: Any) -> int:
        hit()
        layers, copies._layers = copies._layers, copies._layers[:-1]
        try:
            return int(restore(hosts, slots))
        finally:
            copies._layers = layers

    engine.replace(copies, "restore", without_last_layer)


# More requests than the pool holds: some are preempted, and swapped since copies cost less.
CROWD: dict[str, Any] = {
    "crowd": 6,
    "config": {"policy": {"name": "none"}, "park_bytes": 1 << 26},
}
CROWD_UNVERIFIED = CROWD | {"config": CROWD["config"] | {"verify_ratio": 0.0}}


def _let_swaps_pay(engine: Engine) -> None:
    for _ in range(WINDOW):
        engine.runtime.prices.prefills.add(1e6, 1)


def _overwrite_swapped(engine: Engine, hit: Hit) -> None:
    _let_swaps_pay(engine)
    copies = _host_copies(engine)
    restore = copies.restore

    def damaged(hosts: Any, slots: Any) -> int:
        hit()
        copies.park(np.zeros_like(hosts), hosts)
        return int(restore(hosts, slots))

    engine.replace(copies, "restore", damaged)


@ENGINE.fault("I1 restored", "I1, `Runtime.finish_step`", **CROWD)
def overwrite_a_swapped_request(engine: Engine, hit: Hit) -> None:
    """The host slots of a swapped request are overwritten while it waits."""
    _overwrite_swapped(engine, hit)


@ENGINE.fault("I1 restored", "wrong tokens", **CROWD_UNVERIFIED)
def overwrite_a_swapped_request_unverified(engine: Engine, hit: Hit) -> None:
    """They are overwritten, with `verify_ratio` 0."""
    _overwrite_swapped(engine, hit)


@ENGINE.fault("I1 restored", "wrong tokens", **CROWD)
def exchange_host_slots_of_a_swapped_request(engine: Engine, hit: Hit) -> None:
    """The plan exchanges host slots of a swapped request that had evicted nothing."""
    _let_swaps_pay(engine)

    def change(plan: Any) -> bool:
        plan.restore_hosts = plan.restore_hosts[::-1].copy()
        return len(plan.restore_hosts) > 1

    engine.each_plan(change, hit)
