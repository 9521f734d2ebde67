"""The embedded demo model: a small random Llama, made in seconds without a download.

torch, transformers and tokenizers are imported inside functions.

1. A recipe and a library version determine the model: fixed seed, float32.
2. Attention is peaked (`qk_gain`, `vo_gain`), so that an eviction changes the output visibly.
3. Only printable ASCII can win an argmax: the output rows of all other tokens are near zero.
   Text stays readable, and end-of-sequence does not occur in greedy decoding.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vtoken.demo.made_folder import make_once

RECIPE_FILE = "vtoken_recipe.json"
NUM_BYTES = 256
BOS, EOS = "<bos>", "<eos>"
PRINTABLE = range(0x20, 0x7F)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """The parameters of the model. A change of any field gives another model."""

    version: int = 1  # raise if this module makes another model from equal fields
    seed: int = 20_260
    num_layers: int = 4
    hidden_size: int = 256
    intermediate_size: int = 512
    num_heads: int = 4  # query heads
    num_kv_heads: int = 2
    head_size: int = 64
    max_model_len: int = 16_384  # tokens
    qk_gain: float = 6.0  # factor on q_proj and k_proj: how peaked attention is
    vo_gain: float = 3.0  # factor on v_proj and o_proj: how much attention adds to the residual
    embed_std: float = 1.0  # of the token embeddings
    head_std: float = 0.1  # of the output rows of printable bytes


DEMO = Recipe()


def build(path: Path, *, recipe: Recipe = DEMO) -> Path:
    """Make the model of `recipe` in the folder `path`, or reuse an existing one.

    Returns `path`: config, weights (safetensors, float32), tokenizer with a chat template and
    generation config, loadable by `AutoModelForCausalLM`, `AutoTokenizer` and vLLM.
    Raises FileExistsError if `path` holds files that this function did not make.
    """

    def make(folder: Path) -> None:
        save_tokenizer(folder, recipe.max_model_len)
        _save_weights(folder, recipe)

    return make_once(path, RECIPE_FILE, asdict(recipe), make)


def save_tokenizer(path: Path, max_model_len: int) -> None:
    """Save a byte-level tokenizer: one token for each byte, in byte order, then bos and eos."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {char: byte for byte, char in enumerate(_byte_alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(BOS, special=True), AddedToken(EOS, special=True)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        model_max_length=max_model_len,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(path)


def _byte_alphabet() -> list[str]:
    """The character of each byte in byte-level BPE: itself if visible, else chr(256 + n)."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(NUM_BYTES) if byte not in visible]
    return [chr(b) if b in visible else chr(NUM_BYTES + hidden.index(b)) for b in range(NUM_BYTES)]


def _save_weights(path: Path, recipe: Recipe) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=NUM_BYTES + 2,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_kv_heads,
        architectures=["LlamaForCausalLM"],
        head_dim=recipe.head_size,
        max_position_embeddings=recipe.max_model_len,
        bos_token_id=NUM_BYTES,
        eos_token_id=NUM_BYTES + 1,
        tie_word_embeddings=False,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = LlamaForCausalLM(config).float()
        _shape_weights(model, recipe)
    config.save_pretrained(path)
    model.generation_config.save_pretrained(path)
    save_file(model.state_dict(), path / "model.safetensors", metadata={"format": "pt"})


def _shape_weights(model: Any, recipe: Recipe) -> None:
    import torch

    with torch.no_grad():
        for layer in model.model.layers:
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                projection.weight.mul_(recipe.qk_gain)
            for projection in (layer.self_attn.v_proj, layer.self_attn.o_proj):
                projection.weight.mul_(recipe.vo_gain)
        model.model.embed_tokens.weight.normal_(0.0, recipe.embed_std)
        head = model.lm_head.weight
        head.normal_(0.0, recipe.head_std)
        silent = torch.ones(head.shape[0], dtype=torch.bool)
        silent[list(PRINTABLE)] = False
        head[silent] *= 1e-3
