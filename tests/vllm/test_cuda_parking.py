"""Parked tokens on CUDA: content there and back, memory, and every order that streams permit.

Tokens live in slots of a few layers, without requests and engine. `test_cuda_late.py` has them in
the worker's step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.late_device import DEVICE, Dropped, LateDevice
from vtoken.vllm.cuda.copies import host_slabs, transit
from vtoken.vllm.cuda.copies.copy_engine import CUDACopyEngine
from vtoken.vllm.cuda.copies.host_copies import CUDAHostCopies
from vtoken.vllm.cuda.copies.host_slabs import HostSlabs
from vtoken.vllm.cuda.copies.streams import Stream, Streams
from vtoken.vllm.cuda.copies.transfer import upload
from vtoken.vllm.cuda.copies.transit import Transit
from vtoken.vllm.cuda.layout import slot_rows

N, H, S, C, LAYERS = 16, 2, 4, 6, 3
SLOTS, ROW = N * S, H * C
ROW_BYTES = LAYERS * ROW * 4
INTERLEAVINGS = int(os.environ.get("VTOKEN_INTERLEAVINGS", "8"))
WITHIN = 16  # interleavings in which a control must be noticed
STEPS = 14


def make_caches(seed: int = 0) -> list[torch.Tensor]:
    """[N, H, S, C] a layer in LBNHC, random."""
    torch.manual_seed(seed)
    return [layer.permute(0, 2, 1, 3) for layer in torch.randn(LAYERS, N, S, H, C)]


def contents(caches: list[torch.Tensor], slots: Any) -> torch.Tensor:
    return torch.stack([slot_rows(cache)[torch.as_tensor(slots)] for cache in caches])


@pytest.fixture
def tight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slabs of 5 rows, and a ring of 6: every copy of some tokens crosses their borders."""
    monkeypatch.setattr(host_slabs, "MAX_BYTES", 5 * ROW_BYTES)
    monkeypatch.setattr(transit, "MAX_BYTES", 6 * ROW_BYTES)


def on_host(caches: list[torch.Tensor]) -> tuple[CUDACopyEngine, CUDAHostCopies]:
    engine = CUDACopyEngine(caches, Streams(), use_triton=False)
    return engine, CUDAHostCopies(caches, engine.stages, Streams(), use_triton=False)


# ---------------------------------------------------------------- contents


@pytest.mark.parametrize("is_tight", [False, True], ids=["in one part", "in many parts"])
def test_tokens_return_as_they_were_parked_and_nothing_else_changes(
    request: pytest.FixtureRequest, *, is_tight: bool
) -> None:
    if is_tight:
        request.getfixturevalue("tight")
    caches = make_caches()
    engine, host = on_host(caches)
    rng = np.random.default_rng(0)
    slots, hosts = rng.permutation(SLOTS)[:40], rng.permutation(23)
    parked, stays, moved, back = slots[:23], slots[23:30], slots[:7], slots[7:30]
    kept = contents(caches, parked)
    host.park(parked, hosts)
    engine.copy(stays, moved)
    expected = contents(caches, np.arange(SLOTS))
    expected[:, back] = kept
    host.restore(hosts, back)
    assert torch.equal(contents(caches, np.arange(SLOTS)), expected)


def test_a_copy_can_be_restored_again_and_its_host_slot_used_again(tight: None) -> None:
    caches = make_caches()
    _, host = on_host(caches)
    first, second = (contents(caches, [slot]) for slot in (3, 9))
    host.park(np.array([3]), np.array([7]))
    host.restore(np.array([7]), np.array([20]))
    host.restore(np.array([7]), np.array([21]))
    host.park(np.array([9]), np.array([7]))
    host.restore(np.array([7]), np.array([22]))
    assert torch.equal(contents(caches, [20, 21, 22]), torch.cat([first, first, second], 1))


# ---------------------------------------------------------------- memory of the host


def test_memory_is_taken_as_slots_are_used_and_never_beyond_the_limit(tight: None) -> None:
    slabs = HostSlabs(LAYERS * ROW, torch.float32, pinned=False)
    assert not slabs.limit(8)
    assert len(slabs) == 0
    slabs.reserve(1)
    assert len(slabs) == 5
    slabs.reserve(6)
    assert len(slabs) == 8
    assert not slabs.limit(12)
    slabs.reserve(9)
    assert len(slabs) == 12
    assert slabs.limit(6)
    assert len(slabs) == 8  # host slots 5 to 7 are in one slab
    assert slabs.limit(0)
    assert len(slabs) == 0


