"""Why vLLM's engine did not start, in the words that end the log of a server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.model_executor.models import registry

from tests.support import models
from tests.support.engines import engine_args
from tests.vllm.conftest import EngineFactory
from tests.vllm.test_models import configuration
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


def test_a_model_whose_code_imports_torchvision_is_refused_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def there_is_none(look: Callable[[], Any]) -> Any:
        raise ModuleNotFoundError("No module named 'torchvision'")

    lazy, cached = registry._LazyRegisteredModel, registry._try_inspect_model_cls
    monkeypatch.setattr(registry, "_run_in_subprocess", there_is_none)
    monkeypatch.setattr(lazy, "_load_modelinfo_from_cache", lambda *_: None)
    monkeypatch.setattr(startup_error, "find_spec", lambda _: None)
    models.write_config(models.HYBRID["qwen3_5"], tmp_path)
    cached.cache_clear()
    with pytest.raises(ValueError, match="failed to be inspected") as caught:
        configuration(tmp_path)
    cached.cache_clear()
    words = startup_error.words_of(caught.value)
    assert words.startswith("vLLM cannot import its code of Qwen3_5ForCausalLM, and torchvision")
    assert words.endswith("uv pip install --torch-backend cpu torchvision==0.28.0")
