"""Engines with an fp8 KV cache: speculation, chunks, batches and prefix hits change no token."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpmcu.benchmarks.decoding import step_bytes
from cpmcu.config import EngineConfig
from cpmcu.engine.prefix.disk import DiskStore
from cpmcu.engine.prefix.disk_tier import DiskTier
from cpmcu.loading.loader import load_model
from tests.engine.drafted import COUNT, PROMPTS, SAMPLINGS, SEVERAL, TREES, VOCAB, Drive, Models
from tests.engine.harness import SMALL, make_engine, random_ids
from tests.engine.prefix import Job, check_batch, running
from tests.reference.engines import extension_or_skip, prompt_logits
from tests.reference.tiny_checkpoints import write_tiny
from tests.reference.tiny_w4 import quantise, write_w4

extension_or_skip()

KINDS = ["eagle_bias", "eagle3", "model", "ngram", "eagle_filled"]
KINDS = KINDS[1:3] if SMALL else KINDS


class Fp8Models(Models):
    """All engines of `models`, with an fp8 cache."""

    def engine(self, *args: Any, **config: Any) -> Any:
        return super().engine(*args, **{"kv_cache_dtype": "fp8_e4m3", **config})


@pytest.fixture(scope="module")
def fp8_models(tmp_path_factory: pytest.TempPathFactory, device: str) -> Models:
    return Fp8Models(tmp_path_factory.mktemp("fp8"), device)


# ---- the same tokens


@pytest.mark.parametrize("tree", ["chain", "wide"])
@pytest.mark.parametrize("kind", KINDS)
def test_speculation_changes_no_token(fp8_models: Models, kind: str, tree: str) -> None:
    drive = Drive(fp8_models.drafted(kind, "llama", TREES[tree]), ahead=2)
    for ids, name in zip(SEVERAL, ("greedy", "seeded", "all", "greedy", "penalised", "seeded")):
        got = drive.one(ids, COUNT, **SAMPLINGS[name])
        assert got == fp8_models.plain("llama", ids, COUNT, **SAMPLINGS[name]), (len(ids), name)


def test_speculation_and_chunks_with_sinks_change_no_token(fp8_models: Models) -> None:
    root = fp8_models.root / "sinks"
    models = Fp8Models(root, fp8_models.device, num_hidden_layers=2, sliding_window=40)
    drive = Drive(models.drafted("itself", "gptoss", TREES["narrow"]), ahead=2)
    for ids, name in ((SEVERAL[0], "greedy"), (SEVERAL[-1], "seeded"), (PROMPTS[-1], "greedy")):
        expected = models.plain("gptoss", ids, COUNT, **SAMPLINGS[name])
        assert drive.one(ids, COUNT, chunk=17, **SAMPLINGS[name]) == expected


@pytest.mark.parametrize("window", [0, 40])
def test_chunks_change_no_token(fp8_models: Models, window: int) -> None:
    family = "mistral" if window else "llama"
    changes = {"sliding_window": window} if window else {}
    models = Fp8Models(fp8_models.root / f"window{window}", fp8_models.device, **changes)
    drive = Drive(models.drafted("eagle_bias", family, TREES["narrow"]))
    for ids in PROMPTS[-1:] if SMALL else PROMPTS[-2:]:
        expected = models.plain(family, ids, 40)
        for chunk in (17, 64) if SMALL else (1, 17, 63, 64, 100):
            assert drive.one(ids, 40, chunk=chunk) == expected


def test_a_batch_changes_no_token(fp8_models: Models) -> None:
    count = 4 if SMALL else 16
    engine = fp8_models.drafted("eagle_bias", "llama", TREES["narrow"], max_num_seqs=count)
    prompts = [random_ids(20 + 13 * i, VOCAB, seed=i) for i in range(count)]
    check_batch(engine, fp8_models, "llama", prompts, 40)


@pytest.mark.parametrize("kind", ["", "eagle_bias"])
@pytest.mark.parametrize("tier", ["disk"] if SMALL else ["device", "host", "disk"])
def test_prefix_hits_change_no_token(
    fp8_models: Models, tmp_path: Path, kind: str, tier: str
) -> None:
    config: dict[str, Any] = {"max_num_seqs": 2, "chunk_length": 100}
    engine = (
        fp8_models.drafted(kind, "llama", TREES["narrow"], **config)
        if kind
        else fp8_models.engine("llama", None, **config)
    )
    options: dict[str, Any] = {}
    if tier != "device":
        options["host_bytes"] = 6 * engine.pages.page_bytes
    if tier == "disk":
        options["disk"] = DiskTier(DiskStore(tmp_path, "0" * 32, engine.pages.page_bytes, 1 << 30))
    shared = random_ids(300, VOCAB, seed=11)
    others = [random_ids(300, VOCAB, seed=seed) for seed in (1, 2, 3)]
    prompts = [shared[:cut] + random_ids(30, VOCAB, seed=cut) for cut in (300, 64, 200)]
    with running(engine, **options) as (runner, cache):
        for ids in [*prompts, *others, *prompts, *prompts]:
            job = Job(ids, 20, **SAMPLINGS["seeded"])
            runner.submit(job.request)
            assert job.wait() == fp8_models.plain("llama", ids, 20, **SAMPLINGS["seeded"])
        assert cache.counters.hits > 500


# ---- numbers and memory


def test_logits_are_near_those_of_16_bits(fp8_models: Models) -> None:
    ids = random_ids(200, VOCAB, seed=1)
    exact = prompt_logits(fp8_models.engine("llama", None, kv_cache_dtype="auto"), ids)
    rounded = prompt_logits(fp8_models.engine("llama", None), ids)
    error = np.abs(rounded - exact).max() / np.abs(exact).max()
    assert 1e-5 < error < 0.05


def test_memory(tmp_path: Path, device: str) -> None:
    """With heads of 128, the cache has 0.516 of the bytes of 16 bits."""
    changes = {"head_dim": 128, "num_hidden_layers": 2}
    made = write_tiny(tmp_path, "llama", dtype="bfloat16", **changes)
    pages, floors = [], []
    for dtype in ("auto", "fp8_e4m3"):
        config = EngineConfig(
            model=str(made.directory), device=device, memory_limit=0.2, kv_cache_dtype=dtype
        )
        loaded = load_model(str(made.directory), config=config)
        engine = loaded.engine
        rows = [row for row in engine.memory_plan() if row["group"] == "kv"]
        pages.append(engine.pages.page_bytes)
        planned, rest = divmod(sum(row["bytes"] for row in rows), engine.pages.page_bytes)
        assert rest == 0
        assert planned - engine.num_pages in (0, 1)  # idle slots may have a page
        floors.append([step_bytes(engine, loaded.spec, context) for context in (0, 64)])
    assert pages[1] / pages[0] == (128 + 4) / 256
    assert [after - before for before, after in floors] == pages


def test_hopper_plans_scratch_for_prompts(tmp_path: Path) -> None:
    """Kernels of prompts read keys and values in 16 bits. The scratch holds those of a sequence."""
    made = write_tiny(tmp_path, "llama", dtype="bfloat16", head_dim=128, num_hidden_layers=2)

    def scratch(dtype: str, capability: int) -> int:
        config = EngineConfig(memory_limit=8, kv_cache_dtype=dtype)
        engine = load_model(str(made.directory), config=config, plans_for=capability).engine
        (row,) = [row for row in engine.memory_plan() if row["name"] == "attention.partials"]
        return int(row["bytes"])

    heads = made.config["num_key_value_heads"]
    usual, planned = scratch("auto", 90), scratch("fp8_e4m3", 90)
    assert scratch("fp8_e4m3", 80) == usual < planned
    assert planned % (4 * heads * 128 * (128 + 2)) == 0


def test_drafts_keep_16_bits(fp8_models: Models) -> None:
    sizes = {}
    for kind in ("eagle_bias", ""):
        for dtype in ("auto", "fp8_e4m3"):
            engine = (
                fp8_models.drafted(kind, "llama", TREES["narrow"], kv_cache_dtype=dtype)
                if kind
                else fp8_models.engine("llama", None, kv_cache_dtype=dtype)
            )
            sizes[kind, dtype] = engine.pages.page_bytes
    assert sizes["eagle_bias", "auto"] - sizes["", "auto"] == (
        sizes["eagle_bias", "fp8_e4m3"] - sizes["", "fp8_e4m3"]
    )


# ---- checkpoints and refusals


def test_scales_of_checkpoints_are_not_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = write_tiny(tmp_path / "plain", "llama", dtype="bfloat16")
    scales = {
        f"model.layers.{layer}.self_attn.{name}_scale": np.float32([0.5])
        for layer in range(2)
        for name in "kv"
    }
    scaled = write_tiny(
        tmp_path / "scaled", "llama", dtype="bfloat16", weights={**made.weights, **scales}
    )
    ids = random_ids(70, 100)
    with caplog.at_level(logging.WARNING):
        found, expected = (
            prompt_logits(make_engine(each.directory, kv_cache_dtype="fp8_e4m3"), ids)
            for each in (scaled, made)
        )
    assert np.array_equal(found, expected)
    (line,) = [text for text in caplog.messages if "k_scale" in text]
    assert "4 tensors are not used" in line
    assert "an fp8 KV cache computes the scale of each token" in line


def test_a_stated_kv_cache_scheme_is_not_used(
    fp8_models: Models, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = fp8_models.target("llama_compressed")
    stated = {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    directory = write_w4(tmp_path, made.config, quantise(made.weights), "compressed", quant=stated)
    with caplog.at_level(logging.INFO):
        make_engine(directory, fp8_models.device)
    assert len([text for text in caplog.messages if "kv_cache_scheme is not used" in text]) == 1


def test_what_cannot_have_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="kv_cache_dtype is 'fp8', but must be one of auto, fp8_e"):
        EngineConfig(kv_cache_dtype="fp8")
    made = write_tiny(tmp_path, "llama", head_dim=24)
    with pytest.raises(ValueError, match="head_dim is 24, expected 'auto' or a head_dim that is"):
        make_engine(made.directory, kv_cache_dtype="fp8_e4m3")
