"""Two ranks run models whose layers have a recurrent state. Each has the state of its own heads."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpmcu.engine.prefix.disk import DiskStore
from cpmcu.engine.prefix.disk_tier import DiskTier
from tests.engine.drafted import (
    COUNT,
    PROMPTS,
    QUANT_CONFIGS,
    SAMPLINGS,
    TREES,
    VOCAB,
    Drive,
    Models,
)
from tests.engine.harness import SMALL, random_ids
from tests.engine.prefix import Job, running
from tests.engine.test_swap_space import ROOM, engine_of, runner_of, submit_and_check
from tests.reference.engines import check_ranks, extension_or_skip, load_tiny, prompt_logits
from tests.reference.tiny_checkpoints import write_tiny
from tests.reference.tiny_fp8 import write_fp8
from tests.reference.tiny_hybrid import CUDA_SIZES, EXPERTS, HYBRIDS
from tests.reference.tiny_mixed import write_mixed
from tests.reference.tiny_w4 import quantise_hybrid, write_w4

C = extension_or_skip()

# Heads that two ranks can divide, and sizes that CUDA and formats with blocks of 128 can run.
HEADS = {**CUDA_SIZES, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
QUANTISED = {**HEADS, "hidden_size": 128, "intermediate_size": 256}
HYBRID_EXPERTS = {**EXPERTS, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 64}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, device: str) -> Models:
    if device == "cuda" and C.device_count() < 2:
        pytest.skip("one GPU")
    made = Models(tmp_path_factory.mktemp("ranks"), device, num_ranks=2)
    sizes = HEADS if device == "cuda" else {}
    made.hybrid("qwen3_5", "qwen3_5", **sizes)
    made.hybrid("qwen3_next", "qwen3_next", **sizes)
    made.hybrid("experts", "qwen3_5", **{**sizes, **HYBRID_EXPERTS})
    return made


def check_logits(models: Models, family: str, dtype: str = "float32") -> None:
    """The ranks add in another order, and round parts to `dtype`, on CUDA to 16 bits."""
    if (models.device, dtype) == ("cpu", "float32"):
        check_ranks(partial(models.engine, family, None), PROMPTS[5], 2e-5)
    elif family == "experts":
        make = partial(models.engine, family, None, dtype="float16")
        check_ranks(make, PROMPTS[5], 0.02, share=0.75)
    else:
        check_ranks(partial(models.engine, family, None), PROMPTS[5], 0.05)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next", "experts"])
def test_logits(models: Models, family: str) -> None:
    check_logits(models, family)


SHAPES: dict[str, dict[str, Any]] = {
    "a key head for each value head": {"linear_num_value_heads": 2},
    "16 value heads a key": {"linear_num_value_heads": 32},
    "wide keys": {"linear_key_head_dim": 128, "linear_value_head_dim": 40},
    "no attention": {"num_hidden_layers": 3},
    "one key head of attention": {"num_key_value_heads": 1},
    "no gate of attention": {"attn_output_gate": False},
}


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(tmp_path: Path, shape: str, family: str, num_ranks: int) -> None:
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 6, **SHAPES[shape]}
    for key in ("linear_num_key_heads", "linear_num_value_heads"):
        sizes[key] *= num_ranks // 2
    directory = write_tiny(tmp_path, family, **sizes).directory
    one, two = (load_tiny(directory, tensor_parallel_size=n).engine for n in (1, num_ranks))
    ids = random_ids(100, 203, seed=3)
    expected, got = prompt_logits(one, ids), prompt_logits(two, ids)
    assert 0 < np.abs(got - expected).max() < 2e-5 * np.abs(expected).max()


INPUTS = ("in_proj_qkv", "in_proj_z", "in_proj_qkvz")


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
@pytest.mark.parametrize("form", ["gptq", "awq", "compressed", "fp8", *QUANT_CONFIGS])
def test_packed_weights(models: Models, form: str, family: str) -> None:
    """The tensors of in_proj_qkv are cut into three parts in each format."""
    name = f"{family} {form}"
    made = models.hybrid(name, family, **QUANTISED)
    if form == "fp8":
        write_fp8(made.directory, made.config, made.weights, "qwen", extra=INPUTS)
    elif form in QUANT_CONFIGS:
        forms = dict.fromkeys((*INPUTS, ""), form)
        write_mixed(made.directory, made.config, made.weights, forms, QUANT_CONFIGS[form])
    else:
        write_w4(made.directory, made.config, quantise_hybrid(made.weights), form)
    plan = models.engine(name, None).memory_plan(0)
    module = "model.layers.0.linear_attn.in_proj_qkvz"
    (size,) = (row["bytes"] for row in plan if row["name"] == module)
    assert size < 2 * QUANTISED["hidden_size"] * 768  # less than 16 bits for each weight
    check_logits(models, name, "float32" if form in QUANT_CONFIGS else "float16")


def test_state_is_divided(models: Models) -> None:
    one = models.engine("qwen3_5", None, tensor_parallel_size=1)
    two = models.engine("qwen3_5", None)

    def sizes(engine: Any, rank: int = 0) -> dict[str, int]:
        return {row["name"]: row["bytes"] for row in engine.memory_plan(rank)}

    assert sizes(two, 0) == sizes(two, 1)
    module = "model.layers.0.linear_attn."
    for name in ("in_proj_qkv", "in_proj_b", "out_proj", "conv1d", "gates", "state", "window"):
        assert sizes(two)[module + name] == sizes(one)[module + name] // 2, name
    assert sizes(two)[module + "norm"] == sizes(one)[module + "norm"]
    assert one.pages.slot_bytes == two.pages.slot_bytes  # a copy has the states of both ranks


# ---- speculation and the engine's loop change no token


@pytest.mark.parametrize("tree", ["chain", "root"] if SMALL else ["chain", "root", "wide"])
@pytest.mark.parametrize(
    ("family", "kind"),
    [("qwen3_5", "mtp"), ("qwen3_5", "mtp_filled"), ("qwen3_5", "ngram"), ("experts", "mtp")]
    + ([] if SMALL else [("qwen3_next", "mtp"), ("qwen3_5", "dspark"), ("qwen3_5", "domino")]),
)
def test_speculation(models: Models, family: str, kind: str, tree: str) -> None:
    drive = Drive(models.drafted(kind, family, TREES[tree]), ahead=2)
    for i, ids in enumerate(PROMPTS[::2]):
        fields = list(SAMPLINGS.values())[i % len(SAMPLINGS)]
        assert drive.one(ids, COUNT, **fields) == models.plain(family, ids, COUNT, **fields)


def test_chains_and_trees_are_accepted(models: Models) -> None:
    """A small vocabulary, so that steps accept from none to all drafted tokens."""
    sizes = HEADS if models.device == "cuda" else {}
    models.hybrid("small", "qwen3_5", **{"vocab_size": 11, **sizes})
    lengths: set[int] = set()
    for tree in ("chain", "wide"):
        drive = Drive(models.drafted("mtp", "small", TREES[tree]), ahead=2)
        for seed in range(12):
            ids = random_ids(1 + 9 * seed, 11, seed)
            fields = {} if seed % 2 else {"temperature": 0.9, "seed": seed}
            assert drive.one(ids, 24, **fields) == models.plain("small", ids, 24, **fields)
            lengths |= set(drive.emitted[:-1])
    assert {1, 2, 3} <= lengths


def test_any_shapes_in_any_order(models: Models) -> None:
    rng = random.Random(5)
    trees = [(0, 1), (1, 1), (2, 9), (4, 8), (4, 33)]
    drive = Drive(models.drafted("mtp", "qwen3_5", TREES["wide"]), 2, lambda: rng.choice(trees))
    for ids, name in zip(PROMPTS[1::2], ("greedy", "all", "seeded")):
        got = drive.one(ids, COUNT, **SAMPLINGS[name])
        assert got == models.plain("qwen3_5", ids, COUNT, **SAMPLINGS[name])


@pytest.mark.parametrize("chunk", [1, 7, 65])
def test_chunks(models: Models, chunk: int) -> None:
    drive = Drive(models.drafted("mtp", "qwen3_5", TREES["narrow"]))
    got = drive.one(PROMPTS[5], 30, chunk, **SAMPLINGS["seeded"])
    assert got == models.plain("qwen3_5", PROMPTS[5], 30, **SAMPLINGS["seeded"])


@pytest.mark.parametrize("kind", ["", "mtp"])
def test_preemption(models: Models, kind: str) -> None:
    engine, _ = engine_of(models, "qwen3_5", kind)
    runner = runner_of(engine, 100 * engine.pages.page_bytes)
    try:
        submit_and_check(runner, models, "qwen3_5")
        assert runner.call(lambda e: e.num_free_pages) == ROOM
    finally:
        runner.close()


@pytest.mark.parametrize("tiers", ["device", "host", "disk"])
def test_prefix_cache(models: Models, tiers: str, tmp_path: Path) -> None:
    rng = random.Random(tiers)
    config = {"max_num_seqs": 3, "chunk_length": 64, "max_model_len": 400}
    engine = models.drafted("mtp", "qwen3_5", TREES["narrow"], **config)
    pages = engine.pages
    options: dict[str, Any] = {}
    if tiers != "device":
        options["host_bytes"] = 12 * pages.page_bytes + 4 * pages.slot_bytes
    if tiers == "disk":
        store = DiskStore(
            tmp_path, "3" * 32, pages.page_bytes, 1 << 30, state_bytes=pages.slot_bytes
        )
        options["disk"] = DiskTier(store)
    prompts: list[list[int]] = []
    with running(engine, **options) as (runner, cache):
        for wave in range(4):
            fields = {"seed": wave, "temperature": wave % 2 * 0.8}
            jobs = []
            for _ in range(3):
                base = rng.choice(prompts)[:250] if prompts else []
                grown = rng.choice([1, 64, 65, 130])
                prompts.append(base + random_ids(grown, VOCAB, seed=rng.randrange(10**6)))
                jobs.append(Job(prompts[-1], 20, **fields))
                runner.submit(jobs[-1].request)
            for job in jobs:
                expected = models.plain("qwen3_5", job.request.prompt, 20, **fields)
                assert job.wait() == expected
        assert cache.counters.hits > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_num_key_heads": 3}, "linear_attn.linear_num_key_heads is 3"),
        ({"linear_num_key_heads": 1}, "linear_attn.linear_num_key_heads is 1"),
    ],
)
def test_heads_that_cannot_be_divided(
    tmp_path: Path, changes: dict[str, int], message: str
) -> None:
    directory = write_tiny(tmp_path, "qwen3_5", **changes).directory
    with pytest.raises(ValueError, match=f"tensor_parallel_size is 2, but .*{message}"):
        load_tiny(directory, tensor_parallel_size=2)
