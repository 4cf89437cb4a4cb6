"""Speculation changes no token: any drafter, tree, chunk length and sampling, greedy or seeded."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import inspect
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness import DEVICES, SHIPPED, SMALL, random_ids
from tests.reference.engines import extension_or_skip
from tests.reference.tiny_checkpoints import TinyCheckpoint, write_tiny
from tests.reference.tiny_drafts import KINDS, write_draft
from tests.reference.tiny_w4 import quantise, write_w4

extension_or_skip()

VOCAB = 160
CONTEXT = 512
PAGE = 64

SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.8, "top_p": 0.9, "seed": 12345},
    "all": {
        "temperature": 0.8,
        "top_p": 0.9,
        "top_k": 50,
        "min_p": 0.01,
        "seed": 7,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.4,
        "logit_bias": [(5, 2.0), (9, -3.0)],
    },
    "penalised": {"frequency_penalty": 0.7, "repetition_penalty": 1.3},
}
TREES: dict[str, dict[str, int]] = {
    "chain": {"spec_num_iter": 4, "spec_topk_per_iter": 1, "spec_tree_size": 5},
    "root": {"spec_num_iter": 1, "spec_topk_per_iter": 1, "spec_tree_size": 1},
    "narrow": {"spec_num_iter": 3, "spec_topk_per_iter": 4, "spec_tree_size": 12},
    "wide": {"spec_num_iter": 4, "spec_topk_per_iter": 8, "spec_tree_size": 33},
    "full": {"spec_num_iter": 5, "spec_topk_per_iter": 10, "spec_tree_size": 64},
}
TREE_NAMES = ["chain", "narrow"] if SMALL else list(TREES)
# Drafts in 4 bits, of targets in 4 bits: kind -> the dense draft, its layout, the target's.
W4_DRAFTS = {
    "eagle_w4": ("eagle_bias", "gptq", "gptq"),
    "minicpm_eagle_w4": ("minicpm_eagle", "marlin", "marlin"),
    "eagle3_w4": ("eagle3", "compressed", "awq"),
}
DRAFTS = [*KINDS, "ngram", *W4_DRAFTS]
SOME_DRAFTS = DRAFTS
if SMALL:
    DRAFTS = ["minicpm_eagle", "eagle3", "model", "ngram", "eagle_w4"]
    SOME_DRAFTS = DRAFTS[:-1]  # 4 bits are slow under a sanitizer


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Models:
    """Targets, drafts and the engines made of them, on one device."""

    def __init__(self, root: Path, device: str) -> None:
        self.root, self.device = root, device
        self.dtype = "bfloat16" if device == "cuda" else "float32"
        self.expected: dict[Any, list[int]] = {}
        self._targets: dict[str, TinyCheckpoint] = {}
        self._plain: dict[str, Any] = {}

    def target(self, family: str) -> TinyCheckpoint:
        """`family` may end in "_" and a layout of 4-bit weights."""
        if family not in self._targets:
            name, _, layout = family.partition("_")
            made = write_tiny(
                self.root / family,
                name,
                dtype=self.dtype,
                vocab_size=VOCAB,
                num_hidden_layers=3,
                max_position_embeddings=CONTEXT,
                **({"hidden_size": 128, "head_dim": 64} if layout else {"head_dim": 64}),
            )
            if layout:
                write_w4(made.directory, made.config, quantise(made.weights), layout)
            self._targets[family] = made
        return self._targets[family]

    def draft(self, kind: str, family: str) -> Path:
        directory = self.root / f"{family}-{kind}"
        if directory.is_dir():
            return directory
        dense, layout, _ = W4_DRAFTS.get(kind, (kind, "", ""))
        made = write_draft(directory, dense, self.target(family), dtype=self.dtype)
        layout = layout or family.partition("_")[2]
        if layout:
            write_w4(directory, made.config, quantise(made.weights), layout)
        return directory

    def engine(self, family: str, speculation: dict[str, Any] | None, **config: Any) -> Any:
        from cpmcu.config import EngineConfig, SpeculativeConfig
        from cpmcu.loading.loader import load_model

        target = self.target(family).directory
        speculation = {"no_speculation": True} if speculation is None else speculation
        config = {"max_num_seqs": 1, "chunk_length": 128, "num_threads": 2, **config}
        return load_model(
            str(target),
            config=EngineConfig(
                device=self.device,
                memory_limit=0.2,
                speculative_config=SpeculativeConfig(**speculation),
                **config,
            ),
        ).engine

    def drafted(self, kind: str, family: str, tree: dict[str, int], **config: Any) -> Any:
        if kind == "ngram":
            tree = {"spec_num_iter": tree["spec_num_iter"]}
            return self.engine(family, {"method": "ngram", **tree}, **config)
        draft = str(self.draft(kind, family))
        return self.engine(family, {"draft_model_path": draft, **tree}, **config)

    def plain(self, family: str, ids: list[int], count: int, **fields: Any) -> list[int]:
        """What the target says without a drafter."""
        key = (family, tuple(ids), repr(fields))
        known = self.expected.get(key, [])
        if len(known) < count:
            if family not in self._plain:
                self._plain[family] = self.engine(family, None)
            known = self.expected[key] = Drive(self._plain[family]).one(ids, count, **fields)
        return known[:count]


class Drive:
    """Runs sequences to their ends on an engine, as the runner does."""

    def __init__(
        self,
        engine: Any,
        ahead: int = 1,
        shapes: Callable[[], tuple[int, int] | None] = lambda: None,
    ) -> None:
        self.engine, self.ahead, self.shapes = engine, ahead, shapes
        self.emitted: list[int] = []  # tokens of each decode step of the last sequence

    def start(self, ids: list[int], chunk: int = 0, **fields: Any) -> tuple[int, int]:
        from cpmcu import C

        engine = self.engine
        slot = engine.add_sequence(C.SamplingConfig(**fields), ids)
        assert engine.reserve(slot, len(ids))
        chunk = chunk or engine.chunk_length
        outputs = []
        for begin in range(0, len(ids), chunk):
            engine.prefill([(slot, ids[begin : begin + chunk], begin + chunk >= len(ids))])
            outputs = engine.collect()
        return slot, outputs[0].tokens[0]

    def one(self, ids: list[int], count: int, chunk: int = 0, **fields: Any) -> list[int]:
        """`count` tokens, or fewer if the device ends the sequence at a stop id."""
        engine = self.engine
        fields = {"max_tokens": count, **fields}
        slot, first = self.start(ids, chunk, **fields)
        tokens, finished, in_flight, self.emitted = [first], count == 1, 0, []
        while not finished and len(tokens) < count:
            while in_flight < self.ahead:
                wanted = len(ids) + len(tokens) + (in_flight + 1) * engine.tokens_per_step
                if in_flight and len(tokens) + in_flight >= count:
                    break
                assert engine.reserve(slot, min(wanted, engine.max_model_len))
                engine.decode([slot], self.shapes())
                in_flight += 1
            (output,) = engine.collect()
            in_flight -= 1
            tokens += output.tokens
            self.emitted.append(len(output.tokens))
            finished = output.finished
        engine.release(slot)
        while engine.in_flight():
            assert engine.collect() == []
        return tokens


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, device: str) -> Models:
    return Models(tmp_path_factory.mktemp("spec"), device)


def family_of(kind: str) -> str:
    family = "minicpm" if kind.startswith("minicpm") else "llama"
    return f"{family}_{W4_DRAFTS[kind][2]}" if kind in W4_DRAFTS else family


PROMPTS = [random_ids(length, VOCAB, seed=length) for length in (1, 2, 63, 64, 65, 130, 200)]
SEVERAL = PROMPTS[::3] if SMALL else PROMPTS
COUNT = 20 if SMALL else 66  # tokens, over the end of a page from most prompts


@pytest.mark.parametrize("tree", TREE_NAMES)
@pytest.mark.parametrize("kind", DRAFTS)
def test_same_tokens(models: Models, kind: str, tree: str) -> None:
    family = family_of(kind)
    drive = Drive(models.drafted(kind, family, TREES[tree]), ahead=2)
    names = list(SAMPLINGS)
    for i, ids in enumerate(SEVERAL):
        name = names[(i + list(TREES).index(tree)) % len(names)]
        fields = SAMPLINGS[name]
        got = drive.one(ids, COUNT, **fields)
        assert got == models.plain(family, ids, COUNT, **fields), (len(ids), name)


@pytest.mark.parametrize("kind", SOME_DRAFTS)
def test_any_shapes_in_any_order(models: Models, kind: str) -> None:
    family = family_of(kind)
    chain = kind == "ngram"
    rng = random.Random(kind)
    shapes = (
        [(0, 1), (1, 2), (2, 3), (4, 5)] if chain else [(0, 1), (1, 1), (2, 9), (4, 8), (4, 33)]
    )
    drive = Drive(models.drafted(kind, family, TREES["wide"]), 2, lambda: rng.choice(shapes))
    for ids, name in zip(SEVERAL, ("greedy", "all", "seeded")):
        got = drive.one(ids, COUNT, **SAMPLINGS[name])
        assert got == models.plain(family, ids, COUNT, **SAMPLINGS[name])
        got = drive.one(ids, COUNT, **SAMPLINGS[name])  # the slot's cache has holes from before
        assert got == models.plain(family, ids, COUNT, **SAMPLINGS[name])


@contextlib.contextmanager
def memory_full_of(byte: int) -> Iterator[None]:
    """What the C library's malloc hands out is filled with `byte`, not with zeros by chance."""
    perturb, libc = -6, ctypes.CDLL(None)
    libc.mallopt(perturb, byte ^ 0xFF)
    try:
        yield
    finally:
        libc.mallopt(perturb, 0)


