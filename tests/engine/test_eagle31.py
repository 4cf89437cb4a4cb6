"""EAGLE-3.1 heads: norms before fc, and a normed recycled state and residual stream."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpmcu.config import SpeculativeConfig
from tests.engine.harness import generate, make_engine, prefill, random_ids, sampling
from tests.reference.engines import extension_or_skip
from tests.reference.numpy_drafts import NumpyEagle3, NumpyTarget
from tests.reference.tiny_checkpoints import write_tiny
from tests.reference.tiny_drafts import write_draft

extension_or_skip()

HIDDEN, DEPTH = 64, 5


def norm(size: int, seed: int) -> Any:
    return np.random.default_rng(seed).uniform(0.2, 2.0, size).astype(np.float32)


KINDS: dict[str, tuple[dict[str, bool], dict[str, Any]]] = {
    "one by one": (
        {"fc_norm": True, "norm_output": True},
        {f"fc_norm.{i}.weight": norm(HIDDEN, 50 + i) for i in range(3)},
    ),
    "together": (
        {"norm_before_fc": True, "norm_output": True, "norm_before_residual": True},
        {"input_norm.weight": norm(3 * HIDDEN, 60)},
    ),
    "residual": ({"norm_before_residual": True}, {}),
}


@pytest.mark.parametrize("chunk", [7, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_the_draft_is_that_of_the_oracle(tmp_path: Path, kind: str, chunk: int) -> None:
    """Greedy chains after prompts of several lengths, and text as without the draft."""
    flags, norms = KINDS[kind]
    target = write_tiny(tmp_path / "target", "llama", num_hidden_layers=6)
    draft = write_draft(tmp_path / "draft", "eagle3", target, extra=norms, **flags)
    plain = make_engine(target.directory)
    shape = {"spec_num_iter": DEPTH, "spec_topk_per_iter": 1, "spec_tree_size": DEPTH + 1}
    speculation = SpeculativeConfig(draft_model_path=str(draft.directory), **shape)
    engine = make_engine(target.directory, speculative_config=speculation)
    fields = target.fields()
    oracle = NumpyEagle3(
        NumpyTarget(fields, target.weights), draft.weights, head_dim=fields.head_dim
    )
    oracle.norm_output = flags.get("norm_output", False)
    oracle.norm_before_residual = flags.get("norm_before_residual", False)
    for count in (1, 2, 19, 33):
        ids = random_ids(count, fields.vocab_size, seed=count)
        slot = engine.add_sequence(sampling(), ids)
        first = prefill(engine, slot, ids, chunk)
        assert engine.reserve(slot, count + 2 * DEPTH)
        ((tokens, _),) = engine.begin_masked([slot])
        engine.release(slot)
        _, aux_hidden = oracle.target.states(ids, [2, 3, 3])
        logits, recycled = oracle.prefill(aux_hidden, [*ids[1:], first])
        assert tokens[1:] == oracle.chain(recycled[-1], logits[-1], DEPTH)
        for given in ({}, {"temperature": 0.9, "seed": 4}):
            expected = generate(plain, ids, 24, **given)[:24]
            assert generate(engine, ids, 24, chunk=chunk, **given)[:24] == expected
