"""The self-test at start-up refuses a data path that would serve wrong tokens, and names it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.engines import engine_args
from tests.support.packages import installer
from vtoken.base.errors import SelfTestError

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def make_path(engine: Any) -> Iterator[Callable[[], Any]]:
    """The data path of a running engine: its layer, its kernel, its builder, its learned layout."""
    from vllm.model_executor.layers.attention import Attention

    from vtoken.vllm.cpu.data_path import CPUDataPath
    from vtoken.vllm.cpu.layout import learn_layout

    with engine(**engine_args({})) as llm:
        core = llm.llm_engine.engine_core.engine_core
        runner = core.model_executor.driver_worker.worker.model_runner
        context = runner.compilation_config.static_forward_context.values()
        layer = next(layer for layer in context if isinstance(layer, Attention))
        builder = runner.attn_groups[0][0].get_metadata_builder()
        cache = runner.kv_caches[0]

        yield lambda: CPUDataPath(layer, builder, cache, learn_layout(cache, layer.isa))


def test_the_engine_at_hand_passes(make_path: Callable[[], Any]) -> None:
    from vtoken.vllm.worker.selftest import SelfTest

    SelfTest(make_path()).run()


def copy_all_but_the_first(path: Any, patch: pytest.MonkeyPatch) -> None:
    copy = path.half.model.copies.copy
    patch.setattr(path.half.model.copies, "copy", lambda a, b: copy(a[1:], b[1:]))


def copy_keys_only(_path: Any, patch: pytest.MonkeyPatch) -> None:
    from vtoken.vllm.cpu import copy_engine

    patch.setattr(copy_engine, "VALUE", copy_engine.KEY)


def copy_one_by_one(path: Any, patch: pytest.MonkeyPatch) -> None:
    """Copy each token alone, so that a destination that is also a source is overwritten early."""
    copy = path.half.model.copies.copy

    def one_by_one(source: Any, destination: Any) -> int:
        return sum(copy(source[i : i + 1], destination[i : i + 1]) for i in range(len(source)))

    patch.setattr(path.half.model.copies, "copy", one_by_one)


def restore_in_another_order(path: Any, patch: pytest.MonkeyPatch) -> None:
    host = path.half.model.host_copies
    restore = host.restore
    patch.setattr(host, "restore", lambda hosts, slots: restore(hosts[::-1], slots))


def mistake_the_strides(path: Any, patch: pytest.MonkeyPatch) -> None:
    """Use the strides of V for K."""
    from dataclasses import replace

    from vtoken.vllm.cpu.copy_engine import CPUCopyEngine

    key, value = path.half.model.layout.key, path.half.model.layout.value
    wrong = replace(
        path.half.model.layout,
        key=replace(key, token_stride=value.token_stride, dim_stride=value.dim_stride),
    )
    path.half.model.layout = wrong
    path.half.model.copies = CPUCopyEngine(path.half.model.caches, wrong)


def pack_one_token_less(_path: Any, patch: pytest.MonkeyPatch) -> None:
    from vtoken.vllm.cpu import holes

    pack = holes.pack
    patch.setattr(holes, "pack", lambda *a: pack(*a[:6], a[6][1:], a[7][1:]))


def keep_what_was_packed_before(path: Any, patch: pytest.MonkeyPatch) -> None:
    """Never invalidate packed copies, so that an earlier token is read instead of the new one."""
    patch.setattr(path.half.packed, "written", lambda _: None)


def read_one_token_more(path: Any, patch: pytest.MonkeyPatch) -> None:
    physical = path.half.executor.physical

    def longer(*args: Any) -> Any:
        step = physical(*args)
        if step is not None:
            step.num_dead -= 1
        return step

    patch.setattr(path.half.executor, "physical", longer)


def store_elsewhere(path: Any, patch: pytest.MonkeyPatch) -> None:
    store = path.store
    patch.setattr(path, "store", lambda k, v, slots: store(k, v, np.roll(slots, 1)))


def probe_at_another_temperature(_path: Any, patch: pytest.MonkeyPatch) -> None:
    from vtoken.vllm.cpu.compiled_probe import StepProbe

    add = StepProbe.add
    patch.setattr(StepProbe, "add", lambda *a, scale, **k: add(*a, scale=2 * scale, **k))


def score_values_for_keys(path: Any, patch: pytest.MonkeyPatch) -> None:
    model = path.half.model
    patch.setattr(path.half.scores, "_keys", lambda _: model.layout.views(model.caches[0])[1])


@pytest.mark.parametrize(
    ("damage", "case"),
    [
        (copy_all_but_the_first, "a relocated request"),
        (copy_keys_only, "a relocated request"),
        (copy_one_by_one, "tokens that change places"),
        (restore_in_another_order, "parked tokens that came back"),
        (mistake_the_strides, "borrowed blocks"),
        (pack_one_token_less, "borrowed blocks"),
        (keep_what_was_packed_before, "both ways"),
        (read_one_token_more, "borrowed blocks"),
        (store_elsewhere, "evicted nothing"),
        (probe_at_another_temperature, "attention_last"),
        (score_values_for_keys, "key_difference"),
    ],
)
def test_a_broken_part_of_the_data_path_is_named(
    damage: Any, case: str, make_path: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vtoken.vllm.worker.selftest import SelfTest

    path = make_path()
    damage(path, monkeypatch)
    with pytest.raises(SelfTestError, match=case):
        SelfTest(path).run()


def test_a_host_that_refuses_memory_is_no_error(
    make_path: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vtoken.vllm.worker import selftest

    def refuse(*_: Any) -> int:
        raise MemoryError("not a page is left")

    path, said = make_path(), []
    monkeypatch.setattr(path.half.model.host_copies, "park", refuse)
    monkeypatch.setattr(selftest.log, "warning", lambda text, *args: said.append(text % args))
    selftest.SelfTest(path).run()
    assert said == ["vToken: tokens cannot be parked on this machine: not a page is left"]


ODD = """
from vtoken.policies.signals import KeyKind
class Odd(KeyKind):
    name, summary = "odd", "-"
    def numbers(self, values):
        return values.sum(-1) if hasattr(values, "numpy") else values[..., 0]
"""


def test_a_signal_of_another_package_that_differs_in_torch_is_named(
    make_path: Callable[[], Any], tmp_path: Path
) -> None:
    from vtoken.vllm.worker.selftest import SelfTest

    with installer(tmp_path) as install:
        install("vtoken-odd", {"vtoken.signals": {"odd": "odd:Odd"}}, {"odd.py": ODD})
        with pytest.raises(SelfTestError, match=r"odd \(layer"):
            SelfTest(make_path()).run()


def test_an_engine_with_a_broken_copy_engine_does_not_start(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vtoken.vllm.cpu.copy_engine import CPUCopyEngine

    monkeypatch.setattr(CPUCopyEngine, "copy", lambda *_: 0)
    with (
        pytest.raises(SelfTestError, match=r"a relocated request.*does not start"),
        engine(**engine_args({})),
    ):
        pass
