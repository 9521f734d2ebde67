"""Folders of random models that benchmarks make on this machine."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any


def save(model: Any, path: Path, max_model_len: int) -> Path:
    """Save `model` with the demo model's tokenizer in `path`, whole or not at all; returns `path`.

    Another process may make the same folder at the same time.
    """
    from vtoken.demo.model import save_tokenizer

    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        save_tokenizer(scratch, max_model_len)
        model.save_pretrained(scratch)
        scratch.chmod(0o755)
        try:
            os.replace(scratch, path)  # atomic
        except OSError:
            if not (path / "model.safetensors").is_file():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return path
