"""Models, a quantisation scheme, a block, drafters and parsers registered from outside the package.

A model is one decorated function, a parser of answers one decorated class. Each other part is one
C++ file in tests/plugins, compiled here as a plugin. A quantisation scheme and a drafter also have
a Python class.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from cpmcu.config import SpeculativeConfig
from cpmcu.drafters import registry
from cpmcu.drafters.model import DraftModel
from cpmcu.drafters.registry import (
    DraftFiles,
    DraftPlan,
    TargetModel,
    Tensors,
    find_drafter,
    register_drafter,
    registered_drafters,
)
from cpmcu.engine.prefix.disk import DiskStore
from cpmcu.engine.prefix.disk_tier import DiskTier
from cpmcu.loading.checkpoint import open_checkpoint
from cpmcu.loading.tensors import TensorMeta
from cpmcu.models.common import BuildOptions, SpecFields, read_spec
from cpmcu.models.registry import register_model, registered_models
from cpmcu.quant.registry import LinearOptions, QuantPlan, Repack, register_quant, registered_quants
from cpmcu.serving.chat.answers import AnswerParser
from cpmcu.serving.config import ServerConfig
from cpmcu.serving.reasoning_parsers.base import ReasoningParser
from cpmcu.serving.reasoning_parsers.registry import (
    find_reasoning_parser,
    register_reasoning_parser,
    registered_reasoning_parsers,
)
from cpmcu.serving.tool_parsers.base import Steps, ToolParser
from cpmcu.serving.tool_parsers.registry import (
    find_tool_format,
    register_tool_parser,
    registered_tool_parsers,
)
from tests.engine.harness import generate, make_engine, prefill, random_ids, sampling
from tests.engine.prefix import Job, running
from tests.reference.engines import prompt_logits
from tests.reference.tiny_checkpoints import random_weights, tiny_config
from tests.unit.plugins import VOCAB, load_plugin, write_model

if TYPE_CHECKING:
    from cpmcu import C

ROOT = Path(__file__).parents[2]


@register_model("ToyForCausalLM")
def build_toy(config: Mapping[str, Any], options: BuildOptions) -> SpecFields:
    """A Llama whose config has `dim` instead of `hidden_size`."""
    renamed = dict(config)
    renamed["hidden_size"] = renamed.pop("dim")
    return read_spec(renamed, options)


@register_quant("toy_ternary")
class Ternary:
    """int8 `weight_codes` 0, 1, 2 for -1, 0, 1, and one scale per row; packed at load time."""

    def matches(self, quant_config: Mapping[str, Any], tensors: Mapping[str, TensorMeta]) -> bool:
        return quant_config.get("quant_method") == "toy_ternary"

    def plan(self, config: Mapping[str, Any], tensors: Mapping[str, TensorMeta]) -> QuantPlan:
        repacks = []
        for name, meta in tensors.items():
            if name.endswith(".weight_codes"):
                rows, columns = meta.shape
                out = name.replace(".weight_codes", ".packed")
                outputs = (TensorMeta(out, "uint8", (rows, columns // 4)),)
                repacks.append(Repack((name,), outputs, _packer(name, out)))
        return QuantPlan(
            scheme="toy_ternary",
            linear_method="test_ternary",
            linear_overrides={"lm_head": "dense"},
            repacks=repacks,
        )


@register_quant("toy_int8")
class Int8Row:
    """int8 `weight` and float32 `weight_scale` [N], read by a layout of the method "packed"."""

    def matches(self, quant_config: Mapping[str, Any], tensors: Mapping[str, TensorMeta]) -> bool:
        return quant_config.get("quant_method") == "toy_int8"

    def plan(self, config: Mapping[str, Any], tensors: Mapping[str, TensorMeta]) -> QuantPlan:
        return QuantPlan(
            scheme="toy_int8",
            linear_method="packed",
            linear_options=LinearOptions(layout="test_int8_row"),
            linear_overrides={"lm_head": "dense"},
        )


def _packer(name: str, out: str) -> Any:
    def pack(arrays: Mapping[str, Any]) -> dict[str, Any]:
        codes = arrays[name].astype(np.uint8)
        parts = codes.reshape(codes.shape[0], -1, 4)
        return {out: (parts << np.array([0, 2, 4, 6], np.uint8)).sum(-1).astype(np.uint8)}

    return pack


@register_drafter("repeat")
class Repeat:
    """Drafts repetitions of the last token."""

    has_checkpoint = False

    def matches(self, config: Mapping[str, Any], tensors: Tensors) -> bool:
        return False

    def plan(
        self, draft: DraftFiles | None, target: TargetModel, speculation: SpeculativeConfig
    ) -> DraftPlan:
        return DraftPlan(chain=True)


@register_drafter("pair")
class Pair:
    """Drafts a tree with two branches: repetitions of the last token, and n-gram look-up."""

    has_checkpoint = False

    def matches(self, config: Mapping[str, Any], tensors: Tensors) -> bool:
        return False

    def plan(
        self, draft: DraftFiles | None, target: TargetModel, speculation: SpeculativeConfig
    ) -> DraftPlan:
        return DraftPlan(parts=(("repeat", DraftPlan()), ("ngram", DraftPlan())))


@register_model("MixedForCausalLM")
def build_mixed(config: Mapping[str, Any], options: BuildOptions) -> SpecFields:
    """Layers with different kinds, windows, rotary widths, heads and MLP widths."""
    fields = read_spec(config, options)
    narrow = {"num_key_value_heads": 1, "rope_inv_freq": list(fields.rope_inv_freq[:2])}
    layers = (
        (("attention", {"window": 20}), ("mlp", {"intermediate_size": 48})),
        (("memory", {"decay": 0.75}), ("mlp", {})),
        (("attention", narrow),),
        (("memory", {}), ("attention", {"window": 70})),
    )
    return replace(fields, layers=layers)


def mixed_weights(config: dict[str, Any]) -> dict[str, Any]:
    rng = np.random.default_rng(5)
    weights, hidden = random_weights(config), config["hidden_size"]
    for part in ("gate", "up"):
        name = f"model.layers.0.mlp.{part}_proj.weight"
        weights[name] = np.ascontiguousarray(weights[name][:48])
    name = "model.layers.0.mlp.down_proj.weight"
    weights[name] = np.ascontiguousarray(weights[name][:, :48])
    for part in ("k", "v"):
        name = f"model.layers.2.self_attn.{part}_proj.weight"
        weights[name] = np.ascontiguousarray(weights[name][: config["head_dim"]])
    for layer, gone in ((1, "self_attn"), (1, "input_layernorm"), (2, "mlp"), (3, "mlp")):
        for name in list(weights):
            if name.startswith(f"model.layers.{layer}.{gone}"):
                del weights[name]
    del weights["model.layers.2.post_attention_layernorm.weight"]
    del weights["model.layers.3.post_attention_layernorm.weight"]
    for layer in (1, 3):
        prefix = f"model.layers.{layer}.memory"
        weights[f"{prefix}_norm.weight"] = rng.uniform(0.5, 1.5, hidden).astype(np.float32)
        weights[f"{prefix}.gain"] = (rng.standard_normal(hidden) * 0.3).astype(np.float32)
    return weights


@pytest.fixture(scope="module")
def ternary_plugin(tmp_path_factory: pytest.TempPathFactory) -> None:
    load_plugin("ternary", tmp_path_factory.mktemp("plugin"))


@pytest.fixture(scope="module")
def layout_plugin(tmp_path_factory: pytest.TempPathFactory) -> None:
    load_plugin("int8_row_layout", tmp_path_factory.mktemp("plugin"))


@pytest.fixture(scope="module")
def repeat_plugin(tmp_path_factory: pytest.TempPathFactory) -> None:
    load_plugin("repeat_drafter", tmp_path_factory.mktemp("plugin"))


@pytest.fixture(scope="module")
def pair_plugin(tmp_path_factory: pytest.TempPathFactory, repeat_plugin: None) -> None:
    load_plugin("pair_drafter", tmp_path_factory.mktemp("plugin"))


@pytest.fixture(scope="module")
def mixed_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixed")
    load_plugin("memory_block", folder)
    config = tiny_config("llama", vocab_size=VOCAB, num_hidden_layers=4)
    weights = mixed_weights(config)
    return write_model(folder / "model", config | {"architectures": ["MixedForCausalLM"]}, weights)


def test_toy_model_from_outside(tmp_path: Path) -> None:
    config = tiny_config("llama", vocab_size=VOCAB)
    weights = random_weights(config)
    plain = make_engine(write_model(tmp_path / "plain", config, weights))
    toy_config = {**config, "architectures": ["ToyForCausalLM"], "dim": config["hidden_size"]}
    toy_config.pop("hidden_size")
    toy = make_engine(write_model(tmp_path / "toy", toy_config, weights))
    ids = random_ids(10, VOCAB)
    assert generate(toy, ids, 20) == generate(plain, ids, 20)
    assert registered_models()["ToyForCausalLM"] == __file__


def test_toy_quantisation_from_outside(tmp_path: Path, ternary_plugin: None) -> None:
    from cpmcu import C

    config = tiny_config("llama", vocab_size=VOCAB)
    dense, packed = random_weights(config), {}
    for name in list(dense):
        if not name.endswith("_proj.weight"):
            packed[name] = dense[name]
            continue
        codes = np.clip(np.round(dense[name] * np.sqrt(dense[name].shape[1])), -1, 1)
        scale = np.abs(dense[name]).mean(axis=1).astype(np.float32)
        dense[name] = (codes * scale[:, None]).astype(np.float32)
        stem = name.removesuffix(".weight")
        packed[stem + ".weight_codes"] = (codes + 1).astype(np.int32)
        packed[stem + ".scale"] = scale
    plain = make_engine(write_model(tmp_path / "dense", config, dense))
    quant_config = {**config, "quantization_config": {"quant_method": "toy_ternary"}}
    ternary = make_engine(write_model(tmp_path / "ternary", quant_config, packed))
    ids = random_ids(10, VOCAB)
    np.testing.assert_allclose(
        prompt_logits(ternary, ids), prompt_logits(plain, ids), rtol=1e-4, atol=1e-4
    )
    assert len(generate(ternary, ids, 20)) == 20
    assert "test_ternary" in C.registered()["linear"]
    assert registered_quants()["toy_ternary"] == __file__


@pytest.mark.parametrize("family", ["llama", "qwen3moe"])
def test_a_layout_of_packed_weights_from_outside(
    tmp_path: Path, layout_plugin: None, family: str
) -> None:
    """The generic path of the layout gives the logits of dequantised weights. Drafts stay exact."""
    from cpmcu import C

    sizes = {"hidden_size": 160, "intermediate_size": 304, "moe_intermediate_size": 48}
    config = tiny_config(family, vocab_size=VOCAB, **sizes)
    weights, packed = random_weights(config), {}
    for name, weight in weights.items():
        packed[name] = torch.from_numpy(weight)
        if name.endswith("_proj.weight"):
            scale = (np.abs(weight).max(axis=1) / 127).astype(np.float32)
            codes = np.round(weight / scale[:, None]).astype(np.int8)
            weights[name] = (codes * scale[:, None]).astype(np.float32)
            packed[name] = torch.from_numpy(codes)
            packed[name.replace(".weight", ".weight_scale")] = torch.from_numpy(scale)
    plain = make_engine(write_model(tmp_path / "dense", config, weights))
    directory = write_model(tmp_path / "int8", config, {})
    quantised = {**config, "quantization_config": {"quant_method": "toy_int8"}}
    (directory / "config.json").write_text(json.dumps(quantised))
    save_file(packed, directory / "model.safetensors")
    engine = make_engine(directory)
    ids = random_ids(70, VOCAB)
    found = prompt_logits(engine, ids)
    np.testing.assert_allclose(found, prompt_logits(plain, ids), rtol=1e-4, atol=1e-4)
    speculation = SpeculativeConfig(method="ngram", spec_num_iter=3, spec_auto=False)
    drafted = make_engine(directory, speculative_config=speculation)
    expected = generate(engine, ids, 40)
    assert generate(drafted, ids, 40)[:40] == expected
    assert generate(engine, ids, 40, chunk=17) == expected
    assert "test_int8_row" in C.registered()["layout"]


def test_drafter_from_outside(tmp_path: Path, repeat_plugin: None) -> None:
    from cpmcu import C

    config = tiny_config("llama", vocab_size=VOCAB)
    model = write_model(tmp_path / "model", config, random_weights(config))
    speculation = SpeculativeConfig(method="repeat", spec_num_iter=3)
    plain, repeat = make_engine(model), make_engine(model, speculative_config=speculation)
    assert repeat.tokens_per_step == 4
    ids = random_ids(10, VOCAB)
    for fields in ({}, {"temperature": 1.0, "seed": 7}):
        assert generate(repeat, ids, 40, **fields)[:40] == generate(plain, ids, 40, **fields)
    bias = {"logit_bias": [(5, 100.0)]}  # now the draft is right
    steps = repeat.counters["steps"]
    assert generate(repeat, ids, 41, **bias) == [5] * 41
    assert repeat.counters["steps"] - steps == 1 + 10
    assert "repeat" in C.registered()["drafter"]
    assert registered_drafters()["repeat"] == __file__


def test_a_drafter_of_another_kinds_files_is_found_by_name_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a name, the files of a draft model select the plain draft model."""
    monkeypatch.setattr(registry, "_drafters", dict(registry._drafters))

    @register_drafter("model_and_more")
    class ModelAndMore(DraftModel):
        only_by_name = True

    config = tiny_config("llama", vocab_size=VOCAB)
    directory = write_model(tmp_path / "draft", config, random_weights(config))
    files = DraftFiles(directory, config, open_checkpoint(directory))
    assert find_drafter(files)[0] == "model"
    assert find_drafter(files, "model")[0] == "model"
    assert find_drafter(files, "model_and_more")[0] == "model_and_more"