def test_a_draft_is_right_again_after_plain_steps(models: Models) -> None:
    """The target as its own draft, which has not seen what plain steps emitted.

    No matter what the memory of its cache held: of 0x7f a float would be the largest.
    """
    with memory_full_of(0x7F):
        engine = models.drafted("itself", "llama", TREES["chain"])
    shapes = iter([(4, 5)] * 3 + [(0, 1)] * 5 + [(4, 5)] * 50)
    drive = Drive(engine, shapes=lambda: next(shapes))
    assert drive.one(PROMPTS[5], 60) == models.plain("llama", PROMPTS[5], 60)
    assert drive.emitted[:8] == [5] * 3 + [1] * 5
    assert sum(drive.emitted[8:16]) > 8


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((5, 2), "a decode step of depth 5 and 2 nodes, expected a depth of 0 to 4"),
        ((4, 34), "34 nodes, expected a depth of 0 to 4 and 1 to 33 nodes"),
        ((-1, 1), "depth -1"),
        ((1, 0), "1 and 0 nodes"),
        ((0, 2), "a decode step of depth 0 and 2 nodes, but it drafts only 0"),
        ((1, 10), "of depth 1 and 10 nodes, but it drafts only 8"),
    ],
)
def test_shapes_are_checked(models: Models, shape: tuple[int, int], message: str) -> None:
    drive = Drive(models.drafted("eagle", "llama", TREES["wide"]))
    slot, _ = drive.start(PROMPTS[0], max_tokens=9)
    assert drive.engine.reserve(slot, 20)
    with pytest.raises(ValueError, match=message):
        drive.engine.decode([slot], shape)
    drive.engine.decode([slot])
    drive.engine.collect()
    drive.engine.release(slot)