def test_what_a_lower_limit_leaves_keeps_its_contents(tight: None) -> None:
    caches = make_caches()
    _, host = on_host(caches)
    kept = contents(caches, [1, 2])
    host.limit(20)
    host.park(np.array([1, 2, 5]), np.array([0, 4, 12]))
    host.limit(5)
    host.restore(np.array([0, 4]), np.array([30, 31]))
    assert torch.equal(contents(caches, [30, 31]), kept)
    with pytest.raises(IndexError, match="host slots 12 to 12, 5 have memory"):
        host.restore(np.array([12]), np.array([32]))


def test_host_slots_that_follow_one_another_are_one_copy(tight: None) -> None:
    slabs = HostSlabs(LAYERS * ROW, torch.float32, pinned=False)
    slabs.reserve(15)
    runs = [(first, len(part)) for first, part in slabs.runs(np.array([0, 1, 2, 4, 5, 6, 9, 10]))]
    assert runs == [(0, 3), (3, 1), (4, 2), (6, 1), (7, 1)]  # slabs begin at 0, 5 and 10


class Counted(Streams):
    """Streams of the host that count what is launched."""

    launches = 0

    def launch(self, stream: Stream, work: Callable[[], None]) -> None:
        self.launches += 1
        super().launch(stream, work)


@pytest.mark.parametrize(
    ("shape", "refused", "says"),
    [
        (5, RuntimeError("CUDA error: out of memory"), "the host refused memory for parking: CUDA"),
        (6, torch.OutOfMemoryError("1 GiB"), "the device has no memory for parking: 1 GiB"),
        (2, OSError("locked"), "the host refused memory for parking: locked"),
    ],
    ids=["page-locked memory", "memory of the device", "the second slab"],
)
def test_refused_memory_is_a_clear_error_and_nothing_is_half_done(
    tight: None, monkeypatch: pytest.MonkeyPatch, shape: int, refused: Exception, says: str
) -> None:
    caches = make_caches()
    engine, streams = CUDACopyEngine(caches, Streams(), use_triton=False), Counted()
    host = CUDAHostCopies(caches, engine.stages, streams, use_triton=False)
    host.limit(7)
    empty, before = torch.empty, contents(caches, np.arange(SLOTS))

    def refuse(size: Any, **how: Any) -> torch.Tensor:
        if size[0] == shape:
            raise refused
        return empty(size, **how)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", refuse)
        with pytest.raises(MemoryError, match=says):
            host.park(np.arange(7), np.arange(7))
    assert streams.launches <= 1  # of the device's own memory
    assert len(host._slabs) == 0
    assert torch.equal(contents(caches, np.arange(SLOTS)), before)
    host.park(np.arange(7), np.arange(7))
    host.restore(np.arange(7), np.arange(20, 27))
    assert torch.equal(contents(caches, np.arange(20, 27)), before[:, :7])


# ---------------------------------------------------------------- order of streams


class Tokens:
    """Random steps of tokens that are parked, moved, restored, dropped and written.

    Everything is used again as early as plans permit: slots in the same step, host slots of dropped
    tokens in the same step and those of restored ones in the next; for a control, if `hasty`, in
    the same.
    """

    def __init__(self, seed: int, num_hosts: int = 16, *, hasty: bool = False) -> None:
        self.hasty = hasty
        self.rng = np.random.default_rng(seed)
        self.values: list[torch.Tensor] = []  # [L, row] by token
        self.live: dict[int, int] = {}
        self.parked: dict[int, int] = {}
        self.slots = self.rng.permutation(SLOTS).tolist()  # free; the last is taken first
        self.hosts = self.rng.permutation(num_hosts).tolist()
        self.next()

    def next(self) -> None:
        """Choose the step: `park`, `move`, `restore` [2, k], `new` slots; `live` is after it."""
        old = list(self.parked)
        vacated: list[int] = []
        for token in self._some(old, 1):
            self.hosts.append(self.parked.pop(token))
            old.remove(token)
        self.park = np.empty((2, 0), dtype=np.int64)
        if chosen := self._some(list(self.live), 6)[: len(self.hosts)]:
            pairs = [(self.live.pop(token), self.hosts.pop()) for token in chosen]
            self.parked |= {t: h for t, (_, h) in zip(chosen, pairs, strict=True)}
            self.park = np.array(pairs).T
            vacated += self.park[0].tolist()
        moving = self._some(list(self.live), 3)
        self.slots += vacated
        targets = [self.slots.pop() for _ in moving]
        self.move = np.array([[self.live[t] for t in moving], targets], dtype=np.int64)
        self.slots += self.move[0].tolist()
        self.live |= dict(zip(moving, targets, strict=True))
        back = self._some(old, 8)
        freed = [self.parked.pop(token) for token in back]
        targets = [self.slots.pop() for _ in back]
        self.restore = np.array([freed, targets], dtype=np.int64)
        self.live |= dict(zip(back, targets, strict=True))
        self.new = np.array([self.slots.pop() for _ in range(3)])
        for slot in self.new.tolist():
            self.live[len(self.values)] = slot
            self.values.append(torch.randn(LAYERS, ROW))
        while len(self.live) > 24:
            self.slots.insert(0, self.live.pop(next(iter(self.live))))
        self.freed = freed
        if self.hasty and freed and self.park.size:
            token = next(t for t, host in self.parked.items() if host == self.park[1, 0])
            self.parked[token] = self.park[1, 0] = freed.pop()

    def _some(self, tokens: list[int], most: int) -> list[int]:
        count = min(len(tokens), int(self.rng.integers(0, most + 1)))
        chosen: list[int] = self.rng.choice(tokens, count, replace=False).tolist() if count else []
        return chosen


