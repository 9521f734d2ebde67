"""The CUDA copy engine up to the device calls: order between streams (I3), copies, layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from vtoken.base.errors import InvariantViolation, UnsupportedError
from vtoken.vllm.cuda.copies.copy_engine import CUDACopyEngine, TorchSlotCopy
from vtoken.vllm.cuda.copies.staged_copy import StagedCopies
from vtoken.vllm.cuda.copies.streams import HostStreams, Stream
from vtoken.vllm.cuda.layout import page_view, slot_rows, stacked_rows

N, H, S, D, LAYERS = 6, 2, 16, 8, 3


class RecordedStreams:
    """Records the order that a device guarantees: an item runs after the items of its stream, and
    after the events that its stream waited for. `before[x]`: all items that must precede x.
    """

    def __init__(self) -> None:
        self._done: dict[Stream, set[str]] = {stream: set() for stream in Stream}
        self.before: dict[str, set[str]] = {}
        self.host_waits = 0

    def run(self, stream: Stream, name: str) -> None:
        self.before[name] = set(self._done[stream])
        self._done[stream].add(name)

    def record(self, stream: Stream) -> frozenset[str]:
        return frozenset(self._done[stream])

    def wait(self, stream: Stream, event: frozenset[str]) -> None:
        self._done[stream] |= event

    def launch(self, stream: Stream, work: Callable[[], None]) -> None:
        self._launching = stream
        work()

    def synchronize(self, event: frozenset[str]) -> None:  # noqa: ARG002
        self.host_waits += 1

    def copy(self, source: Any, destination: Any) -> None:  # noqa: ARG002
        self.run(self._launching, f"copy {int(source[0])}")


def serve(stages: StagedCopies, streams: RecordedStreams, steps: int = 3) -> None:
    """The launches of `steps` steps in vLLM's order; step n copies slot n."""
    for n in range(steps):
        stages.begin(np.array([n]), np.array([100 + n]))
        streams.run(Stream.MAIN, f"inputs {n}")
        stages.guard()
        streams.run(Stream.MAIN, f"attention {n}")
        stages.forward_ended()
        streams.run(Stream.MAIN, f"sampling {n}")


def violations_of_order(streams: RecordedStreams, steps: int = 3) -> list[str]:
    """The requirements of I3 and of the paper's stages that the recorded order does not meet."""
    wrong = []
    for n in range(steps):
        before = streams.before[f"copy {n}"]
        if f"copy {n}" not in streams.before[f"attention {n}"]:
            wrong.append(f"attention {n} may read before copy {n}")
        if n and f"attention {n - 1}" not in before:
            wrong.append(f"copy {n} may overwrite what attention {n - 1} reads")
        if n and f"sampling {n - 1}" in before:
            wrong.append(f"copy {n} waits for sampling {n - 1}")
        if f"copy {n}" in streams.before[f"inputs {n}"]:
            wrong.append(f"input preparation {n} waits for copy {n}")
    return wrong


def test_a_copy_runs_between_the_forward_before_it_and_the_attention_that_reads() -> None:
    streams = RecordedStreams()
    serve(StagedCopies(streams, streams.copy), streams)
    assert violations_of_order(streams) == []
    assert streams.host_waits == 0


def test_without_the_guard_the_order_check_notices() -> None:
    class Unguarded(StagedCopies):
        def guard(self) -> None:
            pass

    streams = RecordedStreams()
    serve(Unguarded(streams, streams.copy), streams)
    assert "attention 0 may read before copy 0" in violations_of_order(streams)


def test_without_the_wait_for_the_forward_the_order_check_notices() -> None:
    class Hasty(RecordedStreams):
        def wait(self, stream: Stream, event: frozenset[str]) -> None:
            if stream is Stream.MAIN:
                super().wait(stream, event)

    streams = Hasty()
    serve(StagedCopies(streams, streams.copy), streams)
    assert "copy 1 may overwrite what attention 0 reads" in violations_of_order(streams)


def test_recording_the_forward_after_sampling_loses_the_overlap_and_is_noticed() -> None:
    class Late(StagedCopies):
        def begin(self, source: Any, destination: Any) -> None:
            super().forward_ended()
            super().begin(source, destination)

    streams = RecordedStreams()
    serve(Late(streams, streams.copy), streams)
    assert violations_of_order(streams) == [
        "copy 1 waits for sampling 0",
        "copy 2 waits for sampling 1",
    ]


def test_copies_of_a_step_without_a_forward_are_waited_for_by_the_next_one() -> None:
    streams = RecordedStreams()
    stages = StagedCopies(streams, streams.copy)
    stages.begin(np.array([0]), np.array([100]))
    stages.begin(np.array([1]), np.array([101]))
    stages.guard()
    streams.run(Stream.MAIN, "attention 1")
    assert {"copy 0", "copy 1"} <= streams.before["attention 1"]


