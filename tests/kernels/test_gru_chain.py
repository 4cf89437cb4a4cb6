"""gru_cell and chain_step against float64 references."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.kernels.drafted_paths import RandomCandidates
from tests.kernels.util import (
    context,
    get,
    on_devices,
    on_devices_and_dtypes,
    ops,
    put,
    put_ints,
    rounded,
    sizes,
)
from tests.reference.block_draft import gru


@on_devices_and_dtypes
@pytest.mark.parametrize(("num_seqs", "size"), sizes((1, 8), (3, 24), (2, 1024)))
def test_a_cell(device: str, dtype: str, num_seqs: int, size: int) -> None:
    rng = np.random.default_rng([num_seqs, size])
    of_input, of_state = rng.standard_normal((2, num_seqs, 3 * size)).astype(np.float32)
    before = rounded(rng.standard_normal((num_seqs, size)), dtype)
    for is_first in (False, True):
        state = put(device, before, dtype)
        copy = put(device, np.full((num_seqs, size + 8), 7.0), dtype)
        ops.gru_cell(
            context(device), from_input=put(device, of_input), state=state, copy=copy,
            from_state=None if is_first else put(device, of_state), copy_stride=size + 8,
        )  # fmt: skip
        start = np.zeros_like(before) if is_first else before
        expected = [
            gru(
                np.ones(1),
                np.append(row, 1)[:-1],
                *column(of_x, 0 * of_s if is_first else of_s, row),
            )
            for row, of_x, of_s in zip(start.astype(np.float64), of_input, of_state)
        ]
        near = {"float32": 1e-6, "float16": 2e-3, "bfloat16": 2e-2}[dtype]
        assert np.allclose(get(state), expected, atol=near, rtol=0)
        assert np.array_equal(get(copy)[:, :size], get(state)) and (get(copy)[:, size:] == 7).all()


def column(of_input: Any, of_state: Any, state: Any) -> tuple[Any, Any]:
    """Matrices of a GRU that gives these results for the input 1 and a state."""
    place = int(np.argmax(np.abs(state)))
    from_state = np.zeros((len(of_state), len(state)))
    if state[place]:
        from_state[:, place] = of_state / state[place]
    return of_input.astype(np.float64)[:, None], from_state


class Chain(RandomCandidates):
    """Random candidates and corrections."""

    def __init__(self, dtype: str, num_seqs: int, depth: int, topk: int, width: int) -> None:
        super().__init__(dtype, num_seqs, depth, topk, width)
        self.moving = self.rng.standard_normal((depth, num_seqs, width)).astype(np.float32)

    def run(self, device: str, num_tokens: int) -> tuple[Any, Any, Any, list[Any], Any]:
        num_seqs, depth, _ = self.shape
        tokens, parents = (put_ints(device, np.full((num_seqs, num_tokens), -7)) for _ in range(2))
        scores = put(device, np.full((num_seqs, num_tokens), np.nan))
        roots, chosen = (put_ints(device, np.full(num_seqs, -7)) for _ in range(2))
        steps = []
        for level in range(min(depth, num_tokens)):
            ops.chain_step(
                context(device), candidates=put_ints(device, self.candidates), level=level,
                logprobs=put(device, self.logprobs), seq_slots=put_ints(device, self.slots),
                next_tokens=put_ints(device, self.roots),
                fixed=put(device, self.fixed) if level else None,
                moving=put(device, self.moving[level]) if level else None,
                successors=put(device, self.successors, self.dtype), roots=roots, tokens=chosen,
                draft=ops.Draft(tokens=tokens, parents=parents, scores=scores),
            )  # fmt: skip
            steps.append(chosen.numpy().copy())
        return tokens.numpy(), parents.numpy(), scores.numpy(), steps, roots.numpy()

    def check(self, device: str, num_tokens: int) -> None:
        tokens, parents, scores, steps, roots = self.run(device, num_tokens)
        depth = self.shape[1]
        assert (parents == np.arange(num_tokens)).all()
        assert np.array_equal(roots, self.roots[self.slots])
        for seq in range(self.shape[0]):
            total, ended = 0.0, False
            for level in range(num_tokens):
                best, own = self.best(seq, level) if level < depth else (-1, -np.inf)
                ended = ended or own == -np.inf
                total += own
                if ended:
                    assert tokens[seq, level] == -1 and np.isneginf(scores[seq, level])
                else:
                    assert tokens[seq, level] == best
                    assert abs(scores[seq, level] - total) < 1e-4
                if level < len(steps):
                    assert steps[level][seq] == max(tokens[seq, level], 0)

    def best(self, seq: int, level: int) -> tuple[int, float]:
        """The likeliest candidate, and its log-probability."""
        ids, known = self.candidates[seq, level], self.logprobs[seq, level].astype(np.float64)
        known = np.where((ids < 0) | np.isnan(known), -np.inf, known)
        logits = known.copy()
        if level:
            x = self.fixed[seq * self.shape[1] + level].astype(np.float64)
            x = x + self.moving[level, seq]
            logits += self.successors[ids].astype(np.float64) @ (x / (1 + np.exp(-x)))
        if logits.max() == -np.inf:
            return -1, -np.inf
        total = np.exp(logits).sum() + max(0.0, 1 - np.exp(known).sum())
        return int(ids[logits.argmax()]), float(logits.max() - np.log(total))


@on_devices_and_dtypes
@pytest.mark.parametrize(
    ("num_seqs", "depth", "topk", "width"),
    sizes((1, 1, 1, 8), (3, 4, 5, 16), (2, 15, 32, 256), (1, 3, 32, 520)),
)
def test_chains(device: str, dtype: str, num_seqs: int, depth: int, topk: int, width: int) -> None:
    case = Chain(dtype, num_seqs, depth, topk, width)
    for num_tokens in {1, depth, depth + 2}:
        case.check(device, num_tokens)


@on_devices
def test_a_chain_ends_without_candidates(device: str) -> None:
    case = Chain("float16", 4, 4, 3, 16)
    case.candidates[0, 1] = -1
    case.logprobs[1, 0] = np.nan
    case.logprobs[2, 2, :2] = -np.inf
    case.check(device, 4)


@on_devices
def test_of_equal_candidates_the_first_is_chosen(device: str) -> None:
    case = Chain("float16", 1, 2, 5, 8)
    case.logprobs[...] = -2
    case.successors[...] = 0
    case.check(device, 2)


def test_refusals() -> None:
    case = Chain("float32", 2, 3, 4, 16)
    case.moving = case.moving[..., :8]
    with pytest.raises(ValueError, match="expected float32 rows of 16 values"):
        case.run("cpu", 3)
    with pytest.raises(ValueError, match=r"expected float32 \[1, 24\]"):
        ops.gru_cell(
            context("cpu"), from_input=put("cpu", np.zeros((1, 16))), from_state=None,
            state=put("cpu", np.zeros((1, 8))), copy=put("cpu", np.zeros((1, 8))), copy_stride=8,
        )  # fmt: skip
