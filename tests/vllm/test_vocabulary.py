"""The vocabulary of tokenizers like those on the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vtoken.vllm.engine import tokenizer

pytestmark = pytest.mark.vllm


class Tokenizer:
    """Ids 0 to 3; special ones at 1, at 6 (added, beyond a gap) and at 9, which no size counts."""

    all_special_ids = (1, 9)
    added_tokens_decoder: dict[int, Any]

    def __init__(self) -> None:
        self.added_tokens_decoder = {
            6: SimpleNamespace(special=True),
            2: SimpleNamespace(special=False),
        }

    def __len__(self) -> int:
        return 4

    def decode(self, ids: list[int]) -> str:
        return {0: "a", 2: " ,", 3: "b"}[ids[0]]


def test_ids_of_special_tokens_may_exceed_every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "cached_tokenizer_from_config", lambda _: Tokenizer())
    config = SimpleNamespace(get_vocab_size=lambda: 4)
    words = tokenizer.VLLMVocabulary(config, {})
    assert words.refusal() is None
    ids = np.arange(10)
    assert ids[words.special(ids)].tolist() == [1, 6, 9]
    assert ids[words.punctuation(ids)].tolist() == [2]


TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}[end]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.mark.parametrize("named", [True, False])
def test_parts_are_found_by_the_template_that_the_server_was_given(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    from transformers import AutoTokenizer

    own = AutoTokenizer.from_pretrained(demo_model)
    monkeypatch.setattr(tokenizer, "cached_tokenizer_from_config", lambda _: own)
    file = tmp_path / "chat.jinja"
    file.write_text(TEMPLATE)
    text = "[system]Be brief.[end][user]Is it so?[end][assistant]"
    prompt = own.encode(text, add_special_tokens=False)
    assert not any(tokenizer.VLLMChats(None).parts(prompt))
    chats = tokenizer.VLLMChats(None, str(file) if named else TEMPLATE)
    parts = chats.parts(prompt)
    assert own.decode(prompt[slice(*parts.template[0])]) == "[system]"
    assert own.decode(prompt[slice(*parts.template[1])]) == "[assistant]"
    assert own.decode(prompt[slice(*parts.last_user[0])]) == "[user]Is it so?[end]"
    assert parts.tools == ()
    tools = '<tools>[{"type": "function", "function": {"name": "look_up"}}]</tools>'
    prompt = own.encode(tools + text, add_special_tokens=False)
    parts = chats.parts(prompt)
    assert own.decode(prompt[slice(*parts.tools[0])]) == tools
    assert own.decode(prompt[slice(*parts.last_user[0])]) == "[user]Is it so?[end]"
