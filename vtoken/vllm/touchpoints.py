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
from vtoken.vllm.touchpoint import TouchPoint

_CORE = "vllm.v1.core"
_MANAGER = f"{_CORE}.single_type_kv_cache_manager:FullAttentionManager"
_POOL = f"{_CORE}.block_pool:BlockPool"
_SCHEDULER = f"{_CORE}.sched.scheduler:Scheduler"
_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_CPU = "vllm.v1.attention.backends.cpu_attn"
_OPEN = "no stable hook upstream"

TOUCH_POINTS = (
    TouchPoint(
        f"{_SCHEDULER}.schedule",
        "subclass",
        "plan before allocation, commit after",
        "scheduler_cls",
        "a plan hook exists",
        ("throttle_prefills",),
    ),
    TouchPoint(
        f"{_SCHEDULER}.update_from_output",
        "subclass",
        "receive the worker's report",
        "scheduler_cls",
        "a report hook exists",
        ("scheduler_output", "model_runner_output"),
    ),
    TouchPoint(
        f"{_SCHEDULER}._preempt_request",
        "subclass",
        "tell a preemption from a finish",
        _OPEN,
        "pop_blocks_for_free says why",
        ("request", "timestamp"),
    ),
    TouchPoint(
        f"{_SCHEDULER}.add_request",
        "subclass",
        "a request's own policy and budget",
        _OPEN,
        "-",
        ("request",),
    ),
    TouchPoint(
        f"{_SCHEDULER}._free_blocks",
        "subclass",
        "forget a request that is over",
        _OPEN,
        "-",
        ("request",),
    ),
    TouchPoint(
        "vllm.v1.sample.logits_processor:LogitsProcessor.validate_params",
        "subclass",
        "refuse a request's bad vllm_xargs with 400",
        "custom logits processors",
        "requests can be validated without one",
        ("sampling_params",),
    ),
    TouchPoint(
        "vllm.v1.core.sched.async_scheduler:AsyncScheduler",
        "subclass",
        "the same hooks when steps overlap",
        "scheduler_cls",
        "-",
    ),
    TouchPoint(
        "vllm.config.vllm:VllmConfig.max_concurrent_batches",
        "call",
        "how many steps late a report may come",
        _OPEN,
        "-",
    ),
    TouchPoint(
        f"{_SCHEDULER}.get_request_counts",
        "call",
        "running and waiting requests",
        _OPEN,
        "-",
    ),
    TouchPoint(
        f"{_MANAGER}.get_num_blocks_to_allocate",
        "subclass",
        "count places, not tokens",
        "register_kv_cache_spec",
        "-",
        ("request_id", "num_tokens"),
    ),
    TouchPoint(
        f"{_MANAGER}.allocate_new_blocks",
        "subclass",
        "count places, not tokens",
        "register_kv_cache_spec",
        "-",
        ("request_id", "num_tokens", "num_tokens_main_model"),
    ),
    TouchPoint(
        f"{_MANAGER}.add_local_computed_blocks",
        "subclass",
        "know which blocks are cached",
        "register_kv_cache_spec",
        "-",
        ("request_id", "new_computed_blocks"),
    ),
    TouchPoint(
        f"{_MANAGER}.cache_blocks",
        "subclass",
        "never hash after an eviction",
        "register_kv_cache_spec",
        "-",
        ("request", "num_tokens"),
    ),
    TouchPoint(
        f"{_MANAGER}.pop_blocks_for_free",
        "subclass",
        "reset point of finish and abort",
        "register_kv_cache_spec",
        "-",
        ("request_id",),
    ),
    TouchPoint(
        f"{_MANAGER}.has_positionally_stable_blocks",
        "subclass",
        "tell offloaders",
        "register_kv_cache_spec",
        "-",
    ),
    TouchPoint(
        f"{_POOL}.get_new_blocks", "call", "fresh destinations", _OPEN, "-", ("num_blocks",)
    ),
    TouchPoint(f"{_POOL}.free_blocks", "call", "reclaim", _OPEN, "-", ("ordered_blocks",)),
    TouchPoint(
        f"{_POOL}.is_block_writable", "call", "private and unhashed", _OPEN, "-", ("block",)
    ),
    TouchPoint(f"{_POOL}.get_num_free_blocks", "call", "watermark and headroom", _OPEN, "-"),
    TouchPoint(
        "vllm.v1.kv_cache_interface:FullAttentionSpec",
        "subclass",
        "select our manager",
        "register_kv_cache_spec",
        "-",
    ),
    TouchPoint(
        "vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry.register",
        "register",
        "spec -> manager",
        "out-of-tree specs",
        "-",
        ("kvcache_spec_cls", "manager_class", "uniform_type_base_spec"),
    ),
    TouchPoint(
        "vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry._ensure_registered",
        "call",
        "registering first would leave the built-in specs out",
        _OPEN,
        "register() does it",
    ),
    TouchPoint(
        "vllm.v1.attention.backends.registry:register_backend",
        "register",
        "our CPU backend",
        "attention backend registry",
        "-",
        ("backend", "class_path"),
    ),
    TouchPoint(
        "vllm.v1.attention.selector:_cached_get_attn_backend",
        "call",
        "forget the backend that an earlier engine of this process chose",
        _OPEN,
        "register_backend() does it",
    ),
    TouchPoint(
        f"{_CPU}:CPUAttentionBackend.customize_spec",
        "subclass",
        "our KV cache spec",
        "vllm-project/vllm#42449",
        "backends build their own specs",
        ("spec",),
        device="cpu",
    ),
    TouchPoint(
        f"{_CPU}:CPUAttentionBackend.get_supported_kernel_block_sizes",
        "subclass",
        "block size 16 (isa vec16)",
        "stock asks for multiples of 32",
        "-",
        ("kv_cache_spec",),
        device="cpu",
    ),
    TouchPoint(
        f"{_CPU}:CPUAttentionMetadataBuilder.build",
        "subclass",
        "split off holey requests",
        "attention backend registry",
        "-",
        ("common_prefix_len", "common_attn_metadata", "fast_build"),
        device="cpu",
    ),
    TouchPoint(
        f"{_CPU}:CPUAttentionBackendImpl.forward",
        "subclass",
        "stock kernel on packed blocks; score probe after it",
        "attention backend registry",
        "-",
        ("layer", "query", "key", "value", "kv_cache", "attn_metadata", "output"),
        device="cpu",
    ),
    TouchPoint(
        "vllm._custom_ops:cpu_attn_reshape_and_cache",
        "call",
        "learn the cache layout",
        _OPEN,
        "-",
        ("key", "value", "key_cache", "value_cache", "slot_mapping", "isa"),
        device="cpu",
    ),
    TouchPoint(
        "vllm.v1.worker.cpu_worker:CPUWorker.init_device",
        "subclass",
        "our runner's class",
        "worker_cls",
        "a runner_cls option exists",
        device="cpu",
    ),
    TouchPoint(
        f"{_RUNNER}.initialize_kv_cache",
        "subclass",
        "learn the layout, refuse what differs",
        _OPEN,
        "-",
        ("kv_cache_config",),
    ),
    TouchPoint(
        f"{_RUNNER}._update_states",
        "subclass",
        "copies and block tables before vLLM appends",
        _OPEN,
        "-",
        ("scheduler_output",),
    ),
    TouchPoint(
        f"{_RUNNER}._prepare_inputs",
        "subclass",
        "physical sequence lengths and slots",
        _OPEN,
        "-",
        ("scheduler_output", "num_scheduled_tokens"),
    ),
    TouchPoint(
        f"{_RUNNER}.execute_model",
        "subclass",
        "attach the report of a step without tokens",
        _OPEN,
        "-",
        ("scheduler_output",),
    ),
    TouchPoint(
        "vllm.v1.outputs:EMPTY_MODEL_RUNNER_OUTPUT",
        "call",
        "know that a step had no tokens",
        _OPEN,
        "-",
    ),
    TouchPoint(
        f"{_RUNNER}.sample_tokens", "subclass", "attach the report", _OPEN, "-", ("grammar_output",)
    ),
    TouchPoint(
        f"{_RUNNER}.execute_model",
        "subclass",
        "report a step without tokens, whose output is shared",
        _OPEN,
        "-",
        ("scheduler_output",),
    ),
    TouchPoint(
        "vllm.v1.outputs:EMPTY_MODEL_RUNNER_OUTPUT",
        "call",
        "tell a step without tokens",
        _OPEN,
        "-",
    ),
    TouchPoint(
        "vllm.distributed.parallel_state:get_tp_group",
        "call",
        "compare and reduce over the ranks",
        _OPEN,
        "-",
    ),
    TouchPoint(
        "vllm.config.scheduler:SchedulerConfig.get_scheduler_cls",
        "call",
        "resolves make_scheduler, which picks the class",
        "scheduler_cls",
        "-",
    ),
    TouchPoint(
        "vllm.v1.worker.block_table:MultiGroupBlockTable.add_row",
        "call",
        "rewrite a row",
        _OPEN,
        "-",
        ("block_ids", "row_idx"),
    ),
    TouchPoint(
        "vllm.tokenizers:cached_tokenizer_from_config",
        "call",
        "which words are special or punctuation, for policies that ask",
        _OPEN,
        "-",
        ("model_config",),
    ),
    TouchPoint(
        "vllm.v1.request:Request",
        "call",
        "all_token_ids: the words of a request, for policies that ask",
        _OPEN,
        "-",
    ),
    TouchPoint(
        "vllm.v1.engine.core:EngineCore",
        "wrap",
        "one utility method, vtoken_command",
        _OPEN,
        "plugins can register utility calls",
    ),
    *CUDA_POINTS,
)


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
