"""The generate loop with grammars: masks of the current state, and waiting for steps."""

from __future__ import annotations

import numpy as np
import pytest
from fake_engine import FakeEngine
from test_runner import EOS, Job, script, start

__all__ = ["start"]


class FakeGrammar:
    """A grammar that knows the tokens of the fake engine and checks the calls of the loop."""

    def __init__(self, expected: list[int], stops_after: int = 1 << 30) -> None:
        self.expected, self.stops_after = expected, stops_after
        self.num_accepted = self.num_masks = 0
        self.stopped = False
        self.seconds = 0.0
        self.fail_at: int | None = None  # number of tokens after which masks() raises

    def accept(self, token: int) -> None:
        assert not self.stopped
        assert token == self.expected[self.num_accepted]
        self.num_accepted += 1
        self.stopped = self.num_accepted == self.stops_after

    def masks(self, tokens: list[int], parents: list[int]) -> dict[int, np.ndarray]:
        if self.fail_at is not None and self.num_accepted >= self.fail_at:
            raise RuntimeError("too complex")
        assert not self.stopped
        assert parents == list(range(-1, len(tokens) - 1))
        # If the state lagged behind, the draft would differ from the next tokens.
        ahead = self.expected[self.num_accepted :][: len(tokens) - 1]
        assert tokens[1 : 1 + len(ahead)] == ahead
        self.num_masks += len(tokens)
        self.seconds += 0.25
        return {node: np.zeros(1, np.uint32) for node in range(len(tokens))}


def held(key: int, max_tokens: int = 20, prompt_length: int = 3, **options) -> Job:
    """A request with a grammar."""
    probe = Job(prompt_length, max_tokens, key)
    grammar = FakeGrammar(probe.expected(max_tokens), options.pop("stops_after", 1 << 30))
    job = Job(prompt_length, max_tokens, key, grammar=grammar, **options)
    job.grammar = grammar
    return job


@pytest.mark.parametrize("launch_ahead", [1, 2, 4])
@pytest.mark.parametrize("burst", [1, 2, 5])
def test_masks_of_the_current_state(start, burst: int, launch_ahead: int):
    engine = FakeEngine(script, burst=burst, launch_ahead=launch_ahead, max_num_seqs=3)
    runner = start(engine)
    jobs = [held(i, 20 + i, 1 + 7 * i) if i % 3 else Job(1 + 7 * i, 20 + i, i) for i in range(9)]
    runner.submit(*(job.request for job in jobs))
    for i, job in enumerate(jobs):
        output = job.wait()
        assert output.token_ids == job.expected(20 + i)
        assert output.timings.grammar_s == (job.grammar.seconds if i % 3 else 0)
        assert not i % 3 or job.grammar.num_masks >= 20 + i
    assert runner.call(lambda e: (e.num_free_pages, e.slots)) == (engine.num_pages, {})


def test_steps_without_a_grammar_are_launched_ahead(start):
    engine = FakeEngine(script, step_seconds=0.001)
    runner = start(engine)
    free, short = Job(max_tokens=200), held(1, 5)
    runner.submit(free.request, short.request)
    short.wait()
    masked = [method for method, _ in engine.log].count("begin_masked")
    assert masked == 4  # the first token comes from prefill
    engine.most_in_flight = 0
    assert free.wait().token_ids == free.expected(200)
    assert [method for method, _ in engine.log].count("begin_masked") == masked
    assert engine.most_in_flight == 2
    rows = [detail for method, detail in engine.log if method == "end_masked"]
    assert all(sorted(row) == [-1, 0] for row in rows)


@pytest.mark.parametrize("burst", [1, 3])
def test_the_end_of_the_grammar_ends_the_output(start, burst: int):
    runner = start(FakeEngine(script, burst=burst))
    jobs = [held(n, 30, stops_after=n) for n in range(1, 9)]
    runner.submit(*(job.request for job in jobs))
    for n, job in enumerate(jobs, start=1):
        output = job.wait()
        assert output.token_ids == job.expected(n)
        assert (output.finish_reason, output.stop_reason) == ("stop", None)
    last = held(9, 6, stops_after=6)  # complete exactly at the token limit
    runner.submit(last.request)
    assert last.wait().finish_reason == "stop"
    cut = held(9, 6, stops_after=7)
    runner.submit(cut.request)
    assert cut.wait().finish_reason == "length"


