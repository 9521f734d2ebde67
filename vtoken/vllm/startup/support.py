"""The configurations and models that vToken refuses to serve; nothing falls back silently.

Three checks: vLLM's configuration, in the scheduler and in every worker before weights are loaded;
the KV cache's groups; the attention layers. A refusal names the reason and the fix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

from vllm import envs
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, MambaSpec, SlidingWindowSpec

from vtoken.base.errors import UnsupportedError
from vtoken.core.tables.kernels import MAX_HOLDERS
from vtoken.core.tables.pool import MAX_BLOCK_SIZE
from vtoken.vllm.spec import ManagedGroup, VTokenAttentionSpec, spec_of_model
from vtoken.vllm.startup.cuda_rules import cuda_reasons
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
NOT_ON_CPU = {  # model types of which vLLM's CPU build lacks a part, which it finds out late
    "jamba": "vLLM has no Mamba 1 kernel on the CPU",
    "minimax_m2": "vLLM cannot score its experts on the CPU: its router there has no sigmoid",
}
LayerReasons = Callable[[Any], Iterator[str]]
DRAFTS = ("ngram", "suffix", "draft_model", "eagle", "eagle3", "mtp")
STATES = (MambaAttentionBackendEnum.MAMBA2, MambaAttentionBackendEnum.GDN_ATTN)
BOUNDED_SPECS = (
    SlidingWindowSpec,
    ChunkedLocalAttentionSpec,
    MambaSpec,
)  # of groups that vLLM manages alone


def _reasons(config: Any) -> Iterator[str]:
    """Why vLLM's `config` is refused on every device."""
    parallel, cache, scheduling = (
        config.parallel_config,
        config.cache_config,
        config.scheduler_config,
    )
    device = config.device_config.device_type
    dtype = str(config.model_config.dtype).removeprefix("torch.")
    if device not in ("cpu", "cuda"):
        yield f"device {device}: only the CPU and CUDA attention paths are built"
    if config.speculative_config is not None:
        yield from _draft_reasons(config)
    if parallel.data_parallel_size > 1:  # vLLM makes dense models' engines independent
        yield (
            "data parallelism of a mixture of experts: its engines take steps together, which was "
            "never tested; start one server per engine"
        )
    yield from _ray_reasons(parallel)
    if parallel.pipeline_parallel_size > 1:
        yield from _pipeline_reasons(parallel)
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        yield "context parallelism: a rank holds only part of a block"
    if config.kv_transfer_config is not None:
        yield (
            "KV connectors and offloading: they follow positional layouts; leave "
            "--kv-transfer-config and --kv-offloading-size out"
        )
    if _is_quantised(cache.cache_dtype):
        yield f"quantised KV cache ({cache.cache_dtype}): pass another type with --kv-cache-dtype"
    elif cache.cache_dtype not in ("auto", dtype):
        yield (
            f"a KV cache in {cache.cache_dtype} for a model in {dtype}: kernels read the cache in "
            "the model's type; use --kv-cache-dtype auto"
        )
    if (cache.block_size or 0) > MAX_BLOCK_SIZE:
        yield f"blocks of {cache.block_size} slots: at most {MAX_BLOCK_SIZE:,}; set --block-size"
    if scheduling.max_num_seqs > MAX_HOLDERS:
        yield (
            f"{scheduling.max_num_seqs:,} requests at a time, which may share a block: at most "
            f"{MAX_HOLDERS:,}; set --max-num-seqs"
        )
    if scheduling.disable_hybrid_kv_cache_manager and _has_windows(config):
        yield "one cache for full and windowed layers: leave --disable-hybrid-kv-cache-manager out"
    yield from _model_reasons(config.model_config, device, cache.sliding_window)


