"""The gated delta net of one layer in float64, token by token (csrc/kernels/delta_net)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
TAPS = 4


@dataclass(frozen=True)
class DeltaNet:
    """Sizes and weights of one layer. `round` rounds to the model's dtype."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv: F64  # [channels, 4]
    a_log: F64  # [Hv]
    dt_bias: F64  # [Hv]
    norm: F64  # [Dv]
    eps: float
    round: Callable[[F64], F64]

    @property
    def channels(self) -> int:
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    def outputs(self, qkv: F64, z: F64, b: F64, a: F64) -> F64:
        """Outputs [T, Hv * Dv] of a sequence from its first token on: qkv [T, channels] in the
        order q, k, v, z [T, Hv * Dv], b and a [T, Hv]."""
        hk, hv, dk, dv = self.num_key_heads, self.num_value_heads, self.key_dim, self.value_dim
        padded = np.concatenate([np.zeros((TAPS - 1, self.channels)), qkv])
        state = np.zeros((hv, dk, dv))
        rows = []
        for t in range(len(qkv)):
            mixed = sum(padded[t + i] * self.conv[:, i] for i in range(TAPS))
            mixed = self.round(mixed / (1 + np.exp(-mixed)))
            q, k, v = np.split(mixed, [hk * dk, 2 * hk * dk])
            q, k = (np.repeat(x.reshape(hk, dk), hv // hk, axis=0) for x in (q, k))
            q = q / np.sqrt((q * q).sum(-1, keepdims=True) + 1e-6) / np.sqrt(dk)
            k = k / np.sqrt((k * k).sum(-1, keepdims=True) + 1e-6)
            decay = np.exp(-np.exp(self.a_log) * np.logaddexp(0, a[t] + self.dt_bias))
            beta = 1 / (1 + np.exp(-b[t]))
            state = state * decay[:, None, None]
            delta = beta[:, None] * (v.reshape(hv, dv) - np.einsum("hkv,hk->hv", state, k))
            state = state + k[:, :, None] * delta[:, None, :]
            o = np.einsum("hkv,hk->hv", state, q)
            o = o / np.sqrt((o * o).mean(-1, keepdims=True) + self.eps) * self.norm
            gate = z[t].reshape(hv, dv)
            rows.append((o * gate / (1 + np.exp(-gate))).reshape(-1))
        return np.array(rows)


def fused_columns(net: DeltaNet) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Columns of [q | k | v | z] and of [b | a] in the order of Qwen3-Next's fused projections."""
    hk, hv, dk, dv = net.num_key_heads, net.num_value_heads, net.key_dim, net.value_dim
    group = hv // hk
    qkvz: list[int] = []
    ba: list[int] = []

    def take(to: list[int], first: int, count: int) -> None:
        to.extend(range(first, first + count))

    for head in range(hk):
        take(qkvz, head * dk, dk)
        take(qkvz, (hk + head) * dk, dk)
        take(qkvz, 2 * hk * dk + head * group * dv, group * dv)
        take(qkvz, net.channels + head * group * dv, group * dv)
        take(ba, head * group, group)
        take(ba, hv + head * group, group)
    return np.array(qkvz), np.array(ba)


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """The nodes from the root to `node`."""
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]
