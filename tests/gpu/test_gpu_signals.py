"""Signals on the device equal the host's, and no step makes the host wait."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from tests.support.two_workers import DeviceWorker, Life, Worker
from vtoken.vllm.cuda.copies.streams import CUDAStreams, Stream
from vtoken.vllm.cuda.copies.transfer import download


@contextmanager
def no_synchronisation() -> Iterator[None]:
    try:
        with warnings.catch_warnings(action="ignore"):  # that it does not notice everything
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("returns", [False, True], ids=["tokens die", "and come back"])
@pytest.mark.parametrize("seed", range(3))
def test_the_device_reports_the_hosts_scores_and_no_step_waits_for_it(
    cuda: torch.device, seed: int, returns: bool
) -> None:
    """Scores are read three steps late, after tokens were appended, evicted, moved and restored."""
    life = Life(seed, returns=returns)
    host, device = Worker(life), DeviceWorker(life, CUDAStreams(cuda), "cuda")
    waiting = []
    for _ in range(60):
        plan, rows, query = life.next()
        expected = host.step(plan, rows, query)()
        device.follow()
        there = query.to(cuda)
        live = {name: sorted(tokens) for name, tokens in life.live.items()}
        with no_synchronisation():
            pending = device.step(plan, rows, there)
        waiting.append((pending, expected, live))
        if len(waiting) > 3:
            pending, expected, live = waiting.pop(0)
            found = pending()
            assert found.keys() == expected.keys()
            for (name, signal), values in found.items():
                at = [token for token in live[name] if token < len(values)]
                want = expected[name, signal]
                if signal.definition.counts:  # near ties with 1 / n may fall either way
                    assert np.abs(values[at] - want[at]).max() <= 1
                else:
                    np.testing.assert_allclose(values[at], want[at], rtol=1e-3, atol=1e-5)


def test_a_read_from_the_device_would_be_noticed(cuda: torch.device) -> None:
    with pytest.raises(RuntimeError), no_synchronisation():
        torch.ones(3, device=cuda).sum().item()


def test_a_download_is_complete_after_its_event_and_its_source_may_be_dropped(
    cuda: torch.device,
) -> None:
    streams, downloads = CUDAStreams(cuda), []
    for number in range(50):
        made = torch.full((1 << 20,), number, dtype=torch.float32, device=cuda)
        streams.wait(Stream.REPORT, streams.record(Stream.MAIN))
        streams.launch(Stream.REPORT, lambda made=made: downloads.append(download(made)))
        streams.keep(made, Stream.REPORT)
        event = streams.record(Stream.REPORT)
        del made
        torch.full((1 << 20,), -1.0, device=cuda)  # takes the memory, if it is free to take
        streams.synchronize(event)
        assert downloads[-1].is_pinned()
        assert bool((downloads[-1] == number).all())
