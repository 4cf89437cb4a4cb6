"""Block drafters (DFlash, JetSpec, DFlash2, DSpark) draft what the numpy network drafts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cpmcu.config import EngineConfig, SpeculativeConfig
from cpmcu.loading.loader import load_model
from cpmcu.spec_metrics import AcceptanceCounter
from tests.engine.drafted import SAMPLINGS, Drive, memory_full_of
from tests.engine.harness import random_ids
from tests.engine.prefix import PAGE, Job, running
from tests.reference.block_draft import Lattice, NumpyBlock
from tests.reference.engines import extension_or_skip
from tests.reference.numpy_drafts import NumpyTarget
from tests.reference.tiny_blocks import BLOCKS, write_block
from tests.reference.tiny_checkpoints import TinyCheckpoint, write_tiny
from tests.reference.tiny_w4 import quantise, write_w4

extension_or_skip()

VOCAB = 7  # so few tokens that random weights often draft the right one
MASK = 5
HIDDEN, HEAD_DIM = 64, 16
LENGTHS = (1, 2, 63, 64, 65, 130)
CHUNKS = (1, 7, 64)

TREE = {"spec_num_iter": 4, "spec_tree_size": 20}
CHAIN = {"spec_num_iter": 4, "spec_topk_per_iter": 1}


def tensor(*shape: int, seed: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@dataclass(frozen=True)
class Case:
    """A draft, and what differs in its target."""

    kind: str
    overrides: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, npt.NDArray[np.float32]] = field(default_factory=dict)
    drop: tuple[str, ...] = ()
    rename: dict[str, str] = field(default_factory=dict)
    family: str = "qwen3"
    target: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"


def speculators(**keys: Any) -> dict[str, Any]:
    """The config of speculators: ids of layers whose inputs are read, layers as an object."""
    layers = {
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 0.01,
        "rope_theta": 20000.0,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 20,
    }
    nothing = dict.fromkeys([*layers, "target_layer_ids", "attention_bias"])
    named = {"transformer_layer_config": layers, "aux_hidden_state_layer_ids": [2, 1]}
    return {**nothing, **named, "mask_token_id": MASK, **keys}


SINKS = {f"layers.{i}.self_attn.attention_sink_bias": tensor(4, seed=i) for i in range(2)}
REDUCED = {"draft_vocab_size": 5, "enable_confidence_head": False}
CASES = {
    "DFlash": Case("dflash"),
    "DFlash, all layers causal": Case("dflash", {"is_causal": True}),
    "DFlash, no layer causal": Case("dflash", {"is_causal": False}),
    "DFlash, causal in the nested object": Case("dflash", {"dflash_config": {"causal": True}}),
    "DFlash, no kinds of layers": Case("dflash", {"layer_types": None, "sliding_window": None}),
    "DFlash, use_swa": Case(
        "dflash",
        {"layer_types": None, "dflash_config": {"use_swa": True, "swa_window_size": 12}},
    ),
    "DFlash, use_swa of full layers": Case(
        "dflash", {"layer_types": ["full_attention"] * 2, "dflash_config": {"use_swa": True}}
    ),
    "DFlash, window of a block": Case("dflash", {"sliding_window": 8}),
    "DFlash, mask_embedding": Case("dflash", extra={"mask_embedding": tensor(HIDDEN, seed=5)}),
    "DFlash, biases": Case("dflash", {"attention_bias": True}),
    "DFlash, sinks": Case("dflash", extra=SINKS),
    "DFlash, norms around zero": Case("dflash", {"use_gemma_norm": True}),
    "DFlash, other layers of the target": Case(
        "dflash", {"dflash_config": {"target_layer_ids": [1, -1, 0]}}
    ),
    "DFlash, rope_parameters": Case(
        "dflash",
        {
            "rope_theta": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
        },
    ),
    "DFlash, rope_parameters before rope_theta": Case(
        "dflash", {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}}
    ),
    "DFlash, RoPE of the target scaled": Case(
        "dflash", target={"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, family="llama"
    ),
    "DFlash, scaled RoPE": Case(
        "dflash", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, family="llama"
    ),
    "DFlash, scales": Case(
        "dflash",
        {
            "input_embedding_scale": 0.5,
            "output_multiplier": 0.7,
            "final_logit_softcapping": 3.0,
        },
    ),
    "DFlash, scaled target": Case("dflash", family="minicpm"),
    "DFlash, tied target": Case("dflash", target={"tie_word_embeddings": True}),
    "DFlash, other names": Case(
        "dflash",
        rename={
            "fc.": "encoder.fc.",
            "hidden_norm.": "encoder.output_norm_enc.",
        },
    ),
    "DFlash of speculators": Case("dflash", speculators(dflash_config=None)),
    "DFlash of speculators, reduced vocabulary": Case(
        "dflash", speculators(dflash_config=None, draft_vocab_size=5)
    ),
    "DFlash of speculators, the root's row predicts": Case(
        "dflash", speculators(dflash_config=None, sample_from_anchor=True)
    ),
    "DFlash of speculators, causal windows": Case(
        "dflash", speculators(dflash_config=None, sliding_window_non_causal=False)
    ),
    "JetSpec": Case("jetspec"),
    "DFlash2": Case("dflash2"),
    "DFlash2, three taps": Case(
        "dflash2",
        {"dflash_config": {"conv_kernel_size": 3, "selector_rank": 8, "selector_top_k": 6}},
        rename={"_codebook": "_codebook.weight"},
    ),
    "DFlash2, causal": Case("dflash2", {"is_causal": True, "layer_types": None}),
    "DSpark": Case("dspark"),
    "DSpark, confidence without Markov": Case("dspark", {"confidence_head_with_markov": False}),
    "DSpark, reduced vocabulary": Case("dspark", REDUCED),
    "DSpark of rank 0": Case("dspark", {"markov_rank": 0, "enable_confidence_head": False}),
    "DSpark of speculators": Case("dspark", speculators(**REDUCED)),
    "DSpark of speculators, the root's row predicts": Case(
        "dspark", speculators(sample_from_anchor=True)
    ),
    "DSpark, keys in dspark_config": Case(
        "dspark",
        {
            "target_layer_ids": None,
            "mask_token_id": 1,
            "dspark_config": {"target_layer_ids": [1, 0], "mask_token_id": MASK},
        },
    ),
    "DSpark, names with model.": Case(
        "dspark", rename={name: "model." + name for name in ("layers.", "fc.", "hidden_norm.")}
    ),
}


def write(directory: Path, case: Case) -> tuple[TinyCheckpoint, TinyCheckpoint]:
    """The target and the draft."""
    sizes = {"vocab_size": VOCAB, "num_hidden_layers": 3, **case.target}
    target = write_tiny(directory / "target", case.family, seed=3, dtype=case.dtype, **sizes)
    tensors = {"extra": case.extra, "drop": case.drop, "rename": case.rename, "dtype": case.dtype}
    return target, write_block(directory / "draft", case.kind, target, **tensors, **case.overrides)


class Pair:
    """An engine on the CPU, and the numpy network that says what it drafts."""

    def __init__(
        self, directory: Path, case: Case, speculation: dict[str, Any], **config: Any
    ) -> None:
        self.target, self.draft = write(directory, case)
        of_target = NumpyTarget(self.target.fields(), self.target.weights, np.float64)
        self.network = NumpyBlock(of_target, self.draft.config, self.draft.weights)
        self.shape = speculation["spec_num_iter"]
        self.engine = load(self.target, self.draft.directory, speculation, **config)

    def start(self, ids: Sequence[int], chunk: int = 0, **fields: Any) -> Sequenced:
        slot, first = Drive(self.engine).start(list(ids), chunk, max_tokens=400, **fields)
        return Sequenced(slot, [*ids, first])

    def step(self, sequences: Sequence[Sequenced], shape: tuple[int, int] | None = None) -> None:
        """One step of these sequences."""
        engine, slots = self.engine, [each.slot for each in sequences]
        for each in sequences:
            assert engine.reserve(each.slot, len(each.text) + engine.tokens_per_step)
        drafts = engine.begin_masked(slots, shape)
        for each, (tokens, parents) in zip(sequences, drafts):
            depth = self.shape if shape is None else shape[0]
            assert tokens[0] == each.text[-1]
            each.drafts.append((len(each.text) - 1, tokens, parents, depth))
        nodes = sum(len(tokens) for tokens, _ in drafts)
        engine.end_masked([-1] * nodes, np.zeros((0, 0), np.uint32))
        for output in engine.collect():
            (each,) = (each for each in sequences if each.slot == output.slot)
            each.text += output.tokens
            each.emitted.append(len(output.tokens))

    def check(self, each: Sequenced, topk: int = 0) -> None:
        """Compares all drafts of a sequence, and ends it."""
        self.engine.release(each.slot)
        for lattice, draft in self.lattices(each, topk):
            lattice.check(*draft)

    def lattices(self, each: Sequenced, topk: int = 0) -> Iterator[tuple[Lattice, Any]]:
        """The numpy lattice of each draft, and its tokens, parents and depth."""
        _, states = self.network.target.states(each.text, self.network.layers)
        for length, *draft in each.drafts:
            before = [state[:length] for state in states]
            yield self.network.lattice(before, each.text[length], topk), draft

    def run(
        self,
        ids: Sequence[int],
        steps: int,
        chunk: int = 0,
        topk: int = 0,
        shapes: Sequence[tuple[int, int] | None] = (None,),
        **fields: Any,
    ) -> Sequenced:
        """Runs and compares one sequence, whose steps have these shapes in turn."""
        each = self.start(ids, chunk, **fields)
        for i in range(steps):
            self.step([each], shapes[i % len(shapes)])
        self.check(each, topk)
        return each


@dataclass
class Sequenced:
    """A sequence, and its drafts: cached tokens before the step, tokens, parents, depth."""

    slot: int
    text: list[int]  # the last token is the root of the next step
    drafts: list[tuple[int, list[int], list[int], int]] = field(default_factory=list)
    emitted: list[int] = field(default_factory=list)


def load(
    target: TinyCheckpoint, draft: Path | None, speculation: dict[str, Any], **config: Any
) -> Any:
    named = {"no_speculation": True} if draft is None else {"draft_model_path": str(draft)}
    settings = {
        "device": "cpu",
        "num_threads": 1,
        "max_num_seqs": 1,
        "chunk_length": 128,
        "max_model_len": 512,
        "speculative_config": SpeculativeConfig(**named, **speculation),
        **config,
    }
    return load_model(str(target.directory), config=EngineConfig(**settings)).engine


def text_of(length: int, vocab: int = VOCAB) -> list[int]:
    return [i % vocab for i in random_ids(length, 1000, seed=length)]


@pytest.mark.parametrize("name", CASES)
def test_drafts_are_those_of_the_numpy_network(name: str, tmp_path: Path) -> None:
    """Trees and chains in turn, after accepted and rejected tokens, and prompts in chunks."""
    pair = Pair(tmp_path, CASES[name], TREE)
    shapes = [None, (4, 5), (3, 9), (1, 2), (2, 8)]
    seen: set[int] = set()
    for i, length in enumerate(LENGTHS):
        sampling = list(SAMPLINGS.values())[i % 2]
        each = pair.run(text_of(length), 10, CHUNKS[i % 3], shapes=shapes, **sampling)
        seen |= set(each.emitted)
    assert {1, 2} <= seen


@pytest.mark.parametrize("kind", BLOCKS)
def test_drafts_from_a_larger_vocabulary(kind: str, tmp_path: Path) -> None:
    """More tokens than candidates; a whole block is drafted."""
    sizes = {"vocab_size": 160}
    own = {"draft_vocab_size": 72, "enable_confidence_head": False} if kind == "dspark" else {}
    depth = 7
    pair = Pair(
        tmp_path, Case(kind, own, target=sizes), {"spec_num_iter": depth, "spec_tree_size": 30}
    )
    for length in LENGTHS[1::2]:
        each = pair.run(text_of(length, 160), 4, shapes=[None, (7, 8)])
        assert max(len(set(tokens)) for _, tokens, _, _ in each.drafts) > 7
        if kind == "dspark":  # some parents are not in the draft's vocabulary
            chosen = pair.draft.weights["d2t"] + np.arange(72)
            assert not {root for root, *_ in (tokens for _, tokens, _, _ in each.drafts)} <= set(
                chosen.tolist()
            )


@pytest.mark.parametrize("kind", BLOCKS)
def test_drafts_in_bfloat16(kind: str, device: str, tmp_path: Path) -> None:
    """Nearly all drafts hold the likeliest nodes, up to rounding."""
    sizes = {"hidden_size": 128, "head_dim": 64, "vocab_size": 40}
    pair = Pair(
        tmp_path, Case(kind, target=sizes, dtype="bfloat16"), TREE, device=device, memory_limit=0.2
    )
    right = []
    for length in LENGTHS:
        each = pair.start(text_of(length, 40), **SAMPLINGS["seeded"])
        for shape in (None, (4, 5), (3, 9), (4, 12)):
            pair.step([each], shape)
        pair.engine.release(each.slot)
        for lattice, draft in pair.lattices(each):
            try:
                lattice.check(*draft, margin=0.2)
                right.append(True)
            except AssertionError:
                right.append(False)
    assert np.mean(right) > 0.8, np.mean(right)


@pytest.mark.parametrize("shift", [-1, 1])
def test_other_layers_of_the_target_on_demand(shift: int, tmp_path: Path) -> None:
    case = Case("dflash", target={"num_hidden_layers": 4})
    pair = Pair(tmp_path, case, {**TREE, "spec_layer_shift": shift})
    assert pair.network.layers == [1, 2]
    pair.network.layers = [1 + shift, 2 + shift]
    pair.run(text_of(70), 8)


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_the_number_of_candidates_is_an_option(kind: str, tmp_path: Path) -> None:
    shape = {"spec_num_iter": 4, "spec_topk_per_iter": 2, "spec_tree_size": 20, "method": kind}
    pair = Pair(tmp_path, Case(kind), shape)
    for length in (2, 65):
        pair.run(text_of(length), 8, topk=2)
    chain = Pair(tmp_path / "chain", CASES["DSpark"], CHAIN)
    each = chain.run(text_of(40), 8)
    assert all(parents == [-1, 0, 1, 2, 3] for _, _, parents, _ in each.drafts)


def test_keys_of_vllm_ask_for_a_chain(tmp_path: Path) -> None:
    target, draft = write(tmp_path, Case("jetspec"))
    keys = {"method": "jetspec", "model": str(draft.directory), "num_speculative_tokens": 5}
    speculation = SpeculativeConfig.from_mapping(keys)
    drive = Drive(load(target, None, {}, speculative_config=speculation))
    slot, _ = drive.start(text_of(20), max_tokens=9)
    assert drive.engine.reserve(slot, 40)
    ((tokens, parents),) = drive.engine.begin_masked([slot])
    assert parents == [-1, 0, 1, 2, 3, 4] and -1 not in tokens


@pytest.mark.parametrize("kind", ["dflash", "dflash2", "dspark"])
def test_fr_spec_drafts_frequent_tokens(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "frequent.npy"
    np.save(path, np.arange(2, 100, 2))
    case = Case(kind, target={"vocab_size": 100})
    pair = Pair(tmp_path, case, {**TREE, "frspec_path": str(path), "draft_head_quant": "none"})
    ids = np.arange(2, 100, 2).tolist()
    weights = pair.draft.weights
    copies = {name: w for name, w in weights.items() if name != "lm_head.weight"}
    pair.network = NumpyBlock(pair.network.target, pair.draft.config, copies, ids)
    for length in (2, 65):
        each = pair.run(text_of(length, 100), 6, shapes=[None, (4, 5)])
        assert all(token % 2 == 0 for _, tokens, *_ in each.drafts for token in tokens[1:])


@pytest.mark.parametrize("chunk", [1, 19, 20, 21, 60])
@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
def test_prompts_far_beyond_the_window(kind: str, chunk: int, tmp_path: Path) -> None:
    """Chunks around the window of 20 tokens."""
    pair = Pair(tmp_path, Case(kind), TREE)
    pair.run(text_of(230), 6, chunk)


@pytest.mark.parametrize("kind", BLOCKS)
def test_many_steps_in_a_used_slot(kind: str, tmp_path: Path) -> None:
    """Nothing of rejected tokens, of another sequence or of fresh memory is read."""
    with memory_full_of(0x7F):
        pair = Pair(tmp_path, Case(kind), TREE)
    other = pair.run(text_of(140), 10, **SAMPLINGS["seeded"])
    each = pair.run(text_of(30), 50, shapes=[None, (4, 5), (1, 2)], **SAMPLINGS["seeded"])
    assert each.slot == other.slot and {1, 2, 3} <= set(each.emitted)
    roots = {tokens[0] for _, tokens, _, _ in each.drafts}
    assert MASK in roots  # the root's row holds the mask token, too


@pytest.mark.parametrize("kind", BLOCKS)
def test_sequences_of_a_batch_are_alone(kind: str, tmp_path: Path) -> None:
    pair = Pair(tmp_path, Case(kind), TREE, max_num_seqs=3)
    sequences = [pair.start(text_of(n), **SAMPLINGS["seeded"]) for n in (5, 64, 130)]
    for i in range(8):
        pair.step(sequences[i % 2 :] if i < 4 else sequences[::-1], (3, 9) if i % 3 else None)
    for each in sequences:
        pair.check(each)


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_a_block_at_the_end_of_the_context(kind: str, tmp_path: Path) -> None:
    """The rows of the last blocks have positions after the last one."""
    pair = Pair(tmp_path, Case(kind), TREE, max_model_len=128)
    each = pair.start(text_of(110))
    while len(each.text) + pair.engine.tokens_per_step <= 128:
        pair.step([each])
    assert len(each.text) > 120
    pair.check(each)


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_prefix_hit_changes_no_draft(kind: str, tmp_path: Path) -> None:
    """Every step accepts as many drafted tokens as without the hit, in another slot, too."""
    pair = Pair(tmp_path, Case(kind), TREE, max_num_seqs=2)
    seen: set[int] = set()
    with running(pair.engine) as (runner, cache):
        for length in (66, 130, 195):
            steps, tokens = [], []
            for _ in range(2):
                acceptance = AcceptanceCounter(4, detailed=True)
                job = Job(text_of(length), 30, acceptance=acceptance, **SAMPLINGS["seeded"])
                other = Job(text_of(length + 1), 30, **SAMPLINGS["greedy"])
                runner.submit(other.request, job.request)
                tokens.append((other.wait(), job.wait()))
                steps.append(acceptance.metrics().per_step_accepted)
            assert job.request.cached_tokens == (length - 1) // PAGE * PAGE
            assert tokens[0] == tokens[1] and steps[0] == steps[1], length
            seen |= set(steps[0] or ())
        runner.call(lambda _: cache.check())
    assert len(seen) > 2


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_quantised_draft_is_its_dequantised_draft(kind: str, tmp_path: Path) -> None:
    """Also the keys and values of the context, a part of the rows of a fused matrix."""
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "head_dim": 64, "vocab_size": VOCAB}
    target = write_tiny(tmp_path / "t", "qwen3", num_hidden_layers=3, **sizes)
    made = write_block(tmp_path / "d", kind, target)
    weights = quantise(made.weights)
    assert {"fc", "layers.1.self_attn.k_proj"} <= weights.linears.keys()
    quant = {"ignore": ["lm_head", "re:.*_projection$"]}  # those of DFlash2
    runs = []
    for layout in ("dense", "compressed"):
        draft = write_w4(tmp_path / layout, made.config, weights, layout, quant=quant)
        engine = load(target, draft, {**TREE, "draft_head_quant": "none"})
        slot, first = Drive(engine).start(text_of(70), max_tokens=100)
        text, drafts = [first], []
        for _ in range(8):
            assert engine.reserve(slot, 70 + len(text) + engine.tokens_per_step)
            drafts.append(engine.begin_masked([slot])[0])
            engine.end_masked([-1] * len(drafts[-1][0]), np.zeros((0, 0), np.uint32))
            text += engine.collect()[0].tokens
        runs.append((text, drafts))
    assert runs[0] == runs[1]


def test_an_own_head_is_used(tmp_path: Path) -> None:
    """An lm_head that is no copy of the target's makes the logits."""
    head = tensor(VOCAB, HIDDEN, seed=9) / 8
    pair = Pair(tmp_path, Case("dspark", extra={"lm_head.weight": head}), TREE)
    pair.run(text_of(40), 10)


