"""Device times by CUDA events, and the device's copy bandwidth in the same run."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import torch

CEILING_BYTES = 1 << 30


def facts(device: torch.device) -> dict[str, Any]:
    """The device and the versions that a measurement belongs to."""
    on_cuda = device.type == "cuda"
    try:
        import triton

        version = triton.__version__
    except ImportError:
        version = None
    return {
        "device": torch.cuda.get_device_name(device) if on_cuda else "cpu",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version,
        "cuda": torch.version.cuda,
    }


def median_us(work: Callable[[], Any], device: torch.device) -> float | None:
    """Median device time of `work` in µs; None on a CPU, where it runs once.

    `work` is replayed from a CUDA graph, so that the host's launches take no part. By Triton's
    `do_bench`, which clears the L2 cache each time: a serving step reads every cache afresh.
    """
    work()
    if device.type != "cuda":
        return None
    return _bench_us(captured(work, device))


def captured(work: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """The replay of a CUDA graph of `work`, which ran before; `work` itself on a CPU."""
    if device.type != "cuda":
        return work
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work()

    def replay() -> Any:
        graph.replay()
        return result

    return replay


def _bench_us(work: Callable[[], Any]) -> float:
    from triton.testing import do_bench

    return float(do_bench(work, return_mode="median")) * 1e3


def ceiling_gbs(device: torch.device) -> float | None:
    """Bytes read and written a second by one large device-to-device copy, in GB/s.

    Launched, not replayed: in a graph the driver copies 1.5 times slower (2.8 of 4.2 TB/s on an
    H200).
    """
    if device.type != "cuda":
        return None
    source = torch.empty(CEILING_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return gbs(2 * CEILING_BYTES, _bench_us(lambda: target.copy_(source)))


def gbs(num_bytes: int, us: float | None) -> float | None:
    return None if us is None else num_bytes / us / 1e3


def share(part: float | None, whole: float | None) -> float | None:
    return None if part is None or whole is None else part / whole
