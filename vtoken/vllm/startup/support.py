"""The configurations and models that vToken refuses to serve; nothing falls back silently.

Three checks: vLLM's configuration, in the scheduler and in every worker before weights are loaded;
the KV cache's groups; the attention layers. A refusal names the reason and the fix.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm import envs
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, MambaSpec, SlidingWindowSpec

from vtoken.base.errors import UnsupportedError
from vtoken.core.tables.kernels import MAX_HOLDERS
from vtoken.core.tables.pool import MAX_BLOCK_SIZE
from vtoken.vllm.startup.calibration import load_calibration, num_full_layers
from vtoken.vllm.startup.cuda_rules import Rule, cuda_rules
from vtoken.vllm.startup.settings import read_settings

# The `layer_types` of Hugging Face configurations that keep no state or have their own rule. vLLM
# marks its own hybrid models, but does not detect layers with a state in models that it runs
# through the Transformers library.
LAYER_TYPES = {
    "full_attention",
    "attention",
    "sliding_attention",
    "chunked_attention",
    "sparse",
    "dense",
}
MAMBA1 = {"jamba"}
DRAFTS = ("ngram", "suffix")  # methods that draft from tokens alone
STATES = (MambaAttentionBackendEnum.MAMBA2, MambaAttentionBackendEnum.GDN_ATTN)
BOUNDED_SPECS = (
    SlidingWindowSpec,
    ChunkedLocalAttentionSpec,
    MambaSpec,
)  # of groups that vLLM manages alone


def _config_rules(config: Any) -> list[Rule]:
    parallel, cache = config.parallel_config, config.cache_config
    device = config.device_config.device_type
    dtype = str(config.model_config.dtype).removeprefix("torch.")
    return [
        (
            device not in ("cpu", "cuda"),
            f"device {device}: only the CPU and CUDA attention paths are built",
        ),
        *_draft_rules(config),
        (
            parallel.data_parallel_size > 1,  # vLLM makes dense models' engines independent
            "data parallelism of a mixture of experts: its engines take steps together, which was "
            "never tested; start one server per engine",
        ),
        *_ray_rules(parallel),
        *_pipeline_rules(parallel),
        (
            parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
            "context parallelism: a rank holds only part of a block",
        ),
        (
            config.kv_transfer_config is not None,
            "KV connectors and offloading: they follow positional layouts; leave "
            "--kv-transfer-config and --kv-offloading-size out",
        ),
        (
            _is_quantised(cache.cache_dtype),
            f"quantised KV cache ({cache.cache_dtype}): pass another type with --kv-cache-dtype",
        ),
        (
            cache.cache_dtype not in ("auto", dtype) and not _is_quantised(cache.cache_dtype),
            f"a KV cache in {cache.cache_dtype} for a model in {dtype}: kernels read the cache in "
            "the model's type; use --kv-cache-dtype auto",
        ),
        (
            (cache.block_size or 0) > MAX_BLOCK_SIZE,
            f"blocks of {cache.block_size} slots: at most {MAX_BLOCK_SIZE:,}; set --block-size",
        ),
        (
            config.scheduler_config.max_num_seqs > MAX_HOLDERS,
            f"{config.scheduler_config.max_num_seqs:,} requests at a time, which may share a "
            f"block: at most {MAX_HOLDERS:,}; set --max-num-seqs",
        ),
        (
            bool(config.scheduler_config.disable_hybrid_kv_cache_manager) and _has_windows(config),
            "one cache for full and windowed layers: leave --disable-hybrid-kv-cache-manager out",
        ),
        *_model_rules(config.model_config, device, cache.sliding_window),
    ]


def _ray_rules(parallel: Any) -> list[Rule]:
    """Of Ray only the executor is served in which ranks are actors and get each step as with mp."""
    is_executor = parallel.distributed_executor_backend == "ray"
    return [
        (
            parallel.data_parallel_backend == "ray",
            "engines as actors of Ray: never run with vToken; leave --data-parallel-backend out",
        ),
        (
            is_executor and not envs.VLLM_USE_RAY_V2_EXECUTOR_BACKEND,
            "vLLM's first executor for Ray: never run with vToken; unset "
            "VLLM_USE_RAY_V2_EXECUTOR_BACKEND",
        ),
        (
            is_executor and parallel.pipeline_parallel_size > 1,
            "pipeline stages as actors of Ray: never run with vToken; use "
            "--distributed-executor-backend mp",
        ),
    ]


def _pipeline_rules(parallel: Any) -> list[Rule]:
    """Of pipelines only what was compared with one stage is served."""
    if parallel.pipeline_parallel_size == 1:
        return []
    return [
        (
            parallel.distributed_executor_backend == "external_launcher",
            "pipeline parallelism under an external launcher: every stage would sample; use "
            "--distributed-executor-backend mp",
        ),
        (
            parallel.pipeline_parallel_size > 2,
            f"{parallel.pipeline_parallel_size} pipeline stages: never run with vToken; at most 2",
        ),
        (
            parallel.tensor_parallel_size > 1,
            "pipeline stages of several ranks: never run with vToken; use --pipeline-parallel-size "
            "or --tensor-parallel-size alone",
        ),
        (
            parallel.nnodes > 1,
            "pipeline stages over several nodes: never run with vToken; use --tensor-parallel-size",
        ),
    ]


def _draft_rules(config: Any) -> list[Rule]:
    """The rules on speculative decoding."""
    drafts = config.speculative_config
    if drafts is None:
        return []
    parallel, method = config.parallel_config, drafts.method
    device = config.device_config.device_type
    return [
        (
            method not in DRAFTS,
            f"drafts of {method}: a drafter with layers computes slots from positions, so only "
            f"drafts made of tokens alone are served; take the method {' or '.join(DRAFTS)} in "
            "--speculative-config, or leave it out",
        ),
        (
            device != "cpu",
            f"speculative decoding on {device}: the worker there reads probes before tokens are "
            "sampled, and takes no rejected draft back; leave --speculative-config out",
        ),
        (
            bool(config.model_config.is_hybrid) or _has_windows(config),
            "speculative decoding beside layers with a window, chunks or a state: never compared; "
            "leave --speculative-config out",
        ),
        (
            max(parallel.tensor_parallel_size, parallel.pipeline_parallel_size) > 1,
            "speculative decoding with tensor or pipeline parallelism: never compared; leave "
            "--speculative-config out",
        ),
    ]


def _has_windows(config: Any) -> bool:
    model = config.model_config
    kinds = set(getattr(model.hf_text_config, "layer_types", None) or ())
    return bool(kinds & {"sliding_attention", "chunked_attention"})


def _model_rules(model: Any, device: str, sliding_window: int | None) -> list[Rule]:
    """The rules on the model's configuration, which need no weights."""
    text = model.hf_text_config
    kinds = set(getattr(text, "layer_types", None) or ())
    return [
        (model.is_encoder_decoder, "encoder-decoder models: encoder layers have no token table"),
        (model.runner_type != "generate", f"runner {model.runner_type}: nothing is decoded"),
        (model.use_mla, "MLA: the cache holds latents, not K and V"),
        (
            bool(model.is_mm_prefix_lm),
            "prefix-LM models: the spans of images are bidirectional; --limit-mm-per-prompt "
            """'{"image": 0}' serves words alone""",
        ),
        (model.is_attention_free, "models without attention: there is no KV cache"),
        (
            bool(kinds - LAYER_TYPES) and not model.is_hybrid,
            f"layers of type {', '.join(sorted(kinds - LAYER_TYPES))}: only full attention has a "
            "token table",
        ),
        (
            device == "cpu" and text.model_type in MAMBA1,
            f"{text.model_type}: vLLM has no Mamba 1 kernel on the CPU",
        ),
        (model.is_diffusion, "diffusion models: cached tokens are overwritten"),
        (
            sliding_window is not None,
            f"sliding-window attention: the kernel counts slots, not positions; "
            f"--disable-sliding-window serves contexts of up to {sliding_window} tokens",
        ),
        (model.rswa_window is not None, "reference sliding-window attention"),
        (
            hasattr(model.hf_config, "dual_chunk_attention_config"),
            "dual-chunk attention: the chunk is positional",
        ),
        (
            model.uses_alibi or getattr(text, "position_embedding_type", "") == "alibi",
            "ALiBi: the bias follows slot order, not positions",
        ),
    ]


