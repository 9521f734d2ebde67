"""Touch points in vLLM's engine core: scheduler, block manager, block pool, requests.

Part of the table in `vtoken.vllm.touchpoints.register`.
"""

from __future__ import annotations

from vtoken.vllm.touchpoints.touchpoint import points_at

_scheduler = points_at("vllm.v1.core.sched.scheduler:Scheduler.", "subclass")
_manager = points_at(
    "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager.",
    "subclass",
    upstream="register_kv_cache_spec",
)
_coordinator = points_at("vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.", "subclass")
_pool = points_at("vllm.v1.core.block_pool:BlockPool.", "call")
_spec = points_at("vllm.v1.kv_cache_interface:", "call")
_calls = points_at("vllm.", "call")
_wraps = points_at("vllm.v1.engine.", "wrap")
_registers = points_at("vllm.", "register")
_subclasses = points_at("vllm.v1.", "subclass")

ENGINE_POINTS = (
    _scheduler(
        "schedule(throttle_prefills)",
        "plan before allocation, commit after",
        upstream="scheduler_cls",
        ends_with="a plan hook exists",
    ),
    _scheduler(
        "update_from_output(scheduler_output, model_runner_output)",
        "receive the worker's report",
        upstream="scheduler_cls",
        ends_with="a report hook exists",
    ),
    _scheduler(
        "_preempt_request(request, timestamp, drop_stale_output)",
        "distinguish a preemption from a finish, and from one that voids K and V",
        ends_with="pop_blocks_for_free gets the reason",
    ),
    _scheduler(
        "_handle_blocked_waiting_request(request)",
        "let a preempted request whose tokens wait in host memory resume from them",
        ends_with="a preempted request may keep its computed tokens",
    ),
    _scheduler("add_request(request)", "read a request's own policy and budget"),
    _scheduler(
        "_reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)",
        "limit what a check of the quality canary computes in a step",
        ends_with="a request may have a limit of its own",
    ),
    _scheduler("_free_blocks(request)", "drop the state of a finished request"),
    _scheduler(
        "_free_request(request, delay_free_blocks)",
        "say in a request's answer what it kept, if it asks for that",
        ends_with="an answer has a field for plugins",
    ),
    _scheduler(
        "finish_requests(request_ids, finished_status)",
        "end checks of the quality canary before all requests are aborted",
    ),
    _scheduler(
        "get_num_unfinished_requests",
        "keep the engine stepping until checks of the quality canary end",
    ),
    _calls(
        "v1.engine:EngineCoreOutputs(outputs, scheduler_stats, finished_requests)",
        "remove outputs of the quality canary",
    ),
    _calls(
        "sampling_params:SamplingParams(prompt_logprobs, logprobs, skip_reading_prefix_cache)",
        "request prompt log-probabilities for the quality canary",
    ),
    _calls(
        "v1.core.sched.output:SchedulerOutput(scheduled_spec_decode_tokens, num_scheduled_tokens)",
        "know how many of a step's tokens are drafts",
    ),
    _calls(
        "v1.outputs:ModelRunnerOutput(sampled_token_ids, req_id_to_index)",
        "count the drafts that a step rejected, as the scheduler does",
    ),
    _wraps(
        "input_processor:InputProcessor.process_inputs(prompt, params)",
        "reject vllm_xargs that are invalid or do not fit the request's prompt with 400",
        ends_with="plugins can validate a request and its prompt",
    ),
    _subclasses(
        "core.sched.async_scheduler:AsyncScheduler",
        "use the same hooks when steps overlap",
        upstream="scheduler_cls",
    ),
    _calls(
        "config.vllm:VllmConfig.max_concurrent_batches",
        "know by how many steps a report may be late",
    ),
    _calls(
        "v1.core.kv_cache_manager:KVCacheManager.__init__(watermark)",
        "read `watermark_blocks`, which vLLM withholds from waiting requests",
    ),
    _scheduler(
        "set_pause_state(pause_state)",
        "report a pause and exclude it from the step time",
        upstream="scheduler_cls",
    ),
    _scheduler(
        "reset_prefix_cache(reset_running_requests, reset_connector)",
        "abort checks of the quality canary, whose blocks would prevent the reset; forget tokens "
        "in host memory",
    ),
    _scheduler(
        "get_request_counts",
        "count running and waiting requests without those of the quality canary",
    ),
    _manager("get_num_blocks_to_allocate(request_id, num_tokens)", "count places, not tokens"),
    _manager(
        "allocate_new_blocks(request_id, num_tokens, num_tokens_main_model)",
        "count places, not tokens",
    ),
    _manager(
        "add_local_computed_blocks(request_id, new_computed_blocks)", "know which blocks are cached"
    ),
    _coordinator(
        "cache_blocks(request, num_computed_tokens)",
        "hash no group of a request after an eviction",
        ends_with="a request may be left out of the prefix cache",
    ),
    _coordinator(
        "get_num_blocks_to_allocate(request_id, num_tokens)",
        "count a waiting request's demand over all groups",
    ),
    _coordinator(
        "allocate_new_blocks(request_id)", "count what an admitted request has taken in all groups"
    ),
    _spec(
        "SlidingWindowSpec.max_admission_blocks_per_request(max_in_flight_tokens, max_model_len)",
        "know the most blocks that a request holds in a window, for chunks of our own bound",
    ),
    _spec(
        "ChunkedLocalAttentionSpec."
        "max_admission_blocks_per_request(max_in_flight_tokens, max_model_len)",
        "the same for chunked attention",
    ),
    _spec("MambaSpec.max_memory_usage_bytes(vllm_config)", "know the blocks of a state"),
    _calls(
        "v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager."
        "get_num_skipped_tokens(num_computed_tokens)",
        "know which blocks a window gives back before it takes others",
    ),
    _manager("cache_blocks(request, num_tokens)", "know which blocks are cached"),
    _manager("pop_blocks_for_free(request_id)", "reset the token table at finish and abort"),
    _manager("has_positionally_stable_blocks", "declare to offloaders that blocks move"),
    _pool("get_new_blocks(num_blocks)", "take fresh destination blocks"),
    _pool("free_blocks(ordered_blocks)", "reclaim blocks"),
    _pool("is_block_writable(block)", "find private blocks without a hash"),
    _pool("get_num_free_blocks", "compute watermark and headroom"),
    _subclasses(
        "kv_cache_interface:FullAttentionSpec",
        "select vToken's block manager",
        upstream="register_kv_cache_spec",
    ),
    _registers(
        "v1.kv_cache_spec_registry:KVCacheSpecRegistry."
        "register(kvcache_spec_cls, manager_class, uniform_type_base_spec)",
        "map vToken's spec to its block manager",
        upstream="out-of-tree specs",
    ),
    _calls(
        "v1.kv_cache_spec_registry:KVCacheSpecRegistry._ensure_registered",
        "register the built-in specs before vToken's",
        ends_with="register() does it",
    ),
    _calls(
        "config.vllm:VllmConfig.num_lookahead_tokens",
        "know how many places behind a step's tokens vLLM takes for a drafter's layers",
    ),
    _calls(
        "config.scheduler:SchedulerConfig.get_scheduler_cls",
        "resolve make_scheduler, which picks the class",
        upstream="scheduler_cls",
    ),
    _calls(
        "tokenizers:cached_tokenizer_from_config(model_config)",
        "classify words for policies; read the chat template",
    ),
    _calls(
        "v1.request:Request",
        "read the words of a request (all_token_ids, prompt_is_token_ids) and the tokens that are "
        "computed or in flight; make canary checks",
    ),
    _calls(
        "v1.engine.async_llm:AsyncLLM.get_tokenizer",
        "decode the text of a request, with --vtoken-show-text",
    ),
    _calls(
        "v1.engine.async_llm:AsyncLLM.abort(request_id, internal)",
        "end for its client a session that an operator has ended",
        ends_with="an abort from the engine ends a session for its client",
    ),
    _wraps(
        "core:EngineCore",
        "add one utility method, vtoken_command",
        ends_with="plugins can register utility calls",
    ),
    _wraps(
        "core:EngineCore._initialize_kv_caches",
        "repeat at the end of the log why the KV cache has no room for a request",
    ),
    _wraps(
        "core:EngineCore.collective_rpc(method)",
        "check no output of the quality canary with weights that changed after it",
        ends_with="a scheduler is told of new weights",
    ),
    _calls(
        "v1.engine.core_client:AsyncMPClient._call_utility_async(method, engine)",
        "send a command to one engine of a server that has several",
        ends_with="call_utility_async takes an engine",
    ),
    _calls(
        "v1.engine.core_client:AsyncMPClient.__init__(client_index)",
        "read which of the API processes this is",
        ends_with="endpoint plugins are told the index of their API process",
    ),
    _calls(
        "v1.engine:EngineCoreOutput"
        "(request_id, new_token_ids, new_logprobs, new_prompt_logprobs_tensors)",
        "read the new tokens of requests and their log-probabilities",
    ),
)
