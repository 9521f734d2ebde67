"""vToken's Triton kernels as machine code for GPUs that are not present; none is run.

Triton's compiler and NVIDIA's assembler need no device. Shapes and types are those of
Llama-3.1-8B in bfloat16. Pointers and strides are multiples of 16, as Triton finds them at a call.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vtoken.vllm.cuda import kernels
from vtoken.vllm.cuda.pages import ROW_ALIGNMENT
from vtoken.vllm.cuda.signals import kernels as signal_kernels
from vtoken.vllm.cuda.signals import probe_kernels

ARCHITECTURES = {80: "A100", 90: "H100, H200", 100: "B200", 120: "RTX 50"}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
INT, INTS, FLOATS = "i32", "*i32", "*fp32"
LOGITS = {"query": "*bf16", "key": "*bf16", "table": INTS, "queries": INTS, "table_rows": INTS}
LOGITS |= {"seq_lens": INTS, "logits": FLOATS, "tile_max": FLOATS, "tile_sum": FLOATS}
LOGITS |= {"scale": "fp32", "soft_cap": "fp32", "query_row": INT, "key_slot": INT}
LOGITS |= {"key_head": INT, "table_row": INT, "width": INT, "tiles": INT}
NORM = {"tile_max": FLOATS, "tile_sum": FLOATS, "sinks": FLOATS, "norms": FLOATS, "tiles": INT}
SUM = {"logits": FLOATS, "norms": FLOATS, "seq_lens": INTS, "scores": FLOATS, "chosen": INTS}
SUM |= {"num_chosen": INT, "divisor": "fp32", "score_row": INT, "width": INT}
FILL = {"header": INTS, "sent": INTS, "blocks": INTS, "lengths": INTS, "resident": INTS}
FILL |= {"pages": INTS, "seq_lens": INTS, "slot_mapping": "*i64", "num_rows": INT}
FILL |= {"block_row": INT, "page_row": INT}
COPY = {"bases": "*i64", "source": "*i64", "destination": "*i64", "num_tokens": INT}
COPY |= {"row_words": INT}
HOST_ROWS = {"bases": "*i64", "slots": "*i64", "rows": INTS, "num_tokens": INT, "row_words": INT}
COUNTS = {"entries": INTS, "num_entries": INT, "values_row": INT}
ACCUMULATE = COUNTS | {"rows": FLOATS, "bases": "*i64", "kept": INTS, "part_row": INT}
ACCUMULATE |= {"num_rows": INT}
READ = COUNTS | {"bases": "*i64", "values": FLOATS}
ANCHOR = {"keys": "*bf16", "pages": INTS, "entries": INTS, "anchors": FLOATS, "num_entries": INT}
ANCHOR |= {"pages_row": INT, "anchor_row": INT, "key_slot": INT, "key_head": INT}
SCORE = ANCHOR | {"weights": FLOATS, "values": FLOATS, "values_row": INT}
POOL = COUNTS | {"values": FLOATS, "outbox": FLOATS, "num_apart": INT, "radius": INT}
STRIDES = ("row_words", "query_row", "key_slot", "key_head", "pages_row", "anchor_row")


TILED = {"TILE": signal_kernels.TILE}
ALIGNED = {"ALIGNMENT": probe_kernels.ALIGNMENT}


@dataclass(frozen=True, slots=True)
class Case:
    """A kernel with the types and constants of a call; `registers`, `shared`: its budget."""

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    registers: int
    shared_bytes: int
    load_bits: int = 0


CASES = (
    Case(
        "`_copy_slots_kernel`",
        kernels._copy_slots_kernel,
        COPY,
        {"WORDS": 1024, "TOKENS": kernels.TOKENS_PER_PROGRAM}
        | {"ALIGNMENT": kernels.MAX_ALIGNMENT},
        registers=64,
        shared_bytes=0,
        load_bits=128,
    ),
    *(
        Case(
            f"`_host_rows_kernel`, {name}",
            kernels._host_rows_kernel,
            HOST_ROWS,
            {"WORDS": 1024, "TOKENS": kernels.TOKENS_PER_PROGRAM}
            | {"ALIGNMENT": kernels.MAX_ALIGNMENT, "GATHER": name == "gather"},
            registers=64,
            shared_bytes=0,
            load_bits=128,
        )
        for name in ("gather", "scatter")
    ),
    Case(
        "`_fill_tables_kernel`",
        kernels._fill_tables_kernel,
        FILL,
        {"S": 16, "TILE": kernels.COLUMNS_PER_PROGRAM, "ALIGNMENT": ROW_ALIGNMENT},
        registers=64,
        shared_bytes=0,
    ),
    Case(
        "`_probe_logits_kernel`",
        probe_kernels._probe_logits_kernel,
        LOGITS,
        {"GROUP": 4, "GROUP_PAD": 16, "TILE": 64, "D": 128, "D_PAD": 128, "CAPPED": False}
        | ALIGNED,
        registers=128,
        shared_bytes=48 << 10,
        load_bits=128,
    ),
    Case(
        "`_probe_logits_kernel`, D 80, capped",
        probe_kernels._probe_logits_kernel,
        LOGITS,
        {"GROUP": 4, "GROUP_PAD": 16, "TILE": 64, "D": 80, "D_PAD": 128, "CAPPED": True} | ALIGNED,
        registers=128,
        shared_bytes=48 << 10,
    ),
    Case(
        "`_probe_norm_kernel`",
        probe_kernels._probe_norm_kernel,
        NORM,
        {"TILES": probe_kernels.TILES_AT_ONCE},
        registers=64,
        shared_bytes=8 << 10,
    ),
    *(
        Case(
            f"`_probe_sum_kernel`, {name}",
            probe_kernels._probe_sum_kernel,
            SUM,
            {"HEADS": 32, "AT_ONCE": probe_kernels.HEADS_AT_ONCE, "TILE": 64}
            | {"USE_MAX": name == "maximum"}
            | ALIGNED,
            registers=64,
            shared_bytes=8 << 10,
        )
        for name in ("sum", "maximum")
    ),
    *(
        Case(
            f"`_accumulate_kernel`, {kind}",
            signal_kernels._accumulate_kernel,
            ACCUMULATE,
            {"PARTS": 1, "FOLD_MAX": False, "SUMS": kind == "sum", "COUNTS": kind == "hits"}
            | TILED,
            registers=64,
            shared_bytes=8 << 10,
        )
        for kind in ("sum", "window", "hits")
    ),
    Case(
        "`_read_kernel`",
        signal_kernels._read_kernel,
        READ,
        {"BYTES": False, "USE_MAX": False, "MEAN": True} | TILED,
        registers=64,
        shared_bytes=8 << 10,
    ),
    Case(
        "`_key_anchor_kernel`",
        signal_kernels._key_anchor_kernel,
        ANCHOR,
        {"D": 128, "D_PAD": 128} | TILED,
        registers=128,
        shared_bytes=8 << 10,
    ),
    *(
        Case(
            f"`_key_score_kernel`, {name}",
            signal_kernels._key_score_kernel,
            SCORE,
            {"HEADS": 8, "D": 128, "D_PAD": 128, "ANCHORED": name == "cosine"}
            | {"USE_MAX": True, "ADDS": False}
            | TILED,
            registers=128,
            shared_bytes=8 << 10,
        )
        for name in ("cosine", "norm")
    ),
    Case(
        "`_pool_kernel`",
        signal_kernels._pool_kernel,
        POOL,
        {"USE_MAX": False} | TILED,
        registers=64,
        shared_bytes=8 << 10,
    ),
)


@dataclass(frozen=True, slots=True)
class Compiled:
    """Resources of one kernel on one architecture.

    `local_bytes`: of a thread, stack included; `spills`: instructions that use them. `load_bits`:
    of the widest load from the device's memory.
    """

    registers: int
    shared_bytes: int
    local_bytes: int
    spills: int
    load_bits: int

    def excess(self, case: Case) -> list[str]:
        """What is beyond the budget of `case`."""
        found = {
            f"{self.registers} registers": self.registers > case.registers,
            f"{self.shared_bytes} bytes of shared memory": self.shared_bytes > case.shared_bytes,
            f"{self.local_bytes} bytes of local memory": self.local_bytes > 0,
            f"{self.spills} spills": self.spills > 0,
            f"loads of {self.load_bits} bits": self.load_bits < case.load_bits,
        }
        return [what for what, wrong in found.items() if wrong]


def compiled(case: Case, architecture: int, **options: Any) -> Compiled:
    """Compile, once a process; fails for a parameter without a type or a constant."""
    key = str((case.name, case.constants, architecture, options))
    if key not in _made:
        _made[key] = _compile(case, architecture, options)
    return _made[key]


_made: dict[str, Compiled] = {}


def _compile(case: Case, architecture: int, options: dict[str, Any]) -> Compiled:
    names = case.kernel.arg_names
    assert set(names) == case.types.keys() | case.constants.keys()
    aligned = [n for n in names if case.types.get(n, "").startswith("*") or n in STRIDES]
    source = ASTSource(
        fn=case.kernel,
        signature={name: case.types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in case.constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    target = GPUTarget("cuda", architecture, 32)
    made = triton.compile(source, target=target, options=options or None)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = _output("cuobjdump", "--dump-resource-usage", file.name)
        code = _output("nvdisasm", "-c", file.name)
    facts = {name: int(value) for name, value in re.findall(r"(\w+):(\d+)", usage)}
    widths = [int(bits or 32) for bits in re.findall(r"\bLDG\.E(?:\.(64|128))?\b", code)]
    return Compiled(
        facts["REG"],
        int(made.metadata.shared),
        facts["STACK"] + facts["LOCAL"],
        len(re.findall(r"\b(?:LDL|STL)\b", code)),
        max(widths, default=0),
    )


def _output(tool: str, *arguments: str) -> str:
    done = subprocess.run(
        [str(TOOLS / tool), *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout
