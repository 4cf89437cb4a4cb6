"""The generate loop with a fake engine that checks its caller."""

from __future__ import annotations

import dataclasses
import gc
import logging
import queue
import threading
import time
import weakref

import pytest
from fake_engine import PAGE_SIZE, FakeEngine, sampling

from cpmcu.engine import text_worker
from cpmcu.engine.detokenizer import Detokenizer
from cpmcu.engine.request import Request
from cpmcu.engine.runner import Runner
from cpmcu.engine.stopping import StopStrings, StopTokens
from cpmcu.outputs import CompletionOutput, StreamChunk
from cpmcu.spec_metrics import AcceptanceCounter

EOS = 0


def script(key: int, position: int) -> int:
    return 1 + (31 * key + 7 * position) % 90


def decode(ids: list[int]) -> str:
    return "".join(chr(33 + i) for i in ids)


class Job:
    """A request and the chunks that it emitted."""

    def __init__(self, prompt_length: int = 3, max_tokens: int = 10, key: int = 0, **options):
        self.items: queue.SimpleQueue = queue.SimpleQueue()
        self.chunks: list[StreamChunk] = []
        self.progress: list[tuple[int, int]] = []
        self.prompt = list(range(1, prompt_length + 1))
        stop_ids = [EOS, *options.get("stop_ids", ())]
        self.request = Request(
            self.prompt,
            sampling(key, stop_ids, options.pop("device_tokens", max_tokens)),
            detokenizer=Detokenizer(decode, self.prompt),
            stop_strings=StopStrings(options.pop("stop", ())),
            stop_tokens=StopTokens([EOS], options.pop("stop_ids", ()), max_tokens),
            max_tokens=max_tokens,
            emit=options.pop("emit", self.items.put),
            on_prefill=lambda done, total: self.progress.append((done, total)),
            acceptance=options.pop("acceptance", None),
            prompt_logprobs=options.pop("prompt_logprobs", None),
            grammar=options.pop("grammar", None),
            min_tokens=options.pop("min_tokens", None),
            is_streamed=options.pop("is_streamed", True),
        )
        self.key = key

    def wait_for_chunk(self) -> None:
        item = self.items.get(timeout=60)
        if isinstance(item, Exception):
            raise item
        self.chunks.append(item)

    def wait(self) -> CompletionOutput:
        while not self.chunks or self.chunks[-1].finish_reason is None:
            self.wait_for_chunk()
        output = self.request.output()
        assert "".join(chunk.text for chunk in self.chunks) == output.text
        assert [token for chunk in self.chunks for token in chunk.token_ids] == output.token_ids
        return output

    def expected(self, count: int) -> list[int]:
        return [script(self.key, len(self.prompt) + i) for i in range(count)]


@pytest.fixture(params=["text_by_the_engine_thread", "text_by_its_own_thread"])
def start(request, monkeypatch):
    """Makes runners. Every test runs with both ways to make text."""
    if request.param == "text_by_its_own_thread":
        monkeypatch.setattr(text_worker, "FEW_SEQS", -1)
    runners: list[Runner] = []

    def make(engine: FakeEngine, **options) -> Runner:
        runners.append(Runner(engine, page_size=PAGE_SIZE, **options))
        return runners[-1]

    yield make
    for runner in runners:
        runner.close()


def test_one_request(start):
    engine = FakeEngine(script)
    runner = start(engine)
    job = Job(prompt_length=19, max_tokens=25)
    runner.submit(job.request)
    output = job.wait()
    assert output.token_ids == job.expected(25)
    assert output.text == decode(output.token_ids)
    assert output.finish_reason == "length"
    assert job.progress == [(0, 19), (8, 19), (16, 19), (19, 19)]
    assert engine.most_in_flight == 2
    assert output.timings.decode_steps == 24
    assert output.timings.prompt_tokens == 19
    assert runner.call(lambda e: (e.num_free_pages, e.slots)) == (engine.num_pages, {})


def test_no_step_is_launched_beyond_the_token_limit(start):
    engine = FakeEngine(script)
    runner = start(engine)
    job = Job(max_tokens=5)
    runner.submit(job.request)
    job.wait()
    assert sum(method == "decode" for method, _ in engine.log) == 4


@pytest.mark.parametrize("launch_ahead", [1, 2, 4])
def test_eos_drops_the_steps_in_flight(start, launch_ahead):
    engine = FakeEngine(lambda k, p: EOS if p == 7 else script(k, p), launch_ahead=launch_ahead)
    runner = start(engine)
    job, again = Job(max_tokens=50), Job(max_tokens=2)
    runner.submit(job.request)
    output = job.wait()
    assert output.token_ids == [*job.expected(4), EOS]
    assert output.text == decode(job.expected(4))
    assert (output.finish_reason, output.stop_reason) == ("stop", None)
    runner.submit(again.request)  # gets the same slot
    assert again.wait().token_ids == again.expected(2)


