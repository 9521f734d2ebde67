"""Touch points on CUDA; part of the table in `vtoken.vllm.touchpoints.register`."""

from __future__ import annotations

from vtoken.vllm.touchpoints.touchpoint import points_at

_worker = points_at(
    "vllm.v1.worker.gpu_worker:Worker.", "subclass", device="cuda", upstream="worker_cls"
)
_runner = points_at("vllm.v1.worker.gpu.model_runner:GPUModelRunner.", "subclass", device="cuda")
_calls = points_at("vllm.", "call", device="cuda")
_flash, _triton = (
    points_at(
        f"vllm.v1.attention.backends.{module}:",
        "subclass",
        device="cuda",
        upstream="attention backend registry",
    )
    for module in ("flash_attn", "triton_attn")
)

CUDA_POINTS = (
    _worker("init_device", "refuse unsupported configurations before weights are loaded"),
    _worker(
        "_make_model_runner",
        "make vToken's runner",
        upstream="worker_cls; intended to be overridden",
    ),
    _runner("load_model", "allocate the page tables before vLLM sizes its cache"),
    _runner(
        "initialize_kv_cache(kv_cache_config, is_profiling)",
        "refuse an unsupported layout or backend, and give the page tables to the builders",
    ),
    _runner("finish_requests(scheduler_output)", "begin a step"),
    _runner("add_requests(scheduler_output)", "record the blocks of new requests"),
    _runner(
        "update_requests(scheduler_output)",
        "make copies and replace block tables before vLLM appends",
    ),
    _runner(
        "gather_batch_req_state(scheduler_output, dummy_run)",
        "leave full graphs to probe a layer that they do not save",
    ),
    _runner("prepare_attn(input_batch)", "make the page tables, physical lengths and slots"),
    _runner("execute_model", "record the end of the forward"),
    _runner("sample_tokens(grammar_output)", "attach the report"),
    _calls(
        "v1.worker.gpu.buffer_utils:StagedWriteTensor.stage_write(index, start, x)",
        "replace a row of the managed group's block table",
    ),
    _calls(
        "v1.worker.gpu.block_table:BlockTables."
        "append_block_ids(req_index, new_block_ids, overwrite)",
        "extend a replaced row; with `overwrite` it shows how a row and its number are replaced",
    ),
    _calls(
        "v1.worker.utils:KVBlockZeroer.zero_block_ids(block_ids)",
        "zero a block that held a state before tokens are copied to it",
    ),
    *(
        point
        for name, attention in (("Flash", _flash), ("Triton", _triton))
        for point in (
            attention(
                f"{name}AttentionBackend.customize_spec(spec)", "select vToken's KV cache spec"
            ),
            attention(
                f"{name}AttentionBackend.supported_kv_cache_layouts",
                "use LBNHC, with one row a slot",
            ),
            attention(
                f"{name}AttentionMetadataBuilder."
                "build(common_prefix_len, common_attn_metadata, fast_build)",
                "set physical lengths and page size 1",
            ),
            attention(
                f"{name}AttentionImpl."
                "forward(layer, query, key, value, kv_cache, attn_metadata, output)",
                "read the cache at page size 1",
            ),
        )
    ),
    _calls(
        "v1.attention.backends.flash_attn:FlashAttentionMetadataBuilder."
        "_get_scheduler_metadata(aot_schedule, batch_size, max_num_splits)",
        "schedule by self.block_size, which is 1",
    ),
)
