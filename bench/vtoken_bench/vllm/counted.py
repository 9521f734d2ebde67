"""What vToken has a device do: launches of Triton's kernels, transfers, operations of torch."""

from __future__ import annotations

import inspect
from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from vtoken_bench.host import BENCH, VTOKEN
from vtoken_bench.vllm.cpu_time import ROOTS, place

NO_WORK = {  # operations of torch that launch nothing on a device
    "view", "slice", "select", "as_strided", "transpose", "permute", "unsqueeze", "squeeze",
    "expand", "split", "split_with_sizes", "unbind", "alias", "detach", "_unsafe_view", "t",
    "reshape", "_reshape_alias", "unfold", "diagonal", "chunk", "empty", "empty_strided",
    "empty_like", "lift_fresh", "new_empty", "new_empty_strided", "is_pinned", "resize_",
}  # fmt: skip


class Counts(TorchDispatchMode):
    """What vToken has the device do, by kind and name.

    Kinds: `launches` of Triton's kernels, `uploads`, `downloads`, `ops` of torch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[tuple[str, str]] = Counter()
        self._transfers = 0

    def note(self, kind: str, name: str) -> None:
        frame: Any = inspect.currentframe()
        while frame.f_code.co_filename.startswith(str(ROOTS[BENCH])):
            frame = frame.f_back
        if place(frame).owner == VTOKEN:
            self.found[kind, name] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in NO_WORK and not self._transfers:
            uploads = name == "copy_" and args[2:] == (True,)  # into a buffer, without waiting
            self.note("uploads" if uploads else "ops", name)
        return func(*args, **(kwargs or {}))

    def transfer(self, kind: str, function: Any) -> Any:
        """`function`, counted as one of `kind` and not as operations of torch."""

        def call(*args: Any) -> Any:
            self.note(kind, "")
            self._transfers += 1
            try:
                return function(*args)
            finally:
                self._transfers -= 1

        return call
