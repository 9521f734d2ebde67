"""Compiles the core's kernels: `python -m tests.support.kernels`. Numba keeps them on disk."""

from __future__ import annotations

from tests.support.core.live import make_quiet
from vtoken.base.compiled import describe_kernels


def main() -> None:
    core = make_quiet(num_blocks=14)
    core.configure(budget_floor_tokens=32)
    core.admit("a", 100)
    core.admit("b", 80)
    core.steps(20)
    core.call("compact")
    core.call("forget", request_id="a", spans=[(0, 9)])
    core.steps(2)
    core.call("patch_config", patch={"budget_tokens": 1024}, validate_only=True)
    core.reporter.status()
    core.publisher.publish(core.controller.frame, force=True)
    core.close()
    print(describe_kernels())


if __name__ == "__main__":
    main()
