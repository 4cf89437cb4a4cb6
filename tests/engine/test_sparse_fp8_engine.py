"""Sparse attention with an fp8 KV cache: speculation, chunks, batches and prefix hits change no
token, and the logits are those of the rounded keys and values."""

from __future__ import annotations

import numpy as np
import pytest

from cpmcu.benchmarks.decoding import step_bytes
from cpmcu.config import EngineConfig
from cpmcu.loading.loader import load_model
from cpmcu.models.common import BuildOptions
from cpmcu.sparse_options import SparseOptions
from tests.engine.drafted import SAMPLINGS, TREES, VOCAB, Drive, Models
from tests.engine.harness import SMALL, random_ids
from tests.engine.prefix import check_batch
from tests.engine.sparse import FAMILY, check_prefix_hits, family_of
from tests.engine.sparse import sparse_models as make_sparse_models
from tests.engine.test_fp8_engine import Fp8Models
from tests.reference.engines import extension_or_skip, prompt_logits
from tests.reference.numpy_model import NumpyModel
from tests.tolerances import LOGITS, assert_close

extension_or_skip()

KINDS = ["eagle3"] if SMALL else ["minicpm_eagle", "eagle3", "ngram", "model", "minicpm_eagle_w4"]
# The tokens cross dense_len, the edge of a block, and the first edge with a choice of blocks.
STARTS = [random_ids(length, VOCAB, seed=length) for length in (285, 305, 375)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, device: str) -> Models:
    """Targets with a sparse_config, and engines with an fp8 cache."""
    return make_sparse_models(tmp_path_factory.mktemp("sparse_fp8"), device, Fp8Models)


# ---- the same tokens


@pytest.mark.parametrize("tree", ["chain", "wide"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_changes_no_token(models: Models, kind: str, tree: str) -> None:
    family = family_of(kind)
    drive = Drive(models.drafted(kind, family, TREES[tree]), ahead=2)
    for ids, name in zip(STARTS, ("greedy", "seeded", "all")):
        got = drive.one(ids, 30, **SAMPLINGS[name])
        assert got == models.plain(family, ids, 30, **SAMPLINGS[name]), (len(ids), name)


def test_accepted_tokens_are_compressed(models: Models) -> None:
    """The target is its own draft, so steps accept several tokens, across every edge."""
    drive = Drive(models.drafted("itself", FAMILY, TREES["narrow"]))
    ids = random_ids(30, VOCAB, seed=8)
    assert drive.one(ids, 400) == models.plain(FAMILY, ids, 400)


def test_chunks_change_no_bit(models: Models) -> None:
    ids = random_ids(500, VOCAB, seed=5)
    runs = [
        prompt_logits(models.engine(FAMILY, None, chunk_length=chunk), ids)
        for chunk in (1, 63, 64, 2048)
    ]
    for other in runs[1:]:
        assert np.array_equal(runs[0], other)


def test_a_batch_changes_no_token(models: Models) -> None:
    count = 4 if SMALL else 8
    engine = models.drafted("minicpm_eagle", FAMILY, TREES["narrow"], max_num_seqs=count)
    prompts = [random_ids(60 + 50 * i, VOCAB, seed=i) for i in range(count)]
    check_batch(engine, models, FAMILY, prompts, 30)


@pytest.mark.parametrize("kind", ["", "minicpm_eagle"])
@pytest.mark.parametrize("tier", ["host"] if SMALL else ["device", "host"])
def test_prefix_hits_change_no_token(models: Models, kind: str, tier: str) -> None:
    check_prefix_hits(models, kind, tier)


# ---- numbers and memory


def test_logits_of_a_prompt(models: Models) -> None:
    """The reference is float64 with rounded keys and values. Rounded keys also choose the blocks.

    A number near the middle of two codes may round to either, so one logit may be further away.
    """
    tiny = models.target(FAMILY)
    options = BuildOptions(has_lm_head=True, sparse=SparseOptions(apply_sparse=True))
    ids = random_ids(500, VOCAB, seed=3)
    found = prompt_logits(models.engine(FAMILY, None), ids)
    rounded, exact = (
        NumpyModel(tiny.fields(options), tiny.weights, fp8_cache=fp8).logits(ids)
        for fp8 in (True, False)
    )
    if models.device == "cuda":
        return assert_close(found, rounded, LOGITS[models.dtype])
    error, of_rounding = (np.abs(each - rounded).mean() for each in (found, exact))
    assert error < 0.01 * of_rounding


def test_pages_hold_compressed_keys_in_16_bits(models: Models) -> None:
    """The floor of a step counts the bytes of chosen blocks and of compressed keys."""
    made = models.target(FAMILY)
    config = EngineConfig(
        model=str(made.directory), device=models.device, memory_limit=0.2, kv_cache_dtype="fp8_e4m3"
    )
    loaded = load_model(str(made.directory), config=config)
    spec, size = loaded.spec, 4 if loaded.spec.dtype == "float32" else 2
    rows = len(spec.layers) * spec.num_key_value_heads  # key rows of a token, or value rows
    entry, compressed = 2 * rows * (spec.head_dim + 4), rows * spec.head_dim * size
    assert loaded.engine.pages.page_bytes == 64 * entry + 5 * compressed
    weights = step_bytes(loaded.engine, spec, 0)
    assert step_bytes(loaded.engine, spec, 256) - weights == 256 * entry
    # At token 640, a step reads 4 of the 11 blocks, and the compressed keys of 9 pages.
    read = (640 - 64 * 7) * entry + 5 * 9 * compressed
    assert step_bytes(loaded.engine, spec, 640) - weights == read