@pytest.mark.parametrize("chunk", [7] if SMALL else [1, 7, 65])
@pytest.mark.parametrize("kind", SOME_DRAFTS)
def test_chunks(models: Models, kind: str, chunk: int) -> None:
    family = family_of(kind)
    drive = Drive(models.drafted(kind, family, TREES["narrow"]))
    for ids in (PROMPTS[3], PROMPTS[5]):
        runs = []
        for length in (chunk, 0):
            tokens = drive.one(ids, 30, length, **SAMPLINGS["seeded"])
            assert tokens == models.plain(family, ids, 30, **SAMPLINGS["seeded"])
            runs.append(drive.emitted)
        assert runs[0] == runs[1]  # the drafter saw the same


@pytest.mark.parametrize("tree", ["chain", "full"])
@pytest.mark.parametrize(
    "family", ["qwen2_gptq"] if SMALL else ["llama", "qwen2", "qwen3", "minicpm", "qwen2_gptq"]
)
def test_the_target_as_its_own_draft_is_right(models: Models, family: str, tree: str) -> None:
    """A chain always and wholly; the best token of a tree's first level is always in the tree."""
    draft = {"draft_model_path": str(models.draft("itself", family)), "draft_head_quant": "none"}
    drive = Drive(models.engine(family, draft | TREES[tree]))
    for ids in SEVERAL:
        assert drive.one(ids, 61) == models.plain(family, ids, 61)
        if tree == "chain":
            assert drive.emitted == [5] * 12
        else:
            assert min(drive.emitted[:-1]) >= 2


