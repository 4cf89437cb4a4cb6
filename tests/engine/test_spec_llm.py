"""Speculation through LLM: texts, stops, token counts, preemption, metrics."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest

from cpmcu import LLM, SamplingParams
from tests.engine.harness import SMALL
from tests.reference.engines import extension_or_skip
from tests.reference.tiny_checkpoints import TinyCheckpoint, write_tiny
from tests.reference.tiny_drafts import write_draft

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from test_llm_engine import FewerPages
from tokenizers_for_tests import byte_level, write_directory

extension_or_skip()

SETTINGS: dict[str, Any] = {"device": "cpu", "memory_limit": 0.3, "num_threads": 1}
PROMPTS = ["def hello(", "the quick brown fox", "你好 🙂"]
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=40, ignore_eos=True, temperature=1.0, top_p=0.95, seed=7)
SHAPE = {"spec_num_iter": 4, "spec_topk_per_iter": 4, "spec_tree_size": 16}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    directory = tmp_path_factory.mktemp("tiny")
    vocab_size = byte_level().get_vocab_size()
    checkpoint = write_tiny(directory, "llama", vocab_size=vocab_size, num_hidden_layers=3)
    write_directory(directory, byte_level())
    return checkpoint


@pytest.fixture(scope="module")
def drafts(target: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("drafts")
    made: dict[str, Any] = {
        kind: {"draft_model_path": str(write_draft(root / kind, kind, target).directory), **SHAPE}
        for kind in ("itself", "noisy", "eagle", "eagle3")
    }
    return {**made, "ngram": {"method": "ngram", "num_speculative_tokens": 3}}


@pytest.fixture(scope="module")
def plain(target: TinyCheckpoint):
    with LLM(str(target.directory), **SETTINGS) as llm:
        yield llm


@pytest.fixture(params=["eagle"] if SMALL else ["itself", "noisy", "eagle", "eagle3", "ngram"])
def llm(request: pytest.FixtureRequest, target: TinyCheckpoint, drafts: dict[str, Any]):
    options = {"speculative_config": drafts[request.param], **SETTINGS}
    with LLM(str(target.directory), **options) as llm:
        yield llm


def shown(outputs: list[Any]) -> list[Any]:
    return [
        (choice.token_ids, choice.text, choice.finish_reason, choice.stop_reason)
        for output in outputs
        for choice in output.outputs
    ]


def test_steps_at_load_leave_no_trace(llm: LLM) -> None:
    load = llm.engine_load()
    assert (load.running, load.waiting, load.kv_cache_usage, load.preemptions) == (0, 0, 0, 0)
    assert load.step_tokens.total == 0
    assert llm.call_engine(lambda engine: engine.counters["steps"]) > 0
    assert llm.call_engine(lambda engine: engine.num_free_pages == engine.num_pages)


def test_outputs_equal_those_without_speculation(plain: LLM, llm: LLM) -> None:
    tokens = plain.generate(PROMPTS[0], GREEDY)[0].outputs[0]
    stops = [
        {"stop_token_ids": [tokens.token_ids[7]]},
        {"stop": [tokens.text[9:12]]},
        {"max_tokens": 1},
        {"max_tokens": 6},
        {"logit_bias": {2: 4.0}, "ignore_eos": False, "temperature": 1.0, "seed": 3},
        {"n": 3, "seed": 5, "temperature": 1.0, "repetition_penalty": 1.3},
    ]
    stops = stops[::2] if SMALL else stops
    for params in [GREEDY, SAMPLED, *(dataclasses.replace(GREEDY, **stop) for stop in stops)]:
        expected = shown(plain.generate(PROMPTS, params))
        assert shown(llm.generate(PROMPTS, params)) == expected, params
        assert [shown(llm.generate(prompt, params))[0] for prompt in PROMPTS] == [
            expected[i * params.n] for i in range(3)
        ]


def test_streams_and_logprobs(plain: LLM, llm: LLM) -> None:
    params = dataclasses.replace(SAMPLED, logprobs=3, stop=["zz"])
    expected = plain.generate(PROMPTS[1], params)[0].outputs[0]
    chunks = list(llm.stream(PROMPTS[1], params))
    assert [token for chunk in chunks for token in chunk.token_ids] == expected.token_ids
    assert "".join(chunk.text for chunk in chunks) == expected.text
    assert [entry for chunk in chunks for entry in chunk.logprobs or []] == expected.logprobs
    assert all(len(chunk.token_ids) == len(chunk.logprobs or []) for chunk in chunks)


def test_pages_run_out(target: TinyCheckpoint, drafts, plain: LLM, monkeypatch) -> None:
    from cpmcu.loading.loader import load_model

    def load_with_fewer_pages(*arguments: Any, **options: Any) -> Any:
        loaded = load_model(*arguments, **options)
        return dataclasses.replace(loaded, engine=FewerPages(loaded.engine, 12 if SMALL else 16))

    params = SamplingParams(
        max_tokens=120 if SMALL else 200,
        ignore_eos=True,
        temperature=1.0,
        top_p=0.9,
        seed=3,
        presence_penalty=0.5,
    )
    prompts = [[5 + i] * (20 + 9 * i) for i in range(6)]
    expected = shown(plain.generate(prompts, params))
    monkeypatch.setattr("cpmcu.loading.loader.load_model", load_with_fewer_pages)
    options = {**SETTINGS, "max_num_seqs": 6, "speculative_config": drafts["noisy"]}
    with LLM(str(target.directory), **options) as llm:
        assert shown(llm.generate(prompts, params)) == expected
        assert llm.call_engine(lambda engine: engine.most_sequences_added) > len(prompts)


def test_the_end_of_the_context(target: TinyCheckpoint, drafts: dict[str, Any], plain: LLM) -> None:
    options = {**SETTINGS, "max_model_len": 128, "speculative_config": drafts["itself"]}
    expected = plain.generate([[5] * 100], dataclasses.replace(GREEDY, max_tokens=28))
    with LLM(str(target.directory), **options) as llm:
        assert llm.max_length == 128
        outputs = llm.generate([[5] * 100], dataclasses.replace(GREEDY, max_tokens=None))
        assert shown(outputs) == shown(expected)


def test_metrics(target: TinyCheckpoint, drafts: dict[str, Any], plain: LLM) -> None:
    assert plain.generate(PROMPTS[0], GREEDY)[0].outputs[0].spec_decode_metrics is None
    chain = {**drafts["itself"], "spec_topk_per_iter": 1, "spec_tree_size": 5}
    chain["per_request_spec_decode_metrics"] = "detailed"
    params = dataclasses.replace(GREEDY, max_tokens=1 + 5 * 6)
    with LLM(str(target.directory), **SETTINGS, speculative_config=chain) as llm:
        output = llm.generate(PROMPTS[0], params)[0].outputs[0]
        metrics = output.spec_decode_metrics
        assert metrics is not None
        assert metrics.per_step_accepted == (4,) * 6
        assert metrics.mean_acceptance_length == 5 and metrics.draft_acceptance_rate == 1
        assert metrics.num_spec_tokens == 4
        assert output.timings.decode_steps == 6
    chain["per_request_spec_decode_metrics"] = "none"
    with LLM(str(target.directory), **SETTINGS, speculative_config=chain) as llm:
        assert llm.generate(PROMPTS[0], params)[0].outputs[0].spec_decode_metrics is None
