"""Many sequences on the C++ engine: each has the output that it has alone."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Iterator

import pytest
from tokenizers_for_tests import byte_level, write_directory

from cpmcu import LLM, SamplingParams
from cpmcu.engine import text_worker
from cpmcu.outputs import CompletionOutput, StreamChunk
from tests.reference.engines import extension_or_skip
from tests.reference.tiny_checkpoints import write_tiny

extension_or_skip()

COUNT = 40  # sequences; more than text_worker.FEW_SEQS
LENGTH = 24  # tokens of an output without a stop


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> Iterator[LLM]:
    directory = tmp_path_factory.mktemp("tiny")
    write_tiny(directory, "qwen3", vocab_size=byte_level().get_vocab_size())
    write_directory(directory, byte_level())
    with LLM(str(directory), device="cpu", num_threads=1, max_num_seqs=COUNT) as llm:
        yield llm


@pytest.fixture(scope="module")
def cases(llm) -> list[tuple[list[int], SamplingParams]]:
    """Prompts and parameters. Stops are tokens and texts that the outputs really have."""
    base = SamplingParams(max_tokens=LENGTH, temperature=1.0, ignore_eos=True)
    found = []
    for i in range(COUNT):
        prompt = [3 + (7 * i + 3 * j) % 90 for j in range(1 + i % 9)]
        params = dataclasses.replace(base, seed=i, max_tokens=LENGTH - i % 5)
        output = llm.generate(prompt, params)[0].outputs[0]
        token, text = output.token_ids[5 + i % 7], output.text[4 + i % 5 :][:2]
        others = [
            {},
            {"stop_token_ids": [token]},
            {"stop": [text]},
            {"logprobs": 2},
            {"stop": [text], "min_tokens": 12, "logprobs": 1},
            {"stop_token_ids": [token], "min_tokens": 9},
            {"stop": [text], "include_stop_str_in_output": True},
            {"temperature": 0.0, "ignore_eos": False},
        ]
        found.append((prompt, dataclasses.replace(params, **others[i % len(others)])))
    return found


@pytest.fixture(scope="module")
def alone(llm, cases) -> list[CompletionOutput]:
    return [llm.generate(prompt, params)[0].outputs[0] for prompt, params in cases]


def content(output: CompletionOutput) -> CompletionOutput:
    """An output without its times."""
    return dataclasses.replace(output, timings=None)


def test_a_batch_has_the_outputs_of_single_prompts(llm, cases, alone):
    """Tokens, texts, log-probabilities and ends agree, and every kind of end occurs."""
    together = llm.generate([prompt for prompt, _ in cases], [params for _, params in cases])
    assert [content(each.outputs[0]) for each in together] == [content(each) for each in alone]
    assert {type(each.stop_reason) for each in alone} == {int, str, type(None)}
    assert {each.finish_reason for each in alone} == {"stop", "length"}
    timings = [each.outputs[0].timings for each in together]
    assert all(each.decode_steps == each.output_tokens - 1 for each in timings)


@pytest.mark.parametrize("few", [-1, 16, 1000])
def test_streams_side_by_side(llm, cases, alone, few, monkeypatch):
    """Each chunk has the tokens of one step. Some streams are dropped early."""
    monkeypatch.setattr(text_worker, "FEW_SEQS", few)
    chunks: list[list[StreamChunk]] = [[] for _ in cases]

    def read(i: int) -> None:
        prompt, params = cases[i]
        stream = llm.stream(prompt, params)
        chunks[i] += itertools.islice(stream, 3) if i % 6 == 5 else stream
        stream.close()

    threads = [threading.Thread(target=read, args=(i,)) for i in range(COUNT)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for i, (found, expected) in enumerate(zip(chunks, alone)):
        tokens = [token for chunk in found for token in chunk.token_ids]
        assert all(len(chunk.token_ids) == 1 for chunk in found)
        if i % 6 == 5:
            assert tokens == expected.token_ids[:3]
            continue
        assert tokens == expected.token_ids
        assert "".join(chunk.text for chunk in found) == expected.text
        assert content(found[-1].result.outputs[0]) == content(expected)
    llm.call_engine(lambda engine: None)  # the loop has heard of the dropped streams
    load = llm.engine_load()
    assert (load.running, load.waiting) == (0, 0)


def test_a_slot_is_free_after_a_stop_string(llm, cases):
    """More prompts than slots: a sequence that a stop string ends makes room for the next one."""
    prompts = [prompt for prompt, _ in cases] * 3
    params = [params for _, params in cases] * 3
    texts = [result.text for result in llm.generate(prompts, params)]
    assert texts == texts[:COUNT] * 3
    assert llm.call_engine(lambda engine: engine.num_free_pages) > 0
    assert llm.engine_load().running == 0
