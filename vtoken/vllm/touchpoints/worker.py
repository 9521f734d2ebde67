"""Touch points in vLLM's worker: attention backend, model runner, ranks.

Part of the table in `vtoken.vllm.touchpoints.register`.
"""

from __future__ import annotations

from functools import partial

from vtoken.vllm.touchpoints.touchpoint import TouchPoint

_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_CPU = "vllm.v1.attention.backends.cpu_attn"
_on_cpu = partial(TouchPoint, device="cpu")

WORKER_POINTS = (
    TouchPoint(
        "vllm.v1.attention.backends.registry:register_backend",
        "register",
        "select vToken's attention backends",
        ("backend", "class_path"),
        upstream="attention backend registry",
    ),
    TouchPoint(
        "vllm.v1.attention.selector:_cached_get_attn_backend",
        "call",
        "clear the backend that an earlier engine of this process chose",
        ends_with="register_backend() does it",
    ),
    TouchPoint(
        f"{_RUNNER}.get_kv_cache_spec",
        "subclass",
        "cache the states of Mamba 2 at the ends of steps",
        upstream="worker_cls",
        ends_with="the CPU kernel of Mamba 2 returns states inside a prompt",
        device="cpu",
    ),
    TouchPoint(
        "vllm.v1.kv_cache_interface:MambaSpec",
        "call",
        "the same",
        ("num_prefill_checkpoint_blocks", "prefill_checkpoint_alignment"),
        device="cpu",
    ),
    TouchPoint(
        f"{_CPU}:CPUAttentionBackend.customize_spec",
        "subclass",
        "select vToken's KV cache spec",
        ("spec",),
        upstream="vllm-project/vllm#42449",
        ends_with="backends build their own specs",
        device="cpu",
    ),
    TouchPoint(
        f"{_CPU}:CPUAttentionBackend.get_supported_kernel_block_sizes",
        "subclass",
        "allow block size 16 (isa vec16)",
        ("kv_cache_spec",),
        upstream="stock requires multiples of 32",
        device="cpu",
    ),
    TouchPoint(
        f"{_CPU}:CPUAttentionMetadataBuilder.build",
        "subclass",
        "split off requests with holes",
        ("common_prefix_len", "common_attn_metadata", "fast_build"),
        upstream="attention backend registry",
        device="cpu",
    ),
    TouchPoint(
        f"{_CPU}:CPUAttentionBackendImpl.forward",
        "subclass",
        "run the stock kernel on packed blocks, and the score probe after it",
        ("layer", "query", "key", "value", "kv_cache", "attn_metadata", "output"),
        upstream="attention backend registry",
        device="cpu",
    ),
    TouchPoint(
        "vllm._custom_ops:cpu_attn_reshape_and_cache",
        "call",
        "learn the cache layout",
        ("key", "value", "key_cache", "value_cache", "slot_mapping", "isa"),
        device="cpu",
    ),
    TouchPoint(
        "vllm.v1.worker.cpu_worker:CPUWorker.init_device",
        "subclass",
        "set the runner's class",
        upstream="worker_cls",
        ends_with="a runner_cls option exists",
        device="cpu",
    ),
    TouchPoint(
        "vllm.v1.worker.gpu_worker:Worker.execute_model",
        "subclass",
        "learn of an earlier stage's error before waiting for its hidden states",
        ("scheduler_output",),
        upstream="worker_cls",
        ends_with="a stage that fails ends the step of the others",
        device="cpu",
    ),
    TouchPoint(
        "vllm.v1.worker.gpu_worker:Worker.sample_tokens",
        "subclass",
        "answer with the error of a step that failed",
        ("grammar_output",),
        upstream="worker_cls",
        ends_with="the engine reads the answer of execute_model first, whatever is in flight",
        device="cpu",
    ),
    TouchPoint(
        f"{_RUNNER}.sync_and_gather_intermediate_tensors",
        "call",
        "make `intermediate_tensors` on a later stage, which vLLM makes in its warm-up only",
        ("num_tokens", "intermediate_tensors"),
        ends_with="stages work with --enforce-eager on the CPU",
        device="cpu",
    ),
    _on_cpu(
        f"{_RUNNER}.initialize_kv_cache",
        "subclass",
        "learn the cache layout and refuse unsupported ones",
        ("kv_cache_config",),
    ),
    _on_cpu(
        f"{_RUNNER}._update_states",
        "subclass",
        "make copies and replace block tables before vLLM appends",
        ("scheduler_output",),
    ),
    _on_cpu(
        f"{_RUNNER}._prepare_inputs",
        "subclass",
        "set physical sequence lengths and slots",
        ("scheduler_output", "num_scheduled_tokens"),
    ),
    _on_cpu(
        f"{_RUNNER}.execute_model",
        "subclass",
        "attach the report of a step without tokens",
        ("scheduler_output",),
    ),
    _on_cpu("vllm.v1.outputs:EMPTY_MODEL_RUNNER_OUTPUT", "call", "detect a step without tokens"),
    _on_cpu(f"{_RUNNER}.sample_tokens", "subclass", "attach the report", ("grammar_output",)),
    TouchPoint(
        "vllm.v1.outputs:AsyncModelRunnerOutput.get_output",
        "subclass",
        "add scores to the report where vLLM waits for the sampled tokens",
    ),
    TouchPoint(
        "vllm.v1.outputs:AsyncModelRunnerOutput.get_kv_connector_output",
        "subclass",
        "pass on what vLLM asks an output for besides its tokens",
        since="0.33",
    ),
    TouchPoint(
        "vllm.distributed.parallel_state:get_tp_group", "call", "compare and reduce over the ranks"
    ),
    TouchPoint(
        "vllm.distributed.parallel_state:get_pp_group", "call", "send findings and scores on"
    ),
    _on_cpu(
        "vllm.v1.worker.block_table:BlockTable.add_row",
        "call",
        "replace a row of the block table",
        ("block_ids", "row_idx"),
    ),
    _on_cpu(
        f"{_RUNNER}._zero_block_ids",
        "call",
        "zero a block that held a state before tokens are copied to it",
        ("block_ids",),
    ),
)
