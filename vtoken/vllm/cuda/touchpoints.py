"""Touch points on CUDA; part of the table in `vtoken.vllm.touchpoints.register`."""

from __future__ import annotations

from vtoken.vllm.touchpoints.touchpoint import OPEN, TouchPoint

_V1 = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_V2 = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
_FLASH = "vllm.v1.attention.backends.flash_attn"
_TRITON = "vllm.v1.attention.backends.triton_attn"
_REGISTRY = "attention backend registry"
_BUILD = ("common_prefix_len", "common_attn_metadata", "fast_build")
_FORWARD = ("layer", "query", "key", "value", "kv_cache", "attn_metadata", "output")


def _point(
    target: str, kind: str, why: str, upstream: str, expects: tuple[str, ...] = ()
) -> TouchPoint:
    return TouchPoint(target, kind, why, upstream, "-", expects, "cuda")


CUDA_POINTS = (
    _point(
        "vllm.v1.worker.gpu_worker:Worker.init_device",
        "subclass",
        "refuse unsupported configurations before weights are loaded",
        "worker_cls",
    ),
    _point(
        "vllm.v1.worker.gpu_worker:Worker._make_model_runner",
        "subclass",
        "make vToken's runner, V1 or V2",
        "worker_cls; intended to be overridden",
    ),
    _point(
        f"{_V1}._model_forward",
        "subclass",
        "wait for the copies; record the end of the forward",
        OPEN,
    ),
    _point(
        f"{_V1}._determine_batch_execution_and_padding",
        "subclass",
        "leave full graphs in a step with holes",
        OPEN,
        ("force_uniform_decode",),
    ),
    _point(
        f"{_V2}.initialize_kv_cache",
        "subclass",
        "refuse an unsupported layout or backend",
        OPEN,
        ("kv_cache_config", "is_profiling"),
    ),
    _point(f"{_V2}.finish_requests", "subclass", "begin a step", OPEN, ("scheduler_output",)),
    _point(
        f"{_V2}.add_requests",
        "subclass",
        "record the blocks of new requests",
        OPEN,
        ("scheduler_output",),
    ),
    _point(
        f"{_V2}.update_requests",
        "subclass",
        "make copies and replace block tables before vLLM appends",
        OPEN,
        ("scheduler_output",),
    ),
    _point(
        f"{_V2}.gather_batch_req_state",
        "subclass",
        "leave full graphs in a step with holes",
        OPEN,
        ("scheduler_output", "dummy_run"),
    ),
    _point(f"{_V2}.prepare_attn", "subclass", "set physical slots", OPEN, ("input_batch",)),
    _point(f"{_V2}.execute_model", "subclass", "record the end of the forward", OPEN),
    _point(f"{_V2}.sample_tokens", "subclass", "attach the report", OPEN, ("grammar_output",)),
    _point(
        "vllm.v1.worker.gpu.block_table:BlockTables.append_block_ids",
        "call",
        "replace a row of the block table",
        OPEN,
        ("req_index", "new_block_ids", "overwrite"),
    ),
    _point(
        "vllm.v1.worker.gpu.sample.logits_processor.interface:LogitsProcessor.validate_params",
        "subclass",
        "check a request's own arguments under V2 too",
        "logits_processors",
        ("sampling_params",),
    ),
    *(
        _point(target, kind, why, _REGISTRY, expects)
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
        "schedule by self.block_size, which is 1 in a step with holes",
        OPEN,
        ("aot_schedule", "batch_size", "max_num_splits"),
    ),
)
