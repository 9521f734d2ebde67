"""Every place where vToken meets vLLM, in one table, checked at start-up.

`kind` says how vLLM is reached: register > subclass > wrap; no function body is replaced. `expects`
are the parameter names that vToken relies on. On a vLLM whose touch points differ, start-up stops
and names them.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

from vtoken.errors import UnsupportedError
from vtoken.vllm.cuda.touchpoints import CUDA_POINTS
from vtoken.vllm.touchpoints.engine import ENGINE_POINTS
from vtoken.vllm.touchpoints.touchpoint import TouchPoint
from vtoken.vllm.touchpoints.worker import WORKER_POINTS

TOUCH_POINTS: tuple[TouchPoint, ...] = (*ENGINE_POINTS, *WORKER_POINTS, *CUDA_POINTS)


def differences(device: str | None = None) -> list[str]:
    """What of the table does not hold in the installed vLLM, in words; [] when all does.

    `device`: "cpu" or "cuda", whose points are looked at beside the common ones; by default the
    one that vLLM runs on here.
    """
    if device is None:
        from vllm.platforms import current_platform

        device = "cuda" if current_platform.is_cuda() else "cpu"
    wrong = []
    for point in TOUCH_POINTS:
        if point.device not in ("", device):
            continue
        module, _, path = point.target.partition(":")
        try:
            target: Any = import_module(module)
            for name in path.split("."):
                target = inspect.getattr_static(target, name)
        except (ImportError, AttributeError) as error:
            wrong.append(f"{point.target} is missing ({error}); needed to: {point.why}")
            continue
        if point.expects:
            function = getattr(target, "__func__", target)
            have = inspect.signature(function).parameters
            lost = [name for name in point.expects if name not in have]
            if lost:
                wrong.append(
                    f"{point.target} no longer takes {', '.join(lost)} "
                    f"(it takes {', '.join(have)}); needed to: {point.why}"
                )
    return wrong


def check(device: str | None = None) -> None:
    """Raises UnsupportedError naming every touch point that differs."""
    wrong = differences(device)
    if wrong:
        import vllm

        raise UnsupportedError(
            f"vLLM {vllm.__version__} differs from what vToken was built on (0.32):\n  "
            + "\n  ".join(wrong)
        )