def test_stop_string_and_stop_token(start):
    runner = start(FakeEngine(script))
    probe = Job()
    tokens = probe.expected(10)
    stopped, token = Job(stop=[decode(tokens[3:5])]), Job(stop_ids=[tokens[6]])
    runner.submit(stopped.request, token.request)
    output = stopped.wait()
    assert output.text == decode(tokens[:3])
    assert output.token_ids == tokens[:5]
    assert (output.finish_reason, output.stop_reason) == ("stop", decode(tokens[3:5]))
    output = token.wait()
    assert output.token_ids == tokens[:7]
    assert output.text == decode(tokens[:6])
    assert (output.finish_reason, output.stop_reason) == ("stop", tokens[6])


@pytest.mark.parametrize("burst", [2, 5])
def test_bursts_are_cut_at_the_end_of_the_output(start, burst):
    engine = FakeEngine(script, burst=burst)
    runner = start(engine)
    jobs = [Job(max_tokens=n, key=n) for n in range(1, 14)]
    runner.submit(*(job.request for job in jobs))
    for count, job in enumerate(jobs, start=1):
        assert job.wait().token_ids == job.expected(count)


@pytest.mark.parametrize("launch_ahead", [1, 2, 4])
@pytest.mark.parametrize("burst", [2, 5])
def test_bursts_ended_by_the_device(start, burst, launch_ahead):
    def ends(key: int, position: int) -> int:
        return EOS if key % 2 and position == 3 + key else script(key, position)

    engine = FakeEngine(ends, burst=burst, device_stops=True, launch_ahead=launch_ahead)
    runner = start(engine)
    jobs = [Job(max_tokens=n, key=n) for n in range(1, 14)]
    runner.submit(*(job.request for job in jobs))
    for count, job in enumerate(jobs, start=1):
        output = job.wait()
        expected = job.expected(count)
        if job.key % 2 and count > job.key:
            expected = [*expected[: job.key], EOS]
        assert output.token_ids == expected
        assert output.finish_reason == "length"
    eos = Job(max_tokens=50, key=7)
    runner.submit(eos.request)
    output = eos.wait()
    assert output.token_ids == [*eos.expected(7), EOS]
    assert output.text == decode(eos.expected(7))
    assert (output.finish_reason, output.stop_reason) == ("stop", None)
    assert runner.call(lambda e: (e.num_free_pages, e.slots)) == (engine.num_pages, {})


def test_a_slot_ended_by_the_device_is_released_without_tokens(start):
    engine = FakeEngine(script, burst=3, device_stops=True)
    runner = start(engine)
    job = Job(max_tokens=50, device_tokens=7)  # the host sees no reason to stop
    runner.submit(job.request)
    output = job.wait()
    assert output.token_ids == job.expected(7)
    assert output.finish_reason == "length"
    assert runner.call(lambda e: (e.num_free_pages, e.slots)) == (engine.num_pages, {})


def test_stop_strings_cut_bursts(start):
    tokens = Job().expected(20)
    for burst in (2, 3, 7):
        runner = start(FakeEngine(script, burst=burst, device_stops=True))
        job = Job(max_tokens=20, stop=[decode(tokens[8:11])])
        runner.submit(job.request)
        output = job.wait()
        assert output.token_ids == tokens[:11]
        assert output.text == decode(tokens[:8])


def test_acceptance_is_counted_by_step(start):
    engine = FakeEngine(script, burst=4, device_stops=True)
    runner = start(engine)
    job = Job(max_tokens=12, acceptance=AcceptanceCounter(3, detailed=True))
    runner.submit(job.request)
    output = job.wait()
    metrics = output.spec_decode_metrics
    assert metrics.per_step_accepted == (3, 3, 2)  # 1 + 4 + 4 + 3 tokens
    assert output.timings.decode_steps == metrics.num_spec_steps == 3


def test_drafted_tokens_are_those_of_the_longest_path(start):
    """A step of MTP modules with branches has more tokens than the longest path."""
    engine = FakeEngine(script, burst=4, device_stops=True)
    engine.tokens_per_step = 7
    runner = start(engine, draft_depth=3)
    job = Job(max_tokens=9, acceptance=AcceptanceCounter(runner.draft_depth))
    runner.submit(job.request)
    metrics = job.wait().spec_decode_metrics
    assert (metrics.num_draft_tokens, metrics.num_spec_steps) == (6, 2)


