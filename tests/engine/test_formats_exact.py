"""Targets in MXFP4, MXFP8, small groups, 8 bits with zero points and Q4_K: exact drafts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.engine.drafted import PROMPTS, SAMPLINGS, TREES, VOCAB, Drive, Models, write_quantised
from tests.engine.test_gguf_blocks import write as write_blocks
from tests.reference.engines import extension_or_skip
from tests.reference.tiny_checkpoints import write_tiny
from tests.reference.tiny_hybrid import CUDA_SIZES

extension_or_skip()

FORMS = ("mxfp4mo", "mxfp8", "gptq4_g32", "gptq8z_g64")


def check(models: Models, kind: str, family: str, tree: str) -> None:
    drive = Drive(models.drafted(kind, family, TREES[tree]))
    for ids, fields in zip(PROMPTS[2:6], SAMPLINGS.values()):
        assert drive.one(ids, 40, **fields) == models.plain(family, ids, 40, **fields)


DRAFTS = [("eagle", "wide"), ("eagle3", "chain"), ("ngram", "chain")]


@pytest.mark.parametrize(("kind", "tree"), DRAFTS)
@pytest.mark.parametrize("form", FORMS)
def test_target_and_draft_in_one_format(models: Models, form: str, kind: str, tree: str) -> None:
    check(models, kind, f"llama_{form}", tree)


@pytest.mark.parametrize("form", FORMS)
def test_mtp(models: Models, form: str) -> None:
    family = f"hybrid {form}"
    made = models.hybrid(family, "qwen3_5", **CUDA_SIZES)  # K is a multiple of 32
    write_quantised(made.directory, made, form)
    check(models, "mtp", family, "chain")


@pytest.mark.parametrize(("kind", "tree"), DRAFTS)
def test_mixture_of_k_quants(models: Models, kind: str, tree: str) -> None:
    """Files of Q4_K_M have v, down_proj and the head in Q6_K. The draft has 16 bits."""
    family = "llama in gguf"
    path = models.root / "k.gguf"
    if not path.exists():
        sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
        sizes |= {"vocab_size": VOCAB, "tie_word_embeddings": False, "num_hidden_layers": 3}
        tiny = write_tiny(models.root / family, "llama", dtype=models.dtype, **sizes)
        kinds = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "output.": "Q6_K", "attn_": "Q4_K"}
        write_blocks(path, tiny, kinds | {"ffn_": "Q4_K"}, decoded=False)
        models.put(family, replace(tiny, directory=path))
    check(models, kind, family, tree)
