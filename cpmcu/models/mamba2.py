"""Code shared by families with Mamba-2 layers: the parameters of the block "mamba2"."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from cpmcu.models.reader import ConfigReader

MAX_KERNEL = 8  # equal to kMaxConvTaps of csrc/kernels/short_conv/short_conv.h


def read_mamba(reader: ConfigReader, keys: Mapping[str, str]) -> dict[str, Any]:
    """The parameters of a mamba2 block.

    `keys`: the family's key of num_heads, head_dim, num_groups, state_size, conv_kernel and
    conv_bias. Raises ValueError for a config that the engine cannot run.
    """
    names = ("num_heads", "head_dim", "num_groups", "state_size", "conv_kernel")
    params: dict[str, Any] = {name: reader.positive_int(keys[name]) for name in names}
    for name in ("num_heads", "head_dim", "state_size"):
        if params[name] % 8:
            raise reader.fail(keys[name], "a multiple of 8")
    if params["num_heads"] % params["num_groups"]:
        raise reader.fail(keys["num_groups"], f"a divisor of {keys['num_heads']}")
    if not 2 <= params["conv_kernel"] <= MAX_KERNEL:
        raise reader.fail(keys["conv_kernel"], f"2 to {MAX_KERNEL}")
    params["conv_bias"] = reader.flag(keys["conv_bias"], default=True)
    return params | _step_limits(reader)


def _step_limits(reader: ConfigReader) -> dict[str, float]:
    limits = reader.config.get("time_step_limit")
    if limits is None:
        return {}
    # transformers 5 writes infinity as {"__float__": "Infinity"}.
    numbers = [
        math.inf if isinstance(each, dict) and each.get("__float__") == "Infinity" else each
        for each in (limits if isinstance(limits, list | tuple) else [])
    ]
    real = all(isinstance(each, int | float) and not isinstance(each, bool) for each in numbers)
    if len(numbers) != 2 or not real or not 0 <= numbers[0] <= numbers[1]:
        raise reader.fail("time_step_limit", "the least and the largest step, 0 or more")
    least, most = map(float, numbers)
    return ({"min_step": least} if least > 0 else {}) | (
        {"max_step": most} if math.isfinite(most) else {}
    )
