"""The kernel that finds the lowest scores."""

from __future__ import annotations

import numpy as np

from vtoken.base.compiled import kernel

DIGITS = 2048  # of one pass of the radix selection: 11 bits of a score


@kernel
def _rank_bits(score):
    """A float32 as bits in the same order; both zeros are equal and NaN is last."""
    if score != score:
        return np.uint32(0xFFFFFFFF)
    if score == 0:
        return np.uint32(0x80000000)
    bits = np.float32(score).view(np.uint32)
    if bits & np.uint32(0x80000000):
        return ~bits
    return bits | np.uint32(0x80000000)


@kernel
def lowest_scores(ids, scores, num_victims, keys, count, out):
    """Write the `num_victims` of `ids` [n] with the lowest `scores` [n] to `out`, in their order.

    Returns their number: all ids if there are no more. Ties evict the earlier. `keys` [n], `count`:
    scratch. Radix selection in three passes over 11, 11 and 10 bits; each finds one digit of the
    num_victims-th lowest key.
    """
    num_ids = len(ids)
    if num_victims >= num_ids:
        for n in range(num_ids):
            out[n] = ids[n]
        return num_ids
    for n in range(num_ids):
        keys[n] = _rank_bits(scores[n])
    left = num_victims  # victims among the keys that share the digits found so far
    bar = np.uint32(0)
    for shift, width in ((21, 11), (10, 11), (0, 10)):
        for digit in range(1 << width):
            count[digit] = 0
        for n in range(num_ids):
            if shift == 21 or keys[n] >> np.uint32(shift + width) == bar >> np.uint32(
                shift + width
            ):
                count[(keys[n] >> np.uint32(shift)) & np.uint32((1 << width) - 1)] += 1
        digit = 0
        while left >= count[digit]:
            left -= count[digit]
            digit += 1
        bar |= np.uint32(digit) << np.uint32(shift)
    put = 0
    for n in range(num_ids):
        if keys[n] < bar:
            out[put] = ids[n]
            put += 1
        elif keys[n] == bar and left > 0:
            out[put] = ids[n]
            put += 1
            left -= 1
    return put
