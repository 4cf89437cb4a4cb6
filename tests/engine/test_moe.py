"""Mixtures of experts: logits against transformers, and texts that depend on no other text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.drafted import SAMPLINGS, TREES, Drive, Models
from tests.reference.engines import engine_logits, extension_or_skip, load_tiny, random_ids
from tests.reference.hf_model import hf_logits
from tests.reference.numpy_model import NumpyModel
from tests.reference.tiny_checkpoints import TinyCheckpoint, fuse_experts, write_tiny
from tests.tolerances import LOGITS, LOGITS_CUDA, assert_close

extension_or_skip()

FAMILY = "qwen3moe"


def write_moe(directory: Path, **overrides: Any) -> TinyCheckpoint:
    return write_tiny(directory, FAMILY, **overrides)


def hf_reference(tiny: TinyCheckpoint, ids: list[int]) -> Any:
    pytest.importorskip("transformers", reason="the reference needs transformers")
    return hf_logits(tiny.config, tiny.weights, ids)


CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "not renormalised": {"norm_topk_prob": False},
    "tied head": {"tie_word_embeddings": True},
    "one expert": {"num_experts": 1, "num_experts_per_tok": 1},
    "all experts": {"num_experts": 5, "num_experts_per_tok": 5},
    "many experts": {"num_experts": 61, "num_experts_per_tok": 8, "moe_intermediate_size": 8},
    "dense layers": {"num_hidden_layers": 5, "mlp_only_layers": [0, 3]},
    "every second layer": {"num_hidden_layers": 5, "decoder_sparse_step": 2},
    "no layer": {"decoder_sparse_step": 3},
    "odd multiples of 8": {"hidden_size": 136, "moe_intermediate_size": 88, "head_dim": 16},
    "wide experts": {"moe_intermediate_size": 264},
    "window": {"use_sliding_window": True, "sliding_window": 20},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_config(name: str, tmp_path: Path) -> None:
    tiny = write_moe(tmp_path, seed=len(name), **CONFIGS[name])
    ids = random_ids(203, 70)
    assert_close(engine_logits(tmp_path, ids), hf_reference(tiny, ids), LOGITS["float32"])


SHARED: dict[str, dict[str, Any]] = {
    "plain": {},
    "renormalised": {"norm_topk_prob": True},
    "wide": {"shared_expert_intermediate_size": 264},
    "dense layers": {"num_hidden_layers": 3, "mlp_only_layers": [1]},
    "no bias": {"qkv_bias": False},
}


@pytest.mark.parametrize("name", SHARED)
def test_shared_expert(name: str, tmp_path: Path) -> None:
    config = {"norm_topk_prob": False} | SHARED[name]
    tiny = write_tiny(tmp_path / "made", "qwen2moe", **config)
    weights = tiny.weights
    if name == "no bias":
        weights = without(weights, ".bias")
    tiny = write_tiny(tmp_path / "files", "qwen2moe", weights=weights, **config)
    ids = random_ids(203, 70)
    logits = engine_logits(tmp_path / "files", ids, chunk_length=33)
    assert_close(logits, hf_reference(tiny, ids), LOGITS["float32"])
    assert_close(logits, NumpyModel(tiny.fields(), weights).logits(ids), LOGITS["float32"])


@pytest.mark.parametrize("length", [1, 2, 3, 13, 31, 64])
def test_length(length: int, tmp_path: Path) -> None:
    tiny = write_moe(tmp_path)
    ids = random_ids(203, length)
    assert_close(engine_logits(tmp_path, ids), hf_reference(tiny, ids), LOGITS["float32"])


@pytest.mark.parametrize("chunk_length", [1, 7, 64])
def test_chunks(chunk_length: int, tmp_path: Path) -> None:
    write_moe(tmp_path)
    ids = random_ids(203, 133)
    whole = engine_logits(tmp_path, ids)
    np.testing.assert_array_equal(engine_logits(tmp_path, ids, chunk_length=chunk_length), whole)


def test_more_tokens_than_a_group(tmp_path: Path) -> None:
    """A step of more than 1024 tokens runs in groups."""
    tiny = write_moe(tmp_path, num_hidden_layers=1, max_position_embeddings=2048)
    ids = random_ids(203, 1100)
    logits = engine_logits(tmp_path, ids, chunk_length=1100)
    np.testing.assert_array_equal(logits, engine_logits(tmp_path, ids, chunk_length=500))
    assert_close(logits[-9:], hf_reference(tiny, ids)[-9:], LOGITS["float32"])


def test_tied_router_scores(tmp_path: Path) -> None:
    """Experts 1, 4 and 5 always have equal scores; the lower ones are chosen."""
    tiny = write_moe(tmp_path / "made", num_experts_per_tok=3)
    weights = dict(tiny.weights)
    for layer in range(2):
        gate = weights[f"model.layers.{layer}.mlp.gate.weight"].copy()
        gate[[4, 5]] = gate[1]
        weights[f"model.layers.{layer}.mlp.gate.weight"] = gate
    write_moe(tmp_path / "tied", weights=weights, num_experts_per_tok=3)
    ids = random_ids(203, 40)
    reference = NumpyModel(tiny.fields(), weights).logits(ids)
    assert_close(engine_logits(tmp_path / "tied", ids), reference, LOGITS["float32"])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_dtype(dtype: str, tmp_path: Path) -> None:
    """A rounded score may choose another expert, so all experts are chosen here."""
    tiny = write_moe(tmp_path, dtype=dtype, num_experts=3, num_experts_per_tok=3)
    ids = random_ids(203, 133)
    reference = NumpyModel(tiny.fields(), tiny.weights).logits(ids)
    assert_close(engine_logits(tmp_path, ids), reference, LOGITS[dtype])


@pytest.mark.parametrize("shards", [1, 3])
def test_fused_experts(shards: int, tmp_path: Path) -> None:
    tiny = write_moe(tmp_path / "apart", mlp_only_layers=[1], num_hidden_layers=3)
    fused = fuse_experts(tiny.config, tiny.weights)
    assert fused["model.layers.0.mlp.experts.gate_up_proj"].shape == (6, 80, 64)
    write_tiny(
        tmp_path / "fused",
        FAMILY,
        weights=fused,
        shards=shards,
        mlp_only_layers=[1],
        num_hidden_layers=3,
    )
    ids = random_ids(203, 20)
    np.testing.assert_array_equal(
        engine_logits(tmp_path / "fused", ids), engine_logits(tmp_path / "apart", ids)
    )


def test_fused_experts_in_a_torch_file(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="writing .bin files needs torch")
    tiny = write_moe(tmp_path)
    ids = random_ids(203, 20)
    before = engine_logits(tmp_path, ids)
    (tmp_path / "model.safetensors").unlink()
    fused = fuse_experts(tiny.config, tiny.weights)
    state = {name: torch.from_numpy(np.array(array)) for name, array in fused.items()}
    torch.save(state, tmp_path / "pytorch_model.bin")
    np.testing.assert_array_equal(engine_logits(tmp_path, ids), before)


def test_saved_by_transformers(tmp_path: Path) -> None:
    """A directory that transformers 5 writes: num_local_experts, rope_parameters."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=203,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=40,
        initializer_range=0.3,
        eos_token_id=2,
    )
    model = transformers.Qwen3MoeForCausalLM(config).float().eval()
    model.save_pretrained(tmp_path)
    ids = random_ids(203, 30)
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].numpy()
    assert_close(engine_logits(tmp_path, ids), expected, LOGITS["float32"])


