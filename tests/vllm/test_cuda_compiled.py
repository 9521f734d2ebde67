"""vToken's Triton kernels compile to machine code for GPUs that are not present; none is run.

Triton's compiler and NVIDIA's assembler need no device. Shapes and types are those of an 8B model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vtoken.vllm.cuda import kernels

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
]

HOPPER = 90
INT, INTS, FLOATS = "i32", "*i32", "*fp32"
LOGITS = {"query": "*bf16", "key": "*bf16", "table": INTS, "queries": INTS, "table_rows": INTS}
LOGITS |= {"seq_lens": INTS, "logits": FLOATS, "tile_max": FLOATS, "tile_sum": FLOATS}
LOGITS |= {"scale": "fp32", "soft_cap": "fp32", "query_row": INT, "key_slot": INT}
LOGITS |= {"key_head": INT, "table_row": INT, "width": INT, "tiles": INT}
SUM = {"logits": FLOATS, "tile_max": FLOATS, "tile_sum": FLOATS, "seq_lens": INTS}
SUM |= {"sinks": FLOATS, "scores": FLOATS, "chosen": INTS, "num_chosen": INT, "divisor": "fp32"}
SUM |= {"score_row": INT, "width": INT, "tiles": INT}
COPY = {"bases": "*i64", "source": "*i64", "destination": "*i64", "num_tokens": INT}
COPY |= {"row_words": INT}
HEADS = {"GROUP": 4, "GROUP_PAD": 16, "TILE": 64}


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> bytes:
    """The machine code of `kernel`; fails for a parameter without a type or a constant."""
    names = kernel.arg_names
    assert set(names) == types.keys() | constants.keys()
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
    )
    code: bytes = compile_kernel(source, target=GPUTarget("cuda", HOPPER, 32)).asm["cubin"]
    return code


@pytest.mark.parametrize(
    ("kernel", "types", "constants"),
    [
        (
            kernels._probe_logits_kernel,
            LOGITS,
            {**HEADS, "D": 80, "D_PAD": 128, "CAPPED": True},
        ),
        (
            kernels._probe_sum_kernel,
            SUM,
            {"HEADS": 32, "TILES": kernels.TILES_AT_ONCE, "TILE": 64, "USE_MAX": False},
        ),
        (
            kernels._probe_sum_kernel,
            SUM,
            {"HEADS": 32, "TILES": kernels.TILES_AT_ONCE, "TILE": 64, "USE_MAX": True},
        ),
        (
            kernels._copy_slots_kernel,
            COPY,
            {"WORDS": 1024, "TOKENS": kernels.TOKENS_PER_PROGRAM},
        ),
    ],
    ids=["probe logits", "probe sum", "probe maximum", "copy slots"],
)
def test_a_kernel_compiles_for_a_gpu_that_is_not_present(
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert compiled(kernel, types, constants)[:4] == b"\x7fELF"
