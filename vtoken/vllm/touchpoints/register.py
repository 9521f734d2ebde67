"""The table of all vLLM interfaces that vToken depends on, checked at start-up.

`kind` is how vToken uses an interface, in order of preference: register, subclass, wrap. No
function body is replaced. `expects` lists the parameter names that vToken relies on. If the
installed vLLM differs, the engine does not start and the error names the differences. Of an
interface that not every supported version has, the entry says `since` or `until` when. This table
is the only place that asks for vLLM's version.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

from vtoken.base.errors import UnsupportedError
from vtoken.vllm.touchpoints.cuda import CUDA_POINTS
from vtoken.vllm.touchpoints.engine import ENGINE_POINTS
from vtoken.vllm.touchpoints.server import SERVER_POINTS
from vtoken.vllm.touchpoints.touchpoint import TouchPoint
from vtoken.vllm.touchpoints.worker import WORKER_POINTS

SUPPORTED = ">=0.32,<0.34"
TOUCH_POINTS: tuple[TouchPoint, ...] = (
    *ENGINE_POINTS,
    *WORKER_POINTS,
    *CUDA_POINTS,
    *SERVER_POINTS,
)


def differences(device: str | None = None) -> list[str]:
    """Describe every difference between the table and the installed vLLM; [] without any.

    `device`: "cpu", "cuda" or "server", whose points are checked besides the common ones; by
    default the device of the installed vLLM.
    """
    import vllm

    if device is None:
        from vllm.platforms import current_platform

        device = "cuda" if current_platform.is_cuda() else "cpu"
    wrong = []
    for point in TOUCH_POINTS:
        if point.device not in ("", device) or not point.is_in(vllm.__version__):
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
            parameters = inspect.signature(function).parameters
            missing = [name for name in point.expects if name not in parameters]
            if missing:
                wrong.append(
                    f"{point.target} no longer takes {', '.join(missing)} "
                    f"(it takes {', '.join(parameters)}); needed to: {point.why}"
                )
    return wrong


def check(device: str | None = None) -> None:
    """Raises UnsupportedError that names every touch point that differs."""
    wrong = differences(device)
    if wrong:
        import vllm

        raise UnsupportedError(
            f"vLLM {vllm.__version__} differs from what vToken is built for; install vLLM "
            f"{SUPPORTED}:\n  " + "\n  ".join(wrong)
        )