PAIR = SpeculativeConfig(
    method="pair", spec_num_iter=4, spec_topk_per_iter=2, spec_tree_size=9, spec_auto=False
)


def test_a_drafter_made_of_two(tmp_path: Path, pair_plugin: None) -> None:
    """The tree holds the drafts of both parts, and each part has accepted tokens."""
    config = tiny_config("llama", vocab_size=VOCAB)
    model = write_model(tmp_path / "model", config, random_weights(config))
    plain, pair = make_engine(model), make_engine(model, speculative_config=PAIR)
    ids = random_ids(10, VOCAB) * 3
    for fields in ({}, {"temperature": 1.0, "seed": 7}):
        assert generate(pair, ids, 40, **fields)[:40] == generate(plain, ids, 40, **fields)
    slot = pair.add_sequence(sampling(), ids)
    prefill(pair, slot, ids, 128)
    assert pair.reserve(slot, len(ids) + 9)
    ((tokens, parents),) = pair.begin_masked([slot])
    assert tokens[1:5] == [tokens[0]] * 4  # repeated
    assert parents[:5] == [-1, 0, 1, 2, 3]
    assert parents[5] == 0  # the n-gram branch begins at the root
    pair.release(slot)


@pytest.mark.parametrize("draft", ["pair", "repeat"])
def test_layers_of_different_kinds(mixed_model: Path, pair_plugin: None, draft: str) -> None:
    """A block with its own state: speculation, chunks and other sequences change no token."""
    speculation = replace(PAIR, method=draft, spec_topk_per_iter=2 if draft == "pair" else None)
    if draft == "repeat":
        speculation = SpeculativeConfig(method=draft, spec_num_iter=4, spec_auto=False)
    plain = make_engine(mixed_model)
    drafted = make_engine(mixed_model, speculative_config=speculation)
    ids = random_ids(150, VOCAB)
    taken = 0
    for fields in ({}, {"temperature": 0.8, "seed": 3}, {"logit_bias": [(5, 20.0)]}):
        expected = generate(plain, ids, 60, **fields)
        assert generate(plain, ids, 60, chunk=17, **fields) == expected
        steps = drafted.counters["steps"]
        assert generate(drafted, ids, 60, **fields)[:60] == expected
        taken += drafted.counters["steps"] - steps
    assert taken < 3 * 60  # some drafted tokens were accepted
    # The slot's state is reset for the next sequence, and other sequences do not change it.
    slots = [drafted.add_sequence(sampling(), ids[n:]) for n in range(3)]
    texts = [[prefill(drafted, slot, ids[n:], 64)] for n, slot in enumerate(slots)]
    for _ in range(20):
        for n, slot in enumerate(slots):
            assert drafted.reserve(slot, len(ids) - n + len(texts[n]) + 4)
        drafted.decode(slots)
        for output in drafted.collect():
            texts[slots.index(output.slot)] += output.tokens
    for n, text in enumerate(texts):
        assert text[:20] == generate(plain, ids[n:], 20)


