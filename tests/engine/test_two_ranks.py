"""Two ranks: threads of the CPU back end, or two GPUs. Speculation, batches, prefix hits and
preemption change no token, and two ranks compute what one computes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpmcu import LLM, SamplingParams, cli
from cpmcu.config import EngineConfig, SpeculativeConfig
from cpmcu.engine.runner import Runner
from tests.engine.drafted import (
    COUNT,
    DRAFTS,
    PROMPTS,
    SAMPLINGS,
    SEVERAL,
    SOME_DRAFTS,
    TREES,
    VOCAB,
    Drive,
    Models,
    family_of,
)
from tests.engine.harness import SHIPPED, random_ids
from tests.engine.prefix import PAGE, Job, running
from tests.engine.sparse import sparse_models
from tests.engine.test_masked_steps import one as masked_output
from tests.engine.test_swap_space import ROOM, engine_of, runner_of, submit_and_check
from tests.reference.engines import extension_or_skip, load_tiny, prompt_logits
from tests.reference.tiny_checkpoints import ARCHITECTURES, tiny_config, write_tiny
from tests.reference.tiny_fp8 import write_fp8
from tests.reference.tiny_hybrid import HYBRIDS

C = extension_or_skip()

# 4-bit layouts need whole groups of 128 inputs for each rank.
FORMS = ["gptq", "awq", "compressed", "fp8", "nvfp4mo", "mxfp4mo", "mxfp8", "gptq4_g32"]
FORMS += ["gptq8z_g64"]


def two_ranks(root: Path, device: str, **changes: Any) -> Models:
    if device == "cuda" and C.device_count() < 2:
        pytest.skip("one GPU")
    return Models(root, device, num_ranks=2, **{"intermediate_size": 256, **changes})


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, device: str) -> Models:
    return two_ranks(tmp_path_factory.mktemp("ranks"), device)


# ---- two ranks against one


def check_logits(models: Models, family: str) -> None:
    """Sums in another order, and parts rounded to the model's dtype."""
    one = models.engine(family, None, tensor_parallel_size=1)
    two = models.engine(family, None)
    assert (one.num_ranks, two.num_ranks) == (1, 2)
    assert one.max_model_len == two.max_model_len
    expected, got = prompt_logits(one, PROMPTS[5]), prompt_logits(two, PROMPTS[5])
    tolerance = 1e-5 if models.dtype == "float32" and "_" not in family else 0.02
    assert np.abs(got - expected).max() < tolerance * np.abs(expected).max()
    assert np.abs(got - expected).max() > 0  # the sums are indeed divided


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "minicpm", "mistral"])
def test_logits(models: Models, family: str) -> None:
    check_logits(models, family)


@pytest.mark.parametrize("family", ["llama", "olmo2"])
@pytest.mark.parametrize("form", FORMS)
def test_logits_of_packed_weights(models: Models, form: str, family: str) -> None:
    """Each format is cut, and for OLMo the rows of q and k are reordered."""
    check_logits(models, f"{family}_{form}")


@pytest.mark.parametrize("kind", ["ct_tensor", "ct_channel"])
def test_inputs_of_fp8_rows_with_one_scale(tmp_path: Path, device: str, kind: str) -> None:
    """A rank has 72 inputs of down_proj, which are no whole blocks."""
    models = two_ranks(tmp_path, device, intermediate_size=144)
    made = models.target("llama_")
    write_fp8(made.directory, made.config, made.weights, kind)
    check_logits(models, "llama_")


SIZES = {
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 64,
    "shared_intermediate_size": 96,
    "moe_shared_expert_intermediate_size": 64,
    "mamba_num_heads": 16,
}


@pytest.mark.parametrize("family", [*sorted(ARCHITECTURES), *HYBRIDS])
def test_families(tmp_path: Path, family: str) -> None:
    config = tiny_config(family)
    sizes: dict[str, Any] = {key: size for key, size in SIZES.items() if key in config}
    if family == "gemma4":
        sizes["layer_types"] = ["sliding_attention", "full_attention"] * 2
    sizes["num_hidden_layers"] = len(config.get("layer_types") or range(4))
    directory = write_tiny(tmp_path, family, **sizes).directory
    one, two = (load_tiny(directory, tensor_parallel_size=n).engine for n in (1, 2))
    ids = random_ids(100, 60, seed=3)
    expected, got = prompt_logits(one, ids), prompt_logits(two, ids)
    assert 0 < np.abs(got - expected).max() < 2e-5 * np.abs(expected).max()


