"""Is a kit with vLLM complete on this machine? `python -m scripts.gpu_kit.environment`, there.

Prints a JSON array with one object: the device, versions, and under `wrong` what would stop a step,
by the name of the module or part. The exit status is 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import distributions, entry_points
from pathlib import Path
from typing import Any

from scripts.gpu_kit import manifest

KIT = Path(__file__).parents[3]
MODULES = (
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.attention.backends.flash_attn",
    "vllm.v1.attention.backends.triton_attn",
    "vllm.entrypoints.llm",
    "vtoken.vllm.cuda.worker",
    "vtoken.vllm.cuda.backends",
    "vtoken.vllm.engine.scheduler",
    "vtoken_bench.serving_check",
    "vtoken_bench.vllm.worker",
)
ON_CUDA = ("vllm._C_stable_libtorch", "vllm.vllm_flash_attn._vllm_fa3_C")  # they need the driver


def wrong(device: str) -> Iterator[tuple[str, str]]:
    """What is wrong, and where; on the CPU without the device's own parts."""
    for part in manifest.differences(KIT):
        yield "files", part
    for name in (*MODULES, *(ON_CUDA if device == "cuda" else ())):
        yield from _fails(name, lambda name=name: import_module(name))
    if "vtoken" not in {point.name for point in entry_points(group="vllm.general_plugins")}:
        yield "plugin", "vLLM finds no plugin vtoken"
    yield from _fails("touch points", lambda: _touch_points(device))
    if device == "cuda":
        yield from _fails("vLLM's operations", _compiled)
        yield from _fails("FlashAttention 3", _flash_attention)


def _fails(name: str, part: Callable[[], Any]) -> Iterator[tuple[str, str]]:
    try:
        part()
    except Exception as error:  # whatever it is, the other parts are looked at too
        yield name, f"{type(error).__name__}: {error}"[:600]


def _touch_points(device: str) -> None:
    from vtoken.vllm.touchpoints.register import differences

    found = differences(device)
    if found:
        raise RuntimeError("; ".join(found))


def _compiled() -> None:
    """One of vLLM's operations on the GPU: a library slimmed too far has no kernel for it."""
    import torch
    from vllm import _custom_ops

    x, weight = torch.randn(33, 4096, device="cuda"), torch.randn(4096, device="cuda")
    out = torch.empty_like(x)
    _custom_ops.rms_norm(out, x, weight, 1e-5)
    torch.testing.assert_close(out, torch.rms_norm(x, (4096,), weight, 1e-5))


def _flash_attention() -> None:
    from vllm.vllm_flash_attn import flash_attn_interface

    if not flash_attn_interface.FA3_AVAILABLE:
        raise RuntimeError(str(flash_attn_interface.FA3_UNAVAILABLE_REASON))


def main() -> int:
    import torch

    from vtoken_bench.checks.measure import facts

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    device = parser.parse_args().device
    found: dict[str, list[str]] = {}
    for where, why in wrong(device):
        found.setdefault(where, []).append(why)
    result = {
        "check": "environment",
        "facts": facts(torch.device(device)),
        "packages": {d.name: d.version for d in distributions()},
        "wrong": found,
    }
    print(json.dumps([result], indent=1))
    if found:
        first = next(iter(found))
        others = f" ({', '.join(found)})" if len(found) > 1 else ""
        print(f"wrong: {first}: {found[first][0]:.200}{others}", file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
