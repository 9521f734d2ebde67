"""The steps of a signal that look at other tokens: neighbours, and the redundancy of keys."""

from __future__ import annotations

import numpy as np

from vtoken.base.arrays import Floats
from vtoken.policies.signals.signal import Signal

SIMILAR = 0.5  # keys whose cosine is greater are similar


def pooled(signal: Signal, values: Floats) -> Floats:
    """`values` [n] of live tokens in the order of ids, each aggregated with its neighbours."""
    count, radius = signal.num_pooled(len(values)), signal.pool_radius
    if not count:
        return values
    before = values[:count]
    if signal.pool == "mean":
        kernel = np.full(2 * radius + 1, 1 / (2 * radius + 1), dtype=np.float32)
        around = np.convolve(before, kernel)[radius : radius + count]
    else:
        padded = np.pad(before, radius, constant_values=-np.inf)
        around = np.lib.stride_tricks.sliding_window_view(padded, 2 * radius + 1).max(axis=1)
    return np.concatenate([around, values[count:]])


def redundancy(keys: Floats) -> Floats:
    """The redundancy of each token's key among `keys` [..., n, D] of one head: [..., n], sum 1.

    Let s[i, t] be the cosine of the keys of i and t, with s[t, t] = 0, and in each row i the newest
    t with s[i, t] > `SIMILAR` set to 0 (the oldest token if there is none). The redundancy is the
    softmax over t of the mean over i of s[i, t]. Of three similar keys the oldest is the most
    redundant; of two neither is. O(n^2 D) time, O(n^2) memory. Source: `cal_similarity` of R-KV
    (arXiv 2505.24133).
    """
    unit = keys / np.maximum(np.linalg.norm(keys, axis=-1, keepdims=True), 1e-12)
    cosine = unit @ np.swapaxes(unit, -1, -2)
    places = np.arange(cosine.shape[-1])
    cosine[..., places, places] = 0
    newest = np.where(cosine > SIMILAR, places, 0).max(axis=-1, keepdims=True)
    np.put_along_axis(cosine, newest, 0, axis=-1)
    mean = cosine.mean(axis=-2)
    weights = np.exp(mean - mean.max(axis=-1, keepdims=True))
    found: Floats = weights / weights.sum(axis=-1, keepdims=True)
    return found
