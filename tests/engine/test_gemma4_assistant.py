"""Gemma 4's assistant against transformers: the same drafts, and the same text as without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from cpmcu.config import EngineConfig, SpeculativeConfig
from cpmcu.loading.loader import load_model
from tests.engine.drafted import COUNT, PROMPTS, QUANT_CONFIGS, SAMPLINGS, TREES, VOCAB, Drive
from tests.engine.harness import SMALL
from tests.engine.prefix import Job, running
from tests.engine.test_mixed import compressed, group
from tests.missing import missing
from tests.reference.engines import extension_or_skip
from tests.reference.hf_model import hf_model
from tests.reference.tiny_checkpoints import TinyCheckpoint, write_safetensors, write_tiny
from tests.reference.tiny_mixed import write_mixed

C = extension_or_skip()

LAYERS = ["sliding_attention", "full_attention"] * 2
TARGETS: dict[str, dict[str, Any]] = {
    "dense": {"num_hidden_layers": 4, "layer_types": LAYERS, "sliding_window": 100},
    "E": {
        "num_hidden_layers": 6,
        "layer_types": LAYERS + LAYERS[:2],
        "sliding_window": 100,
        "attention_k_eq_v": False,
        "hidden_size_per_layer_input": 24,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
    },
}
OF_TEXT = ("head_dim", "global_head_dim", "num_key_value_heads", "num_global_key_value_heads")
OF_TEXT += ("sliding_window", "rope_parameters", "vocab_size", "attention_k_eq_v")
OF_TEXT += ("max_position_embeddings", "rms_norm_eps")


@pytest.fixture(autouse=True)
def sharing_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule that transformers states for the layers whose keys an assistant reads.

    transformers 5.24 raises for a model without keys of its own, and returns nothing from a target
    whose layers share nothing.
    """
    from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig

    if not hasattr(Gemma4TextConfig, "kv_sharing_modes"):
        missing("Gemma 4's assistants need transformers 5.24 or later")

    def modes(config: Any) -> list[str | None]:
        num_layers = config.num_hidden_layers
        first = num_layers - config.num_kv_shared_layers
        found: list[str | None] = [None if i < first else "reuse" for i in range(num_layers)]
        for kind in set(config.layer_types[:first]):
            last = max(i for i in range(first) if config.layer_types[i] == kind)
            found[last] = "store"
        return found

    monkeypatch.setattr(Gemma4TextConfig, "kv_sharing_modes", property(modes))


def assistant(target: TinyCheckpoint, **keys: Any) -> Any:
    """A random assistant of transformers for a target."""
    import torch
    from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM

    text = {
        **{key: target.config[key] for key in OF_TEXT if key in target.config},
        "model_type": "gemma4_text",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "final_logit_softcapping": None,
        "pad_token_id": None,
        "tie_word_embeddings": True,
        "enable_moe_block": False,
    }
    config = Gemma4AssistantConfig(
        text_config=text, backbone_hidden_size=target.config["hidden_size"], **keys
    )
    torch.manual_seed(0)
    model = Gemma4AssistantForCausalLM(config).float().eval()
    for name, tensor in model.named_parameters():
        if tensor.dim() == 1:
            torch.nn.init.uniform_(tensor, 0.5, 1.5)
        else:
            torch.nn.init.normal_(tensor, std=tensor.shape[-1] ** -0.5)
        if "embed_tokens" in name:
            tensor.data *= 6
    return model


