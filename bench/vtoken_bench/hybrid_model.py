"""A random model with windows in every other layer: gpt-oss's pattern, window and sinks, small.

Its output is meaningless. The tokenizer is the demo model's, one token for each byte.
"""

from __future__ import annotations

from pathlib import Path

from vtoken_bench.random_model import save

LAYERS, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_SIZE = 8, 256, 384, 8, 2, 32
EXPERTS, EXPERTS_PER_TOKEN = 4, 2
WINDOW = 128  # gpt-oss's
MAX_MODEL_LEN = 40_960
SEED = 0


def build(path: Path) -> Path:
    """Make the model in `path`, or reuse an existing one; returns `path`."""
    if (path / "model.safetensors").is_file():
        return path
    import torch
    from transformers import GptOssConfig, GptOssForCausalLM

    from vtoken.demo.model import NUM_BYTES

    config = GptOssConfig(
        vocab_size=NUM_BYTES + 2,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_SIZE,
        num_local_experts=EXPERTS,
        num_experts_per_tok=EXPERTS_PER_TOKEN,
        sliding_window=WINDOW,
        max_position_embeddings=MAX_MODEL_LEN,
        bos_token_id=NUM_BYTES,
        eos_token_id=NUM_BYTES + 1,
        pad_token_id=NUM_BYTES + 1,
        tie_word_embeddings=False,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(SEED)
        model = GptOssForCausalLM(config).float()
        for weight in model.parameters():
            if weight.dim() == 2:  # peaked attention, so that scores differ
                weight.normal_(0.0, 1.6 / weight.shape[1] ** 0.5)
    return save(model, path, MAX_MODEL_LEN)
