"""The CUDA worker's step on a device that runs everything late: contents in every legal order.

A random life of requests is executed twice: on the host, which is the oracle, and by
`DeviceExecutor` on a `LateDevice` with vLLM's order of a step. Each seed is another interleaving of
the main stream, the relocations and the reports. VTOKEN_INTERLEAVINGS=1000 tries more.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from tests.support import filled
from tests.support.late_device import DEVICE, Dropped, Event, LateDevice
from tests.support.torch_kernels import signals_in_torch
from tests.support.two_workers import (
    BLOCKS,
    HEADS,
    MAX_LENGTH,
    TWO,
    Life,
    S,
    Worker,
    positional,
)
from tests.support.two_workers import SIGNALS as EVERY_KIND
from vtoken.core.protocol.step import StepPlan
from vtoken.policies.signals import Signal
from vtoken.vllm.cuda import step as steps
from vtoken.vllm.cuda.copies.copy_engine import CUDACopyEngine
from vtoken.vllm.cuda.copies.staged_copy import StagedCopies
from vtoken.vllm.cuda.copies.streams import Stream
from vtoken.vllm.cuda.copies.transfer import upload
from vtoken.vllm.cuda.device_executor import DeviceExecutor
from vtoken.vllm.cuda.layout import keys_of, slot_rows
from vtoken.vllm.cuda.pages import PageTables
from vtoken.vllm.cuda.signals.layers import AttentionLayer
from vtoken.vllm.worker.executor import Batch
from vtoken.vllm.worker.ranks import Ranks

pytestmark = pytest.mark.vllm

INTERLEAVINGS = int(os.environ.get("VTOKEN_INTERLEAVINGS", "4"))
WITHIN = 16  # interleavings in which a control must be noticed
# Copies run as soon as they may, and overwrite what is still to be read.
HASTY = {Stream.MAIN: 0.5, Stream.RELOCATION: 0.97, Stream.REPORT: 0.0, Stream.PARK: 0.0}
STEPS = 12
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}
SIGNALS = {  # an accumulator in place, one with a window, and keys that are read from the cache
    "a": (Signal("attention_sum", layers=TWO),),
    "b": (Signal("key_norm", layers=TWO), Signal("key_difference", layers=TWO, anchor="seen")),
    "c": (Signal("attention_window", 6, layers=TWO),),
}
# What makes a host wait for a device, of its memory.
LOOKS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda rows: rows.sum().item(),
    "mask": lambda rows: rows[rows > 0],
    "to the host": lambda rows: rows.cpu(),
    "to the device": lambda rows: torch.zeros(1).to(rows.device),
    "nonzero": lambda rows: rows.nonzero(),
}


@pytest.fixture(scope="module", autouse=True)
def _signals_in_torch() -> Iterator[None]:
    with signals_in_torch():
        yield


class LateWorker:
    """The steps of `life` on `device`, in the order of vLLM's runner.

    `mistake`: what it does wrong, for controls.
    """

    def __init__(self, life: Life, device: LateDevice, mistake: str = "") -> None:
        self.life, self.device, self.mistake = life, device, mistake
        memory = torch.stack([slot_rows(cache) for cache in life.caches])
        there = memory.to(DEVICE, non_blocking=True)
        shape = life.caches[0].permute(0, 2, 1, 3).shape
        caches = [layer.view(shape).permute(0, 2, 1, 3) for layer in there]
        self.rows = [slot_rows(cache) for cache in caches]
        self.tables = PageTables(len(life.signals), MAX_LENGTH, DEVICE)
        self.layers = [AttentionLayer(keys_of(cache), HEADS, 0.3, 5.0) for cache in caches]
        self.layers[0].hold(len(life.signals), torch.float32)  # the others when they are probed
        self.half = DeviceExecutor(caches, self.layers, self.tables, ranks=Ranks(), streams=device)

    def step(
        self, plan: StepPlan, batch: Batch, query: torch.Tensor, *, zeroed: list[int], verify: bool
    ) -> tuple[Callable[[], Any], list[torch.Tensor], torch.Tensor]:
        """Launch one step; what fetches its scores, the rows that attention read, by layer, and the
        lengths of these.

        `zeroed`: slots that vLLM clears before its forward. `verify`: read the copies back.
        """
        half, executor = self.half, self.half.executor
        stages = half.copies.stages
        executor.begin(plan, ())
        executor.prepare(self.life.blocks_of)
        executor.before_copies()
        written = np.append(plan.destination_slots, plan.restore_slots)
        zero = self._zero(np.setdiff1d(written, plan.source_slots))
        half.relocate(plan, None if self.mistake == "zeroes beside the copies" else zero)
        if self.mistake == "zeroes beside the copies":
            zero()
        if zeroed:
            if self.mistake != "clears before the copies":
                stages.guard()
            self._zero(np.array(zeroed))()
        if verify and len(plan.destination_slots):
            self._verify(plan)
        executor.apply()
        mapping, width = self._present(batch)
        stages.guard()
        if self.mistake == "ends the forward before it begins":
            stages.forward_ended()
        if (look := LOOKS.get(self.mistake)) is not None:
            look(self.rows[0])
        lengths = self.tables.seq_lens[: len(batch.names)] + 0
        read = self._forward(batch, mapping, upload(query.numpy(), DEVICE), width)
        if self.mistake == "ends the forward before it begins":
            executor.forward_ended()
        elif self.mistake == "reads keys after the forward's end":
            stages.forward_ended()
            executor.forward_ended()
        else:
            half.forward_ended()
        half.clear()
        mapping.add_(1)  # sampling and the next inputs use the memory of this step's
        assert executor._pending_scores is not None
        return executor._pending_scores, read, lengths

    def _zero(self, slots: Any) -> Callable[[], None]:
        def zero() -> None:
            at = upload(slots, DEVICE)
            for rows in self.rows:
                rows.index_fill_(0, at, 0.0)

        return zero

    def _verify(self, plan: StepPlan) -> None:
        found = self.half.copies.contents(plan.destination_slots)
        for cache, (key, _) in zip(self.life.caches, found, strict=True):
            want = keys_of(cache).flatten(0, 1)[torch.from_numpy(plan.destination_slots)]
            assert key.tobytes() == want.contiguous().numpy().tobytes(), "verified contents"

    def _present(self, batch: Batch) -> tuple[torch.Tensor, int]:
        """Make the step's inputs; the slot mapping, and the longest row."""
        made: list[Any] = []

        def present() -> None:
            made.append(positional(self.life, batch, DEVICE))
            self.half.present(batch, made[0])

        def kernel(*given: Any, block_size: int, width: int) -> None:
            *inputs, tables, mapping = given
            here = tables.resident, tables.pages, tables.seq_lens
            self.device.compute(filled.fill, *inputs, *here, mapping, block_size, width)

        with patch("vtoken.vllm.cuda.kernels.fill_tables", kernel):
            if self.mistake == "fills the tables beside the forward before":
                self.device.launch(Stream.RELOCATION, present)
                self.device.wait(Stream.MAIN, self.device.record(Stream.RELOCATION))
            else:
                present()
        return made[0].slot_mapping, int(made[0].max_lens.max())

    def _forward(
        self, batch: Batch, mapping: torch.Tensor, query: torch.Tensor, width: int
    ) -> list[torch.Tensor]:
        life, current = self.life, steps.current()
        tokens = [
            life.live[name][token]
            for name, num_new, computed in zip(
                batch.names, batch.num_new.tolist(), batch.num_computed.tolist(), strict=True
            )
            for token in range(computed, computed + num_new)
        ]
        seen = []
        for layer, (rows, cache) in enumerate(zip(self.rows, life.caches, strict=True)):
            new = slot_rows(cache)[torch.tensor(tokens)].numpy()
            rows.index_copy_(0, mapping, upload(new, DEVICE))  # as reshape_and_cache does
            pages = self.tables.pages[: len(batch.names), :width]
            # Beyond a row's length a page is arbitrary, and must only not be out of range.
            at = pages.clamp(0, BLOCKS * S - 1).long().flatten()
            seen.append(rows.index_select(0, at).view(*pages.shape, -1))
            self.layers[layer].save(query)
            if current is not None and current.probe is not None:
                current.probe.add_layer(layer, query)
        return seen