def test_a_noisy_draft_is_sometimes_right(models: Models) -> None:
    drive = Drive(models.drafted("noisy", "llama", TREES["narrow" if SMALL else "wide"]))
    seen: set[int] = set()
    for ids in SEVERAL:
        for name in ("greedy", "seeded"):
            drive.one(ids, 70, **SAMPLINGS[name])
            seen |= set(drive.emitted[:-1])
    assert {1, 2, 3} <= seen


@pytest.mark.parametrize("kind", ["itself", "noisy", "eagle", "ngram"])
def test_stop_inside_a_run(models: Models, kind: str) -> None:
    drive = Drive(models.drafted(kind, "llama", TREES["wide"]), ahead=2)
    for ids in PROMPTS[: 1 if SMALL else 4]:
        expected = models.plain("llama", ids, 40)
        for at in range(1, 14):
            stop = expected[at]
            if stop == expected[0]:  # the first token is the host's
                continue
            end = expected.index(stop) + 1
            assert (
                drive.one(ids, 40, stop_ids=[159, stop] if stop != 159 else [stop])
                == (expected[: min(end, _first(expected, 159))])
            )


def _first(tokens: list[int], token: int) -> int:
    return tokens[1:].index(token) + 2 if token in tokens[1:] else len(tokens)


@pytest.mark.parametrize("kind", ["itself", "eagle3"])
def test_limit_inside_a_run(models: Models, kind: str) -> None:
    drive = Drive(models.drafted(kind, "llama", TREES["wide"]), ahead=2)
    ids = PROMPTS[2]
    for count in range(1, 14):
        assert drive.one(ids, count) == models.plain("llama", ids, count)


@pytest.mark.parametrize("kind", SOME_DRAFTS)
@pytest.mark.parametrize("length", [CONTEXT - at for at in ([2] if SMALL else [9, 2, 1])])
def test_the_context_ends_inside_a_tree(models: Models, kind: str, length: int) -> None:
    family = family_of(kind)
    ids = random_ids(length, VOCAB, seed=length)
    drive = Drive(models.drafted(kind, family, TREES["full"]), ahead=2)
    assert drive.engine.max_model_len == CONTEXT
    assert drive.one(ids, CONTEXT - length) == models.plain(family, ids, CONTEXT - length)


@pytest.mark.parametrize("kind", SOME_DRAFTS)
@pytest.mark.parametrize("name", ["all"] if SMALL else ["greedy", "all"])
def test_several_sequences(models: Models, kind: str, name: str) -> None:
    from cpmcu import C

    family, fields = family_of(kind), SAMPLINGS[name]
    engine = models.drafted(kind, family, TREES["narrow"], max_num_seqs=4)
    drive = Drive(engine)
    prompts = [PROMPTS[i] for i in (5, 0, 3, 6)]
    counts = [30, 45, 10, 60]
    slots, tokens = [], []
    for ids, count in zip(prompts[:2], counts[:2]):
        slot, first = drive.start(ids, **fields, max_tokens=count)
        slots.append(slot), tokens.append([first])
    # Two prompts in one step.
    for ids, count in zip(prompts[2:], counts[2:]):
        slot = engine.add_sequence(C.SamplingConfig(**fields, max_tokens=count), ids)
        assert engine.reserve(slot, len(ids))
        slots.append(slot), tokens.append([])
    engine.prefill([(slots[2], prompts[2], True), (slots[3], prompts[3][:60], False)])
    tokens[2] += engine.collect()[0].tokens
    engine.prefill([(slots[3], prompts[3][60:180], False)])
    assert engine.collect() == []
    engine.prefill([(slots[3], prompts[3][180:], True)])
    tokens[3] += engine.collect()[0].tokens
    running = list(range(4))
    while running:
        for i in running:
            wanted = len(prompts[i]) + len(tokens[i]) + engine.tokens_per_step
            assert engine.reserve(slots[i], min(wanted, CONTEXT))
        engine.decode([slots[i] for i in running])
        for output in engine.collect():
            i = slots.index(output.slot)
            tokens[i] += output.tokens
            assert output.finished == (len(tokens[i]) == counts[i])
        running = [i for i in running if len(tokens[i]) < counts[i]]
    for ids, count, got in zip(prompts, counts, tokens):
        assert got == models.plain(family, ids, count, **fields)


