"""The MTP head of Nemotron 3: its chains are those of transformers' layers, and change no token."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.drafted import SAMPLINGS, TREES, Drive, Models
from tests.engine.prefix import PAGE, Job, running
from tests.engine.test_mtp import load
from tests.reference.engines import extension_or_skip, random_ids
from tests.reference.hf_model import hf_model, hf_states
from tests.reference.tiny_checkpoints import TinyCheckpoint, write_tiny

C = extension_or_skip()

DEPTH = 3
SUPER: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hybrid_override_pattern": "ME*E",
    "moe_latent_size": 32,
    "num_nextn_predict_layers": 1,
    "mtp_layers_block_type": ["attention", "moe"],
}
# With these sizes, each of two ranks has whole heads and whole columns.
DIVIDED = {
    "mamba_num_heads": 16,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 64,
}
VOCAB = 7  # so few tokens that random weights often draft the right one


class Head:
    """The module as two layers of transformers, which compute all rows anew for each token."""

    def __init__(self, tiny: TinyCheckpoint) -> None:
        self.weights = tiny.weights
        weights = {
            name.replace("mtp.layers.", "backbone.layers."): array
            for name, array in tiny.weights.items()
            if name.startswith("mtp.layers.") and (".mixer." in name or ".norm." in name)
        }
        weights["backbone.norm_f.weight"] = tiny.weights["mtp.layers.1.final_layernorm.weight"]
        for name in ("backbone.embeddings.weight", "lm_head.weight"):
            weights[name] = tiny.weights[name]
        own = {"num_hidden_layers": 2, "hybrid_override_pattern": "*E"}
        self.model = hf_model({**tiny.config, **own}, weights)

    def norm(self, x: Any, name: str) -> Any:
        weight = self.weights[f"mtp.layers.0.{name}.weight"]
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight

    def rows(self, states: Any, next_ids: list[int]) -> Any:
        embedding = self.weights["backbone.embeddings.weight"][next_ids]
        both = np.concatenate([self.norm(embedding, "enorm"), self.norm(states, "hnorm")], -1)
        return both @ self.weights["mtp.layers.0.eh_proj.weight"].T

    def draft(self, states: Any, next_ids: list[int]) -> list[int]:
        """The greedy chain after the rows of the target's states."""
        import torch

        rows, drafted = self.rows(states, next_ids), []
        for _ in range(DEPTH):
            with torch.no_grad():
                found = self.model(
                    inputs_embeds=torch.from_numpy(rows[None].astype(np.float32)),
                    output_hidden_states=True,
                    use_cache=False,
                )
            drafted.append(int(found.logits[0, -1].argmax()))
            last = found.hidden_states[-1][0, -1:].numpy()
            rows = np.concatenate([rows, self.rows(last, drafted[-1:])])
        return drafted


def test_a_chain_is_that_of_transformers_layers(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the reference needs transformers")
    tiny = write_tiny(tmp_path, "nemotron", vocab_size=VOCAB, **SUPER)
    head = Head(tiny)
    loaded = load(tmp_path, method="mtp", num_speculative_tokens=DEPTH)
    drive, seen = Drive(loaded.engine), set()
    for length in (1, 31, 40):
        ids = random_ids(VOCAB, length, seed=length)
        tokens = drive.one(ids, 50)
        text = ids + tokens
        _, states = hf_states(tiny.config, tiny.weights, text)
        lengths, root = [], len(ids)  # the root is the last emitted token
        while root < len(text) - 1:
            drafted = head.draft(states[:root], text[1 : root + 1])
            right = 0
            while right < DEPTH and text[root + 1 + right : root + 2 + right] == [drafted[right]]:
                right += 1
            lengths.append(min(right + 1, len(text) - 1 - root))
            root += lengths[-1]
        assert drive.emitted == lengths
        seen |= set(drive.emitted[:-1])
    assert len(seen) >= 3, seen


def models_of(root: Path, device: str, num_ranks: int) -> Models:
    if device == "cuda" and C.device_count() < num_ranks:
        pytest.skip("one GPU")
    return Models(root, device, num_ranks=num_ranks, vocab_size=VOCAB, **SUPER, **DIVIDED)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_tokens(num_ranks: int, device: str, tmp_path: Path) -> None:
    """Chains, trees, chunks and prefix hits give the tokens of plain steps."""
    models = models_of(tmp_path, device, num_ranks)
    drafted = partial(models.drafted, "mtp", "nemotron")
    prompt = random_ids(VOCAB, 100)
    for tree in ("chain", "narrow"):
        drive = Drive(drafted(TREES[tree]), ahead=2)
        for ids, fields in ((prompt[:1], {}), (prompt, {}), (prompt, SAMPLINGS["seeded"])):
            tokens = models.plain("nemotron", ids, 40, **fields)
            assert drive.one(ids, 40, chunk=7, **fields) == tokens
        assert max(drive.emitted) > 1
    with running(drive.engine) as (runner, _):
        for cached in (0, 100 // PAGE * PAGE):
            job = Job(prompt, 40, **SAMPLINGS["seeded"])
            runner.submit(job.request)
            assert job.wait() == tokens
            assert job.request.cached_tokens == cached
