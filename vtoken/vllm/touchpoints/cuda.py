"""Touch points on CUDA; part of the table in `vtoken.vllm.touchpoints.register`."""

from __future__ import annotations

from functools import partial

from vtoken.vllm.touchpoints.touchpoint import TouchPoint

_V2 = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
_FLASH = "vllm.v1.attention.backends.flash_attn"
_TRITON = "vllm.v1.attention.backends.triton_attn"
_REGISTRY = "attention backend registry"
_BUILD = ("common_prefix_len", "common_attn_metadata", "fast_build")
_FORWARD = ("layer", "query", "key", "value", "kv_cache", "attn_metadata", "output")
_point = partial(TouchPoint, device="cuda")

CUDA_POINTS = (
    _point(
        "vllm.v1.worker.gpu_worker:Worker.init_device",
        "subclass",
        "refuse unsupported configurations before weights are loaded",
        upstream="worker_cls",
    ),
    _point(
        "vllm.v1.worker.gpu_worker:Worker._make_model_runner",
        "subclass",
        "make vToken's runner",
        upstream="worker_cls; intended to be overridden",
    ),
    _point(
        f"{_V2}.load_model",
        "subclass",
        "allocate the page tables before vLLM sizes its cache",
    ),
    _point(
        f"{_V2}.initialize_kv_cache",
        "subclass",
        "refuse an unsupported layout or backend, and give the page tables to the builders",
        ("kv_cache_config", "is_profiling"),
    ),
    _point(f"{_V2}.finish_requests", "subclass", "begin a step", ("scheduler_output",)),
    _point(
        f"{_V2}.add_requests",
        "subclass",
        "record the blocks of new requests",
        ("scheduler_output",),
    ),
    _point(
        f"{_V2}.update_requests",
        "subclass",
        "make copies and replace block tables before vLLM appends",
        ("scheduler_output",),
    ),
    _point(
        f"{_V2}.gather_batch_req_state",
        "subclass",
        "leave full graphs to probe a layer that they do not save",
        ("scheduler_output", "dummy_run"),
    ),
    _point(
        f"{_V2}.prepare_attn",
        "subclass",
        "make the page tables, physical lengths and slots",
        ("input_batch",),
    ),
    _point(f"{_V2}.execute_model", "subclass", "record the end of the forward"),
    _point(f"{_V2}.sample_tokens", "subclass", "attach the report", ("grammar_output",)),
    _point(
        "vllm.v1.worker.gpu.buffer_utils:StagedWriteTensor.stage_write",
        "call",
        "replace a row of the managed group's block table",
        ("index", "start", "x"),
    ),
    _point(
        "vllm.v1.worker.gpu.block_table:BlockTables.append_block_ids",
        "call",
        "extend a replaced row; with `overwrite` it shows how a row and its number are replaced",
        ("req_index", "new_block_ids", "overwrite"),
    ),
    _point(
        "vllm.v1.worker.utils:KVBlockZeroer.zero_block_ids",
        "call",
        "zero a block that held a state before tokens are copied to it",
        ("block_ids",),
    ),
    *(
        _point(target, kind, why, expects, upstream=_REGISTRY)
        for module, name in ((_FLASH, "Flash"), (_TRITON, "Triton"))
        for target, kind, why, expects in (
            (
                f"{module}:{name}AttentionBackend.customize_spec",
                "subclass",
                "select vToken's KV cache spec",
                ("spec",),
            ),
            (
                f"{module}:{name}AttentionBackend.supported_kv_cache_layouts",
                "subclass",
                "use LBNHC, with one row a slot",
                (),
            ),
            (
                f"{module}:{name}AttentionMetadataBuilder.build",
                "subclass",
                "set physical lengths and page size 1",
                _BUILD,
            ),
            (
                f"{module}:{name}AttentionImpl.forward",
                "subclass",
                "read the cache at page size 1",
                _FORWARD,
            ),
        )
    ),
    _point(
        f"{_FLASH}:FlashAttentionMetadataBuilder._get_scheduler_metadata",
        "call",
        "schedule by self.block_size, which is 1",
        ("aot_schedule", "batch_size", "max_num_splits"),
    ),
)
