"""Fixtures for tests that run vLLM in this process: scheduler, worker and caller share it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest

from tests.support.heap import freeze_heap, frozen_heap

# Read by vLLM when it is imported.
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # would override kv_cache_memory_bytes

DEFAULTS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 2048,
    "block_size": 32,
    "kv_cache_memory_bytes": 64 << 20,  # 16,384 tokens of the demo model
    "seed": 0,
}

TORCHVISION = (  # its modules that vLLM's code of Qwen3.5 imports
    "torchvision",
    "torchvision.transforms",
    "torchvision.transforms.v2",
    "torchvision.transforms.v2.functional",
)

EngineFactory = Callable[..., AbstractContextManager[Any]]


@pytest.fixture(scope="session")
def engine(demo_model: Path) -> EngineFactory:
    """`with engine(**overrides) as llm:` a `vllm.LLM` on the demo model, shut down at the end.

    Overrides are keyword arguments of `LLM` over DEFAULTS; engines, stock ones and those with
    `vtoken.vllm.engine_args`, may follow each other, one at a time. The scheduler is
    `llm.llm_engine.engine_core.engine_core.scheduler`: VLLM_ENABLE_V1_MULTIPROCESSING is 0.
    """

    num_made = 0

    @contextmanager
    def make(**overrides: Any) -> Iterator[Any]:
        from vllm import LLM
        from vllm.distributed import cleanup_dist_env_and_memory

        nonlocal num_made
        num_made += 1
        if num_made == 2:
            freeze_heap()  # the first engine has imported the rest of vLLM
        _choose_plugin("scheduler_cls" in overrides)
        with frozen_heap(), kernels_bound_once():
            llm = LLM(**{"model": str(demo_model), **DEFAULTS, **overrides})
            try:
                yield llm
            finally:
                llm.llm_engine.engine_core.shutdown()
                cleanup_dist_env_and_memory()

    return make


@contextmanager
def kernels_bound_once() -> Iterator[None]:
    """Keep vLLM from looking for its kernels in all modules again, unless one has been imported."""
    from vllm.platforms.cpu import CpuPlatform

    bind = CpuPlatform.register_triton_kernel_overrides

    def bind_in_new_modules() -> None:
        if _searched != (modules := set(sys.modules)):
            bind()
            _searched.clear()
            _searched.update(modules)

    name = "register_triton_kernel_overrides"
    with patch.object(CpuPlatform, name, staticmethod(bind_in_new_modules)):
        yield


_searched: set[str] = set()  # modules whose kernels are bound


def _choose_plugin(on: bool) -> None:
    """Register or unregister vToken, because vLLM loads plugins only once a process."""
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from vtoken import vllm as plugin

    if on:
        os.environ[plugin.ENABLED] = "1"
        plugin.register()
    else:
        os.environ.pop(plugin.ENABLED, None)
        AttentionBackendEnum.CPU_ATTN.clear_override()
    selector._cached_get_attn_backend.cache_clear()


@pytest.fixture(scope="session")
def greedy() -> Callable[..., list[list[int]]]:
    """`greedy(llm, prompts, num_new)`: token ids of concurrent greedy requests, eos ignored."""

    def run(llm: Any, prompts: list[list[int]], num_new: int, **sampling: Any) -> list[list[int]]:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True, **sampling)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(inputs, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return run


@pytest.fixture(scope="module")
def in_process() -> Iterator[Callable[..., Any]]:
    """`in_process(function, …)`: its result. With all models (VTOKEN_ALL_MODELS=1) it runs in
    another process, because vLLM's Transformers backend changes the classes of that library in its
    own.
    """
    if not os.environ.get("VTOKEN_ALL_MODELS"):
        yield lambda function, *arguments: function(*arguments)
        return
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


@pytest.fixture(scope="module")
def folder_of(
    tmp_path_factory: pytest.TempPathFactory, in_process: Callable[..., Any]
) -> Callable[[str], Path]:
    """`folder_of(family)`: its tiny model, made at the first call."""
    from tests.support import models

    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = in_process(
                models.make, models.recipe_of(name), tmp_path_factory.mktemp(name)
            )
        return made[name]

    return folder


@pytest.fixture
def any_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Model classes are inspected in this process; vLLM uses another to keep CUDA out of it.

    Where torchvision is missing, empty modules stand for it: vLLM's code of Qwen3.5 imports it
    for images, and words do not use it.
    """
    from vllm.model_executor.models import registry

    monkeypatch.setattr(registry, "_run_in_subprocess", lambda look: look())
    keep = "_save_modelinfo_to_cache"  # what is found here would be believed where it cannot run
    monkeypatch.setattr(registry._LazyRegisteredModel, keep, lambda *_: None)
    if find_spec("torchvision") is None:
        import transformers.image_utils  # noqa: F401  (knows now that there is none)

        for name in TORCHVISION:
            module = ModuleType(name)
            module.__spec__ = ModuleSpec(name, None)
            monkeypatch.setitem(sys.modules, name, module)