def differences(
    seed: int,
    num_steps: int = STEPS,
    *,
    dropped: Container[Dropped] = (),
    mistake: str = "",
    haste: Mapping[Stream, float] | None = None,
    signals: Mapping[str, tuple[Signal, ...]] = SIGNALS,
) -> list[str]:
    """What one interleaving made wrong: rows that attention read, scores, contents, host waits."""
    life, device = Life(seed, signals, returns=True), LateDevice(seed, dropped, haste)
    host, wrong = Worker(life), []
    with device:
        worker = LateWorker(life, device, mistake)
        waiting: list[tuple[int, Any, Any, dict[str, list[int]]]] = []
        reads: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
        counts: list[tuple[torch.Tensor, list[int]]] = []

        def check_scores() -> None:
            number, pending, expected, live = waiting.pop(0)
            for key, values in pending().items():
                at = [token for token in live[key[0]] if token < len(values)]
                close = np.isclose(values[at], expected[key][at], **CLOSE)
                if not close.all():
                    wrong.append(f"step {number}: {key} differs")

        for number in range(num_steps):
            plan, batch, query = life.next()
            if not batch.names:
                continue
            live = {name: sorted(tokens) for name, tokens in life.live.items()}
            expected = host.step(plan, batch, query)()
            waits = device.host_waits
            verify = seed % 3 == 2 and number % 4 == 3
            zeroed = [] if number % 3 else life.written  # vLLM clears new blocks
            try:
                pending, seen, lengths = worker.step(
                    plan, batch, query, zeroed=zeroed, verify=verify
                )
            except (AssertionError, NotImplementedError, RuntimeError) as error:
                wrong.append(f"step {number}: {error}")
                return wrong
            if device.host_waits > waits and not verify:
                wrong.append(f"step {number} made the host wait")
            waiting.append((number, pending, expected, live))
            counts.append((lengths, [len(life.live[name]) for name in batch.names]))
            for layer, found in enumerate(seen):
                rows = slot_rows(life.caches[layer])
                reads.append(
                    (found, [rows[[life.live[n][t] for t in live[n]]] for n in batch.names])
                )
            if len(waiting) > seed % 4:
                check_scores()
        while waiting:
            check_scores()
        for lengths, num_live in counts:
            if device.read(lengths).tolist() != num_live:
                wrong.append(f"attention read other lengths than {num_live}")
        for number, (found, expected_rows) in enumerate(reads):
            there = device.read(found)
            for row, want in zip(there, expected_rows, strict=True):
                if not torch.equal(row[: len(want)], want):
                    wrong.append(f"read {number}: attention read other rows")
    return wrong + device.faults


