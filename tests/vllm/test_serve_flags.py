"""`vtoken serve`: which of vLLM's own flags take a value, from its own parser."""

from __future__ import annotations

import pytest

from vtoken.vllm.startup.model_argument import flag_values, take_model

pytestmark = pytest.mark.vllm


def test_vllms_parser_says_which_flags_take_values() -> None:
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
