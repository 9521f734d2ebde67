"""Where vToken meets vLLM's engine core: scheduler, block manager, block pool, requests.

Part of the table in `vtoken.vllm.touchpoints.register`.
"""

from __future__ import annotations

from vtoken.vllm.touchpoints.touchpoint import OPEN, TouchPoint

_CORE = "vllm.v1.core"
_MANAGER = f"{_CORE}.single_type_kv_cache_manager:FullAttentionManager"
_POOL = f"{_CORE}.block_pool:BlockPool"
_SCHEDULER = f"{_CORE}.sched.scheduler:Scheduler"

ENGINE_POINTS = (
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
        OPEN,
        "pop_blocks_for_free says why",
        ("request", "timestamp"),
    ),
    TouchPoint(
        f"{_SCHEDULER}.add_request",
        "subclass",
        "a request's own policy and budget",
        OPEN,
        "-",
        ("request",),
    ),
    TouchPoint(
        f"{_SCHEDULER}._free_blocks",
        "subclass",
        "forget a request that is over",
        OPEN,
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
        OPEN,
        "-",
    ),
    TouchPoint(
        f"{_CORE}.kv_cache_manager:KVCacheManager.__init__",
        "call",
        "`watermark_blocks`, which are kept from requests that wait",
        OPEN,
        "-",
        ("watermark",),
    ),
    TouchPoint(
        f"{_SCHEDULER}.get_request_counts",
        "call",
        "running and waiting requests",
        OPEN,
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
    TouchPoint(f"{_POOL}.get_new_blocks", "call", "fresh destinations", OPEN, "-", ("num_blocks",)),
    TouchPoint(f"{_POOL}.free_blocks", "call", "reclaim", OPEN, "-", ("ordered_blocks",)),
    TouchPoint(f"{_POOL}.is_block_writable", "call", "private and unhashed", OPEN, "-", ("block",)),
    TouchPoint(f"{_POOL}.get_num_free_blocks", "call", "watermark and headroom", OPEN, "-"),
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
        OPEN,
        "register() does it",
    ),
    TouchPoint(
        "vllm.config.scheduler:SchedulerConfig.get_scheduler_cls",
        "call",
        "resolves make_scheduler, which picks the class",
        "scheduler_cls",
        "-",
    ),
    TouchPoint(
        "vllm.tokenizers:cached_tokenizer_from_config",
        "call",
        "which words are special or punctuation, for policies that ask",
        OPEN,
        "-",
        ("model_config",),
    ),
    TouchPoint(
        "vllm.v1.request:Request",
        "call",
        "all_token_ids: the words of a request, for policies that ask",
        OPEN,
        "-",
    ),
    TouchPoint(
        "vllm.v1.engine.core:EngineCore",
        "wrap",
        "one utility method, vtoken_command",
        OPEN,
        "plugins can register utility calls",
    ),
    TouchPoint(
        "vllm.v1.engine:EngineCoreOutput",
        "call",
        "which requests were given a token",
        OPEN,
        "-",
        ("request_id", "new_token_ids"),
    ),
)