class Device:
    """The steps of `tokens` on a late device, in the order of the worker's step.

    `mistake`: what it does wrong, for controls.
    """

    def __init__(self, tokens: Tokens, device: LateDevice, mistake: str) -> None:
        self.tokens, self.device, self.mistake = tokens, device, mistake
        there = torch.zeros(LAYERS, N, S, H, C).to(DEVICE, non_blocking=True)
        caches = [layer.permute(0, 2, 1, 3) for layer in there]
        self.rows = [slot_rows(cache) for cache in caches]
        self.engine = CUDACopyEngine(caches, device, use_triton=False)
        self.host = CUDAHostCopies(caches, self.engine.stages, device, use_triton=False)

    def step(self) -> torch.Tensor:
        """Launch the step; what its forward reads [L, n, row] of the live tokens."""
        tokens, stages = self.tokens, self.engine.stages
        order = [self._park, self._zero, self._move, self._restore]
        if self.mistake == "parks after the relocations":
            order = [self._zero, self._move, self._park, self._restore]
        if self.mistake == "zeroes before it parks":
            order = [self._zero, self._park, self._move, self._restore]
        if self.mistake == "restores before the relocations":
            order = [self._park, self._zero, self._restore, self._move]
        for work in order:
            work()
        stages.guard()
        values = torch.stack(tokens.values)
        new = upload(tokens.new, DEVICE)
        for number, layer in enumerate(self.rows):
            layer.index_copy_(0, new, upload(values[-3:, number].numpy(), DEVICE))
        at = upload(np.array([*tokens.live.values()]), DEVICE)
        read = torch.stack([layer.index_select(0, at) for layer in self.rows])
        stages.forward_ended()
        tokens.hosts += tokens.freed
        return read

    def _park(self) -> None:
        if self.tokens.park.size:
            self.host.park(*self.tokens.park)

    def _zero(self) -> None:
        at = np.concatenate([self.tokens.move[1], self.tokens.restore[1]])
        if len(at) and not {*at}.intersection(self.tokens.move[0]):

            def zero() -> None:
                for layer in self.rows:
                    layer.index_fill_(0, upload(at, DEVICE), 0.0)

            self.engine.stages.launch(zero)

    def _move(self) -> None:
        if self.tokens.move.size:
            self.engine.copy(*self.tokens.move)

    def _restore(self) -> None:
        if not self.tokens.restore.size:
            return
        with apart(self.device, self.mistake):
            self.host.restore(*self.tokens.restore)


@contextmanager
def apart(device: LateDevice, mistake: str) -> Iterator[None]:
    """For controls: uploads in the context are on a stream that is not that of downloads."""
    if not mistake.startswith("uploads apart"):
        yield
        return
    launch, record = device.launch, device.record
    if mistake != "uploads apart, and before downloads":
        device.wait(Stream.REPORT, record(Stream.PARK))

    def other(stream: Stream) -> Stream:
        return Stream.REPORT if stream is Stream.PARK else stream

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "launch", lambda stream, work: launch(other(stream), work))
        patch.setattr(device, "record", lambda stream, **how: record(other(stream), **how))
        yield


