"""Touch points in vLLM's worker: attention backend, model runner, ranks.

Part of the table in `vtoken.vllm.touchpoints.register`.
"""

from __future__ import annotations

from vtoken.vllm.touchpoints.touchpoint import points_at

_runner = points_at("vllm.v1.worker.gpu_model_runner:GPUModelRunner.", "subclass", device="cpu")
_worker = points_at("vllm.v1.worker.", "subclass", device="cpu", upstream="worker_cls")
_attention = points_at(
    "vllm.v1.attention.backends.cpu_attn:",
    "subclass",
    device="cpu",
    upstream="attention backend registry",
)
_drafter = points_at(
    "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer.", "subclass", device="cpu"
)
_output = points_at("vllm.v1.outputs:AsyncModelRunnerOutput.", "subclass")
_calls_on_cpu = points_at("vllm.", "call", device="cpu")
_wraps_on_cpu = points_at("vllm.", "wrap", device="cpu")
_calls = points_at("vllm.", "call")
_registers = points_at("vllm.", "register")

WORKER_POINTS = (
    _registers(
        "v1.attention.backends.registry:register_backend(backend, class_path)",
        "select vToken's attention backends",
        upstream="attention backend registry",
    ),
    _calls(
        "v1.attention.selector:_cached_get_attn_backend",
        "clear the backend that an earlier engine of this process chose",
        ends_with="register_backend() does it",
    ),
    _runner(
        "get_kv_cache_spec",
        "cache the states of Mamba 2 at the ends of steps",
        upstream="worker_cls",
        ends_with="the CPU kernel of Mamba 2 returns states inside a prompt",
    ),
    _calls_on_cpu(
        "v1.kv_cache_interface:"
        "MambaSpec(num_prefill_checkpoint_blocks, prefill_checkpoint_alignment)",
        "the same",
    ),
    _wraps_on_cpu(
        "model_executor.layers.mamba.ops.cpu.gdn_attention:"
        "_spec_forward(layer, attn_metadata_i, mixed_qkv_spec, b_spec, a_spec)",
        "fill rows that have fewer drafts than the most",
        ends_with="0.32 is no longer supported",
    ),
    _attention(
        "CPUAttentionBackend.customize_spec(spec)",
        "select vToken's KV cache spec",
        upstream="vllm-project/vllm#42449",
        ends_with="backends build their own specs",
    ),
    _attention(
        "CPUAttentionBackend.get_supported_kernel_block_sizes(kv_cache_spec)",
        "allow block size 16 (isa vec16)",
        upstream="stock requires multiples of 32",
    ),
    _attention(
        "CPUAttentionMetadataBuilder.build(common_prefix_len, common_attn_metadata, fast_build)",
        "split off requests with holes",
    ),
    _attention(
        "CPUAttentionBackendImpl."
        "forward(layer, query, key, value, kv_cache, attn_metadata, output)",
        "run the stock kernel on packed blocks, and the score probe after it",
    ),
    _attention(
        "CPUAttentionMetadataBuilder.build_for_drafting(common_attn_metadata, draft_index)",
        "set the lengths that a drafter's layers read, and split off requests with holes",
    ),
    _drafter(
        "set_inputs_first_pass(cad)", "set the physical slots of a drafter with inputs of its own"
    ),
    _drafter(
        "_update_positions_dependent_metadata(positions, common_attn_metadata)",
        "set the physical slots of drafts",
    ),
    _calls_on_cpu(
        "v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer.load_model",
        "compare the drafter's layers (_draft_attn_layer_names) with those of the group",
    ),
    _calls_on_cpu(
        "_custom_ops:"
        "cpu_attn_reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, isa)",
        "learn the cache layout",
    ),
    _worker(
        "cpu_worker:CPUWorker.init_device",
        "set the runner's class",
        ends_with="a runner_cls option exists",
    ),
    _worker(
        "gpu_worker:Worker.execute_model(scheduler_output)",
        "learn of an earlier stage's error before waiting for its hidden states",
        ends_with="a stage that fails ends the step of the others",
    ),
    _worker(
        "gpu_worker:Worker.sample_tokens(grammar_output)",
        "answer with the error of a step that failed",
        ends_with="the engine reads the answer of execute_model first, whatever is in flight",
    ),
    _calls_on_cpu(
        "v1.worker.gpu_model_runner:GPUModelRunner."
        "sync_and_gather_intermediate_tensors(num_tokens, intermediate_tensors)",
        "make `intermediate_tensors` on a later stage, which vLLM makes in its warm-up only",
        ends_with="stages work with --enforce-eager on the CPU",
    ),
    _runner(
        "initialize_kv_cache(kv_cache_config)", "learn the cache layout and refuse unsupported ones"
    ),
    _runner(
        "_update_states(scheduler_output)",
        "make copies and replace block tables before vLLM appends",
    ),
    _runner(
        "_prepare_inputs(scheduler_output, num_scheduled_tokens)",
        "set physical sequence lengths and slots",
    ),
    _runner("execute_model(scheduler_output)", "attach the report of a step without tokens"),
    _calls_on_cpu("v1.outputs:EMPTY_MODEL_RUNNER_OUTPUT", "detect a step without tokens"),
    _runner("sample_tokens(grammar_output)", "attach the report"),
    _output("get_output", "add scores to the report where vLLM waits for the sampled tokens"),
    _output(
        "get_kv_connector_output",
        "pass on what vLLM asks an output for besides its tokens",
        since="0.33",
    ),
    _calls("distributed.parallel_state:get_tp_group", "compare and reduce over the ranks"),
    _calls("distributed.parallel_state:get_pp_group", "send findings and scores on"),
    _calls_on_cpu(
        "v1.worker.block_table:BlockTable.add_row(block_ids, row_idx)",
        "replace a row of the block table",
    ),
    _calls_on_cpu(
        "v1.worker.gpu_model_runner:GPUModelRunner._zero_block_ids(block_ids)",
        "zero a block that held a state before tokens are copied to it",
    ),
)
