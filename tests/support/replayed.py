"""vLLM's full graphs without a GPU: V2 picks, pads, captures and replays them itself.

A replay runs the forward again with the Python objects of its capture: tensors by address, numbers
as they were, and no context of the step. So whatever a graph cannot see is wrong here too. Some
mistakes of that kind are planted, for controls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from vllm.config import CUDAGraphMode
from vllm.platforms import current_platform
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

from vtoken.vllm.cuda import step as steps
from vtoken.vllm.cuda.backends import PhysicalBuilderMixin
from vtoken.vllm.cuda.inputs import StepInputs

SIZES = [2, 4]  # of captured batches: one request is padded, and so are three


def choose_graphs(config: Any) -> None:
    """Set vLLM's `compilation_config` to full graphs of decodes, before the runner reads it."""
    config.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
    config.cudagraph_capture_sizes, config.max_cudagraph_capture_size = SIZES, max(SIZES)


def capture(runner: Any, replayed: Callable[[], None]) -> None:
    """Have V2 capture its graphs; `replayed` is called when one is replayed."""

    def without_gpu(manager: Any, create_forward: Any, _: str) -> None:
        for graph in manager._capture_descs[CUDAGraphMode.FULL]:
            forward = partial(create_forward(graph, warmup=False), CUDAGraphMode.NONE)
            forward()
            manager.graphs[graph] = SimpleNamespace(replay=partial(_replay, forward, replayed))
        manager._graphs_captured = True

    with patch.object(CudaGraphManager, "capture", without_gpu):
        runner.cudagraph_manager.capture(
            *(runner.model, runner.model_state, runner.input_buffers, None),
            *(runner.block_tables, runner.attn_groups, runner.kv_cache_config),
        )


def no_graph_pool() -> None:
    type(current_platform).get_global_graph_pool = lambda _: None


def _replay(forward: Callable[[], None], replayed: Callable[[], None]) -> None:
    step = steps.current()
    steps.set_current(None)
    replayed()
    forward()
    steps.set_current(step)


# ---------------------------------------------------------------- mistakes, for controls


@contextmanager
def moves(name: str) -> Iterator[None]:
    """A tensor of the page tables is a new one in every step."""
    put = StepInputs.put

    def moved(self: Any, *given: Any) -> None:
        setattr(self._tables, name, getattr(self._tables, name).clone())
        put(self, *given)

    with patch.object(StepInputs, "put", moved):
        yield


@contextmanager
def page_size_of_the_step() -> Iterator[None]:
    """Only steps with requests that have evicted are read at page size 1."""
    build, put, evicted = PhysicalBuilderMixin.build, StepInputs.put, [False]

    def noted(self: Any, step: Any, *given: Any) -> None:
        evicted[0] = step is not None and len(step.rows) > 0
        put(self, step, *given)

    def chosen(self: Any, prefix: int, common: Any, fast_build: bool = False) -> Any:
        managed = self._is_managed
        self._is_managed = managed and steps.current() is not None and evicted[0]
        try:
            return build(self, prefix, common, fast_build)
        finally:
            self._is_managed = managed

    with (
        patch.object(StepInputs, "put", noted),
        patch.object(PhysicalBuilderMixin, "build", chosen),
    ):
        yield


MISTAKES = {
    "the page table moves": partial(moves, "pages"),
    "the lengths move": partial(moves, "seq_lens"),
    "page size of the step": page_size_of_the_step,
}