def test_tokens_beyond_a_stop_string_are_counted_as_accepted(start):
    tokens = Job().expected(20)
    runner = start(FakeEngine(script, burst=4, device_stops=True))
    acceptance = AcceptanceCounter(3, detailed=True)
    job = Job(max_tokens=20, stop=[decode(tokens[5:7])], acceptance=acceptance)
    runner.submit(job.request)
    output = job.wait()
    assert output.token_ids == tokens[:7]  # 1 of prefill, 4 of a step, 2 of 4
    assert output.spec_decode_metrics.per_step_accepted == (3, 3)


def test_a_prompt_waits_for_pages_beyond_its_tokens(start):
    """Drafts need pages, too. A prompt that does not fit now may fit later."""
    engine = FakeEngine(script, num_pages=8, burst=3)
    reserve, extra = engine.reserve, 8

    def reserve_more(slot: int, num_tokens: int) -> bool:
        return reserve(slot, num_tokens + extra)

    engine.reserve = reserve_more
    runner = start(engine)
    jobs = [Job(prompt_length=6, max_tokens=10, key=i) for i in range(4)]
    runner.submit(*(job.request for job in jobs))
    for job in jobs:
        assert job.wait().token_ids == job.expected(10)


def test_many_requests_and_alternating_prefill(start):
    engine = FakeEngine(script, max_num_seqs=3)
    runner = start(engine)
    jobs = [Job(prompt_length=1 + 5 * i, max_tokens=3 + i, key=i) for i in range(12)]
    for job in jobs:
        runner.submit(job.request)
    for i, job in enumerate(jobs):
        assert job.wait().token_ids == job.expected(3 + i)
    assert runner.call(lambda its: its.num_free_pages) == engine.num_pages


def _kinds(engine: FakeEngine) -> str:
    """The engine's steps in order: p for prefill, d for decode."""
    return "".join(method[0] for method, _ in engine.log if method in ("prefill", "decode"))


@pytest.mark.parametrize("streamed", [0, 1])
def test_prompts_of_outputs_that_are_not_streamed_are_read_first(start, streamed):
    """One streamed sequence that decodes is enough to make passes and decode steps alternate."""
    engine = FakeEngine(script, max_num_seqs=6, launch_ahead=1)
    runner = start(engine)
    jobs = [Job(prompt_length=8, max_tokens=12, key=i, is_streamed=i < streamed) for i in range(6)]
    runner.submit(*(job.request for job in jobs))
    for job in jobs:
        assert job.wait().token_ids == job.expected(12)
    kinds = _kinds(engine)
    assert kinds.count("p") == 6
    assert kinds.startswith("pppppp" if not streamed else "pdpd")


def test_a_long_prompt_does_not_starve_running_sequences(start):
    engine = FakeEngine(script, step_seconds=0.001)
    runner = start(engine)
    short, long = Job(max_tokens=60), Job(prompt_length=160, max_tokens=1, key=1)
    runner.submit(short.request)
    short.wait_for_chunk()
    runner.submit(long.request)
    long.wait()
    kinds = [method for method, _ in engine.log if method in ("prefill", "decode")]
    first = kinds.index("prefill", 1)
    during = kinds[first : len(kinds) - kinds[::-1].index("prefill")]
    assert during.count("decode") >= during.count("prefill") - 1
    assert short.wait().token_ids[-1] == short.expected(60)[-1]


def test_cancel(start):
    engine = FakeEngine(script, step_seconds=0.001, max_num_seqs=1)
    runner = start(engine)
    running, waiting = Job(max_tokens=900), Job(max_tokens=900, key=1)
    runner.submit(running.request, waiting.request)
    running.wait_for_chunk()
    waiting.request.cancel()
    running.request.cancel()
    assert running.wait().finish_reason == "abort"
    output = waiting.wait()
    assert (output.finish_reason, output.token_ids) == ("abort", [])
    assert runner.call(lambda e: e.num_free_pages) == engine.num_pages


def test_cancel_during_prefill_ends_it_within_a_chunk(start):
    engine = FakeEngine(script, step_seconds=0.002, chunk_length=8, max_num_seqs=1)
    runner = start(engine)
    long, next_one = Job(prompt_length=800), Job(key=1)
    runner.submit(long.request, next_one.request)
    while len(long.progress) < 2:
        time.sleep(0.0005)
    long.request.cancel()
    done = long.progress[-1][0]
    assert long.wait().finish_reason == "abort"
    assert next_one.wait().token_ids == next_one.expected(10)
    assert long.progress[-1][0] <= done + 2 * 8
    chunks = [detail for method, detail in engine.log if method == "prefill"]
    read = sum(length for ((_, length, _),) in chunks[:-1])
    assert read <= done + (engine.launch_ahead + 2) * 8 < 800