@pytest.mark.parametrize("draft", ["", "pair", "disk"])
def test_a_prefix_with_state_of_its_own(
    mixed_model: Path, pair_plugin: None, draft: str, tmp_path: Path
) -> None:
    """A prefix ends at a checkpoint of per-slot state. Host memory and disk keep both."""
    speculation = SpeculativeConfig(no_speculation=True)
    if draft == "pair":
        speculation = replace(PAIR, spec_topk_per_iter=2)
    plain = make_engine(mixed_model)
    engine = make_engine(
        mixed_model, speculative_config=speculation, max_num_seqs=2, chunk_length=150,
        max_model_len=500,
    )  # fmt: skip
    options: dict[str, Any] = {"host_bytes": 12 * engine.pages.page_bytes}
    if draft == "disk":
        store = DiskStore(
            tmp_path,
            "2" * 32,
            engine.pages.page_bytes,
            1 << 30,
            state_bytes=engine.pages.slot_bytes,
        )
        options["disk"] = DiskTier(store)
    shared = random_ids(300, VOCAB)
    with running(engine, **options) as (runner, cache):
        for number, length in enumerate((300, 300, 140, 299, 70, 64, 65, 300, 300)):
            if number > 6:  # other prompts take the pages
                other = Job(random_ids(320, VOCAB, seed=number), 20)
                runner.submit(other.request)
                assert other.wait() == generate(plain, other.request.prompt, 20)[:20]
            ids = shared[:length] + random_ids(7, VOCAB, seed=number)
            job = Job(ids, 30)
            runner.submit(job.request)
            assert job.wait() == generate(plain, ids, 30)[:30], (number, length)
            found = job.request.cached_tokens
            assert found is not None and (number == 0 or found > 0 or length < 128), number
        assert cache.counters.hits > 1000