@pytest.mark.parametrize("seed", range(INTERLEAVINGS))
def test_every_interleaving_reads_copies_and_reports_the_hosts_contents(seed: int) -> None:
    assert differences(seed) == []


def test_signals_of_every_kind_are_reported_late() -> None:
    assert differences(3, signals=EVERY_KIND) == []


def noticed(**control: Any) -> bool:
    return any(differences(seed, **control) for seed in range(WITHIN))


@pytest.mark.parametrize(
    "dropped",
    [
        (Stream.RELOCATION, Stream.MAIN),
        Stream.MAIN,
        (Stream.PARK, Stream.RELOCATION),
        (Stream.RELOCATION, Stream.PARK),
        Stream.REPORT,
        "synchronize",
        "keep",
    ],
    ids=[
        "copies do not wait for the forward before",
        "the forward does not wait for the copies",
        "downloads do not wait for what is parked",
        "what returns does not wait for its upload",
        "the report does not wait for the scores",
        "the fetch does not wait for the report",
        "the outbox is not kept for the report",
    ],
)
def test_control_a_dropped_wait_is_noticed(dropped: Dropped) -> None:
    assert noticed(dropped=(dropped,))


@pytest.mark.parametrize(
    "mistake",
    [
        "clears before the copies",
        "zeroes beside the copies",
        "ends the forward before it begins",
        "reads keys after the forward's end",
        "fills the tables beside the forward before",
        *LOOKS,
    ],
)
def test_control_work_at_the_wrong_place_is_noticed(mistake: str) -> None:
    assert noticed(mistake=mistake, haste=HASTY)


