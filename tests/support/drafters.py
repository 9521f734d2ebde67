"""Drafters with layers, made on this machine: parts of a model, or random heads on it."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copytree
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support import models

AUX_LAYERS = [1, 2, 3]  # whose hidden states EAGLE-3 reads


def more_kv_heads(target: Path, folder: Path) -> Path:
    """The Llama `target` in `folder` with each KV head twice: it computes the same."""
    copytree(target, folder)
    num_heads = _write_config(folder)["num_key_value_heads"]
    _write_config(folder, num_key_value_heads=2 * num_heads)
    (weights,) = folder.glob("*.safetensors")
    found = load_file(weights)
    for name, weight in found.items():
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            heads = weight.view(num_heads, -1, weight.shape[1]).repeat_interleave(2, dim=0)
            found[name] = heads.reshape(-1, weight.shape[1]).contiguous()
    save_file(found, weights, metadata={"format": "pt"})
    return folder


def eagle_head(target: Path, folder: Path, method: str) -> Path:
    """A random head of one layer for the Llama `target`; `method`: "eagle" or "eagle3"."""
    copytree(target, folder, ignore=lambda _, names: [n for n in names if "safetensors" in n])
    is_third = method == "eagle3"
    config = _write_config(
        folder,
        num_hidden_layers=1,
        architectures=["LlamaForCausalLMEagle3" if is_third else "EagleLlamaForCausalLM"],
        **({"eagle_aux_hidden_state_layer_ids": AUX_LAYERS} if is_third else {}),
    )
    size, inner, vocab = (
        config[name] for name in ("hidden_size", "intermediate_size", "vocab_size")
    )
    head = config.get("head_dim") or size // config["num_attention_heads"]
    queries, keys = (config[name] * head for name in ("num_attention_heads", "num_key_value_heads"))
    layer = "midlayer." if is_third else "layers.0."
    read = 2 * size if is_third else size
    shapes = {
        "fc.weight": (size, (len(AUX_LAYERS) if is_third else 2) * size),
        f"{layer}self_attn.q_proj.weight": (queries, read),
        f"{layer}self_attn.k_proj.weight": (keys, read),
        f"{layer}self_attn.v_proj.weight": (keys, read),
        f"{layer}self_attn.o_proj.weight": (size, queries),
        f"{layer}mlp.gate_proj.weight": (inner, size),
        f"{layer}mlp.up_proj.weight": (inner, size),
        f"{layer}mlp.down_proj.weight": (size, inner),
        f"{layer}post_attention_layernorm.weight": (size,),
    }
    if is_third:
        norms = ("midlayer.hidden_norm", "midlayer.input_layernorm", "norm")
        shapes |= {f"{norm}.weight": (size,) for norm in norms} | {"lm_head.weight": (vocab, size)}
        _write_config(folder, draft_vocab_size=vocab)
    save_file(
        {name: _random(*shape) for name, shape in shapes.items()}, folder / "model.safetensors"
    )
    return folder


MTP = models.Recipe(
    "glm4_moe",
    {
        "head_dim": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 64,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "num_hidden_layers": 3,
        "num_nextn_predict_layers": 0,
    },
)


def mtp_model(folder: Path) -> Path:
    """A random GLM 4.x of two layers whose third predicts the token after the next."""
    models.make(MTP, folder)
    weights = load_file(folder / "model.safetensors")
    size = weights["model.embed_tokens.weight"].shape[1]
    ones, last = torch.ones(size), "model.layers.2."
    weights |= {
        f"{last}enorm.weight": ones,
        f"{last}hnorm.weight": ones.clone(),
        f"{last}eh_proj.weight": _random(size, 2 * size),
        f"{last}shared_head.norm.weight": ones.clone(),
        f"{last}shared_head.head.weight": weights["lm_head.weight"].clone(),
        f"{last}embed_tokens.weight": weights["model.embed_tokens.weight"].clone(),
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _write_config(folder, num_hidden_layers=2, num_nextn_predict_layers=1)
    return folder


def _random(*shape: int) -> torch.Tensor:
    """A matrix whose products keep their scale; a vector of ones."""
    if len(shape) == 1:
        return torch.ones(*shape)
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator) * (1.6 / shape[-1] ** 0.5)


def _write_config(folder: Path, **values: Any) -> dict[str, Any]:
    path = folder / "config.json"
    config: dict[str, Any] = json.loads(path.read_text()) | values
    path.write_text(json.dumps(config))
    return config
