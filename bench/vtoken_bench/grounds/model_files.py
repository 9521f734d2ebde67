"""The weight files of a model's folder, and their fingerprint, for the keys of logs.

The fingerprint is the SHA-256 of

1. `config.json`, without the fields that affect how the model runs but not what it computes
2. for every weight file that Hugging Face loads: its name, its size, the header of a safetensors
   file, and PIECES pieces of PIECE_BYTES bytes, evenly spaced over the file

Computing it takes milliseconds for any model size. It does not depend on the folder. Another
revision, a fine-tuned or a quantised version has another fingerprint.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

PIECES, PIECE_BYTES = 256, 256
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format
RUN_FIELDS = frozenset(
    {"_name_or_path", "dtype", "torch_dtype", "transformers_version", "use_cache"}
)
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SINGLE = ("model.safetensors", "pytorch_model.bin")


def fingerprint(folder: Path) -> str:
    """32 hexadecimal digits that identify the weights in `folder`; raises ValueError."""
    digest = hashlib.sha256()
    try:
        config = json.loads((folder / "config.json").read_bytes())
        fields = {name: value for name, value in config.items() if name not in RUN_FIELDS}
        digest.update(json.dumps(fields, sort_keys=True).encode())
        for path in weight_files(folder):
            digest.update(f"\n{path.name} {path.stat().st_size}\n".encode())
            with path.open("rb") as file:
                for piece in _pieces(file, path):
                    digest.update(piece)
    except (OSError, ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"the model in {folder} has no fingerprint: {error}") from None
    return digest.hexdigest()[:32]


def weight_files(folder: Path) -> list[Path]:
    """The weight files that Hugging Face loads from `folder`, by name; raises ValueError."""
    for index in INDEXES:
        if (folder / index).is_file():
            names = set(json.loads((folder / index).read_bytes())["weight_map"].values())
            return [folder / name for name in sorted(names)]
    for name in SINGLE:
        if (folder / name).is_file():
            return [folder / name]
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise ValueError(f"{folder} holds no weights: neither *.safetensors nor {SINGLE[1]}")
    return found


def _pieces(file: BinaryIO, path: Path) -> Iterator[bytes]:
    if path.suffix == ".safetensors":
        size = int.from_bytes(file.read(8), "little")
        if size > MAX_HEADER_BYTES:
            raise ValueError(f"{path.name} is not a safetensors file")
        yield file.read(size)
    start = file.tell()
    step = (path.stat().st_size - start - PIECE_BYTES) / (PIECES - 1)
    for number in range(PIECES):
        file.seek(start + max(0, int(number * step)))
        yield file.read(PIECE_BYTES)