@register_model("ScaledForCausalLM")
def build_scaled(config: Mapping[str, Any], options: BuildOptions) -> SpecFields:
    """A Llama with a scale between the GEMMs of the second layer's MLP."""
    fields = read_spec(config, options)
    plain, scaled = (("attention", {}), ("mlp", {})), (("attention", {}), ("scaled_mlp", {}))
    return replace(fields, layers=(plain, scaled))


def test_an_op_between_two_gemms(tmp_path: Path) -> None:
    """The op ends the fused launch, and the plan shows that. The text is that of scaled weights."""
    load_plugin("scaled_mlp", tmp_path)
    config = tiny_config("llama", vocab_size=VOCAB, head_dim=64)
    weights = random_weights(config)
    scale = np.random.default_rng(3).uniform(0.5, 2, config["intermediate_size"])
    scaled = weights | {"model.layers.1.mlp.scale": scale.astype(np.float32)}
    scaled_config = config | {"architectures": ["ScaledForCausalLM"]}
    engine = make_engine(write_model(tmp_path / "scaled", scaled_config, scaled))
    weights["model.layers.1.mlp.down_proj.weight"] *= scale.astype(np.float32)
    plain = make_engine(write_model(tmp_path / "plain", config, weights))

    def launches(of: C.Engine) -> list[tuple[str, str]]:
        found = of.launches(capability=90)
        return [(row["kind"], ", ".join(row["ops"])) for row in found if row["layer"] == 1]

    before = "combine splits, self_attn.o_proj, sum, post_attention_layernorm, mlp.gate_up_proj"
    assert launches(plain)[1:] == [("fused layer", f"{before}, mlp.down_proj, sum")]
    assert launches(engine)[1:] == [
        ("fused layer", before),
        ("call", "mlp.scale"),
        ("fused layer", "mlp.down_proj, sum"),
    ]
    ids = random_ids(70, VOCAB)
    np.testing.assert_allclose(
        prompt_logits(engine, ids), prompt_logits(plain, ids), rtol=1e-4, atol=1e-4
    )
    expected = generate(engine, ids, 40)
    engine.cut_for(90)  # the CPU runs the fused launches op by op
    assert generate(engine, ids, 40) == expected


