"""Where vToken meets vLLM on CUDA; part of the table in `vtoken.vllm.touchpoints.register`."""

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
        "vllm.v1.worker.gpu_worker:Worker.init_device", "subclass", "refuse first", "worker_cls"
    ),
    _point(
        "vllm.v1.worker.gpu_worker:Worker._make_model_runner",
        "subclass",
        "our runner, V1 or V2",
        "worker_cls; upstream means it to be overridden",
    ),
    _point(f"{_V1}._model_forward", "subclass", "the copies first; where the forward ends", OPEN),
    _point(
        f"{_V1}._determine_batch_execution_and_padding",
        "subclass",
        "no full graph in a step with holes",
        OPEN,
        ("force_uniform_decode",),
    ),
    _point(
        f"{_V2}.initialize_kv_cache",
        "subclass",
        "refuse a layout or backend that does not do",
        OPEN,
        ("kv_cache_config", "is_profiling"),
    ),
    _point(f"{_V2}.finish_requests", "subclass", "a step begins", OPEN, ("scheduler_output",)),
    _point(f"{_V2}.add_requests", "subclass", "their blocks", OPEN, ("scheduler_output",)),
    _point(
        f"{_V2}.update_requests",
        "subclass",
        "copies and block tables before vLLM appends",
        OPEN,
        ("scheduler_output",),
    ),
    _point(
        f"{_V2}.gather_batch_req_state",
        "subclass",
        "no full graph in a step with holes",
        OPEN,
        ("scheduler_output", "dummy_run"),
    ),
    _point(f"{_V2}.prepare_attn", "subclass", "physical slots", OPEN, ("input_batch",)),
    _point(f"{_V2}.execute_model", "subclass", "where the forward ends", OPEN),
    _point(f"{_V2}.sample_tokens", "subclass", "attach the report", OPEN, ("grammar_output",)),
    _point(
        "vllm.v1.worker.gpu.block_table:BlockTables.append_block_ids",
        "call",
        "rewrite a row",
        OPEN,
        ("req_index", "new_block_ids", "overwrite"),
    ),
    _point(
        "vllm.v1.worker.gpu.sample.logits_processor.interface:LogitsProcessor.validate_params",
        "subclass",
        "a request's own arguments are checked under V2 too",
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
                "our KV cache spec",
                ("spec",),
            ),
            (
                f"{module}:{name}AttentionBackend.supported_kv_cache_layouts",
                "subclass",
                "a row a slot: LBNHC",
                (),
            ),
            (
                f"{module}:{name}AttentionMetadataBuilder.build",
                "subclass",
                "physical lengths; page size 1",
                _BUILD,
            ),
            (
                f"{module}:{name}AttentionImpl.forward",
                "subclass",
                "the cache at page size 1",
                _FORWARD,
            ),
        )
    ),
    _point(
        f"{_FLASH}:FlashAttentionMetadataBuilder._get_scheduler_metadata",
        "call",
        "schedules by self.block_size, which is 1 in a step with holes",
        OPEN,
        ("aot_schedule", "batch_size", "max_num_splits"),
    ),
)
