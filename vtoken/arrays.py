"""The array types of the core. The name of an argument says what its numbers are: `ids` are token
ids, `slots` places in the cache (`block_id * S + offset`), `blocks` block ids.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]