def _is_quantised(cache_dtype: str) -> bool:
    return cache_dtype not in ("auto", "float32", "bfloat16", "float16")


def check_config(config: Any) -> None:
    """Raises UnsupportedError that lists every reason to refuse this vLLM configuration, or says
    why a calibration profile named by the user cannot be used.
    """
    settings = read_settings(config.additional_config or {})
    rules = _config_rules(config)
    if config.device_config.device_type == "cuda":
        rules += cuda_rules(config, experimental=settings.experimental_cuda)
    _raise([reason for broken, reason in rules if broken])
    if settings.calibration:
        load_calibration(settings.calibration, config)


def check_scheduler(config: Any, *, is_async: bool) -> None:
    """Raises UnsupportedError when the scheduler's class and vLLM's flag disagree."""
    flag = bool(config.scheduler_config.async_scheduling)
    if flag == is_async:
        return
    name = "VTokenAsyncScheduler" if is_async else "VTokenScheduler"
    raise UnsupportedError(
        f"scheduler_cls is {name}, but async_scheduling is {flag}: the engine would plan steps in "
        "a different order from their reports. Set scheduler_cls to "
        "vtoken.vllm.engine.scheduler.make_scheduler, which picks the right class."
    )


def check_kv_cache(kv_cache_config: Any, spec_class: Any, *, num_stages: int = 1) -> None:
    """Raises UnsupportedError unless one group has vToken's spec, and the others are bounded.

    With several pipeline stages there may be no other group.
    """
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    managed = [spec for spec in specs if isinstance(spec, spec_class)]
    reasons = []
    if num_stages > 1 and len(specs) > 1:
        reasons.append(
            "windows, chunks or states with pipeline parallelism: the scheduler knows only the "
            "first stage's layers of each group; use --tensor-parallel-size"
        )
    if len(managed) > 1:
        reasons.append(f"{len(managed)} groups of full-attention layers: vToken serves one")
    for spec in specs:
        if type(spec) in BOUNDED_SPECS and managed:
            if isinstance(spec, MambaSpec) and spec.mamba_type not in STATES:
                reasons.append(f"states of type {spec.mamba_type.name}: never compared")
            continue
        if type(spec) is spec_class.__base__:
            reasons.append(
                "an attention backend that is not vToken's; on CUDA, use --attention-backend "
                "FLASH_ATTN (version 3) or TRITON_ATTN"
            )
        elif not isinstance(spec, spec_class):
            reasons.append(f"{type(spec).__name__} layers: only full attention has a token table")
        elif spec.sliding_window is not None or spec.attention_chunk_size is not None:
            reasons.append("sliding-window or chunked-local layers")
        elif spec.non_causal:
            reasons.append("non-causal layers")
    _raise(reasons)