# ---- refusals

NO_IDS = {"dflash_config": {"target_layer_ids": None}}
REFUSED: dict[str, tuple[Case, str]] = {
    "no layers": (Case("dflash", NO_IDS), "target_layer_ids is missing"),
    "no layers of DSpark": (
        Case("dspark", {"target_layer_ids": None}),
        "target_layer_ids is missing",
    ),
    "the last layer": (
        Case("dflash", {"dflash_config": {"target_layer_ids": [0, 2]}}),
        r"target_layer_ids is \[0, 2\].*last layer",
    ),
    "no such layer": (
        Case("dflash", {"dflash_config": {"target_layer_ids": [0, 7]}}),
        r"target_layer_ids is \[0, 7\]",
    ),
    "no theta": (Case("jetspec", {"rope_theta": None}), "rope_theta is missing"),
    "a mask beyond the table": (
        Case("dflash", {"dflash_config": {"mask_token_id": VOCAB}}),
        f"mask_token_id is {VOCAB}, expected .* 0 to {VOCAB - 1}",
    ),
    "no mask": (
        Case("dflash2", {"dflash_config": {"mask_token_id": None}}),
        "mask_token_id is missing",
    ),
    "Domino": (Case("dflash", {"dflash_config": {"projector_type": "domino"}}), "(?i)domino"),
    "attn_output_gate": (Case("dflash", {"attn_output_gate": True}), "attn_output_gate"),
    "XPress": (Case("dflash", {"architectures": ["DFlashQwen3XPressModel"]}), "XPress"),
    "LiLiCorr": (Case("dflash", {"architectures": ["LiLiCorrDraftModel"]}), "LiLiCorr"),
    "Laguna": (Case("dflash", {"architectures": ["DFlashLagunaForCausalLM"]}), "Laguna"),
    "tensors of XPress": (
        Case("dflash", extra={"xpress_head.w1.weight": tensor(VOCAB, 4, seed=1)}),
        "XPress",
    ),
    "tensors of LiLiCorr": (
        Case("dflash", extra={"lilicorr.token_proj.weight": tensor(8, HIDDEN, seed=1)}),
        "LiLiCorr",
    ),
    "tensors of Laguna": (
        Case("dflash", extra={"aux_hidden_norms.0.weight": tensor(HIDDEN, seed=1)}),
        "Laguna",
    ),
    "a gated Markov head": (
        Case("dspark", {"markov_head_type": "gated"}),
        "markov_head_type is 'gated'",
    ),
    "a Markov head before a soft cap": (
        Case("dspark", {"final_logit_softcapping": 30.0}),
        "final_logit_softcapping is 30.0",
    ),
    "an rnn Markov head": (Case("dspark", {"markov_head_type": "rnn"}), "'rnn'"),
    "another embedding": (
        Case("dspark", extra={"embed_tokens.weight": tensor(VOCAB, HIDDEN, seed=2)}),
        "embed_tokens.weight differs from the target's",
    ),
    "an unknown tensor": (
        Case("dflash", extra={"layers.0.extra.weight": tensor(HIDDEN, seed=3)}),
        "layers.0.extra.weight",
    ),
    "another hidden size": (Case("dflash", {"hidden_size": 32}), "hidden_size is 32"),
    "another number of layers": (
        Case("dflash", {"num_target_layers": 4}),
        "num_target_layers is 4, expected 3",
    ),
    "a window smaller than a block": (
        Case("dflash", {"sliding_window": 7}),
        "window of 7 is smaller than block_size 8",
    ),
    "a large block": (Case("dflash", {"block_size": 18}), "block_size is 18, expected 2 to 17"),
    "a large block of DSpark": (Case("dspark", {"block_size": 17}), "block_size is 17"),
    "scaled values": (Case("dflash", {"attention_value_scale": 2.0}), "attention_value_scale is 2"),
    "interleaved RoPE": (Case("dflash", {"is_neox_style": False}), "is_neox_style is [Ff]alse"),
    "another rank": (
        Case("dspark", extra={"markov_head.markov_w1.weight": tensor(VOCAB, 8, seed=4)}),
        "markov_rank is 16, expected 8",
    ),
    "a convolution longer than a block": (
        Case("dflash2", {"dflash_config": {"conv_kernel_size": 9}}),
        "9 weights a channel",
    ),
    "groups that divide no row": (
        Case("dflash2", {"dflash_config": {"conv_group_size": 24}}, drop=("fc.weight",)),
        "groups of 24",
    ),
    "too many candidates": (
        Case("dflash2", {"dflash_config": {"selector_top_k": 40}}),
        "selector_top_k is 40",
    ),
    "more candidates than tokens": (
        Case("dflash2", {"dflash_config": {"selector_top_k": 8}}),
        "8",
    ),
    "d2t without a head": (
        Case("dspark", REDUCED, drop=("lm_head.weight",)),
        "d2t is present, expected lm_head.weight",
    ),
    "another target's width": (
        Case("dflash", {"target_hidden_size": 128}),
        "target_hidden_size is 128, expected 64",
    ),
    "another vocabulary": (Case("dflash", {"vocab_size": 8}), "vocab_size is 8, expected 7"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_are_one_sentence(name: str, tmp_path: Path) -> None:
    case, message = REFUSED[name]
    target, draft = write(tmp_path, case)
    with pytest.raises(ValueError, match=message) as error:
        load(target, draft.directory, TREE)
    assert "\n" not in str(error.value)


DROPPED = {
    "fc.weight": "dflash2",
    "hidden_norm.weight": "dspark",
    "norm.weight": "dflash",
    "layers.1.self_attn.k_norm.weight": "dflash",
    "layers.0.mlp_conv.base_kernel": "dflash2",
    "candidate_selector.successor_codebook": "dflash2",
    "markov_head.markov_w2.weight": "dspark",
}


@pytest.mark.parametrize("name", DROPPED)
def test_a_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    target, draft = write(tmp_path, Case(DROPPED[name], drop=(name,)))
    with pytest.raises(ValueError, match=name.replace(".weight", "")) as error:
        load(target, draft.directory, {**TREE, "method": DROPPED[name]})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"spec_num_iter": 8}, "spec_num_iter.* is 8, expected at most 7"),
        ({"spec_num_iter": 1, "spec_tree_size": 18}, "spec_tree_size is 18"),
        ({"spec_window_size": 64}, "spec_window_size is 64"),
    ],
)
def test_impossible_shapes(given: dict[str, int], message: str, tmp_path: Path) -> None:
    target, draft = write(tmp_path, Case("dflash", target={"vocab_size": 60}))
    with pytest.raises(ValueError, match=message):
        load(target, draft.directory, {"method": "dflash", **given})