@pytest.mark.parametrize("form", ["gptq", "awq", "nvfp4mo"])
@pytest.mark.parametrize("family", ["qwen3moe", "qwen2moe"])
def test_experts_of_packed_weights(tmp_path: Path, device: str, family: str, form: str) -> None:
    sizes = {"moe_intermediate_size": 256, "num_experts": 4}
    if family == "qwen2moe":
        sizes["shared_expert_intermediate_size"] = 256
    models = two_ranks(tmp_path, device, **sizes)
    check_logits(models, f"{family}_{form}")
    drive = Drive(models.drafted("ngram", f"{family}_{form}", TREES["chain"]))
    for ids, name in zip(PROMPTS[1:4], SAMPLINGS):
        got = drive.one(ids, 40, **SAMPLINGS[name])
        assert got == models.plain(f"{family}_{form}", ids, 40, **SAMPLINGS[name])


def test_sparse_attention(tmp_path: Path, device: str) -> None:
    """Each rank chooses the blocks of its own KV heads."""
    if device == "cuda" and C.device_count() < 2:
        pytest.skip("one GPU")
    models = sparse_models(tmp_path, device)
    one = models.engine("minicpm", None)
    models.num_ranks = 2
    two = models.engine("minicpm", None)
    ids = random_ids(450, VOCAB, seed=9)
    expected, got = prompt_logits(one, ids), prompt_logits(two, ids)
    tolerance = 1e-5 if models.dtype == "float32" else 0.02
    assert 0 < np.abs(got - expected).max() < tolerance * np.abs(expected).max()
    drive = Drive(models.drafted("minicpm_eagle", "minicpm", TREES["narrow"]))
    for name in ("greedy", "seeded"):
        got = drive.one(ids, 40, **SAMPLINGS[name])
        assert got == models.plain("minicpm", ids, 40, **SAMPLINGS[name])


