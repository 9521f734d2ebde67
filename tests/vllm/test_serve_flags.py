"""`vtoken serve`: vLLM's flags that take a value, read from vLLM's parser."""

from __future__ import annotations

import pytest

from vtoken.vllm.startup.model_argument import flag_values, take_model

pytestmark = pytest.mark.vllm


def test_flags_with_values_are_read_from_vllms_parser() -> None:
    values = flag_values()
    for words in (
        ["--port", "8001", "m"],
        ["--enforce-eager", "m", "--max-model-len", "2048"],
        ["-tp", "2", "m"],
        ["--served-model-name", "a", "b", "--enforce-eager", "m"],
    ):
        model, others = take_model(words, lambda: values)
        assert model == "m"
        assert others == [word for word in words if word != "m"]
