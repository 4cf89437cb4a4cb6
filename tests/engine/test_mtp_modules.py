"""Several MTP modules: their drafts, their KV caches, and refusals.

After any rejections, chunks and reused slots, the caches hold what one prompt would have written.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cpmcu.spec_metrics import AcceptanceCounter
from tests.engine.drafted import SAMPLINGS, Drive, memory_full_of
from tests.engine.harness import random_ids
from tests.engine.prefix import PAGE, Job, running
from tests.reference.engines import extension_or_skip
from tests.reference.numpy_drafts import NumpyModule, NumpyTarget, draft_of_modules
from tests.reference.tiny_modules import write_modules

extension_or_skip()

VOCAB = 7  # so few tokens that random weights often draft the right one
KINDS = [("deepseek", False), ("deepseek", True), ("mimo", False)]  # layout, chained
DEPTH = 3


def load(directory: Path, device: str = "cpu", **speculation: Any) -> Any:
    from cpmcu.config import EngineConfig, SpeculativeConfig
    from cpmcu.loading.loader import load_model

    config = EngineConfig(
        device=device,
        num_threads=1,
        max_num_seqs=speculation.pop("max_num_seqs", 1),
        chunk_length=64,
        max_model_len=512,
        memory_limit=0.2,
        speculative_config=SpeculativeConfig.from_mapping({"method": "mtp", **speculation}),
    )
    return load_model(str(directory), config=config).engine


def write(directory: Path, layout: str, chained: bool, **fields: Any) -> Any:
    fields = {"vocab_size": VOCAB, "seed": 3, **fields}
    return write_modules(directory, layout, DEPTH, chained=chained, **fields)


def text_of(length: int) -> list[int]:
    return [i % VOCAB for i in random_ids(length, 1000, seed=length)]


@pytest.mark.parametrize(("layout", "chained"), KINDS)
@pytest.mark.parametrize("depth", [1, 2, DEPTH])
def test_each_module_drafts_its_token(
    layout: str, chained: bool, depth: int, tmp_path: Path
) -> None:
    """The tokens are those of the numpy modules, which compute all rows anew for each draft."""
    tiny, weights = write(tmp_path, layout, chained)
    of_target = {k: w for k, w in tiny.weights.items() if "layers.2" not in k and "mtp" not in k}
    target = NumpyTarget(tiny.fields(), of_target)
    head_dim, first = tiny.config["head_dim"], layout == "mimo"
    modules = [NumpyModule(target, w, head_dim, first) for w in weights[:depth]]
    engine = load(tmp_path, num_speculative_tokens=depth)
    seen: set[int] = set()
    for length in (1, 2, 31, 70, 130):
        slot = Slot(engine, text_of(length))
        trees, drafts = [], []
        for _ in range(25):
            trees.append((len(slot.ids), slot.draft_and_decode()))
        states, _ = target.states(slot.ids)
        for known, tree in trees:
            drafts.append(
                draft_of_modules(modules, states[: known - 1], slot.ids[1:known], chained=chained)
            )
            assert tree == drafts[-1], (length, known)
        seen |= {tuple(draft) for draft in drafts}
        slot.release()
    assert len(seen) > 3


class Slot:
    """A sequence whose slot stays, so that its pages can be read."""

    def __init__(self, engine: Any, ids: Sequence[int], chunk: int = 0, **fields: Any) -> None:
        self.engine, self.ids = engine, list(ids)
        self.slot, first = Drive(engine).start(self.ids, chunk, max_tokens=400, **fields)
        self.ids.append(first)

    def decode(self, steps: int) -> list[int]:
        emitted = []
        for _ in range(steps):
            assert self.engine.reserve(self.slot, len(self.ids) + self.engine.tokens_per_step)
            self.before = len(self.ids) - 1  # cached tokens before the step
            self.engine.decode([self.slot])
            (output,) = self.engine.collect()
            self.ids += output.tokens
            emitted.append(len(output.tokens))
        return emitted

    def draft_and_decode(self) -> list[int]:
        """The drafted tokens of a step."""
        assert self.engine.reserve(self.slot, len(self.ids) + self.engine.tokens_per_step)
        ((tokens, _),) = self.engine.begin_masked([self.slot])
        self.engine.end_masked([-1] * len(tokens), np.zeros((0, 0), np.uint32))
        (output,) = self.engine.collect()
        self.ids += output.tokens
        return tokens[1:]

    def rows(self, heads: int, width: int) -> npt.NDArray[Any]:
        """Returns bits [entries, planes, heads, width] of the target's and the modules' planes."""
        from cpmcu import C

        engine, pages = self.engine, []
        room = C.HostBlocks(engine, engine.pages.page_bytes, 1, 1)
        room.grow()
        for page in engine.pages.of_slot(self.slot):
            engine.pages.save([page], room, [0])
            engine.pages.wait_for_copies()
            pages.append(np.array(room.view(0), copy=True).view(np.uint8).copy())
        return np.concatenate(
            [
                page.reshape(-1, heads, 64, width * len(page) // page.size).transpose(2, 0, 1, 3)
                for page in pages
            ]
        )

    def release(self) -> None:
        self.engine.release(self.slot)


def cache_of(slot: Slot, tiny: Any, itemsize: int) -> npt.NDArray[Any]:
    return slot.rows(tiny.config["num_key_value_heads"], tiny.config["head_dim"] * itemsize)


TREES = {
    "chain": {"num_speculative_tokens": DEPTH},
    "tree": {"spec_num_iter": DEPTH, "spec_topk_per_iter": 3, "spec_tree_size": 9},
}


@pytest.mark.parametrize("tree", list(TREES))
@pytest.mark.parametrize(("layout", "chained"), KINDS)
def test_caches_after_rejections_are_those_of_a_prompt(
    layout: str, chained: bool, tree: str, tmp_path: Path
) -> None:
    """The bits are equal, also in a slot that another sequence used."""
    tiny, _ = write(tmp_path, layout, chained)
    with memory_full_of(0x7F):
        engine = load(tmp_path, **TREES[tree])
    other = Slot(engine, text_of(100), **SAMPLINGS["seeded"])
    other.decode(12)
    other.release()
    seen: set[int] = set()
    for length in (3, 60):
        slot = Slot(engine, text_of(length), **SAMPLINGS["seeded"])
        seen |= set(slot.decode(34))
        final = slot.before - DEPTH  # rows that no drafted token reaches
        found = cache_of(slot, tiny, 4)[:final]
        slot.release()
        fresh = Slot(engine, slot.ids[:-1])
        expected = cache_of(fresh, tiny, 4)[:final]
        fresh.release()
        assert found.shape[0] == final and found.shape[1] == 2 * (2 + DEPTH)
        assert np.array_equal(found, expected), np.argwhere(found != expected)[:, :2]
    assert {1, 2} <= seen  # some drafts were right, some were not


@pytest.mark.parametrize("chunk", [1, 2, 5, 33])
@pytest.mark.parametrize(("layout", "chained"), KINDS)
def test_chunks_leave_the_same_caches(
    layout: str, chained: bool, chunk: int, tmp_path: Path
) -> None:
    """A chunk ends before the ids of its last rows are known."""
    tiny, _ = write(tmp_path, layout, chained)
    engine = load(tmp_path, num_speculative_tokens=DEPTH)
    ids = text_of(50)
    caches = []
    for length in (chunk, 64):
        slot = Slot(engine, ids, length)
        caches.append(cache_of(slot, tiny, 4)[: len(ids) - DEPTH])
        slot.release()
    assert np.array_equal(*caches)


@pytest.mark.parametrize("tree", list(TREES))
@pytest.mark.parametrize(("layout", "chained"), KINDS)
def test_same_tokens(layout: str, chained: bool, tree: str, tmp_path: Path, device: str) -> None:
    """A draft changes no token, with any sampling, chunks, and shapes in any order."""
    dtype = "bfloat16" if device == "cuda" else "float32"
    sizes = {"hidden_size": 128, "head_dim": 64} if device == "cuda" else {}
    write(tmp_path, layout, chained, dtype=dtype, vocab_size=40, **sizes)
    plain = Drive(load(tmp_path, device, method="ngram", no_speculation=True))
    rng = np.random.default_rng(0)
    small = [(0, 1), (1, 2), (2, 3), None]
    engine = load(tmp_path, device, **TREES[tree])
    for drive in (Drive(engine, 2), Drive(engine, 2, lambda: small[rng.integers(4)])):
        for (name, fields), length in zip(SAMPLINGS.items(), (1, 63, 64, 130)):
            ids = [i % 40 for i in random_ids(length, 1000, seed=length)]
            for chunk in (0, 7):
                assert drive.one(ids, 50, chunk, **fields) == plain.one(ids, 50, **fields), name


def test_several_sequences(tmp_path: Path, device: str) -> None:
    """Prompts of two sequences in one step, steps of three sequences."""
    from cpmcu import C

    dtype = "bfloat16" if device == "cuda" else "float32"
    sizes = {"hidden_size": 128, "head_dim": 64} if device == "cuda" else {}
    write(tmp_path, "deepseek", True, dtype=dtype, vocab_size=40, **sizes)
    plain = Drive(load(tmp_path, device, no_speculation=True))
    engine = load(tmp_path, device, max_num_seqs=3, **TREES["tree"])
    prompts = [[i % 40 for i in random_ids(n, 1000, seed=n)] for n in (5, 40, 70)]
    fields = SAMPLINGS["seeded"]
    slots = []
    for ids in prompts:
        slots.append(engine.add_sequence(C.SamplingConfig(**fields, max_tokens=40), ids))
        assert engine.reserve(slots[-1], len(ids))
    tokens: list[list[int]] = [[], [], []]
    engine.prefill([(slots[0], prompts[0][:2], False), (slots[1], prompts[1][:30], False)])
    engine.collect()
    engine.prefill([(slots[1], prompts[1][30:], True), (slots[0], prompts[0][2:], True)])
    for output in engine.collect():
        tokens[slots.index(output.slot)] += output.tokens
    engine.prefill([(slots[2], prompts[2][:64], False)])
    engine.collect()
    engine.prefill([(slots[2], prompts[2][64:], True)])
    tokens[2] += engine.collect()[0].tokens
    running = [0, 1, 2]
    while running:
        for i in running:
            assert engine.reserve(slots[i], len(prompts[i]) + len(tokens[i]) + 4)
        engine.decode([slots[i] for i in running])
        for output in engine.collect():
            tokens[slots.index(output.slot)] += output.tokens
        running = [i for i in running if len(tokens[i]) < 40]
    for ids, got in zip(prompts, tokens):
        assert got == plain.one(ids, 40, **fields)


@pytest.mark.parametrize("tree", list(TREES))
@pytest.mark.parametrize(("layout", "chained"), KINDS)
def test_a_prefix_hit_changes_no_token(
    layout: str, chained: bool, tree: str, tmp_path: Path, device: str
) -> None:
    """Prompts may differ first near a page's end, and a module's last rows read ids beyond it."""
    dtype = "bfloat16" if device == "cuda" else "float32"
    sizes = {"hidden_size": 128, "head_dim": 64} if device == "cuda" else {}
    write(tmp_path, layout, chained, dtype=dtype, vocab_size=40, **sizes)
    plain = Drive(load(tmp_path, device, no_speculation=True))
    engine = load(tmp_path, device, max_num_seqs=2, **TREES[tree])
    with running(engine) as (runner, cache):
        for length in (130, 133, 63, 65, 67, 126, 129, 191, 195):
            ids = [i % 40 for i in random_ids(200, 1000, seed=1)][:length]
            prompts = [(ids, "greedy"), ([*ids, 9, 11, 2, 5], "seeded")]
            jobs = [Job(prompt, 20, **SAMPLINGS[name]) for prompt, name in prompts]
            runner.submit(*(job.request for job in jobs))
            for job, (prompt, name) in zip(jobs, prompts):
                assert job.wait() == plain.one(prompt, 20, **SAMPLINGS[name]), length
            runner.call(lambda _: cache.check())
        assert cache.counters.hits >= 10 * PAGE


@pytest.mark.parametrize("tree", list(TREES))
@pytest.mark.parametrize(("layout", "chained"), KINDS)
def test_a_prefix_hit_changes_no_draft_of_the_same_prompt(
    layout: str, chained: bool, tree: str, tmp_path: Path
) -> None:
    """Every step accepts as many drafted tokens as without the hit."""
    write(tmp_path, layout, chained)
    engine = load(tmp_path, max_num_seqs=2, **TREES[tree])
    seen: set[int] = set()
    with running(engine) as (runner, _):
        for length in (66, 127, 130, 195):
            steps, tokens = [], []
            for _ in range(2):
                acceptance = AcceptanceCounter(DEPTH, detailed=True)
                job = Job(text_of(length), 40, acceptance=acceptance, **SAMPLINGS["seeded"])
                runner.submit(job.request)
                tokens.append(job.wait())
                steps.append(acceptance.metrics().per_step_accepted)
            assert job.request.cached_tokens == (length - 1) // PAGE * PAGE
            assert tokens[0] == tokens[1] and steps[0] == steps[1], length
            seen |= set(steps[0] or ())
    assert len(seen) > 2


def test_a_draft_that_the_context_fills(tmp_path: Path) -> None:
    """Paths of the text are longer than those of the modules."""
    write(tmp_path, "mimo", False)
    plain = Drive(load(tmp_path, no_speculation=True))
    filled = {"mtp_strategy": "with_ngram", "num_model_steps": 3, "num_speculative_tokens": 6}
    drive = Drive(load(tmp_path, **filled), 2)
    for length in (2, 64, 100):
        assert drive.one(text_of(length), 80) == plain.one(text_of(length), 80)
    assert max(drive.emitted) > DEPTH + 1


def test_the_first_module_alone(tmp_path: Path) -> None:
    """The first module runs once for each token, and the other modules are not read."""
    tiny, weights = write(tmp_path, "mimo", False)
    of_target = {name: w for name, w in tiny.weights.items() if "mtp" not in name}
    target = NumpyTarget(tiny.fields(), of_target)
    module = NumpyModule(target, weights[0], tiny.config["head_dim"], hidden_first=True)
    engine = load(tmp_path, num_speculative_tokens=4, enable_multi_layers_mtp=False)
    drive, ids = Drive(engine), text_of(20)
    tokens = drive.one(ids, 60)
    text, at = ids + tokens, len(ids)
    states, _ = target.states(text)
    for emitted in drive.emitted[:-1]:
        logits, recycled = module.prefill(states[:at], text[1 : at + 1])
        drafted = module.chain(recycled[-1], logits[-1], 4)
        right = [*(a == b for a, b in zip(drafted, text[at + 1 :])), False].index(False)
        assert emitted == right + 1
        at += emitted