def test_logits_in_16_bits(tmp_path: Path, device: str) -> None:
    models = two_ranks(tmp_path, device)
    models.dtype = "bfloat16"
    check_logits(models, "qwen2")


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_key_heads_that_ranks_share(tmp_path: Path, device: str, num_ranks: int) -> None:
    """Two ranks share one key head; four ranks share two."""
    if device == "cuda" and C.device_count() < num_ranks:
        pytest.skip("too few GPUs")
    models = two_ranks(tmp_path, device, num_key_value_heads=num_ranks // 2)
    models.num_ranks = num_ranks
    one = models.engine("qwen2", None, tensor_parallel_size=1)
    expected, got = (prompt_logits(e, PROMPTS[5]) for e in (one, models.engine("qwen2", None)))
    tolerance = 1e-5 if models.dtype == "float32" else 0.02
    assert np.abs(got - expected).max() < tolerance * np.abs(expected).max()


def test_memory_is_divided(models: Models) -> None:
    one = models.engine("llama", None, tensor_parallel_size=1)
    two = models.engine("llama", None)

    def sizes(engine: Any, rank: int = 0) -> dict[str, int]:
        return {row["name"]: row["bytes"] for row in engine.memory_plan(rank)}

    assert sizes(two, 0) == sizes(two, 1)
    for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"):
        of_one = sizes(one)[f"model.layers.1.{name}"]
        assert sizes(two)[f"model.layers.1.{name}"] == of_one // 2
    for engine in (one, two):
        assert sizes(engine)["model.embed_tokens"] == sizes(one)["model.embed_tokens"]
    pages = [sizes(engine)["pages"] / engine.pages.num_pages(0) for engine in (one, two)]
    assert pages[1] == pages[0] / 2
    assert one.pages.page_bytes == two.pages.page_bytes  # a copy has the parts of both ranks


# ---- speculation and the engine's loop change no token


@pytest.mark.parametrize("tree", ["chain", "narrow"])
@pytest.mark.parametrize("kind", DRAFTS)
def test_speculation(models: Models, kind: str, tree: str) -> None:
    family = family_of(kind)
    if family.endswith("_marlin"):
        pytest.skip("q, k and v are one tensor in these files")
    drive = Drive(models.drafted(kind, family, TREES[tree]), ahead=2)
    names = list(SAMPLINGS)
    for i, ids in enumerate(SEVERAL):
        name = names[i % len(names)]
        got = drive.one(ids, COUNT, **SAMPLINGS[name])
        assert got == models.plain(family, ids, COUNT, **SAMPLINGS[name]), (len(ids), name)


@pytest.mark.parametrize("kind", ["eagle3", "itself"])
def test_a_draft_quantised_at_load(models: Models, kind: str) -> None:
    draft = {"draft_model_path": str(models.draft(kind, "llama")), "draft_quant": "w4"}
    drive = Drive(models.engine("llama", {**draft, **TREES["narrow"]}))
    assert drive.one(PROMPTS[5], 40) == models.plain("llama", PROMPTS[5], 40)
    assert kind != "itself" or max(drive.emitted) > 2


def test_a_draft_is_accepted(models: Models) -> None:
    """The target is its own draft. The draft is whole on each rank, so its last bits differ."""
    drive = Drive(models.drafted("itself", "llama", TREES["chain"]))
    assert drive.one(PROMPTS[5], 61) == models.plain("llama", PROMPTS[5], 61)
    assert sum(drive.emitted) / len(drive.emitted) > 4


@pytest.mark.parametrize("chunk", [1, 7, 65])
def test_chunks(models: Models, chunk: int) -> None:
    drive = Drive(models.drafted("eagle_bias", "llama", TREES["narrow"]))
    got = drive.one(PROMPTS[5], 30, chunk, **SAMPLINGS["seeded"])
    assert got == models.plain("llama", PROMPTS[5], 30, **SAMPLINGS["seeded"])


def test_masks(models: Models) -> None:
    drafted = models.drafted("eagle_bias", "llama", TREES["narrow"])
    plain = models.engine("llama", None)
    for ids, name in zip(PROMPTS[1:4], ("greedy", "all", "seeded")):
        expected = masked_output(plain, ids, 30, **SAMPLINGS[name]).tokens
        assert masked_output(drafted, ids, 30, **SAMPLINGS[name]).tokens[:30] == expected


@pytest.mark.parametrize("kind", ["", *SOME_DRAFTS])
def test_preemption(models: Models, kind: str) -> None:
    family = family_of(kind) if kind else "llama"
    if family.endswith("_marlin"):
        pytest.skip("q, k and v are one tensor in these files")
    engine, _ = engine_of(models, family, kind)
    runner = runner_of(engine, 100 * engine.pages.page_bytes)
    try:
        submit_and_check(runner, models, family)
        assert runner.call(lambda e: e.num_free_pages) == ROOM
    finally:
        runner.close()


@pytest.mark.parametrize("kind", ["", "eagle_bias"])
def test_prefix_cache_with_host_memory(models: Models, kind: str) -> None:
    engine, taken = engine_of(models, "llama", kind)
    page = engine.pages.page_bytes
    with running(engine, 100 * page, host_bytes=20 * page) as (runner, cache):
        prompt = random_ids(150, VOCAB, seed=5)
        for turn, name in enumerate(("greedy", "seeded", "all", "greedy")):
            jobs = [
                Job(prompt + random_ids(i, VOCAB, seed=i), 40, **SAMPLINGS[name])
                for i in range(1, 4)
            ]
            runner.submit(*(job.request for job in jobs))
            for job in jobs:
                expected = models.plain("llama", job.request.prompt, 40, **SAMPLINGS[name])
                assert job.wait() == expected
            prompt = prompt + random_ids(30 + turn, VOCAB, seed=turn)
        runner.call(lambda e: e.pages.drop(taken))
        assert cache.counters.hits > 0


def test_batches_with_log_probabilities(models: Models) -> None:
    """Log-probabilities do not depend on the batch."""
    fields = {"logprobs": 3, **SAMPLINGS["seeded"]}
    engine = models.drafted("eagle_bias", "llama", TREES["narrow"], max_num_seqs=4)
    plain = models.engine("llama", None, max_num_seqs=4)
    found = []
    for each, ids in ((engine, PROMPTS[1:5]), (plain, PROMPTS[1:2])):
        slots, values = [], []
        for prompt in ids:
            slot = each.add_sequence(C.SamplingConfig(max_tokens=30, **fields), prompt)
            assert each.reserve(slot, len(prompt))
            each.prefill([(slot, prompt, True)])
            first = each.collect()
            if prompt is ids[0]:
                values += first[0].logprobs
            slots.append(slot)
        while len(values) < 20:
            for slot, prompt in zip(slots, ids):
                assert each.reserve(slot, len(prompt) + 100)
            each.decode(slots)
            values += next(o.logprobs for o in each.collect() if o.slot == slots[0])
        found.append(values[:20])
        for slot in slots:
            each.release(slot)
    assert found[0] == found[1]


# ---- what cannot be divided, and ranks that fail


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 3, "num_key_value_heads": 3}, "num_attention_heads is 3"),
        ({"num_attention_heads": 6, "num_key_value_heads": 3}, "num_key_value_heads is 3"),
    ],
)
def test_heads_that_cannot_be_divided(
    tmp_path: Path, changes: dict[str, int], message: str
) -> None:
    models = Models(tmp_path, "cpu", num_ranks=2, **changes)
    with pytest.raises(ValueError, match=f"tensor_parallel_size is 2, but .*{message}"):
        models.engine("llama", None)