# ---- files that do not fit


def without(weights: dict[str, Any], part: str) -> dict[str, Any]:
    return {name: array for name, array in weights.items() if part not in name}


def test_missing_expert(tmp_path: Path) -> None:
    tiny = write_moe(tmp_path / "made")
    write_moe(tmp_path / "bad", weights=without(tiny.weights, "layers.1.mlp.experts.4."))
    message = (
        r"3 tensors are missing that config.json asks for: "
        r"model.layers.1.mlp.experts.4.down_proj.weight, "
        r"model.layers.1.mlp.experts.4.gate_proj.weight, "
        r"model.layers.1.mlp.experts.4.up_proj.weight$"
    )
    with pytest.raises(ValueError, match=message):
        load_tiny(tmp_path / "bad")


def test_surplus_expert(tmp_path: Path) -> None:
    write_moe(tmp_path)
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"num_experts": 6', '"num_experts": 5'))
    message = (
        r"mlp.experts.5.\w+_proj.weight' is of expert 5, but config.json has 5 experts, "
        r"expected 0 to 4$"
    )
    with pytest.raises(ValueError, match=message):
        load_tiny(tmp_path)


def test_fused_experts_of_another_number(tmp_path: Path) -> None:
    tiny = write_moe(tmp_path)
    write_moe(tmp_path, weights=fuse_experts(tiny.config, tiny.weights), num_experts=7)
    message = r"gate_up_proj has shape \[6, 80, 64\], expected \[7, 80, ...\] \(together "
    with pytest.raises(ValueError, match=message):
        load_tiny(tmp_path)


