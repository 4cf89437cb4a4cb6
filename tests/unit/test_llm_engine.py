"""LLM and CLI on the C++ engine, with a tiny random model on the CPU."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_cli import run
from tokenizers_for_tests import byte_level, write_directory

from cpmcu import LLM, SamplingParams
from cpmcu.loading.loader import load_model
from cpmcu.shipped import ASSETS
from tests.reference.engines import extension_or_skip
from tests.reference.tiny_checkpoints import write_tiny

PAGE_SIZE = extension_or_skip().PAGE_SIZE
SETTINGS = {"device": "cpu", "memory_limit": 0.3, "num_threads": 1}
PROMPTS = ["def hello(", "the quick brown fox", "你好 🙂"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    write_tiny(directory, "qwen3", vocab_size=byte_level().get_vocab_size())
    write_directory(
        directory,
        byte_level(),
        chat_template="{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}",
    )
    return directory


@pytest.fixture(scope="module")
def llm(model):
    with LLM(str(model), **SETTINGS) as llm:
        yield llm


def ids(outputs) -> list[list[int]]:
    return [choice.token_ids for output in outputs for choice in output.outputs]


GREEDY = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=40, ignore_eos=True, temperature=1.0, top_p=0.95, seed=7)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_a_batch_gives_the_texts_of_single_prompts(llm, params):
    together = llm.generate(PROMPTS, params)
    alone = [llm.generate(prompt, params)[0] for prompt in PROMPTS]
    assert ids(together) == ids(alone)
    assert [output.text for output in together] == [output.text for output in alone]
    assert all(len(tokens) == 40 for tokens in ids(together))


def test_streamed_text_equals_generated_text(llm):
    chunks = list(llm.stream(PROMPTS[2], SAMPLED))
    whole = llm.generate(PROMPTS[2], SAMPLED)[0]
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert chunks[-1].result.outputs[0].token_ids == whole.outputs[0].token_ids


def test_the_reported_seed_reproduces(llm):
    params = SamplingParams(max_tokens=30, temperature=1.0, n=3)
    first = llm.generate(PROMPTS[0], params)[0]
    again = llm.generate(
        PROMPTS[0], SamplingParams(max_tokens=30, temperature=1.0, n=3, seed=first.seed)
    )[0]
    assert ids([first]) == ids([again])
    assert len({tuple(choice.token_ids) for choice in first.outputs}) == 3


def test_stop_token_and_eos(llm):
    tokens = llm.generate(PROMPTS[0], GREEDY)[0].outputs[0].token_ids
    stop = tokens[5]
    end = tokens.index(stop) + 1
    params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.0, stop_token_ids=[stop])
    output = llm.generate(PROMPTS[0], params)[0].outputs[0]
    assert (output.token_ids, output.finish_reason, output.stop_reason) == (
        tokens[:end],
        "stop",
        stop,
    )


def test_logprobs(llm):
    params = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0.0, logprobs=3)
    output = llm.generate(PROMPTS[0], params)[0].outputs[0]
    assert [entry.token_id for entry in output.logprobs] == output.token_ids
    for entry in output.logprobs:
        assert len(entry.top) == 3
        assert entry.top[0] == (entry.token_id, pytest.approx(entry.logprob))
        assert entry.logprob <= 0
        assert entry.text == llm.tokenizer.decode([entry.token_id]) == entry.top_texts[0]
    chunks = list(llm.stream(PROMPTS[0], params))
    assert [entry for chunk in chunks for entry in chunk.logprobs] == output.logprobs


def test_logprobs_of_a_prompt_have_texts(llm):
    params = SamplingParams(max_tokens=1, prompt_logprobs=2)
    first, *others = llm.generate("def f(x):", params)[0].prompt_logprobs
    assert first is None
    scored = llm.generate("def f(x):", dataclasses.replace(params, max_tokens=0))[0]
    assert scored.prompt_logprobs == [first, *others] and not scored.outputs[0].token_ids
    assert "".join(entry.text for entry in others) in "def f(x):"
    assert all(len(entry.top_texts) == 2 and all(entry.top_texts) for entry in others)


def test_logit_bias_and_ban(llm):
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logit_bias={77: 100.0})
    assert llm.generate(PROMPTS[0], params)[0].outputs[0].token_ids == [77] * 8


class FewerPages:
    """An engine with at most `num_pages` pages."""

    def __init__(self, engine, num_pages: int) -> None:
        self._engine, self.num_pages = engine, num_pages
        self._taken: dict[int, int] = {}
        self.most_sequences_added = 0

    def __getattr__(self, name: str):
        return getattr(self._engine, name)

    @property
    def num_free_pages(self) -> int:
        return self.num_pages - sum(self._taken.values())

    def add_sequence(self, *arguments) -> int:
        self.most_sequences_added += 1
        return self._engine.add_sequence(*arguments)

    def reserve(self, slot: int, num_tokens: int) -> bool:
        before = self._taken.get(slot, 0)
        pages = max(before, -(-num_tokens // PAGE_SIZE))
        if pages - before > self.num_free_pages or not self._engine.reserve(slot, num_tokens):
            return False
        self._taken[slot] = pages
        return True

    def release(self, slot: int) -> None:
        self._taken.pop(slot, None)
        self._engine.release(slot)


@pytest.mark.parametrize(
    "penalties",
    [{}, {"frequency_penalty": 1.5, "presence_penalty": 0.5, "repetition_penalty": 1.3}],
)
def test_pages_run_out_and_no_text_changes(model, monkeypatch, penalties):
    """Preempted and recomputed sequences have unchanged texts."""
    params = SamplingParams(
        max_tokens=300, ignore_eos=True, temperature=1.0, top_p=0.9, seed=3, **penalties
    )
    prompts = [[5 + i] * (20 + 9 * i) for i in range(6)]
    with LLM(str(model), **SETTINGS, max_num_seqs=6) as llm:
        expected = ids(llm.generate(prompts, params))

    def load_with_fewer_pages(*arguments, **options):
        loaded = load_model(*arguments, **options)
        return dataclasses.replace(loaded, engine=FewerPages(loaded.engine, 14))

    monkeypatch.setattr("cpmcu.loading.loader.load_model", load_with_fewer_pages)
    with LLM(str(model), **SETTINGS, max_num_seqs=6) as llm:
        assert ids(llm.generate(prompts, params)) == expected
        assert llm.call_engine(lambda engine: engine.most_sequences_added) > len(prompts)


def test_the_tokenizer_is_read_before_the_weights(model, tmp_path):
    directory = tmp_path / "without"
    shutil.copytree(model, directory, ignore=shutil.ignore_patterns("tokenizer*"))

    class Progress:
        def start(self, total_bytes: int, what: str) -> None:
            pytest.fail("weights were asked for")

    with pytest.raises(FileNotFoundError, match="has no tokenizer"):
        LLM(str(directory), **SETTINGS, progress=Progress())


def test_the_cpu_plan_has_no_buffers_of_cuda_kernels():
    with LLM(str(ASSETS / "tiny-python-minicpm-w4"), **SETTINGS) as llm:
        sizes = {row["name"]: row["bytes"] for row in llm.memory_plan()}
    for name in ("attention.partials", "packed.dequantized", "packed.partials", "fused_layer"):
        assert sizes[name] == 0


def test_a_context_beyond_the_integer_range(model):
    with pytest.raises(ValueError, match="max_model_len is 2147483647, expected 1 to 1073741824"):
        LLM(str(model), **SETTINGS, max_model_len=2**31 - 1)


def test_the_end_of_the_context(model):
    with LLM(str(model), **SETTINGS, max_model_len=128) as llm:
        output = llm.generate([[5] * 100], SamplingParams(ignore_eos=True))[0].outputs[0]
        assert (len(output.token_ids), output.finish_reason) == (28, "length")
        with pytest.raises(ValueError, match="has 128 tokens"):
            llm.generate([[5] * 128])


def test_chunk_length_changes_nothing(model, llm):
    prompt = [[5 + i % 50 for i in range(200)]]
    with LLM(str(model), **SETTINGS, chunk_length=48) as chunked:
        assert ids(chunked.generate(prompt, GREEDY)) == ids(llm.generate(prompt, GREEDY))


def test_cli(model):
    arguments = ("--model", str(model), "--device", "cpu", "--num-generate", "8", "--seed", "1")
    result = run(*arguments, "--prompt-text", "def f(", "--stats", "--logprobs", "2")
    assert result.returncode == 0, result.stderr
    assert "decode" in result.stderr and "logprob" in result.stderr
    plan = run(*arguments, "--memory-plan")
    assert plan.returncode == 0, plan.stderr
    assert "\ntotal " in plan.stdout
    chat = run(*arguments, "--chat", stdin="hello\nagain\n")
    assert chat.returncode == 0, chat.stderr
    assert chat.stderr.count("finish reason") == 2


EXIT_WHILE_LOADING = """
import sys, threading, time
from cpmcu import LLM

class Slow:
    def start(self, total_bytes, what): started.set()
    def update(self, done_bytes): time.sleep(0.05)
    def finish(self): pass

started = threading.Event()
options = dict(device="cpu", memory_limit=0.3, num_threads=1, progress=Slow())
threading.Thread(target=lambda: LLM(sys.argv[1], **options), daemon=True).start()
started.wait()
"""


def test_exit_while_another_thread_loads(model):
    command = [sys.executable, "-c", EXIT_WHILE_LOADING, str(model)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
