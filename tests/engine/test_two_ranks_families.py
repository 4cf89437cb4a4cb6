"""Two ranks run families whose blocks have states of their own, and MLPs beside experts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.drafted import PROMPTS, QUANT_CONFIGS, SAMPLINGS, TREES, VOCAB, Drive, Models
from tests.engine.prefix import PAGE, Job, running
from tests.engine.test_swap_space import engine_of, runner_of, submit_and_check
from tests.reference.engines import check_ranks, extension_or_skip, prompt_logits, random_ids
from tests.reference.tiny_fp8 import write_fp8
from tests.reference.tiny_mixed import write_mixed

C = extension_or_skip()

# Name -> family, changes of its config.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("lfm2", {"num_hidden_layers": 4}),
    "lfm2_moe": ("lfm2moe", {"num_hidden_layers": 4, "moe_intermediate_size": 48}),
    "lfm3": ("lfm3", {"num_hidden_layers": 6}),
    "nemotron_h": (
        "nemotron",
        {
            "num_hidden_layers": 8,
            "mamba_num_heads": 16,
            "moe_intermediate_size": 48,
            "moe_shared_expert_intermediate_size": 64,
        },
    ),
    "nemotron_h with latent experts in groups": (
        "nemotron",
        {
            "num_hidden_layers": 4,
            "hybrid_override_pattern": "ME*E",
            "mamba_num_heads": 16,
            "moe_intermediate_size": 48,
            "moe_shared_expert_intermediate_size": 64,
            "moe_latent_size": 32,
            "n_group": 4,
            "topk_group": 2,
        },
    ),
    "gemma4 with experts": (
        "gemma4",
        {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 2,
            "moe_intermediate_size": 48,
        },
    ),
    # The second half of the layers reads the keys of the first.
    "gemma4 with embeddings of each layer": (
        "gemma4",
        {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "hidden_size_per_layer_input": 16,
            "num_kv_shared_layers": 2,
        },
    ),
    # The heads of the mamba blocks are one group.
    "granite4 with mamba": (
        "granitehybrid",
        {
            "num_hidden_layers": 4,
            "layer_types": ["mamba", "attention", "mamba", "mamba"],
            "intermediate_size": 48,
            "shared_intermediate_size": 64,
        },
    ),
    "olmo2": ("olmo2", {}),
    "olmo3 with one key head": ("olmo3", {"num_hidden_layers": 4, "num_key_value_heads": 1}),
    "nemotron_h without experts": (
        "nemotron",
        {
            "num_hidden_layers": 4,
            "hybrid_override_pattern": "M-M*",
            "use_conv_bias": False,
            "mamba_num_heads": 32,
            "n_groups": 4,
        },
    ),
}

MLPS = ("w1", "w2", "w3")  # names in LFM

# With these sizes, each rank has whole groups and blocks.
QUANTISED: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2 in few bits": (
        "lfm2",
        {
            "num_hidden_layers": 4,
            "hidden_size": 256,
            "intermediate_size": 256,
            "num_attention_heads": 4,
        },
    ),
    "nemotron_h in few bits": (
        "nemotron",
        {
            "num_hidden_layers": 4,
            "hybrid_override_pattern": "M-M*",
            "hidden_size": 128,
            "intermediate_size": 256,
            "mamba_num_heads": 16,
        },
    ),
    "olmo2 in few bits": (
        "olmo2",
        {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4},
    ),
}


def models_of(name: str, root: Path, device: str) -> tuple[Models, str]:
    if device == "cuda" and C.device_count() < 2:
        pytest.skip("one GPU")
    family, changes = {**CASES, **QUANTISED}[name]
    return Models(root, device, num_ranks=2, **changes), family


@pytest.mark.parametrize("name", CASES)
def test_logits(name: str, device: str, tmp_path: Path) -> None:
    models, family = models_of(name, tmp_path, device)
    if device == "cpu":
        check_ranks(partial(models.engine, family, None), PROMPTS[5], 2e-5)
    else:
        make = partial(models.engine, family, None, dtype="float16")
        check_ranks(make, PROMPTS[5], 0.02, share=0.75)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_norms_over_heads_of_all_ranks(num_ranks: int, device: str, tmp_path: Path) -> None:
    """Each rank has all rows of q and k, but attends with its own heads."""
    if device == "cuda" and C.device_count() < num_ranks:
        pytest.skip("too few GPUs")
    models = Models(tmp_path, device, num_ranks=num_ranks)
    one = models.engine("olmo2", None, tensor_parallel_size=1)
    several = models.engine("olmo2", None)
    expected, got = (prompt_logits(engine, PROMPTS[5]) for engine in (one, several))
    tolerance = 2e-5 if device == "cpu" else 0.05
    assert 0 < np.abs(got - expected).max() < tolerance * np.abs(expected).max()

    def sizes(engine: Any) -> dict[str, int]:
        return {row["name"]: row["bytes"] for row in engine.memory_plan(0)}

    attention = "model.layers.1.self_attn."
    of_one, of_rank = (
        {name: sizes(engine)[attention + name] for name in ("q_proj", "q_norm", "k_norm", "o_proj")}
        for engine in (one, several)
    )
    # "q_proj" has q, k and v: four heads, two and two. Each rank has one head of v.
    assert of_rank.pop("q_proj") * 8 == of_one.pop("q_proj") * 7
    assert of_rank.pop("o_proj") * num_ranks == of_one.pop("o_proj")
    assert of_rank == of_one


def test_mamba_with_fewer_groups_than_ranks(device: str, tmp_path: Path) -> None:
    """Two ranks divide two groups. Each of four ranks has all of them."""
    if device == "cuda" and C.device_count() < 4:
        pytest.skip("too few GPUs")
    _, changes = CASES["nemotron_h without experts"]
    models = Models(tmp_path, device, **{**changes, "n_groups": 2})
    engines = {
        ranks: models.engine("nemotron", None, tensor_parallel_size=ranks) for ranks in (1, 2, 4)
    }
    logits = {ranks: prompt_logits(engine, PROMPTS[5]) for ranks, engine in engines.items()}
    tolerance = 2e-5 if device == "cpu" else 0.05
    for ranks in (2, 4):
        error = np.abs(logits[ranks] - logits[1]).max()
        assert 0 < error < tolerance * np.abs(logits[1]).max()
    (one, two, four) = (
        {
            row["name"]: row["bytes"]
            for row in engine.memory_plan(0)
            if row["name"] in ("model.layers.0.mamba.in_proj", "model.layers.0.mamba.state")
        }
        for engine in engines.values()
    )
    assert len(one) == 2
    assert two == {name: size // 2 for name, size in one.items()}
    assert four == one


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("lfm2 in few bits", "qwen"),
        *((name, form) for name in QUANTISED for form in ("mxfp8", "nvfp4mo")),
        ("olmo2 in few bits", "qwen"),
        ("olmo2 in few bits", "gptq4_g32"),
        ("nemotron_h in few bits", "gptq8z_g64"),
        ("nemotron_h in few bits", "ct_tensor"),
        ("nemotron_h in few bits", "ct_channel"),
    ],
)
def test_logits_of_packed_weights(name: str, form: str, device: str, tmp_path: Path) -> None:
    """in_proj is cut into its parts in each format."""
    models, family = models_of(name, tmp_path, device)
    made = models.target(family)
    is_fp8 = form not in QUANT_CONFIGS
    if is_fp8:
        write_fp8(made.directory, made.config, made.weights, form, extra=MLPS)
    else:
        forms = dict.fromkeys((*MLPS, ""), form)
        write_mixed(made.directory, made.config, made.weights, forms, QUANT_CONFIGS[form])
    tolerance = 2e-5 if device == "cpu" and not is_fp8 else 0.05
    check_ranks(partial(models.engine, family, None), PROMPTS[5], tolerance)


def test_blocks_with_one_scale_that_cannot_be_divided(tmp_path: Path) -> None:
    """The rows of dt in in_proj are fewer than a block of FP8."""
    models, family = models_of("nemotron_h in few bits", tmp_path, "cpu")
    made = models.target(family)
    write_fp8(made.directory, made.config, made.weights, "qwen")
    with pytest.raises(ValueError, match=r"in_proj.* cannot be divided among 2 GPUs"):
        models.engine(family, None)


@pytest.mark.parametrize("name", CASES)
def test_tokens(name: str, device: str, tmp_path: Path) -> None:
    """Chains, trees, chunks and prefix hits give the tokens of plain steps."""
    models, family = models_of(name, tmp_path, device)
    prompt, greedy = random_ids(VOCAB, 100), SAMPLINGS["greedy"]
    # The text has three tokens only, so that n-grams are often right.
    few = {**SAMPLINGS["seeded"], "logit_bias": [(5, 90.0), (9, 90.0), (17, 90.0)]}
    chain = Drive(models.drafted("ngram", family, TREES["narrow"]), ahead=2)
    draft = "itself" if family in ("gemma4", "olmo2", "olmo3") else "eagle"
    tree = Drive(models.drafted(draft, family, TREES["wide"]), ahead=2)
    for ids, fields in ((prompt[:1], greedy), (prompt, greedy), (prompt, few)):
        tokens = models.plain(family, ids, 40, **fields)
        assert chain.one(ids, 40, chunk=7, **fields) == tokens
        assert tree.one(ids, 40, chunk=7, **fields) == tokens
    assert max(chain.emitted) > 1
    with running(chain.engine) as (runner, _):
        for cached in (0, 100 // PAGE * PAGE):
            job = Job(prompt, 40, **few)
            runner.submit(job.request)
            assert job.wait() == tokens
            assert job.request.cached_tokens == cached


@pytest.mark.parametrize(
    "name",
    ["lfm3", "nemotron_h", "olmo2", "granite4 with mamba", "gemma4 with embeddings of each layer"],
)
def test_preemption(name: str, device: str, tmp_path: Path) -> None:
    models, family = models_of(name, tmp_path, device)
    engine, _ = engine_of(models, family, "ngram")
    runner = runner_of(engine, 100 * (engine.pages.page_bytes + engine.pages.slot_bytes))
    try:
        submit_and_check(runner, models, family)
    finally:
        runner.close()