def test_force_sync_makes_the_host_wait_for_every_relocation() -> None:
    streams = RecordedStreams()
    serve(StagedCopies(streams, streams.copy, sync=True), streams)
    assert streams.host_waits == 3


def make_caches(*, separate: bool = False) -> list[torch.Tensor]:
    """[N, H, S, 2D] a layer in LBNHC, random, evenly spaced in one allocation unless `separate`."""
    torch.manual_seed(0)
    memory = torch.randn(LAYERS, N, S, H, 2 * D)
    layers = [memory[i].clone() for i in range(LAYERS)] if separate else list(memory)
    return [layer.permute(0, 2, 1, 3) for layer in layers]


@pytest.mark.parametrize("separate", [False, True], ids=["one allocation", "layers apart"])
@pytest.mark.parametrize("limit", [1 << 28, 3 * H * 2 * D * 4], ids=["whole", "chunks"])
def test_a_copy_moves_every_layer_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, separate: bool, limit: int
) -> None:
    monkeypatch.setattr("vtoken.vllm.cuda.copies.copy_engine.MAX_GATHERED_BYTES", limit)
    caches = make_caches(separate=separate)
    assert (stacked_rows(caches) is None) == separate
    before = [cache.clone() for cache in caches]
    order = torch.randperm(N * S)
    source, destination = order[:20], order[40:60]
    TorchSlotCopy(caches)(source, destination)
    for cache, old in zip(caches, before, strict=True):
        expected = old.clone()
        for s, d in zip(source.tolist(), destination.tolist(), strict=True):
            expected[d // S, :, d % S] = old[s // S, :, s % S]
        assert torch.equal(cache, expected)


def test_tokens_may_change_places_while_they_can_be_gathered_at_once() -> None:
    caches = make_caches()
    before = [slot_rows(cache).clone() for cache in caches]
    engine = CUDACopyEngine(caches, HostStreams(), use_triton=False)
    engine._direct = lambda *_: pytest.fail("a kernel without an order must not be used here")
    engine.copy(np.array([3, 50]), np.array([50, 3]))
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(slot_rows(cache)[[3, 50]], old[[50, 3]])
    engine._gathering.chunk = 1
    with pytest.raises(InvariantViolation, match="overwrite one another"):
        engine.copy(np.array([3, 50]), np.array([50, 3]))


def test_contents_are_read_after_the_copies_and_in_the_requested_order() -> None:
    caches = make_caches()
    source, destination = np.array([3, 50]), np.array([90, 17])
    before = [cache.clone() for cache in caches]
    engine = CUDACopyEngine(caches, HostStreams(), use_triton=False)
    engine.copy(source, destination)
    for cache, (key, value) in zip(before, engine.contents(destination), strict=True):
        rows = torch.stack([cache[slot // S, :, slot % S] for slot in source.tolist()])
        k, v = rows.split(D, dim=-1)
        assert key.tobytes() == k.contiguous().numpy().tobytes()
        assert value.tobytes() == v.contiguous().numpy().tobytes()


def test_reading_contents_waits_for_copies_that_were_launched() -> None:
    class Guarded(HostStreams):
        waited = False

        def wait(self, stream: Stream, event: Any) -> None:  # noqa: ARG002
            self.waited |= stream is Stream.MAIN

    streams = Guarded()
    engine = CUDACopyEngine(make_caches(), streams, use_triton=False)
    engine.copy(np.array([3]), np.array([90]))
    assert not streams.waited
    list(engine.contents(np.array([90])))
    assert streams.waited


def test_slot_and_page_views_share_the_memory_of_the_cache() -> None:
    cache = make_caches()[1]
    rows, pages = slot_rows(cache), page_view(cache)
    assert rows.shape == (N * S, H * 2 * D)
    assert pages.shape == (N * S, H, 1, 2 * D)
    for slot in (0, 17, N * S - 1):
        assert torch.equal(rows[slot].view(H, 2 * D), cache[slot // S, :, slot % S])
        assert torch.equal(pages[slot, :, 0], cache[slot // S, :, slot % S])
    pages[17] = 0
    assert not cache[1, :, 1].any()


def hnd() -> torch.Tensor:
    return torch.zeros(N, H, S, 2 * D)  # LBHNC: a token's heads are S tokens apart


def interleaved() -> torch.Tensor:
    return torch.zeros(N, LAYERS, S, H, 2 * D)[:, 1].permute(0, 2, 1, 3)  # BLNHC


@pytest.mark.parametrize("make", [hnd, interleaved])
def test_other_layouts_are_refused_by_name(make: Callable[[], torch.Tensor]) -> None:
    with pytest.raises(UnsupportedError, match="LBNHC"):
        slot_rows(make())
