"""The process of `vtoken bench host`, whose answers also have `direct`: the launches of vToken's
kernels in a load, counted at the kernels.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from vtoken_bench.vllm.without_gpu import ENVIRONMENT, keep_triton


def main() -> None:
    os.environ |= ENVIRONMENT
    keep_triton()
    from triton.runtime.interpreter import InterpretedFunction

    from vtoken_bench.vllm import host
    from vtoken_bench.vllm.host_engine import HostEngine

    launches: list[str] = []

    def noted(kernel: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            launches.append(kernel.fn.__name__)
            InterpretedFunction.run(kernel, *args, **kwargs)

        return launch

    run = HostEngine.run

    def counted(engine: HostEngine, **asked: Any) -> dict[str, Any]:
        for name, module in list(sys.modules.items()):
            if name.startswith("vtoken."):
                for value in vars(module).values():
                    if isinstance(value, InterpretedFunction):
                        value.run = noted(value)
        launches.clear()
        return run(engine, **asked) | {"direct": len(launches)}

    HostEngine.run = counted  # type: ignore[method-assign]
    host.main()


if __name__ == "__main__":
    main()
