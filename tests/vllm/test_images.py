"""Prompts with images: their tokens are evicted, moved and recycled like those of words.

The model is a tiny random PaddleOCR-VL, whose image tokens have positions of three dimensions. Its
reference gets pixels and positions from the library's own processor and model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import reference
from tests.support.engines import H2O, RELOCATING, engine_args
from tests.support.observe import Observer, scheduler_of

pytestmark = pytest.mark.vllm

IMAGE, NUM_IDS = 258, 262  # the placeholder's id; ids, those of other special tokens included
SIDE, PATCH = 112, 14  # pixels
IMAGE_TOKENS = (SIDE // PATCH // 2) ** 2
NUM_NEW, CHUNK = 48, 48


def words(length: int, seed: int) -> list[int]:
    return reference.random_prompt(length, seed)


# Two prompts differ in nothing but their image; one has two images; one has none.
PROMPTS = [
    [*words(40, 1), IMAGE, *words(61, 2)],
    [*words(40, 1), IMAGE, *words(61, 2)],
    [*words(9, 3), IMAGE, *words(30, 4), IMAGE, *words(20, 5)],
    words(70, 6),
]
SEEDS = [[1], [2], [1, 3], []]


def picture(seed: int) -> Any:
    """A random image of `SIDE` by `SIDE` pixels."""
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with its processor."""
    import torch
    from transformers import (
        PaddleOCRVLConfig,
        PaddleOCRVLForConditionalGeneration,
        PaddleOCRVLProcessor,
        PreTrainedTokenizerFast,
    )
    from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import (
        PaddleOCRVLImageProcessorPil,
    )

    from vtoken.demo.model import save_tokenizer

    folder = tmp_path_factory.mktemp("images")
    config = PaddleOCRVLConfig(
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": SIDE,
            "patch_size": PATCH,
        },
        text_config={
            "vocab_size": NUM_IDS,
            "bos_token_id": 256,
            "eos_token_id": 257,
            "pad_token_id": 257,
            "hidden_size": 128,
            "intermediate_size": 192,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 1024,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [4, 6, 6],
            },
            "tie_word_embeddings": False,
        },
        image_token_id=IMAGE,
        video_token_id=IMAGE + 1,
        vision_start_token_id=IMAGE + 2,
        vision_end_token_id=IMAGE + 3,
        tie_word_embeddings=False,
    )
    config.architectures = ["PaddleOCRVLForConditionalGeneration"]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        model = PaddleOCRVLForConditionalGeneration(config).float()
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                is_table = "embed_tokens" in name or "lm_head" in name
                weight.normal_(0.0, 1.0 if is_table else 1.6 / weight.shape[1] ** 0.5)
        model.get_output_embeddings().weight[IMAGE:] = 0.0  # nobody samples them
    model.save_pretrained(folder)
    save_tokenizer(folder, 1024)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(
        folder, extra_special_tokens={"image_token": "<image>"}
    )
    size = {"shortest_edge": 28 * 28, "longest_edge": SIDE * SIDE}
    PaddleOCRVLProcessor(
        PaddleOCRVLImageProcessorPil(size=size, patch_size=PATCH), tokenizer
    ).save_pretrained(folder)
    return folder


class Seeing:
    """The model as the reference's language model, which sees one prompt's images."""

    def __init__(self, model: Any, shown: dict[str, Any]) -> None:
        self.config, self.dtype = model.config.text_config, model.dtype
        self._model, self._shown, self._shift = model, shown, 0

    def __call__(self, *, input_ids: Any, position_ids: Any, **arguments: Any) -> Any:
        """Positions of words behind an image count its sides, not its tokens."""
        if position_ids[0, 0] > 0:
            places = position_ids.expand(3, 1, -1) + self._shift
            return self._model(input_ids=input_ids, position_ids=places, **arguments)
        places = position_ids.expand(3, 1, -1)
        if self._shown:
            places, shift = self._model.model.get_rope_index(
                input_ids, (input_ids == IMAGE).int(), self._shown["image_grid_thw"]
            )
            self._shift = int(shift)
        return self._model(input_ids=input_ids, position_ids=places, **self._shown, **arguments)


def expanded(prompt: list[int]) -> list[int]:
    """`prompt` with the placeholders that an image takes."""
    return [token for token in prompt for _ in range(IMAGE_TOKENS if token == IMAGE else 1)]


def seeing(folder: Path) -> list[Seeing]:
    """The reference of each prompt."""
    from transformers import PaddleOCRVLForConditionalGeneration, PaddleOCRVLProcessor

    load = PaddleOCRVLForConditionalGeneration.from_pretrained
    model = load(folder, attn_implementation="eager").eval()
    process = PaddleOCRVLProcessor.from_pretrained(folder).image_processor
    shown = [
        dict(process([picture(seed) for seed in seeds], return_tensors="pt")) if seeds else {}
        for seeds in SEEDS
    ]
    return [Seeing(model, images) for images in shown]


def test_prompts_with_images_are_pruned_exactly(engine: Any, folder: Path) -> None:
    """In chunks that split images, then with all prompts in the prefix cache."""
    from vllm import SamplingParams

    inputs = [
        {
            "prompt_token_ids": prompt,
            "multi_modal_data": {"image": [picture(seed) for seed in seeds]} if seeds else {},
        }
        for prompt, seeds in zip(PROMPTS, SEEDS, strict=True)
    ]
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
    with engine(
        model=str(folder),
        max_model_len=512,
        block_size=16,
        num_gpu_blocks_override=512,
        max_num_batched_tokens=CHUNK,
        max_num_seqs=8,
        limit_mm_per_prompt={"image": 2},
        **engine_args(H2O | {"verify_ratio": 1.0}, check_every_step=True),
    ) as llm:
        observer = Observer(llm)
        controller = scheduler_of(llm).vtoken_controller
        found, hits = [], []
        for patch in ({}, RELOCATING):
            controller.patch_config(patch)
            outputs = llm.generate(inputs, params, use_tqdm=False)
            found += [list(output.outputs[0].token_ids) for output in outputs]
            hits = [output.num_cached_tokens for output in outputs]
        counters = observer.runtime.counters
        assert counters.reclamation.recycled_slots > 100
        assert counters.reclamation.relocations > 0
        assert counters.invariants.violations == 0
        logs = observer.logs()
    prompts = [expanded(prompt) for prompt in PROMPTS]
    assert hits == [len(prompt) // 16 * 16 for prompt in prompts]
    images = [{i for i, token in enumerate(prompt) if token == IMAGE} for prompt in prompts]
    first = [log[min(log)] for log in logs[: len(prompts)]]  # victims of the first eviction
    dead = [own & gone for own, gone in zip(images, first, strict=True)]
    assert all(dead[:3])
    assert any(gone < own for own, gone in zip(images, dead, strict=True))
    models = seeing(folder)
    assert found == [
        reference.generate(model, prompt, NUM_NEW, reference.replay(log), draft=tokens)
        for model, prompt, log, tokens in zip(models * 2, prompts * 2, logs, found, strict=True)
    ]
    full = [
        reference.generate(model, prompt, NUM_NEW, reference.full)
        for model, prompt in zip(models, prompts, strict=True)
    ]
    assert all(one != other for one, other in zip(full, found, strict=False))
    assert full[0] != full[1]