@pytest.mark.parametrize("num_top", [0, 2])
@pytest.mark.parametrize("prompt_length", [1, 2, 8, 9, 17, 24])
def test_logprobs_of_a_prompt(start, prompt_length, num_top):
    """Each token except the first gets a log-probability; other prompts continue meanwhile."""
    runner = start(FakeEngine(script, chunk_length=8))
    job = Job(prompt_length=prompt_length, prompt_logprobs=num_top)
    others = [Job(prompt_length=11, key=i) for i in (1, 2)]
    runner.submit(others[0].request, job.request, others[1].request)
    assert job.wait().token_ids == job.expected(10)
    assert [other.wait().token_ids for other in others] == [other.expected(10) for other in others]
    first, *scores = job.request.prompt_logprobs
    assert first is None
    assert [score.token_id for score in scores] == job.prompt[1:]
    assert [score.logprob for score in scores] == [-float(token) for token in job.prompt[1:]]
    assert {len(score.top) for score in scores} <= {num_top}
    assert job.progress[-1] == (prompt_length, prompt_length)


def test_logprobs_of_a_prompt_survive_preemption(start):
    engine = FakeEngine(script, num_pages=12)
    runner = start(engine)
    jobs = [Job(prompt_length=6, max_tokens=30, key=i, prompt_logprobs=0) for i in range(4)]
    runner.submit(*(job.request for job in jobs))
    for job in jobs:
        assert job.wait().token_ids == job.expected(30)
        assert [score.token_id for score in job.request.prompt_logprobs[1:]] == job.prompt[1:]
    assert runner.load().preemptions > 0


def test_utilisation(start):
    engine = FakeEngine(script, step_seconds=0.001, max_num_seqs=1)
    runner = start(engine)
    assert dataclasses.astuple(runner.load())[:6] == (0, 0, 0.0, 0, engine.num_pages, PAGE_SIZE)
    jobs = [Job(max_tokens=200), Job(max_tokens=5, key=1)]
    runner.submit(*(job.request for job in jobs))
    for _ in range(20):
        jobs[0].wait_for_chunk()
    load = runner.load()
    assert (load.running, load.waiting) == (1, 1)
    assert 0 < load.kv_cache_usage < 0.5
    for job in jobs:
        job.wait()
    runner.call(lambda e: None)  # one iteration after the last step
    assert runner.load().kv_cache_usage == 0
    steps = (
        runner.load().step_tokens
    )  # 2 prompts of 3 tokens and their first tokens, then 1 token each
    assert (steps.total, steps.counts[:3]) == (6 + 205, [203, 2, 0])


def test_preemption_changes_no_text(start):
    engine = FakeEngine(script, num_pages=12)
    runner = start(engine)
    jobs = [Job(prompt_length=6, max_tokens=30, key=i) for i in range(4)]
    runner.submit(*(job.request for job in jobs))
    for job in jobs:
        output = job.wait()
        assert output.token_ids == job.expected(30)
        assert output.text == decode(output.token_ids)
    assert engine.num_free_pages == 12
    added = [detail for method, detail in engine.log if method == "add_sequence"]
    assert len(added) > 4
    assert all(prompt == 6 for prompt, _ in added)  # the output so far is passed separately
    assert any(generated > 0 for _, generated in added)


def test_a_single_sequence_out_of_pages_ends(start, caplog):
    engine = FakeEngine(script, num_pages=10)
    runner = start(engine)
    engine.num_free_pages = 3  # as if the other pages were taken
    job = Job(prompt_length=5, max_tokens=20)
    with caplog.at_level(logging.WARNING, "cpmcu"):
        runner.submit(job.request)
        output = job.wait()
    assert output.finish_reason == "length"
    assert output.token_ids == job.expected(8)
    assert "KV pages ran out" in caplog.text


def test_a_request_longer_than_the_context_is_refused(start):
    runner = start(FakeEngine(script, num_pages=3))
    with pytest.raises(ValueError, match=r"5 prompt tokens and up to 8 more, but .* holds 12"):
        runner.submit(Job(prompt_length=5, max_tokens=8).request)