def test_control_contents_read_before_the_copies_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    contents, guard = CUDACopyEngine.contents, StagedCopies.guard

    def hasty(self: CUDACopyEngine, slots: Any) -> Any:
        monkeypatch.setattr(StagedCopies, "guard", lambda _: None)
        found = [*contents(self, slots)]
        monkeypatch.setattr(StagedCopies, "guard", guard)
        return iter(found)

    monkeypatch.setattr(CUDACopyEngine, "contents", hasty)
    assert noticed()


def test_control_staging_that_is_written_before_it_was_read_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = torch.zeros(4096, dtype=torch.int32)

    def hasty(array: Any, device: torch.device) -> torch.Tensor:
        host = memory[: len(array)]
        host.copy_(torch.from_numpy(array))
        return host.to(device, non_blocking=True)

    monkeypatch.setattr("vtoken.vllm.cuda.copies.staging.upload", hasty)
    assert noticed()


# ---------------------------------------------------------------- a few launches alone


def engine_on(device: LateDevice, **how: Any) -> tuple[CUDACopyEngine, torch.Tensor]:
    """A copy engine over one layer on `device`, whose slots hold their numbers."""
    memory = torch.arange(8.0).view(2, 4, 1, 1).expand(2, 4, 1, 2).contiguous()
    cache = memory.to(DEVICE, non_blocking=True).permute(0, 2, 1, 3)
    return CUDACopyEngine([cache], device, use_triton=False, **how), slot_rows(cache)


@pytest.mark.parametrize("waits", [True, False], ids=["waits", "control: does not wait"])
def test_copies_before_the_first_forward_wait_for_everything_so_far(*, waits: bool) -> None:
    found = set()
    for seed in range(WITHIN):
        with LateDevice(seed) as device:
            engine, rows = engine_on(device)
            if not waits:
                engine.stages._forward_end = Event(Stream.MAIN, 0)
            engine.copy(np.array([1]), np.array([6]))
            engine.stages.guard()
            found.add(float(device.read(rows)[6, 0]))
    assert (found == {1.0}) == waits


def test_copies_wait_for_no_sampling_and_input_preparation_waits_for_no_copies() -> None:
    """The overlap: neither of them has to run for the other to be complete."""
    with LateDevice(0, haste=0.0) as device:
        engine, rows = engine_on(device)
        rows.add_(1)  # the forward
        engine.stages.forward_ended()
        sampled = rows.sum()
        after_sampling = device.record(Stream.MAIN)
        engine.copy(np.array([1]), np.array([6]))
        copied = device.record(Stream.RELOCATION)
        rows.new_zeros(3).add_(sampled)  # the next inputs
        prepared = device.record(Stream.MAIN)
        device.synchronize(copied)
        assert not device.is_done(after_sampling)
        engine.copy(np.array([2]), np.array([7]))
        copied = device.record(Stream.RELOCATION)
        device.synchronize(prepared)
        assert not device.is_done(copied)


def test_force_sync_makes_the_host_wait_for_every_relocation() -> None:
    for sync in (False, True):
        with LateDevice(0, haste=0.0) as device:
            engine, _ = engine_on(device, sync=sync)
            engine.copy(np.array([1]), np.array([6]))
            assert device.is_done(device.record(Stream.RELOCATION)) == sync