def _ray_reasons(parallel: Any) -> Iterator[str]:
    """Of Ray only the executor is served in which ranks are actors and get each step as with mp."""
    if parallel.data_parallel_backend == "ray":
        yield "engines as actors of Ray: never run with vToken; leave --data-parallel-backend out"
    if parallel.distributed_executor_backend != "ray":
        return
    if not getattr(envs, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", True):  # vLLM 0.33 has no other one
        yield (
            "vLLM's first executor for Ray: never run with vToken; unset "
            "VLLM_USE_RAY_V2_EXECUTOR_BACKEND"
        )
    if parallel.pipeline_parallel_size > 1:
        yield (
            "pipeline stages as actors of Ray: never run with vToken; use "
            "--distributed-executor-backend mp"
        )


def _pipeline_reasons(parallel: Any) -> Iterator[str]:
    """Of pipelines only what was compared with one stage is served."""
    if parallel.distributed_executor_backend == "external_launcher":
        yield (
            "pipeline parallelism under an external launcher: every stage would sample; use "
            "--distributed-executor-backend mp"
        )
    if parallel.pipeline_parallel_size > 2:
        yield f"{parallel.pipeline_parallel_size} pipeline stages: never run with vToken; at most 2"
    if parallel.tensor_parallel_size > 1:
        yield (
            "pipeline stages of several ranks: never run with vToken; use --pipeline-parallel-size "
            "or --tensor-parallel-size alone"
        )
    if parallel.nnodes > 1:
        yield (
            "pipeline stages over several nodes: never run with vToken; use --tensor-parallel-size"
        )


def _draft_reasons(config: Any) -> Iterator[str]:
    """Of speculative decoding only what was compared with none is served."""
    parallel, drafts = config.parallel_config, config.speculative_config
    device = config.device_config.device_type
    if drafts.method not in DRAFTS:
        yield (
            f"drafts of {drafts.method}: never compared; take the method "
            f"{', '.join(DRAFTS[:-1])} or {DRAFTS[-1]} in --speculative-config, or leave it out"
        )
    elif drafts.parallel_drafting:
        yield (
            "parallel drafting: its queries read tokens that nothing has computed; leave "
            "parallel_drafting out of --speculative-config"
        )
    elif drafts.uses_draft_kv_cache() and (
        config.model_config.uses_mrope or drafts.draft_model_config.uses_mrope
    ):
        yield (
            "a drafter with layers for a model with M-RoPE: a place is not one position; take the "
            "method ngram or suffix in --speculative-config"
        )
    elif drafts.uses_draft_kv_cache() and _has_windows(config):
        yield (
            "a drafter with layers beside layers with a window: never compared; take the method "
            "ngram or suffix in --speculative-config"
        )
    elif drafts.uses_draft_kv_cache() and drafts.method != "mtp" and config.model_config.is_hybrid:
        yield (
            f"drafts of {drafts.method} beside states: never compared; take the method mtp or "
            "ngram in --speculative-config"
        )
    elif drafts.use_gemma4_mtp() or drafts.use_step3p5_mtp():
        yield "MTP of Gemma 4 and Step 3.5: never compared; leave --speculative-config out"
    elif drafts.use_multi_module_mtp():
        yield "several modules of MTP: never compared; set num_speculative_tokens to 1"
    if device != "cpu":
        yield (
            f"speculative decoding on {device}: the worker there reads probes before tokens are "
            "sampled, and takes no rejected draft back; leave --speculative-config out"
        )
    if "chunked_attention" in _layer_types(config.model_config):
        yield "drafts beside layers with chunks: never compared; leave --speculative-config out"
    if config.cache_config.mamba_cache_mode == "align":
        yield (
            "drafts beside states in a prefix cache: vLLM has no kernel on the CPU that keeps the "
            "state where a block ends; use --no-enable-prefix-caching"
        )
    if max(parallel.tensor_parallel_size, parallel.pipeline_parallel_size) > 1:
        yield (
            "speculative decoding with tensor or pipeline parallelism: never compared; leave "
            "--speculative-config out"
        )


def _layer_types(model: Any) -> set[str]:
    return set(getattr(model.hf_text_config, "layer_types", None) or ())


def _has_windows(config: Any) -> bool:
    return bool(_layer_types(config.model_config) & {"sliding_attention", "chunked_attention"})


def _model_reasons(model: Any, device: str, sliding_window: int | None) -> Iterator[str]:
    """Why the model's configuration is refused; needs no weights."""
    text, others = model.hf_text_config, _layer_types(model) - LAYER_TYPES
    if model.is_encoder_decoder:
        yield "encoder-decoder models: encoder layers have no token table"
    if model.runner_type != "generate":
        yield f"runner {model.runner_type}: nothing is decoded"
    if model.use_mla:
        yield "MLA: the cache holds latents, not K and V"
    if model.is_mm_prefix_lm:
        yield (
            "prefix-LM models: the spans of images are bidirectional; --limit-mm-per-prompt "
            """'{"image": 0}' serves words alone"""
        )
    if shared := getattr(text, "num_kv_shared_layers", 0):
        yield f"KV sharing: {shared} layers read the K and V of other layers, never compared"
    value_size = getattr(text, "v_head_dim", None) or model.get_head_size()
    if value_size != model.get_head_size() and not hasattr(text, "kv_lora_rank"):
        yield (
            f"K of {model.get_head_size()} and V of {value_size} numbers a head: vLLM reads such a "
            "cache with a backend of its own, which has no token table"
        )
    if model.is_attention_free:
        yield "models without attention: there is no KV cache"
    if others and not model.is_hybrid:
        yield f"layers of type {', '.join(sorted(others))}: only full attention has a token table"
    if device == "cpu" and text.model_type in NOT_ON_CPU:
        yield f"{text.model_type}: {NOT_ON_CPU[text.model_type]}"
    if model.is_diffusion:
        yield "diffusion models: cached tokens are overwritten"
    if sliding_window is not None:
        yield (
            "sliding-window attention: the kernel counts slots, not positions; "
            f"--disable-sliding-window serves contexts of up to {sliding_window} tokens"
        )
    if model.rswa_window is not None:
        yield "reference sliding-window attention"
    if hasattr(model.hf_config, "dual_chunk_attention_config"):
        yield "dual-chunk attention: the chunk is positional"
    if model.uses_alibi or getattr(text, "position_embedding_type", "") == "alibi":
        yield "ALiBi: the bias follows slot order, not positions"


def _is_quantised(cache_dtype: str) -> bool:
    return cache_dtype not in ("auto", "float32", "bfloat16", "float16")


def check_config(config: Any) -> None:
    """Raises UnsupportedError that lists every reason to refuse this vLLM configuration."""
    settings = read_settings(config.additional_config or {})
    reasons = [*_reasons(config)]
    if config.device_config.device_type == "cuda":
        reasons += cuda_reasons(config, experimental=settings.experimental_cuda)
    refuse(*reasons)


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


def num_full_layers(model: Any) -> int:
    """How many layers of vLLM's `model` configuration have full attention."""
    text = model.hf_text_config
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)
    if not kinds:
        return int(model.get_total_num_hidden_layers())
    return sum(kind in ("full_attention", "attention") for kind in kinds)