def test_output_up_to_the_last_token_of_the_context(start):
    for launch_ahead in (1, 2, 3):
        engine = FakeEngine(script, num_pages=4, max_model_len=15, launch_ahead=launch_ahead)
        runner = start(engine)
        job = Job(prompt_length=6, max_tokens=runner.max_length - 6)
        runner.submit(job.request)
        assert job.wait().token_ids == job.expected(9)


@pytest.mark.parametrize("method", ["prefill", "decode", "collect", "reserve"])
def test_an_engine_error_fails_requests_and_the_engine_continues(start, method):
    engine = FakeEngine(script)
    runner = start(engine)
    engine.fail_on[method] = RuntimeError("device says no")
    jobs = [Job(key=i) for i in range(6)]
    runner.submit(*(job.request for job in jobs))
    failed = 0
    for job in jobs:
        try:
            job.wait()
        except RuntimeError as error:
            assert "device says no" in str(error)
            failed += 1
    assert failed
    after = Job(key=9)
    runner.submit(after.request)
    assert after.wait().token_ids == after.expected(10)


def test_an_engine_that_stays_broken_is_refused(start):
    engine = FakeEngine(script)
    runner = start(engine)
    engine.fail_on["decode"] = RuntimeError("device is gone")
    engine.fail_on["release"] = RuntimeError("still gone")
    job = Job()
    runner.submit(job.request)
    with pytest.raises(RuntimeError, match="device is gone"):
        job.wait()
    runner._thread.join(timeout=60)
    with pytest.raises(RuntimeError, match="stopped after an error: device is gone"):
        runner.submit(Job().request)


def test_a_request_the_engine_refuses_fails_alone(start):
    engine = FakeEngine(script)
    runner = start(engine)
    engine.fail_on["add_sequence"] = ValueError("top_k is strange")
    bad, good = Job(), Job(key=1)
    runner.submit(bad.request, good.request)
    with pytest.raises(ValueError, match="top_k is strange"):
        bad.wait()
    assert good.wait().token_ids == good.expected(10)


def test_a_listener_that_raises_cancels_its_own_request(start):
    def emit(item: object) -> None:
        raise OSError("the socket is closed")

    engine = FakeEngine(script)
    runner = start(engine)
    bad, good = Job(max_tokens=900, emit=emit), Job(key=1)
    runner.submit(bad.request, good.request)
    assert good.wait().token_ids == good.expected(10)
    deadline = time.monotonic() + 60
    while not bad.request.done and time.monotonic() < deadline:
        time.sleep(0.01)
    assert bad.request.output().finish_reason == "abort"


def test_close_aborts_and_frees_the_engine():
    engine = FakeEngine(script, step_seconds=0.001)
    alive = weakref.ref(engine)
    runner = Runner(engine, page_size=PAGE_SIZE)
    job, queued = Job(max_tokens=900), [Job(max_tokens=900, key=i) for i in range(8)]
    runner.submit(job.request, *(each.request for each in queued))
    job.wait_for_chunk()
    runner.close()
    runner.close()
    assert job.wait().finish_reason == "abort"
    assert all(each.wait().finish_reason == "abort" for each in queued)
    with pytest.raises(RuntimeError, match="closed"):
        runner.submit(Job().request)
    with pytest.raises(RuntimeError, match="closed"):
        runner.call(lambda e: None)
    del engine
    gc.collect()
    assert alive() is None
    assert not any(thread.name == "cpmcu-engine" for thread in threading.enumerate())


def test_calls_run_between_steps(start):
    engine = FakeEngine(script, step_seconds=0.001)
    runner = start(engine)
    job = Job(max_tokens=100)
    runner.submit(job.request)
    assert all(runner.call(lambda e: e.in_flight()) == 0 for _ in range(5))
    with pytest.raises(ZeroDivisionError):
        runner.call(lambda e: 1 / 0)
    assert job.wait().token_ids == job.expected(100)


def test_shapes_are_chosen_and_observed(start):
    shapes = [(0, 1), (1, 2), (4, 5)]
    engine = FakeEngine(script, burst=5, step_seconds=0.001)
    runner = start(engine, shapes=shapes)
    jobs = [Job(max_tokens=900) for _ in range(3)]
    for job in jobs:
        runner.submit(job.request)
    for job in jobs:
        assert job.wait().token_ids == job.expected(900)
    assert engine.shapes[0] == shapes[0]
    assert set(engine.shapes) <= set(shapes) and shapes[-1] in engine.shapes


def test_without_shapes_the_engine_takes_the_whole_draft(start):
    engine = FakeEngine(script, burst=5)
    runner = start(engine)
    job = Job(max_tokens=20)
    runner.submit(job.request)
    job.wait()
    assert set(engine.shapes) == {None}
