"""Each kernel in plain float64 numpy, without the rounding of csrc/kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

PROMPT_BIT = 1 << 30

# ---- layers


def embedding(table: F64, ids: Sequence[int], scale: float) -> F64:
    rows = [i if 0 <= i < len(table) else 0 for i in ids]
    return table[rows] * scale


def rms_norm(x: F64, weight: F64, eps: float) -> F64:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def silu_mul(x: F64) -> F64:
    gate, up = np.split(x, 2, axis=1)
    with np.errstate(over="ignore"):
        return gate / (1 + np.exp(-gate)) * up


def gemm(x: F64, w: F64, alpha: float, beta: float, y: F64) -> F64:
    y_new = alpha * (x @ w.T)
    return y_new if beta == 0 else y_new + beta * y


def w4_weights(q: npt.NDArray[np.uint8], scales: F64, zeros: Ints | None = None) -> F64:
    """Returns W [N, K] from q [K, N], scales and zero points [ceil(K / 128) or 1, N]."""
    group = np.arange(len(q)) // 128 if len(scales) > 1 else np.zeros(len(q), np.int64)
    z = 8 if zeros is None else zeros.astype(np.int64)[group]
    return ((q.astype(np.int64) - z) * scales[group]).T


def route(logits: F64, top_k: int, renormalise: bool) -> tuple[Ints, F64]:
    """Experts [T, k] by rank, of equal logits the lower one first, and their weights [T, k]."""
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    experts = np.argsort(-logits, axis=1, kind="stable")[:, :top_k]
    weights = np.take_along_axis(p, experts, axis=1)
    return experts, weights / weights.sum(axis=1, keepdims=True) if renormalise else weights


def expert_gemm(x: F64, w: F64, experts: Ints, pairs_per_x: int, gated: bool) -> F64:
    """x [P / pairs_per_x, K], w [E, N, K]: row p is x[p / pairs_per_x] times w[experts[p]]."""
    y = np.stack([w[expert] @ x[p // pairs_per_x] for p, expert in enumerate(experts)])
    return silu_mul(y) if gated else y


def rope(x: F64, position: int, inv_freq: npt.NDArray[np.float32], scaling: float) -> F64:
    """x [..., D], of which the first 2 * len(inv_freq) elements are rotated.

    The angle is computed in float32, as in the reference models.
    """
    angle = (np.float32(position) * inv_freq).astype(np.float64)
    cos, sin = np.cos(angle) * scaling, np.sin(angle) * scaling
    a, b, rest = np.split(x, [len(inv_freq), 2 * len(inv_freq)], axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def in_window(entries: Ints, own: int, window: int) -> Ints:
    """The entries of a token that lie in its window; window 0: all entries."""
    return entries if window == 0 else entries[entries > own - window]


def attention_row(q: F64, k: F64, v: F64, scale: float, sinks: F64 | None = None) -> F64:
    """q [Hq, D] over the visible entries' k and v [entries, Hkv, D]; returns [Hq, D].

    `sinks` [Hq]: a further logit of each head, without a value.
    """
    group = q.shape[0] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = scale * np.einsum("hd,chd->hc", q, k)
    p = np.exp(scores - scores.max(axis=1, keepdims=True))
    total = p.sum(axis=1, keepdims=True)
    if sinks is not None:
        total += np.exp(sinks[:, None] - scores.max(axis=1, keepdims=True))
    return np.einsum("hc,chd->hd", p / total, v)


# ---- sampling; `s` is one element of ops.slot_sampling_dtype


def adjusted(logits: F64, s: Any, counts: Ints | None, bias: F64 | None) -> F64:
    """Logits after penalties and bias."""
    z = np.where(np.isnan(logits), -np.inf, logits)
    if s["use_penalties"] and counts is not None:
        r = float(s["repetition_penalty"])
        z = np.where(counts != 0, np.where(z > 0, z / r, z * r), z)
        emitted = counts & ~PROMPT_BIT
        z = z - (emitted > 0) * float(s["presence_penalty"])
        z = z - emitted * float(s["frequency_penalty"])
    if s["use_bias"] and bias is not None:
        z = z + bias
    return z


def passing(z: F64, s: Any) -> npt.NDArray[np.bool_]:
    """The tokens that pass top-k, top-p and min-p."""
    temperature, keep = float(s["temperature"]), np.isfinite(z)
    if 0 < s["top_k"] < len(z):
        keep &= z >= np.sort(z)[-s["top_k"]]
    p = np.exp((z - z.max()) / temperature)
    if s["top_p"] < 1:
        units = np.rint(np.where(keep, p, 0) * 2.0**40).astype(np.int64)
        order = np.argsort(-z, kind="stable")
        reached = np.cumsum(units[order])
        wanted = np.ceil(float(s["top_p"]) * float(units.sum()))
        keep &= z >= z[order[np.argmax(reached >= wanted)]]
    if s["min_p"] > 0:
        keep &= p >= float(s["min_p"])
    return keep


def distribution(z: F64, s: Any) -> F64:
    """The probabilities of the tokens that pass the filters."""
    p = np.where(passing(z, s), np.exp((z - z.max()) / float(s["temperature"])), 0)
    return p / p.sum()


def philox(counter: Sequence[Any], key: Sequence[Any]) -> list[npt.NDArray[np.uint64]]:
    """Philox-4x32-10 over arrays of counters."""
    low = np.uint64(0xFFFFFFFF)
    c = [np.asarray(word, np.uint64) for word in counter]
    k = [int(key[0]), int(key[1])]
    for _ in range(10):
        product0, product1 = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [
            (product1 >> np.uint64(32)) ^ c[1] ^ np.uint64(k[0]),
            product1 & low,
            (product0 >> np.uint64(32)) ^ c[3] ^ np.uint64(k[1]),
            product0 & low,
        ]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def gumbels(vocab_size: int, seed: int, stream: int, position: int) -> F64:
    """The Gumbel noise of each token in the draw for `position`."""
    groups = np.arange((vocab_size + 3) // 4)
    words = philox([groups, position, stream, 0], [seed & 0xFFFFFFFF, seed >> 32])
    flat = np.stack(np.broadcast_arrays(*words), axis=1).reshape(-1)[:vocab_size]
    u = ((flat >> np.uint64(9)).astype(np.float64) + 0.5) * 2.0**-23
    return -np.log(-np.log(u))


def draw_scores(z: F64, s: Any, row_position: int) -> F64:
    """The scores of the draw: the largest one is drawn, filtered tokens have -inf."""
    noise = gumbels(len(z), int(s["seed"]), int(s["stream"]), row_position + 1)
    with np.errstate(invalid="ignore"):
        return np.where(passing(z, s), (z - z.max()) / float(s["temperature"]) + noise, -np.inf)


def log_softmax(logits: F64) -> F64:
    z = np.where(np.isnan(logits), -np.inf, logits)
    return z - z.max() - np.log(np.exp(z - z.max()).sum())