def test_a_model_pays_only_for_the_state_of_its_blocks(mixed_model: Path) -> None:
    """KV entries of three layers of four, and one row per page for two layers."""
    engine = make_engine(mixed_model)
    pages = sum(row["bytes"] for row in engine.memory_plan() if row["group"] == "kv")
    config = json.loads((mixed_model / "config.json").read_text())
    heads = 2 * config["num_key_value_heads"] + 1
    per_token = 2 * heads * config["head_dim"] * 4
    assert pages == engine.num_pages * (64 * per_token + 2 * config["hidden_size"] * 4)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ((("attention", {"windw": 3}),), 'has no parameter "windw", expected num_attention'),
        ((("attention", {"window": "3"}),), '"window" has another type, expected an integer'),
        ((("attention", {"num_key_value_heads": 3}),), "4 heads and 3 key heads"),
        ((("mlp", {"intermediate_size": 12}),), "intermediate_size is 12, expected a positive"),
        ((("convolution", {}),), 'block "convolution" is not known; known are "attention"'),
    ],
)
def test_bad_parameters_of_a_block(tmp_path: Path, layer: Any, message: str) -> None:
    @register_model("BadBlockForCausalLM")
    def build(config: Mapping[str, Any], options: BuildOptions) -> SpecFields:
        fields = read_spec(config, options)
        return replace(fields, layers=(layer,) * fields.num_hidden_layers)

    config = tiny_config("llama", vocab_size=VOCAB) | {"architectures": ["BadBlockForCausalLM"]}
    model = write_model(tmp_path / "model", config, random_weights(config))
    with pytest.raises(ValueError, match=message):
        make_engine(model)


