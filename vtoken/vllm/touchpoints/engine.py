"""Touch points in vLLM's engine core: scheduler, block manager, block pool, requests.

Part of the table in `vtoken.vllm.touchpoints.register`.
"""

from __future__ import annotations

from vtoken.vllm.touchpoints.touchpoint import TouchPoint

_CORE = "vllm.v1.core"
_MANAGER = f"{_CORE}.single_type_kv_cache_manager:FullAttentionManager"
_COORDINATOR = f"{_CORE}.kv_cache_coordinator:KVCacheCoordinator"
_POOL = f"{_CORE}.block_pool:BlockPool"
_SPECS = "vllm.v1.kv_cache_interface"
_SCHEDULER = f"{_CORE}.sched.scheduler:Scheduler"

ENGINE_POINTS = (
    TouchPoint(
        f"{_SCHEDULER}.schedule",
        "subclass",
        "plan before allocation, commit after",
        ("throttle_prefills",),
        upstream="scheduler_cls",
        ends_with="a plan hook exists",
    ),
    TouchPoint(
        f"{_SCHEDULER}.update_from_output",
        "subclass",
        "receive the worker's report",
        ("scheduler_output", "model_runner_output"),
        upstream="scheduler_cls",
        ends_with="a report hook exists",
    ),
    TouchPoint(
        f"{_SCHEDULER}._preempt_request",
        "subclass",
        "distinguish a preemption from a finish",
        ("request", "timestamp"),
        ends_with="pop_blocks_for_free gets the reason",
    ),
    TouchPoint(
        f"{_SCHEDULER}.add_request",
        "subclass",
        "read a request's own policy and budget",
        ("request",),
    ),
    TouchPoint(
        f"{_SCHEDULER}._reserve_prefill_lookahead",
        "subclass",
        "limit what a check of the quality canary computes in a step",
        ("request", "num_computed_tokens", "num_new_tokens"),
        ends_with="a request may have a limit of its own",
    ),
    TouchPoint(
        f"{_SCHEDULER}._free_blocks",
        "subclass",
        "drop the state of a finished request",
        ("request",),
    ),
    TouchPoint(
        f"{_SCHEDULER}._free_request",
        "subclass",
        "say in a request's answer what it kept, if it asks for that",
        ("request", "delay_free_blocks"),
        ends_with="an answer has a field for plugins",
    ),
    TouchPoint(
        f"{_SCHEDULER}.finish_requests",
        "subclass",
        "end checks of the quality canary before all requests are aborted",
        ("request_ids", "finished_status"),
    ),
    TouchPoint(
        f"{_SCHEDULER}.get_num_unfinished_requests",
        "subclass",
        "keep the engine stepping until checks of the quality canary end",
    ),
    TouchPoint(
        "vllm.v1.engine:EngineCoreOutputs",
        "call",
        "remove outputs of the quality canary",
        ("outputs", "scheduler_stats", "finished_requests"),
    ),
    TouchPoint(
        "vllm.sampling_params:SamplingParams",
        "call",
        "request prompt log-probabilities for the quality canary",
        ("prompt_logprobs", "logprobs", "skip_reading_prefix_cache"),
    ),
    TouchPoint(
        "vllm.v1.core.sched.output:SchedulerOutput",
        "call",
        "know how many of a step's tokens are drafts",
        ("scheduled_spec_decode_tokens", "num_scheduled_tokens"),
    ),
    TouchPoint(
        "vllm.v1.outputs:ModelRunnerOutput",
        "call",
        "count the drafts that a step rejected, as the scheduler does",
        ("sampled_token_ids", "req_id_to_index"),
    ),
    TouchPoint(
        "vllm.v1.engine.input_processor:InputProcessor.process_inputs",
        "wrap",
        "reject vllm_xargs that are invalid or do not fit the request's prompt with 400",
        ("prompt", "params"),
        ends_with="plugins can validate a request and its prompt",
    ),
    TouchPoint(
        "vllm.v1.core.sched.async_scheduler:AsyncScheduler",
        "subclass",
        "use the same hooks when steps overlap",
        upstream="scheduler_cls",
    ),
    TouchPoint(
        "vllm.config.vllm:VllmConfig.max_concurrent_batches",
        "call",
        "know by how many steps a report may be late",
    ),
    TouchPoint(
        f"{_CORE}.kv_cache_manager:KVCacheManager.__init__",
        "call",
        "read `watermark_blocks`, which vLLM withholds from waiting requests",
        ("watermark",),
    ),
    TouchPoint(
        f"{_SCHEDULER}.set_pause_state",
        "subclass",
        "report a pause and exclude it from the step time",
        ("pause_state",),
        upstream="scheduler_cls",
    ),
    TouchPoint(
        f"{_SCHEDULER}.reset_prefix_cache",
        "subclass",
        "abort checks of the quality canary, whose blocks would prevent the reset",
        ("reset_running_requests", "reset_connector"),
    ),
    TouchPoint(
        f"{_SCHEDULER}.get_request_counts",
        "subclass",
        "count running and waiting requests without those of the quality canary",
    ),
    TouchPoint(
        f"{_MANAGER}.get_num_blocks_to_allocate",
        "subclass",
        "count places, not tokens",
        ("request_id", "num_tokens"),
        upstream="register_kv_cache_spec",
    ),
    TouchPoint(
        f"{_MANAGER}.allocate_new_blocks",
        "subclass",
        "count places, not tokens",
        ("request_id", "num_tokens", "num_tokens_main_model"),
        upstream="register_kv_cache_spec",
    ),
    TouchPoint(
        f"{_MANAGER}.add_local_computed_blocks",
        "subclass",
        "know which blocks are cached",
        ("request_id", "new_computed_blocks"),
        upstream="register_kv_cache_spec",
    ),
    TouchPoint(
        f"{_COORDINATOR}.cache_blocks",
        "subclass",
        "hash no group of a request after an eviction",
        ("request", "num_computed_tokens"),
        ends_with="a request may be left out of the prefix cache",
    ),
    TouchPoint(
        f"{_COORDINATOR}.get_num_blocks_to_allocate",
        "subclass",
        "count a waiting request's demand over all groups",
        ("request_id", "num_tokens"),
    ),
    TouchPoint(
        f"{_COORDINATOR}.allocate_new_blocks",
        "subclass",
        "count what an admitted request has taken in all groups",
        ("request_id",),
    ),
    TouchPoint(
        f"{_SPECS}:SlidingWindowSpec.max_admission_blocks_per_request",
        "call",
        "know the most blocks that a request holds in a window, for chunks of our own bound",
        ("max_in_flight_tokens", "max_model_len"),
    ),
    TouchPoint(
        f"{_SPECS}:ChunkedLocalAttentionSpec.max_admission_blocks_per_request",
        "call",
        "the same for chunked attention",
        ("max_in_flight_tokens", "max_model_len"),
    ),
    TouchPoint(
        f"{_SPECS}:MambaSpec.max_memory_usage_bytes",
        "call",
        "know the blocks of a state",
        ("vllm_config",),
    ),
    TouchPoint(
        f"{_CORE}.single_type_kv_cache_manager:SingleTypeKVCacheManager.get_num_skipped_tokens",
        "call",
        "know which blocks a window gives back before it takes others",
        ("num_computed_tokens",),
    ),
    TouchPoint(
        f"{_MANAGER}.cache_blocks",
        "subclass",
        "know which blocks are cached",
        ("request", "num_tokens"),
        upstream="register_kv_cache_spec",
    ),
    TouchPoint(
        f"{_MANAGER}.pop_blocks_for_free",
        "subclass",
        "reset the token table at finish and abort",
        ("request_id",),
        upstream="register_kv_cache_spec",
    ),
    TouchPoint(
        f"{_MANAGER}.has_positionally_stable_blocks",
        "subclass",
        "declare to offloaders that blocks move",
        upstream="register_kv_cache_spec",
    ),
    TouchPoint(f"{_POOL}.get_new_blocks", "call", "take fresh destination blocks", ("num_blocks",)),
    TouchPoint(f"{_POOL}.free_blocks", "call", "reclaim blocks", ("ordered_blocks",)),
    TouchPoint(
        f"{_POOL}.is_block_writable", "call", "find private blocks without a hash", ("block",)
    ),
    TouchPoint(f"{_POOL}.get_num_free_blocks", "call", "compute watermark and headroom"),
    TouchPoint(
        "vllm.v1.kv_cache_interface:FullAttentionSpec",
        "subclass",
        "select vToken's block manager",
        upstream="register_kv_cache_spec",
    ),
    TouchPoint(
        "vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry.register",
        "register",
        "map vToken's spec to its block manager",
        ("kvcache_spec_cls", "manager_class", "uniform_type_base_spec"),
        upstream="out-of-tree specs",
    ),
    TouchPoint(
        "vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry._ensure_registered",
        "call",
        "register the built-in specs before vToken's",
        ends_with="register() does it",
    ),
    TouchPoint(
        "vllm.config.scheduler:SchedulerConfig.get_scheduler_cls",
        "call",
        "resolve make_scheduler, which picks the class",
        upstream="scheduler_cls",
    ),
    TouchPoint(
        "vllm.tokenizers:cached_tokenizer_from_config",
        "call",
        "classify words for policies; read the chat template",
        ("model_config",),
    ),
    TouchPoint(
        "vllm.v1.request:Request",
        "call",
        "read the words of a request (all_token_ids, prompt_is_token_ids) and the tokens that are "
        "computed or in flight; make canary checks",
    ),
    TouchPoint(
        "vllm.v1.engine.async_llm:AsyncLLM.get_tokenizer",
        "call",
        "decode the text of a request, with --vtoken-show-text",
    ),
    TouchPoint(
        "vllm.v1.engine.async_llm:AsyncLLM.abort",
        "call",
        "end for its client a session that an operator has ended",
        ("request_id", "internal"),
        ends_with="an abort from the engine ends a session for its client",
    ),
    TouchPoint(
        "vllm.v1.engine.core:EngineCore",
        "wrap",
        "add one utility method, vtoken_command",
        ends_with="plugins can register utility calls",
    ),
    TouchPoint(
        "vllm.v1.engine.core:EngineCore._initialize_kv_caches",
        "wrap",
        "repeat at the end of the log why the KV cache has no room for a request",
    ),
    TouchPoint(
        "vllm.v1.engine.core:EngineCore.collective_rpc",
        "wrap",
        "check no output of the quality canary with weights that changed after it",
        ("method",),
        ends_with="a scheduler is told of new weights",
    ),
    TouchPoint(
        "vllm.v1.engine.core_client:AsyncMPClient._call_utility_async",
        "call",
        "send a command to one engine of a server that has several",
        ("method", "engine"),
        ends_with="call_utility_async takes an engine",
    ),
    TouchPoint(
        "vllm.v1.engine.core_client:AsyncMPClient.__init__",
        "call",
        "read which of the API processes this is",
        ("client_index",),
        ends_with="endpoint plugins are told the index of their API process",
    ),
    TouchPoint(
        "vllm.v1.engine:EngineCoreOutput",
        "call",
        "read the new tokens of requests and their log-probabilities",
        ("request_id", "new_token_ids", "new_logprobs", "new_prompt_logprobs_tensors"),
    ),
)
