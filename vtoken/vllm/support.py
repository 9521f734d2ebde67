"""What vToken refuses to serve, each with its reason; nothing falls back silently.

Checked twice: on vLLM's configuration in the scheduler and in every worker, and on the model's
KV cache spec once it is known.
"""

from __future__ import annotations

from typing import Any

from vtoken.errors import UnsupportedError
from vtoken.vllm.cuda.support import Rule, cuda_rules
from vtoken.vllm.settings import read_settings


def _config_rules(config: Any) -> list[Rule]:
    parallel, cache, model = config.parallel_config, config.cache_config, config.model_config
    text = model.hf_text_config
    device = config.device_config.device_type
    return [
        (
            device not in ("cpu", "cuda"),
            f"device {device}: only the CPU and CUDA attention paths are built",
        ),
        (
            device == "cpu" and bool(config.use_v2_model_runner),
            "model runner V2 on CPU: set VLLM_USE_V2_MODEL_RUNNER=0",
        ),
        (
            config.speculative_config is not None,
            "speculative decoding: drafts are not in the table",
        ),
        (parallel.pipeline_parallel_size > 1, "pipeline parallelism"),
        (parallel.data_parallel_size > 1, "data parallelism: commands reach one engine only"),
        (
            parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
            "context parallelism: a rank holds only part of a block",
        ),
        (config.kv_transfer_config is not None, "KV connectors: they follow positional layouts"),
        (
            cache.cache_dtype not in ("auto", "float32", "bfloat16", "float16"),
            f"quantised KV cache ({cache.cache_dtype})",
        ),
        (model.is_encoder_decoder, "encoder-decoder models: encoder layers have no token table"),
        (model.runner_type != "generate", f"runner {model.runner_type}: nothing is decoded"),
        (model.use_mla, "MLA: the cache holds latents, not K and V"),
        (bool(model.is_mm_prefix_lm), "prefix-LM models: bidirectional spans are positional"),
        (model.rswa_window is not None, "reference sliding-window attention"),
        (
            hasattr(model.hf_config, "dual_chunk_attention_config"),
            "dual-chunk attention: the chunk is positional",
        ),
        (
            bool(getattr(text, "alibi", False))
            or getattr(text, "position_embedding_type", "") == "alibi",
            "ALiBi: the bias follows slot order, not positions",
        ),
    ]


def check_config(config: Any) -> None:
    """Raises UnsupportedError listing every reason why this vLLM configuration is refused."""
    rules = _config_rules(config)
    if config.device_config.device_type == "cuda":
        settings = read_settings(config.additional_config or {})
        rules += cuda_rules(config, experimental=settings.experimental_cuda)
    _raise([reason for broken, reason in rules if broken])


def check_scheduler(config: Any, *, is_async: bool) -> None:
    """Raises UnsupportedError when the scheduler's class and vLLM's flag disagree."""
    flag = bool(config.scheduler_config.async_scheduling)
    if flag == is_async:
        return
    have = "VTokenAsyncScheduler" if is_async else "VTokenScheduler"
    raise UnsupportedError(
        f"scheduler_cls is {have}, but async_scheduling is {flag}: the engine would plan steps "
        "in another order than they are reported. Let scheduler_cls be "
        "vtoken.vllm.scheduler.make_scheduler, which chooses."
    )


def check_kv_cache(kv_cache_config: Any, spec_class: Any) -> None:
    """Raises UnsupportedError unless the model has one full-attention KV cache group of ours."""
    groups = kv_cache_config.kv_cache_groups
    reasons = []
    if len(groups) != 1:
        reasons.append(f"{len(groups)} KV cache groups: the token table serves exactly one")
    for group in groups:
        spec = group.kv_cache_spec
        if type(spec) is spec_class.__base__:
            reasons.append(
                "an attention backend that is not vToken's; on CUDA: --attention-backend "
                "FLASH_ATTN (version 3) or TRITON_ATTN"
            )
        elif not isinstance(spec, spec_class):
            reasons.append(f"{type(spec).__name__} layers: only full attention has a token table")
        elif spec.sliding_window is not None or spec.attention_chunk_size is not None:
            reasons.append("sliding-window or chunked-local layers")
        elif spec.non_causal:
            reasons.append("non-causal layers")
    _raise(reasons)


def check_layers(layers: dict[str, Any]) -> None:
    """Raises UnsupportedError for an attention layer whose reading depends on slot order."""
    reasons = []
    for name, layer in layers.items():
        impl = layer.impl
        if getattr(impl, "alibi_slopes", None) is not None:
            reasons.append(f"{name}: ALiBi, the bias follows slot order")
        if getattr(impl, "sliding_window", -1) not in (None, -1, (-1, -1)):
            reasons.append(f"{name}: sliding-window attention")
        if getattr(impl, "kv_sharing_target_layer_name", None) is not None:
            reasons.append(f"{name}: KV sharing between layers")
    _raise(reasons)


def _raise(reasons: list[str]) -> None:
    if reasons:
        raise UnsupportedError(
            "vToken cannot serve this configuration: "
            + "; ".join(reasons)
            + ". Start without vToken, or change what is named."
        )