# ---- the text of a sequence


PROMPTS = [random_ids(160, length, seed=length) for length in (1, 65, 130)]


@pytest.mark.parametrize(
    ("family", "kind", "tree"),
    [
        *((FAMILY, kind, tree) for kind in ("noisy", "eagle3") for tree in ("chain", "full")),
        (FAMILY, "ngram", "chain"),
        (FAMILY, "itself", "narrow"),
        ("qwen2moe", "noisy", "full"),
        ("qwen3moe_gptq", "noisy", "narrow"),
        ("qwen2moe_awq", "ngram", "chain"),
    ],
)
def test_speculation_changes_no_token(models: Models, family: str, kind: str, tree: str) -> None:
    drive = Drive(models.drafted(kind, family, TREES[tree]), ahead=2)
    for ids, name in zip(PROMPTS, SAMPLINGS):
        fields = SAMPLINGS[name]
        assert drive.one(ids, 40, **fields) == models.plain(family, ids, 40, **fields), name


def test_other_sequences_change_no_token(models: Models) -> None:
    engine = models.engine(FAMILY, None, max_num_seqs=4)
    drive = Drive(engine)
    fields = SAMPLINGS["seeded"]
    slots, tokens = [], []
    for ids in PROMPTS:
        slot, first = drive.start(ids, max_tokens=30, **fields)
        slots.append(slot)
        tokens.append([first])
    for step in range(1, 30):
        for slot, ids in zip(slots, PROMPTS):
            assert engine.reserve(slot, len(ids) + step)
        engine.decode(slots)
        for output in engine.collect():
            tokens[slots.index(output.slot)] += output.tokens
    assert tokens == [models.plain(FAMILY, ids, 30, **fields) for ids in PROMPTS]


def test_prefix_cache_changes_no_token(models: Models) -> None:
    from tests.engine.prefix import Job, running

    engine = models.engine(FAMILY, None, max_num_seqs=2)
    ids = PROMPTS[2]
    fields = SAMPLINGS["seeded"]
    with running(engine) as (runner, _):
        texts = []
        for _ in range(2):
            job = Job(ids, 30, **fields)
            runner.submit(job.request)
            texts.append(job.wait())
        assert job.request.cached_tokens == 128
    assert texts == [models.plain(FAMILY, ids, 30, **fields)] * 2


def test_sampled_logits_of_a_decode_step_match_prefill(models: Models) -> None:
    """Decoding with the experts of one token gives the tokens of scoring the whole text."""
    if models.device == "cuda":
        pytest.skip("prefill and decode steps may differ in the last bits on CUDA")
    ids = PROMPTS[1]
    tokens = models.plain(FAMILY, ids, 20)
    logits = engine_logits(models.target(FAMILY).directory, [*ids, *tokens])
    assert logits[len(ids) - 1 : -1].argmax(axis=1).tolist() == tokens


def test_floor_counts_the_experts_of_one_token(tmp_path: Path) -> None:
    from cpmcu.benchmarks.decoding import step_bytes

    def floor_of(top_k: int) -> int:
        write_moe(tmp_path, num_experts_per_tok=top_k)
        loaded = load_tiny(tmp_path)
        return step_bytes(loaded.engine, loaded.spec, 64)

    expert = 2 * 3 * 40 * 64 * 4  # layers, matrices, sizes, bytes of a number
    assert floor_of(6) - floor_of(2) == 4 * expert


# ---- CUDA against the CPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_cuda(dtype: str, tmp_path: Path) -> None:
    write_moe(tmp_path, dtype=dtype, head_dim=64, num_experts=3, num_experts_per_tok=3)
    ids = random_ids(203, 133)
    on_cpu = engine_logits(tmp_path, ids)
    assert_close(engine_logits(tmp_path, ids, device="cuda"), on_cpu, LOGITS_CUDA[dtype])