def managed_group(kv_cache_config: Any, config: Any) -> ManagedGroup:
    """The one group with vToken's spec; `config`: vLLM's.

    Raises UnsupportedError if there is none or a second one, or if another group is not bounded.
    """
    drafts = config.speculative_config
    has_layers = drafts is not None and drafts.uses_draft_kv_cache()
    num_layers = num_full_layers(config.model_config) if has_layers else None
    specs = [spec_of_model(group, num_layers) for group in kv_cache_config.kv_cache_groups]
    refuse(*_group_reasons(specs, config.parallel_config.pipeline_parallel_size))
    return ManagedGroup.of(kv_cache_config, num_layers)


def _group_reasons(specs: list[Any], num_stages: int) -> Iterator[str]:
    managed = [spec for spec in specs if isinstance(spec, VTokenAttentionSpec)]
    if num_stages > 1 and len(specs) > 1:
        yield (
            "windows, chunks or states with pipeline parallelism: the scheduler knows only the "
            "first stage's layers of each group; use --tensor-parallel-size"
        )
    if len(managed) > 1:
        yield f"{len(managed)} groups of full-attention layers: vToken serves one"
    for spec in specs:
        if type(spec) in BOUNDED_SPECS and managed:
            if isinstance(spec, MambaSpec):
                yield from _state_reasons(spec)
        elif type(spec) is VTokenAttentionSpec.__base__:
            yield (
                "an attention backend that is not vToken's; on CUDA, use --attention-backend "
                "FLASH_ATTN (version 3) or TRITON_ATTN"
            )
        elif not isinstance(spec, VTokenAttentionSpec):
            yield f"{type(spec).__name__} layers: only full attention has a token table"
        elif spec.sliding_window is not None or spec.attention_chunk_size is not None:
            yield "sliding-window or chunked-local layers"
        elif spec.non_causal:
            yield "non-causal layers"


def _state_reasons(spec: MambaSpec) -> Iterator[str]:
    if spec.mamba_type not in STATES:
        yield f"states of type {spec.mamba_type.name}: never compared"
    if spec.mamba_type == MambaAttentionBackendEnum.MAMBA2 and spec.num_speculative_blocks:
        yield (
            "drafts beside states of Mamba 2: vLLM's kernels on the CPU compute other states when "
            "a request has drafts; leave --speculative-config out"
        )


def check_stages(config: Any, num_layers: list[int]) -> None:
    """Raises UnsupportedError unless each pipeline stage has a layer of full attention, and all of
    them together `num_layers` are as many as vLLM's `config` says.
    """
    expected = num_full_layers(config.model_config)
    if min(num_layers) == 0:
        refuse(
            f"stage {num_layers.index(0)} of the pipeline has no layer of full attention: lower "
            "--pipeline-parallel-size, or set VLLM_PP_LAYER_PARTITION"
        )
    if sum(num_layers) != expected:
        refuse(
            f"pipeline stages of {', '.join(map(str, num_layers))} layers of full attention, where "
            f"the model's configuration has {expected}: use --tensor-parallel-size"
        )


def check_layers(layers: dict[str, Any], reasons_of: LayerReasons | None = None) -> None:
    """Raises UnsupportedError unless all managed layers are plain causal attention.

    `reasons_of`: why a device refuses a layer.
    """
    found: dict[str, list[str]] = {}
    for name, layer in layers.items():
        for reason in chain(_layer_reasons(layer), reasons_of(layer) if reasons_of else ()):
            found.setdefault(reason, []).append(name)
    if len({getattr(layer.impl, "num_heads", None) for layer in layers.values()}) > 1:
        found["query heads of several numbers: vLLM plans their attention apart"] = [*layers]
    refuse(
        *(
            f"{reason} ({len(names)} of {len(layers)} attention layers, {names[0]} the first)"
            for reason, names in found.items()
        )
    )


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


def refuse(*reasons: str) -> None:
    """Raises UnsupportedError that lists `reasons`, if there are any."""
    if reasons:
        raise UnsupportedError(
            "vToken cannot serve this configuration: "
            + "; ".join(reasons)
            + ". Change it, or start without vToken."
        )