def test_a_slot_that_ended_emits_nothing_more(models: Models) -> None:
    engine = models.drafted("itself", "llama", TREES["chain"])
    slot, _ = Drive(engine).start(PROMPTS[1], max_tokens=4)
    assert engine.reserve(slot, 60)
    engine.decode([slot])
    engine.decode([slot])
    (first,), (second,) = engine.collect(), engine.collect()
    assert len(first.tokens) == 3 and first.finished
    assert second.tokens == [] and second.finished
    engine.release(slot)


def test_logprobs_are_those_of_plain_decoding(models: Models) -> None:
    plain = models.engine("llama", None)
    drafted = models.drafted("noisy", "llama", TREES["wide"])
    results = []
    for engine in (plain, drafted):
        fields = {**SAMPLINGS["all"], "logprobs": 3}
        slot, first = Drive(engine).start(PROMPTS[4], max_tokens=40, **fields)
        tokens, logprobs, tops = [first], [], []
        while len(tokens) < 40:
            engine.reserve(slot, len(PROMPTS[4]) + len(tokens) + engine.tokens_per_step)
            engine.decode([slot])
            (output,) = engine.collect()
            assert len(output.logprobs) == len(output.top_ids) == len(output.tokens)
            tokens += output.tokens
            logprobs += output.logprobs
            tops += output.top_ids
        engine.release(slot)
        results.append((tokens, logprobs, tops))
    assert results[0] == results[1]


@pytest.mark.parametrize("quant", ["w4"] if SMALL else ["none", "w8", "w4"])
@pytest.mark.parametrize(
    "kind", ["eagle"] if SMALL else ["eagle", "minicpm_eagle_hf", "eagle3_shared", "eagle_w4"]
)
def test_frspec(models: Models, kind: str, quant: str) -> None:
    import numpy as np

    family = family_of(kind)
    path = models.root / "frequent.npy"
    np.save(path, np.arange(2, VOCAB, 3))
    draft = str(models.draft(kind, family))
    speculation = {"draft_model_path": draft, "frspec_path": str(path), **TREES["wide"]}
    speculation["draft_head_quant"] = quant
    drive = Drive(models.engine(family, speculation))
    for ids in PROMPTS[:4]:
        assert drive.one(ids, 40) == models.plain(family, ids, 40)


@pytest.mark.parametrize("quant", ["w8"] if SMALL else ["w8", "w4"])
@pytest.mark.parametrize("kind", ["itself", "eagle", "eagle3"])
def test_a_quantised_draft_head(models: Models, kind: str, quant: str) -> None:
    """The target's head rounded, or the draft's own."""
    draft = str(models.draft(kind, "llama"))
    speculation = {"draft_model_path": draft, "draft_head_quant": quant, **TREES["narrow"]}
    drive = Drive(models.engine("llama", speculation))
    for i, ids in enumerate(PROMPTS[:4]):
        fields = list(SAMPLINGS.values())[i]
        assert drive.one(ids, 40, **fields) == models.plain("llama", ids, 40, **fields)
        if kind == "itself" and quant == "w8" and not fields:
            assert len(drive.emitted) < 20  # and it is nearly as good


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["eagle_bias", "minicpm_eagle", "minicpm_eagle_hf", "eagle3", "model"]
)
def test_a_quantised_draft_drafts_what_it_stands_for(models: Models, kind: str) -> None:
    """In every layout the same steps as each other, and in float32 as its dense twin."""
    family = f"{family_of(kind)}_gptq"
    target = models.target(family)
    dense = write_draft(models.root / f"{kind}-dense", kind, target, dtype=models.dtype)
    weights = quantise(dense.weights)
    ids = PROMPTS[5 if kind.startswith("minicpm") else 4]  # where some of the drafts are right
    layouts = ["marlin", {"eagle_bias": "gptq", "eagle3": "awq"}.get(kind, "compressed")]
    layouts += ["dense"] if models.dtype == "float32" else []
    seen = []
    for layout in layouts:
        directory = write_w4(models.root / f"{kind}-{layout}", dense.config, weights, layout)
        draft = {"draft_model_path": str(directory), "draft_head_quant": "none", **TREES["full"]}
        drive = Drive(models.engine(family, draft))
        assert drive.one(ids, COUNT) == models.plain(family, ids, COUNT)
        seen.append(drive.emitted)
    assert all(steps == seen[0] for steps in seen)
    assert max(seen[0]) > 1


