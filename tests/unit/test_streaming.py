"""`async for` on LLM.stream and scoring, with a fake engine."""

from __future__ import annotations

import asyncio
import gc
import time
from pathlib import Path

import pytest
from story import Stage, told

from cpmcu import LLM, SamplingParams, StreamChunk


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Stage:
    return Stage(monkeypatch, tmp_path)


async def chunks_of(llm: LLM, prompt: list[int], params: SamplingParams) -> list[StreamChunk]:
    return [chunk async for chunk in llm.stream(prompt, params)]


def wait_idle(llm: LLM) -> None:
    begin = time.monotonic()
    while (load := llm.engine_load()).running or load.waiting:
        assert time.monotonic() - begin < 60, "the request runs on"
        time.sleep(0.01)


def test_chunks_are_those_of_a_for_loop(make: Stage) -> None:
    with make() as llm:
        params = SamplingParams(max_tokens=40, stop="lazy", seed=1, n=2)
        found = asyncio.run(chunks_of(llm, [1, 2, 3], params))
        expected = list(llm.stream([1, 2, 3], params))
        assert sorted(chunk.text for chunk in found) == sorted(chunk.text for chunk in expected)
        assert found[-1].result is not None and expected[-1].result is not None
        assert found[-1].result.text == expected[-1].result.text
        assert [chunk.result is None for chunk in found[:-1]] == [True] * (len(found) - 1)


def test_several_streams_share_the_engine(make: Stage) -> None:
    async def all_of(llm: LLM) -> list[list[StreamChunk]]:
        params = SamplingParams(max_tokens=12)
        return await asyncio.gather(*(chunks_of(llm, [5] * n, params) for n in range(1, 9)))

    with make(max_num_seqs=4, step_seconds=0.001) as llm:
        for n, chunks in enumerate(asyncio.run(all_of(llm)), 1):
            assert [token for chunk in chunks for token in chunk.token_ids] == told(n, 12)
        engine = make.engines[0]()
        assert engine is not None
        assert max(len(slots) for name, slots in engine.log if name == "decode") == 4


def test_leaving_the_loop_cancels(make: Stage) -> None:
    async def first(llm: LLM) -> None:
        async for chunk in llm.stream([1, 2], SamplingParams(max_tokens=150)):
            assert chunk.token_ids
            break

    async def cancelled(llm: LLM) -> None:
        task = asyncio.create_task(chunks_of(llm, [1, 2], SamplingParams(max_tokens=150)))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with make(step_seconds=0.01) as llm:
        for way in (first, cancelled):
            asyncio.run(way(llm))
            wait_idle(llm)
        for _ in llm.stream([1, 2], SamplingParams(max_tokens=150)):
            break
        gc.collect()
        wait_idle(llm)
        engine = make.engines[0]()
        assert engine is not None
        assert sum(name == "decode" for name, _ in engine.log) < 150


def test_a_failed_step_and_a_closed_engine(make: Stage) -> None:
    with make() as llm:
        engine = make.engines[0]()
        assert engine is not None
        engine.fail_on["decode"] = RuntimeError("the device is gone")
        with pytest.raises(RuntimeError, match="the device is gone"):
            asyncio.run(chunks_of(llm, [1], SamplingParams(max_tokens=5)))
    with pytest.raises(RuntimeError, match="closed"):
        asyncio.run(chunks_of(llm, [1], SamplingParams(max_tokens=5)))


def test_the_event_loop_goes_on_meanwhile(make: Stage) -> None:
    async def ticks(llm: LLM) -> int:
        task = asyncio.create_task(chunks_of(llm, [1], SamplingParams(max_tokens=10)))
        count = 0
        while not task.done():
            count += 1
            await asyncio.sleep(0.001)
        return count

    with make(step_seconds=0.05) as llm:
        assert asyncio.run(ticks(llm)) > 5


def test_scoring_generates_nothing(make: Stage) -> None:
    """A request with `max_tokens` 0 may run beside others, and its prompt may have one token."""
    score = SamplingParams(max_tokens=0, prompt_logprobs=1)
    with make(step_seconds=0.001) as llm:
        prompts = [[7], list(range(30)), [3, 4]]
        plain = SamplingParams(max_tokens=6)
        one, long, other = llm.generate(prompts, [score, score, plain])
        assert one.prompt_logprobs == [None]
        assert long.prompt_logprobs is not None and long.prompt_logprobs[0] is None
        assert [entry.token_id for entry in long.prompt_logprobs[1:] if entry] == list(range(1, 30))
        for result in (one, long):
            assert (result.text, result.outputs[0].token_ids) == ("", [])
            assert result.outputs[0].finish_reason == "length"
            assert result.usage.completion_tokens == 0
        assert long.timings.prefill_s > 0
        assert other.outputs[0].token_ids == told(2, 6)
        engine = make.engines[0]()
        assert engine is not None
        read = [item for name, items in engine.log if name == "prefill" for item in items]
        assert sum(last for _, _, last in read) == 2  # the warm-up and the plain request
        assert llm.call_engine(lambda its: its.num_free_pages) == engine.num_pages


@pytest.mark.parametrize("fields", [{}, {"prompt_logprobs": 0, "n": 2}])
def test_scoring_needs_prompt_logprobs(fields: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least 1 unless prompt_logprobs is given"):
        SamplingParams(max_tokens=0, **fields)