def check_stages(config: Any, num_layers: list[int]) -> None:
    """Raises UnsupportedError unless each pipeline stage has a layer of full attention, and all of
    them together `num_layers` are as many as vLLM's `config` says.
    """
    expected = num_full_layers(config.model_config)
    reasons = []
    if min(num_layers) == 0:
        reasons.append(
            f"stage {num_layers.index(0)} of the pipeline has no layer of full attention: lower "
            "--pipeline-parallel-size, or set VLLM_PP_LAYER_PARTITION"
        )
    elif sum(num_layers) != expected:
        reasons.append(
            f"pipeline stages of {', '.join(map(str, num_layers))} layers of full attention, where "
            f"the model's configuration has {expected}: use --tensor-parallel-size"
        )
    _raise(reasons)


def check_layers(layers: dict[str, Any]) -> None:
    """Raises UnsupportedError unless all managed layers are plain causal attention."""
    found: dict[str, list[str]] = {}
    for name, layer in layers.items():
        for reason in _layer_reasons(layer):
            found.setdefault(reason, []).append(name)
    reasons = [
        f"{reason} ({len(names)} of {len(layers)} attention layers, {names[0]} the first)"
        for reason, names in found.items()
    ]
    _raise(reasons)


def _layer_reasons(layer: Any) -> Iterator[str]:
    impl = layer.impl
    if getattr(impl, "alibi_slopes", None) is not None:
        yield "ALiBi: the bias follows slot order"
    if getattr(impl, "sliding_window", -1) not in (None, -1, (-1, -1)):
        yield "sliding-window attention"
    if getattr(impl, "kv_sharing_target_layer_name", None) is not None:
        yield "KV sharing between layers"
    if getattr(layer, "attn_type", "decoder") != "decoder":
        yield f"{layer.attn_type} attention"
    if _is_quantised(getattr(layer, "kv_cache_dtype", "auto")):
        yield f"a quantised KV cache ({layer.kv_cache_dtype})"


def _raise(reasons: list[str]) -> None:
    if reasons:
        raise UnsupportedError(
            "vToken cannot serve this configuration: "
            + "; ".join(reasons)
            + ". Change it, or start without vToken."
        )