def test_a_broken_plugin_is_an_error(tmp_path: Path) -> None:
    from cpmcu import C

    (tmp_path / "broken.so").write_bytes(b"not a library")
    with pytest.raises(ValueError, match=r"broken\.so cannot be loaded"):
        C.load_plugin(str(tmp_path / "broken.so"))


@register_tool_parser("toy_arrow", signs=("->call ",), tags=("->call ",))
class ArrowParser(ToolParser):
    """A call is a line: ->call NAME {...}."""

    first_tag = "->call "

    def parse(self) -> Steps[None]:
        while (yield from self.content_until("->call ")) is not None:
            name = yield from self.name_until(" ")
            if name is None or (yield from self.peek()) != "{":
                self.content(f"->call {name or ''}")
                continue
            self.begin_call(name)
            yield from self.json_rest(self.arguments, "\n")
            self.end_call()


@register_reasoning_parser("toy_notes")
class NotesParser(ReasoningParser):
    """Reasoning stands in notes."""

    begin, end = "<notes>", "</notes>"


def test_parsers_from_outside() -> None:
    """Such parsers are found by name and by the chat template. They read pieces of any size."""
    assert registered_tool_parsers()["toy_arrow"] == __file__
    assert registered_reasoning_parsers()["toy_notes"] == __file__
    config = ServerConfig(tool_call_parser="toy_arrow", reasoning_parser="toy_notes")
    template = "Think in <notes></notes>. Call with ->call NAME {}"
    for tool_name, reasoning_name in (
        ("auto", "auto"),
        (config.tool_call_parser, config.reasoning_parser),
    ):
        tools = find_tool_format(tool_name, template)
        reasoning = find_reasoning_parser(reasoning_name, template)
        assert tools is not None and reasoning is NotesParser
        text = '<notes>add</notes>Now\n->call add {"a": [1]}\n->call mul {}\nDone.'
        for size in (1, 3, len(text)):
            parser = AnswerParser(reasoning(), tools.make({}))
            parts = [
                parser.push(text[at : at + size], final=at + size >= len(text))
                for at in range(0, len(text), size)
            ]
            assert "".join(part.reasoning for part in parts) == "add"
            assert "".join(part.content for part in parts) == "Now\nDone."
            calls = [(call.name, call.arguments) for part in parts for call in part.calls]
            assert calls == [("add", '{"a": [1]}'), ("mul", "{}")]


@pytest.mark.parametrize(
    ("register", "message"),
    [
        (lambda kind: register_tool_parser("hermes")(kind), "'hermes' is registered twice: by .*h"),
        (lambda kind: register_tool_parser("auto")(kind), "a tool parser is named 'auto'"),
        (lambda kind: register_reasoning_parser("think")(kind), "'think' is registered twice: by"),
        (lambda kind: register_reasoning_parser("none")(kind), "is named none, but must have"),
    ],
)
def test_names_of_parsers_that_are_taken(register: Any, message: str) -> None:
    registered_tool_parsers()
    registered_reasoning_parsers()
    with pytest.raises(ValueError, match=message):
        register(type("Another", (), {}))
