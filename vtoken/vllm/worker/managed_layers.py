"""Attention layers of the managed group, in a worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vtoken.vllm.startup import support


def managed_layers(
    context: Mapping[str, Any],
    names: Sequence[str],
    first: int = 0,
    reasons_of: support.LayerReasons | None = None,
) -> dict[str, Any]:
    """The layers `names`, first to last, from vLLM's `static_forward_context`.

    Numbers them from `first`, how many layers earlier stages of a pipeline hold:
    `layer.impl.vtoken_layer` is a layer's number in probes. Raises UnsupportedError, also for
    a layer that the device has `reasons_of` to refuse.
    """
    layers = {name: context[name] for name in names}
    support.check_layers(layers, reasons_of)
    for number, layer in enumerate(layers.values(), first):
        layer.impl.vtoken_layer = number
    return layers