def differences(seed: int, *, dropped: Container[Dropped] = (), mistake: str = "") -> list[str]:
    """What one interleaving made wrong: rows that the forwards read, and host waits."""
    torch.manual_seed(seed)
    tokens = Tokens(seed, hasty=mistake == "uses a host slot again too early")
    device = LateDevice(seed, dropped)
    with device:
        worker = Device(tokens, device, mistake)
        reads: list[tuple[torch.Tensor, torch.Tensor]] = []
        for number in range(STEPS):
            if number:
                tokens.next()
            expected = torch.stack([tokens.values[token] for token in tokens.live], 1)
            reads.append((worker.step(), expected))
        wrong = [
            f"forward {number} read other rows"
            for number, (found, expected) in enumerate(reads)
            if not torch.equal(device.read(found), expected)
        ]
        if device.host_waits:
            wrong.append(f"the host waited {device.host_waits} times")
    return wrong + device.faults


@pytest.mark.parametrize("seed", range(INTERLEAVINGS))
def test_forwards_read_what_was_written_in_every_interleaving(tight: None, seed: int) -> None:
    assert differences(seed) == []


def test_the_steps_park_restore_move_and_use_everything_again() -> None:
    tokens, parks, restores, again = Tokens(0), 0, 0, 0
    for _ in range(STEPS):
        before = {*tokens.freed}
        tokens.hosts += tokens.freed
        tokens.next()
        parks += tokens.park.shape[1]
        restores += tokens.restore.shape[1]
        again += len(before.intersection(tokens.park[1].tolist()))
    assert min(parks, restores, again) >= 4


def noticed(**control: Any) -> bool:
    return any(differences(seed, **control) for seed in range(WITHIN))


@pytest.mark.parametrize(
    "dropped",
    [
        (Stream.RELOCATION, Stream.MAIN),
        (Stream.MAIN, Stream.RELOCATION),
        (Stream.PARK, Stream.RELOCATION),
        (Stream.RELOCATION, Stream.PARK),
    ],
    ids=[
        "a gather does not wait for the forward before",
        "the forward does not wait for gathers and scatters",
        "a download does not wait for its gather",
        "a scatter does not wait for its upload",
    ],
)
def test_control_a_dropped_wait_is_noticed(dropped: Dropped) -> None:
    assert noticed(dropped=(dropped,))


@pytest.mark.parametrize(
    "mistake",
    [
        "parks after the relocations",
        "zeroes before it parks",
        "restores before the relocations",
        "uploads apart, and before downloads",
        "uses a host slot again too early",
    ],
)
def test_control_work_in_another_order_is_noticed(mistake: str) -> None:
    assert noticed(mistake=mistake)


def test_no_download_has_to_wait_for_an_earlier_upload_from_its_host_slot() -> None:
    """The gather before it waits already, for the scatter: uploads on another stream would do."""
    assert not noticed(mistake="uploads apart")


@pytest.mark.parametrize("filling", [Stream.RELOCATION, Stream.PARK], ids=lambda s: s.value)
def test_control_rows_that_are_filled_before_they_were_emptied_are_noticed(
    tight: None, monkeypatch: pytest.MonkeyPatch, filling: Stream
) -> None:
    take = Transit.take

    def hasty(self: Transit, count: int, stream: Stream) -> torch.Tensor:
        if stream is filling:
            self._uses.clear()
        return take(self, count, stream)

    monkeypatch.setattr(Transit, "take", hasty)
    assert noticed()


def test_neither_relocation_nor_forward_waits_for_the_bus() -> None:
    """A step that parks is complete although none of its downloads has run."""
    with LateDevice(0, haste=0.0) as device:
        worker = Device(Tokens(0), device, "")
        worker.host.park(np.array([1, 2]), np.array([0, 1]))
        downloaded = device.record(Stream.PARK)
        worker.engine.copy(np.array([3]), np.array([1]))
        worker.engine.stages.guard()
        device.read(worker.rows[0])
        assert not device.is_done(downloaded)


def test_the_time_of_a_transfer_is_by_the_newest_finished_one() -> None:
    """A `LateDevice` counts operations instead of µs."""
    with LateDevice(0, haste=0.0) as device:
        host = Device(Tokens(0), device, "").host

        def finish() -> None:
            for stream in (Stream.PARK, Stream.RELOCATION):
                device.synchronize(device.record(stream))

        assert host.park(np.arange(2), np.arange(2)) == 0
        finish()
        assert host.restore(np.array([0, 1]), np.arange(30, 32)) == 1  # as to the host
        assert host.park(np.arange(3), np.array([2, 4, 6])) == 2  # 1.5, of one operation for two
        finish()
        assert host.park(np.arange(4), np.arange(4)) == 4  # three for three
        assert host.restore(np.arange(4), np.arange(30, 34)) == 2  # one for two