@pytest.mark.parametrize("kind", ["itself", "eagle", "eagle with FR-Spec"])
@pytest.mark.parametrize("family", ["llama"] if SMALL else ["llama", "llama_gptq"])
def test_a_quantised_target_head(models: Models, kind: str, family: str) -> None:
    """lm_head_quant changes the text, and drafts follow it."""
    import numpy as np

    kind, _, frspec = kind.partition(" with ")
    plain = Drive(models.engine(family, None, lm_head_quant="w4"))
    speculation = {"draft_model_path": str(models.draft(kind, family)), **TREES["narrow"]}
    if frspec:
        np.save(models.root / "some.npy", np.arange(2, VOCAB, 3))
        speculation["frspec_path"] = str(models.root / "some.npy")
    drafted = Drive(models.engine(family, speculation, lm_head_quant="w4"))
    same = True
    for ids in PROMPTS[:5]:
        tokens = drafted.one(ids, 40)
        assert tokens == plain.one(ids, 40)
        same &= tokens == models.plain(family, ids, 40)
    assert not same


@pytest.mark.parametrize("kind", ["eagle"] if SMALL else ["eagle", "eagle3", "model"])
def test_a_target_head_stored_quantised(models: Models, tmp_path: Path, kind: str) -> None:
    """A quantised draft with default options shares it, or has its own."""
    from cpmcu.config import EngineConfig, SpeculativeConfig
    from cpmcu.loading.loader import load_model

    sizes = {"vocab_size": VOCAB, "hidden_size": 128, "head_dim": 64, "num_hidden_layers": 3}
    target = write_tiny(tmp_path / "target", "llama", dtype=models.dtype, **sizes)
    dense = write_draft(tmp_path / "draft", kind, target, dtype=models.dtype)
    write_w4(target.directory, target.config, quantise(target.weights, extra=("lm_head",)), "gptq")
    write_w4(dense.directory, dense.config, quantise(dense.weights), "gptq")

    def tokens(**speculation: Any) -> list[int]:
        config = {"device": models.device, "dtype": models.dtype, "memory_limit": 0.2}
        speculative = SpeculativeConfig(**speculation)
        config |= {"max_num_seqs": 1, "num_threads": 2, "speculative_config": speculative}
        return Drive(load_model(str(target.directory), config=EngineConfig(**config)).engine).one(
            PROMPTS[4], 20
        )

    assert tokens(draft_model_path=str(dense.directory)) == tokens(no_speculation=True)


@pytest.mark.parametrize("window", [16] if SMALL else [1, 16, 64])
def test_draft_window(models: Models, window: int) -> None:
    draft = str(models.draft("eagle", "llama"))
    speculation = {"draft_model_path": draft, "spec_window_size": window, **TREES["narrow"]}
    drive = Drive(models.engine("llama", speculation))
    for ids in PROMPTS:
        assert drive.one(ids, 40) == models.plain("llama", ids, 40)


def test_a_slot_used_again_forgets(models: Models) -> None:
    drive = Drive(models.drafted("itself", "llama", TREES["narrow"]), ahead=2)
    first = drive.one(PROMPTS[6], 40), drive.emitted
    drive.one(PROMPTS[2], 50)
    assert (drive.one(PROMPTS[6], 40), drive.emitted) == first


