"""Why vLLM's engine did not start, in the words that end the log of a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.engines import engine_args
from tests.vllm.conftest import EngineFactory
from vtoken.vllm.startup import startup_error

pytestmark = pytest.mark.vllm


def test_a_length_that_does_not_fit_is_said_with_figures_and_remedy(
    engine: EngineFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "words"
    file.touch()
    monkeypatch.setenv(startup_error.PLACE, f"0:{file}")
    with (
        pytest.raises(ValueError, match="max seq len"),
        engine(num_gpu_blocks_override=20, **engine_args()),
    ):
        pass
    words = file.read_text()
    assert words.startswith("one request of 2048 tokens needs ")
    assert "; set --max-model-len 6" in words  # 20 blocks of 32 tokens, one of them vLLM's own
    with engine(**engine_args()) as llm:  # the next one starts
        assert llm.llm_engine
