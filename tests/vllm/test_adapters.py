"""LoRA adapters: each request of one batch is pruned exactly under its own adapter.

The reference has the adapter's product added to its weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support import reference
from tests.support.engines import H2O, RELOCATING, engine_args
from tests.support.observe import Observer, scheduler_of

pytestmark = pytest.mark.vllm

RANK, ALPHA = 8, 16
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NUM_NEW = 48
PROMPT = reference.random_prompt(130, 1)

Product = dict[str, tuple[Any, Any]]


def make_adapter(folder: Path, model: Any, seed: int) -> Product:
    """A random adapter of `model` in `folder`, as PEFT writes it; weight's name -> (A, B)."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    pairs: Product = {}
    for name, weight in model.named_parameters():
        if name.split(".")[-2] in MODULES:
            rows, columns = weight.shape
            down = torch.randn(RANK, columns, generator=generator) / columns**0.5
            up = torch.randn(rows, RANK, generator=generator) * weight.std()
            pairs[name] = (down, up)
    tensors = {}
    for name, (down, up) in pairs.items():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        tensors |= {f"{stem}.lora_A.weight": down, f"{stem}.lora_B.weight": up}
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": [*MODULES]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return pairs


def merged(folder: Path, pairs: Product) -> Any:
    """The model of `folder` with an adapter in its weights."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, (down, up) in pairs.items():
            model.get_parameter(name).add_(up @ down, alpha=ALPHA / RANK)
    return model


def test_requests_with_adapters_are_pruned_exactly(
    engine: Any, demo_model: Path, hf_model: Any, tmp_path: Path
) -> None:
    """The same prompt under no adapter and two; the prefix cache keeps the three apart."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    pairs = [make_adapter(tmp_path / str(seed), hf_model, seed) for seed in (1, 2)]
    adapters = [None, *(LoRARequest(f"a{i}", i, str(tmp_path / str(i))) for i in (1, 2))]
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
    found: list[list[list[int]]] = []
    logs: list[dict[int, set[int]]] = []
    with engine(
        block_size=16,
        num_gpu_blocks_override=512,
        enable_lora=True,
        max_loras=3,  # one free: else vLLM gives it to whoever has no adapter
        max_lora_rank=RANK,
        max_num_batched_tokens=256,
        max_num_seqs=8,
        **engine_args(H2O | {"verify_ratio": 1.0}, check_every_step=True),
    ) as llm:
        observer = Observer(llm)
        controller = scheduler_of(llm).vtoken_controller
        for patch in ({}, RELOCATING):
            controller.patch_config(patch)
            outputs = llm.generate(
                [{"prompt_token_ids": PROMPT}] * len(adapters),
                params,
                lora_request=adapters,
                use_tqdm=False,
            )
            found.append([list(output.outputs[0].token_ids) for output in outputs])
            hits = sum(output.num_cached_tokens for output in outputs)
        counters = observer.runtime.counters
        assert counters.reclamation.recycled_slots > 50
        assert counters.reclamation.relocations > 0
        assert counters.invariants.violations == 0
        assert hits == len(adapters) * (len(PROMPT) // 16 * 16)
        logs = observer.logs()
    recycled, relocated = logs[: len(adapters)], logs[len(adapters) :]
    models = [hf_model, *(merged(demo_model, product) for product in pairs)]
    for tokens, victims in zip(found, (recycled, relocated), strict=True):
        assert tokens == [
            reference.generate(model, PROMPT, NUM_NEW, reference.replay(log), draft=draft)
            for model, log, draft in zip(models, victims, tokens, strict=True)
        ]
    full = [reference.generate(model, PROMPT, NUM_NEW, reference.full) for model in models]
    assert all(one != other for one, other in zip(full, found[0], strict=True))
    assert len({tuple(tokens) for tokens in full}) == len(models)