def test_a_resumed_sequence_goes_on(models: Models) -> None:
    """One that lost its pages reads its own output as a prompt: on the CPU nobody sees that. CUDA
    rounds prompts and steps differently, so there it goes on as plain decoding that lost its pages
    at the same place."""
    from cpmcu import C

    ids, fields = PROMPTS[4], SAMPLINGS["all"]
    uninterrupted = models.plain("llama", ids, 60, **fields)

    def resumed(engine: Any) -> list[int]:
        tokens = uninterrupted[:20]
        slot = engine.add_sequence(C.SamplingConfig(**fields), ids, tokens)
        assert engine.reserve(slot, len(ids) + 60)
        engine.prefill([(slot, ids + tokens, True)])
        tokens = tokens + engine.collect()[0].tokens
        while len(tokens) < 60:
            engine.reserve(slot, len(ids) + len(tokens) + engine.tokens_per_step)
            engine.decode([slot])
            tokens += engine.collect()[0].tokens
        engine.release(slot)
        return tokens[:60]

    expected = resumed(models.engine("llama", None))
    assert resumed(models.drafted("noisy", "llama", TREES["narrow"])) == expected
    if models.device == "cpu":
        assert expected == uninterrupted


SHIPPED_DRAFTS = ["tiny-python-eagle2", "tiny-python-eagle3", "tiny-python-draft", "ngram"]
SOURCES = ("heapq", "textwrap", "bisect", "fnmatch", "queue", "shlex", "string", "sched")


def shipped_engine(device: str, speculation: dict[str, Any], dtype: str = "auto") -> Any:
    from cpmcu.config import EngineConfig, SpeculativeConfig
    from cpmcu.loading.loader import load_model

    config = EngineConfig(
        device=device,
        dtype=dtype,
        memory_limit=0.2,
        max_num_seqs=1,
        chunk_length=256,
        max_model_len=1024,
        speculative_config=SpeculativeConfig(**speculation),
    )
    return load_model(str(SHIPPED), config=config).engine


@pytest.fixture(scope="module")
def python_texts(device: str) -> list[tuple[list[int], dict[str, Any], list[int]]]:
    """13 beginnings of Python code, how to sample, and the 200 tokens without speculation."""
    from cpmcu.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_directory(SHIPPED)
    plain = Drive(shipped_engine(device, {"no_speculation": True}), ahead=2)
    texts = []
    for i in range(13):
        module = importlib.import_module(SOURCES[i % len(SOURCES)])
        ids = tokenizer.encode(inspect.getsource(module)[200 * i : 200 * i + 60 + 150 * i])
        fields = {
            **list(SAMPLINGS.values())[i % len(SAMPLINGS)],
            "stop_ids": list(tokenizer.eos_token_ids),
        }
        texts.append((ids, fields, plain.one(ids, 200, **fields)))
    return texts


def test_an_eagle_head_after_a_short_draft_and_plain_steps(device: str) -> None:
    """No matter what the memory of its features held: of 0x7f a float16 would be a NaN."""
    from cpmcu.tokenizer import Tokenizer

    ids = Tokenizer.from_directory(SHIPPED).encode(
        inspect.getsource(importlib.import_module("heapq"))
    )
    draft = {"draft_model_path": str(SHIPPED.parent / "tiny-python-eagle2"), **TREES["narrow"]}
    with memory_full_of(0x7F):
        engine = shipped_engine(device, draft, dtype="float16")
    shapes = iter([(1, 2)] + [(0, 1)] * 8 + [(3, 12)] * 60)
    drive = Drive(engine, shapes=lambda: next(shapes))
    drive.one(ids[:300], 60)
    trees = drive.emitted[9:]
    assert sum(trees) / len(trees) > 1.8


@pytest.mark.slow
@pytest.mark.parametrize("name", SHIPPED_DRAFTS)
def test_the_shipped_drafts(device: str, python_texts: Any, name: str) -> None:
    """13 beginnings of Python code and 200 tokens for each draft; most accept two a step."""
    if name != "ngram" and not (SHIPPED.parent / name / "model.safetensors").is_file():
        pytest.skip(f"{name} is not there")
    draft: dict[str, Any] = {"method": "ngram"}
    if name != "ngram":
        draft = {"draft_model_path": str(SHIPPED.parent / name), **TREES["narrow"]}
    drafted = Drive(shipped_engine(device, draft), ahead=2)
    emitted: list[int] = []
    for ids, fields, expected in python_texts:
        tokens = drafted.one(ids, 200, **fields)
        # Without a drafter the device does not look at stop ids.
        assert tokens == expected[: len(tokens)]
        assert len(tokens) == 200 or tokens[-1] in fields["stop_ids"]
        emitted += drafted.emitted
    assert sum(emitted) / len(emitted) > (1.05 if name == "ngram" else 1.8)