def write(directory: Path, model: Any, dtype: str = "float32", **keys: Any) -> Path:
    """The files of an assistant, as published: text_config holds the keys of the layers."""
    directory.mkdir()
    named = {"architectures": [type(model).__name__], "torch_dtype": dtype}
    config = {**model.config.to_dict(), **named, **keys}
    (directory / "config.json").write_text(json.dumps(config, default=str))
    tensors = {
        name: tensor.numpy()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    write_safetensors(directory / "model.safetensors", tensors, dtype)
    return directory


def load(target: Path, draft: Path | None, device: str = "cpu", **keys: Any) -> Any:
    names = ("max_num_seqs", "kv_cache_dtype", "tensor_parallel_size")
    engine = {name: keys.pop(name) for name in names if name in keys}
    named = {"draft_model_path": str(draft)} if draft else {"no_speculation": True}
    config = EngineConfig(
        device=device,
        memory_limit=0.2,
        speculative_config=SpeculativeConfig(**named, **keys),
        **{"max_num_seqs": 1, "chunk_length": 128, "num_threads": 1, **engine},
    )
    return load_model(str(target), config=config).engine


def chain_of_transformers(target: Any, model: Any, text: list[int], count: int) -> list[int]:
    """The chain that transformers drafts after `text`, whose last token is not cached."""
    import torch

    with torch.no_grad():
        output = target(
            torch.tensor([text[:-1]]),
            output_hidden_states=True,
            return_shared_kv_states=True,
            use_cache=True,
        )
        hidden, token = output.hidden_states[-1][:, -1:], torch.tensor([text[-1:]])
        drafted = []
        for _ in range(count):
            embedded = target.get_input_embeddings()(token)
            made = model(
                inputs_embeds=torch.cat([embedded, hidden], -1),
                position_ids=torch.tensor([[len(text) - 1]]),
                shared_kv_states=dict(output.shared_kv_states.items()),
            )
            token, hidden = made.logits.argmax(-1), made.last_hidden_state
            drafted.append(int(token))
    return drafted


@pytest.mark.parametrize(
    ("kind", "num_ranks"), [("dense", 1), ("dense", 2), ("dense", 4), ("E", 1), ("E", 2)]
)
def test_drafts_are_those_of_transformers(kind: str, num_ranks: int, tmp_path: Path) -> None:
    target = write_tiny(tmp_path / "target", "gemma4", vocab_size=VOCAB, **TARGETS[kind])
    model = assistant(target)
    reference = hf_model(target.config, target.weights)
    ranks = {"tensor_parallel_size": num_ranks}
    engine = load(target.directory, write(tmp_path / "draft", model), **ranks, **TREES["chain"])
    seen = set()
    for length in (1, 2, 40, 64, 65):
        text = [int(i) for i in np.random.default_rng(length).integers(VOCAB, size=length)]
        slot, first = Drive(engine).start(text, 30, max_tokens=60)
        text.append(first)
        for _ in range(5):
            assert engine.reserve(slot, len(text) + engine.tokens_per_step)
            ((tokens, parents),) = engine.begin_masked([slot], None)
            assert tokens[0] == text[-1] and parents[1:] == [0, 1, 2, 3]
            expected = chain_of_transformers(reference, model, text, 4)
            assert tokens[1:] == expected, length
            engine.end_masked([-1] * len(tokens), np.zeros((0, 0), np.uint32))
            (output,) = engine.collect()
            text += output.tokens
            seen |= set(expected)
        engine.release(slot)
    assert len(seen) > 10


def pair(directory: Path, device: str, kind: str = "dense", **keys: Any) -> tuple[Path, Path]:
    """The files of a target and its assistant."""
    dtype = "bfloat16" if device == "cuda" else "float32"
    sizes = {"hidden_size": 128, "head_dim": 64} if device == "cuda" else {}
    sizes |= {"vocab_size": VOCAB, **TARGETS[kind], "sliding_window": 33}
    target = write_tiny(directory / "target", "gemma4", dtype=dtype, **sizes)
    return target.directory, write(directory / "draft", assistant(target, **keys), dtype)


@pytest.mark.parametrize("tree", ["chain", "wide"] if SMALL else list(TREES))
@pytest.mark.parametrize("kind", TARGETS)
def test_the_text_is_the_same(kind: str, tree: str, tmp_path: Path, device: str) -> None:
    """A draft does not change the text, also far beyond the window and after plain steps."""
    target, draft = pair(tmp_path, device, kind)
    plain = Drive(load(target, None, device))
    shapes = iter([None, (0, 1), None, None] * 1000)
    drive = Drive(load(target, draft, device, **TREES[tree]), 2, lambda: next(shapes))
    for ids in PROMPTS[::3]:
        for fields in (SAMPLINGS["greedy"], SAMPLINGS["all"]):
            expected = plain.one(ids, COUNT, **fields)
            assert drive.one(ids, COUNT, 50, **fields) == expected, len(ids)


@pytest.mark.parametrize("kind", TARGETS)
def test_the_text_of_two_ranks(kind: str, tmp_path: Path, device: str) -> None:
    """Each rank has the heads that read its part of the keys. The memory of q_proj is halved."""
    if device == "cuda" and C.device_count() < 2:
        pytest.skip("one GPU")
    target, draft = pair(tmp_path, device, kind)
    ranks, fp8 = {"tensor_parallel_size": 2}, {"kv_cache_dtype": "fp8_e4m3"}
    for config, tree in ((ranks, "chain"), ({**ranks, **fp8}, "wide")):
        plain = Drive(load(target, None, device, **config))
        drive = Drive(load(target, draft, device, **config, **TREES[tree]), 2)
        for ids, sampling in zip(PROMPTS[3:6], ("greedy", "all", "greedy"), strict=True):
            expected = plain.one(ids, COUNT, **SAMPLINGS[sampling])
            assert drive.one(ids, COUNT, 50, **SAMPLINGS[sampling]) == expected, len(ids)
    one = load(target, draft, device, **TREES["chain"]).memory_plan(0)
    of_one, of_two = (
        {row["name"]: row["bytes"] for row in rows if row["name"].startswith("draft.layers.0.")}
        for rows in (one, drive.engine.memory_plan(0))
    )
    halved = {name: of_one[f"draft.layers.0.self_attn.{name}_proj"] // 2 for name in "qo"}
    assert of_two == of_one | {f"draft.layers.0.self_attn.{n}_proj": halved[n] for n in "qo"}


@pytest.mark.parametrize("form", ["int8", "gptq4_g32"])
def test_a_quantised_assistant_of_two_ranks(form: str, tmp_path: Path) -> None:
    """The ranks have parts of the stored integers, and draft what one rank drafts."""
    target, draft = pair(tmp_path, "cpu")
    weights = load_file(draft / "model.safetensors")
    config = json.loads((draft / "config.json").read_text())
    quant = {**QUANT_CONFIGS, "int8": compressed(group(["Linear"], "int8"))}[form]
    forms = dict.fromkeys(("layers.", "pre_projection", "post_projection"), form)
    made = write_mixed(tmp_path / "quantised", config, weights, forms, quant)
    trees = []
    for num_ranks in (1, 2):
        ranks = {"tensor_parallel_size": num_ranks}
        engine = load(target, made, **ranks, **TREES["wide"])
        slot, _ = Drive(engine).start(PROMPTS[3], 30, max_tokens=60)
        assert engine.reserve(slot, len(PROMPTS[3]) + 1 + engine.tokens_per_step)
        trees.append(engine.begin_masked([slot], None))
        engine.end_masked([-1] * len(trees[-1][0][0]), np.zeros((0, 0), np.uint32))
        engine.collect()
    assert trees[0] == trees[1] and len(trees[0][0][0]) == 33


def test_the_text_is_the_same_with_an_fp8_cache(tmp_path: Path, device: str) -> None:
    target, draft = pair(tmp_path, device)
    fp8 = {"kv_cache_dtype": "fp8_e4m3"}
    plain = Drive(load(target, None, device, **fp8))
    drive = Drive(load(target, draft, device, **fp8, **TREES["narrow"]))
    for ids in PROMPTS[3:6]:
        assert drive.one(ids, COUNT) == plain.one(ids, COUNT)


def test_a_prefix_hit_changes_no_token(tmp_path: Path, device: str) -> None:
    target, draft = pair(tmp_path, device)
    plain = Drive(load(target, None, device))
    with running(load(target, draft, device, max_num_seqs=3, **TREES["narrow"])) as (runner, cache):
        for ids in (PROMPTS[5], [*PROMPTS[5], 7], PROMPTS[6]):
            jobs = [Job(ids, 30, **SAMPLINGS[name]) for name in ("greedy", "seeded", "all")]
            runner.submit(*(job.request for job in jobs))
            for job, name in zip(jobs, ("greedy", "seeded", "all")):
                assert job.wait() == plain.one(ids, 30, **SAMPLINGS[name])
            runner.call(lambda _: cache.check())
        assert cache.counters.hits > 0


def test_ordered_embeddings_are_not_read(tmp_path: Path) -> None:
    """The engine computes the logits of all tokens, so it needs no head over clusters."""
    keys = {"use_ordered_embeddings": True, "num_centroids": 4, "centroid_intermediate_top_k": 2}
    target, draft = pair(tmp_path, "cpu", **keys)
    ids = PROMPTS[3]
    expected = Drive(load(target, None)).one(ids, 20)
    assert Drive(load(target, draft, **TREES["chain"])).one(ids, 20) == expected


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "width": ({"backbone_hidden_size": 96}, "backbone_hidden_size is 96, expected 64"),
    "per-layer input": (
        {"text_config": {"hidden_size_per_layer_input": 8}},
        "hidden_size_per_layer_input is 8, expected 0",
    ),
    "heads": (
        {"text_config": {"num_key_value_heads": 4}},
        "num_key_value_heads of sliding_attention is 4, expected 2, as in layer 2 of the target",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_assistant_of_another_target_is_refused(name: str, tmp_path: Path) -> None:
    keys, message = REFUSED[name]
    target = write_tiny(tmp_path / "target", "gemma4", vocab_size=VOCAB, **TARGETS["dense"])
    model = assistant(target)
    text = model.config.to_dict()["text_config"]
    if "text_config" in keys:
        keys = {"text_config": {**text, **keys["text_config"]}}
    draft = write(tmp_path / "draft", model, **keys)
    with pytest.raises(ValueError, match=message):
        load(target.directory, draft)
    other = write_tiny(tmp_path / "llama", "llama", vocab_size=VOCAB)
    with pytest.raises(ValueError, match="model_type is 'llama', expected a Gemma 4 model"):
        load(other.directory, draft)