def test_tokens_after_the_end_are_not_counted_as_accepted(start):
    from cpmcu.spec_metrics import AcceptanceCounter

    runner = start(FakeEngine(script, burst=4))
    job = held(1, 30, stops_after=7, acceptance=AcceptanceCounter(3, detailed=True))
    runner.submit(job.request)
    assert job.wait().spec_decode_metrics.per_step_accepted == (3, 1)  # 1 + 4 + 2 tokens


def test_preemption_keeps_the_state(start):
    engine = FakeEngine(script, num_pages=12)
    runner = start(engine)
    jobs = [held(i, 30, 6) if i % 2 else Job(6, 30, i) for i in range(4)]
    runner.submit(*(job.request for job in jobs))
    for job in jobs:
        assert job.wait().token_ids == job.expected(30)
    assert sum(method == "add_sequence" for method, _ in engine.log) > 4
    assert engine.num_free_pages == 12


@pytest.mark.parametrize("fail_at", [0, 1, 4])
def test_a_grammar_that_fails_ends_its_request_alone(start, fail_at: int):
    engine = FakeEngine(script, burst=2)
    runner = start(engine)
    bad, good, free = held(1), held(2), Job(key=3)
    bad.grammar.fail_at = fail_at
    runner.submit(bad.request, good.request, free.request)
    with pytest.raises(RuntimeError, match="too complex"):
        bad.wait()
    assert good.wait().token_ids == good.expected(20)
    assert free.wait().token_ids == free.expected(10)
    assert runner.call(lambda e: (e.num_free_pages, e.slots)) == (engine.num_pages, {})


def test_a_token_refused_by_the_grammar_fails_its_request_alone(start):
    runner = start(FakeEngine(script))
    bad, good = held(1), held(2)

    def refuse(token: int) -> None:
        raise RuntimeError(f"token {token} is not allowed")

    bad.grammar.accept = refuse
    runner.submit(bad.request, good.request)
    with pytest.raises(RuntimeError, match="is not allowed"):
        bad.wait()
    assert good.wait().token_ids == good.expected(20)


@pytest.mark.parametrize("method", ["begin_masked", "end_masked"])
def test_an_engine_error_in_begin_or_end_masked(start, method: str):
    engine = FakeEngine(script)
    runner = start(engine)
    engine.fail_on[method] = RuntimeError("device says no")
    job, after = held(1), held(2)
    runner.submit(job.request)
    with pytest.raises(RuntimeError, match="device says no"):
        job.wait()
    runner.submit(after.request)
    assert after.wait().token_ids == after.expected(20)


def test_cancel(start):
    engine = FakeEngine(script, step_seconds=0.001)
    runner = start(engine)
    job, other = held(1, 900), Job(max_tokens=30)
    runner.submit(job.request, other.request)
    job.wait_for_chunk()
    job.request.cancel()
    assert job.wait().finish_reason == "abort"
    assert other.wait().token_ids == other.expected(30)


def test_eos_ends_the_output(start):
    engine = FakeEngine(lambda k, p: EOS if p == 7 else script(k, p))
    runner = start(engine)
    job = held(1, 50)
    job.grammar.expected[4] = EOS
    job.grammar.stops_after = 5
    runner.submit(job.request)
    output = job.wait()
    assert output.token_ids == [*job.expected(4), EOS]
    assert (output.finish_reason, output.stop_reason) == ("stop", None)


def test_during_its_prefill_others_are_launched_ahead(start):
    """A sequence with a grammar limits launching ahead only after its first token."""
    engine = FakeEngine(script, step_seconds=0.0005)
    runner = start(engine)
    free = Job(max_tokens=100)
    runner.submit(free.request)
    free.wait_for_chunk()
    long = held(1, 3, prompt_length=160)
    runner.submit(long.request)
    assert long.wait().token_ids == long.expected(3)
    assert free.wait().token_ids == free.expected(100)
    methods = [method for method, _ in engine.log]
    first = methods.index("begin_masked")
    last_chunk = max(i for i, method in enumerate(methods) if method == "prefill")
    assert last_chunk < first and methods.count("begin_masked") == 2
    assert methods[:first].count("decode") > 15