def test_groups_that_cannot_be_divided(tmp_path: Path) -> None:
    models = Models(tmp_path, "cpu", num_ranks=2, intermediate_size=128)
    with pytest.raises(ValueError, match="down_proj has 64 inputs for each GPU, expected a mult"):
        models.engine("llama_gptq", None)


def test_infinities_are_named_by_their_place_in_the_file(tmp_path: Path) -> None:
    made = write_tiny(tmp_path, "llama")
    made.weights["model.layers.1.self_attn.o_proj.weight"][3, 50] = np.inf
    write_tiny(tmp_path, "llama", weights=made.weights)
    with pytest.raises(ValueError, match=r"o_proj.weight\" holds inf at \[3, 50\]"):
        load_tiny(tmp_path, tensor_parallel_size=2)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_silent_rank_ends_with_a_sentence(models: Models, rank: int) -> None:
    engine = models.engine("llama", None)
    drive = Drive(engine)
    slot, _ = drive.start(PROMPTS[3], max_tokens=99)
    assert engine.reserve(slot, 200)
    engine.silence(rank)
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=r"got no answer from .* within 4 s: the step is lost"):
        engine.decode([slot])
        engine.collect()
    assert time.monotonic() - begin < 30
    with pytest.raises(RuntimeError, match="a GPU failed before: load the model again"):
        engine.decode([slot])
    del engine, drive  # frees its memory without a wait


def test_an_error_of_all_ranks_ends_nothing(models: Models) -> None:
    engine = models.engine("llama", None)
    with pytest.raises(ValueError, match="slot 0 holds no sequence"):
        engine.decode([0])
    assert Drive(engine).one(PROMPTS[2], 20) == models.plain("llama", PROMPTS[2], 20)


def test_requests_get_the_error_of_a_rank(models: Models) -> None:
    engine = models.engine("llama", None, max_num_seqs=2)
    runner = Runner(engine, page_size=PAGE)
    try:
        jobs = [Job(PROMPTS[i], 400) for i in (1, 2)]
        jobs[0].before_item = lambda: engine.silence(1)
        runner.submit(*(job.request for job in jobs))
        for job in jobs:
            with pytest.raises(RuntimeError, match=r"got no answer|failed before"):
                job.wait()
    finally:
        runner.close()


# ---- the package


def test_llm_and_plan(capsys: pytest.CaptureFixture[str]) -> None:
    with LLM(str(SHIPPED), device="cpu", tensor_parallel_size=2, num_threads=1) as llm:
        params = SamplingParams(max_tokens=40, temperature=0.8, seed=7)
        assert llm.draft_spec is not None
        drafted = llm.generate("def add(", params)[0].outputs[0].token_ids
    with LLM(
        str(SHIPPED),
        device="cpu",
        tensor_parallel_size=2,
        num_threads=1,
        speculative_config=SpeculativeConfig(no_speculation=True),
    ) as llm:
        assert llm.generate("def add(", params)[0].outputs[0].token_ids == drafted
    arguments = ["--model", str(SHIPPED), "--memory-plan", "--device", "cpu"]
    assert cli.main([*arguments, "--tensor-parallel-size", "2"]) == 0
    text = capsys.readouterr()
    assert "GPU 0 of 2" in text.out + text.err and "GPU 1 of 2" in text.out + text.err


@pytest.mark.parametrize("size", [0, 3, 16])
def test_sizes_that_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match="tensor_parallel_size is"):
        EngineConfig(tensor_parallel_size=size)
