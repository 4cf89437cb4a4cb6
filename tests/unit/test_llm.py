"""LLM with a fake engine: prompts, defaults, streams, conversations, shutdown."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
import sys

import numpy as np
import pytest
from story import Stage, told
from tokenizers_for_tests import byte_level

import cpmcu
from cpmcu import LLM, SamplingParams
from cpmcu.chat_template import ChatTemplateError


@pytest.fixture
def make(monkeypatch, tmp_path):
    return Stage(monkeypatch, tmp_path)


def test_generate(make):
    with make() as llm:
        first, second = llm.generate(["def f", [5, 6, 7]], SamplingParams(max_tokens=20))
        length = len(byte_level().encode("def f").ids)
        assert first.outputs[0].token_ids == told(length, 20)
        assert second.outputs[0].token_ids == told(3, 20)
        assert first.usage.prompt_tokens == length
        assert first.usage.total_tokens == length + 20
        assert first.outputs[0].finish_reason == "length"
        assert 0 <= first.seed < 1 << 64
        assert first.seed != second.seed
        assert llm.generate([5, 6], SamplingParams(max_tokens=1))[0].prompt_token_ids == [5, 6]
        assert llm.memory_plan()[0]["name"] == "kv"


def test_stream_is_generate_in_pieces(make):
    with make() as llm:
        params = SamplingParams(max_tokens=60, stop="lazy", seed=1)
        whole = llm.generate("def", params)[0]
        chunks = list(llm.stream("def", params))
        assert "".join(chunk.text for chunk in chunks) == whole.text
        assert [t for chunk in chunks for t in chunk.token_ids] == whole.outputs[0].token_ids
        assert not any("\ufffd" in chunk.text for chunk in chunks)
        assert [chunk.result is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
        result = chunks[-1].result
        assert (result.text, result.seed) == (whole.text, 1)
        assert result.outputs[0].stop_reason == "lazy"


def test_choices(make):
    with make() as llm:
        output = llm.generate("def", SamplingParams(max_tokens=4, n=6))[0]
        assert [choice.index for choice in output.outputs] == list(range(6))
        assert output.usage.completion_tokens == 24
        chunks = list(llm.stream("def", SamplingParams(max_tokens=4, n=2)))
        assert sum(chunk.finish_reason is not None for chunk in chunks) == 2
        assert sum(chunk.result is not None for chunk in chunks) == 1


def test_limits(make):
    with make() as llm:
        assert llm.max_length == 200
        with pytest.raises(ValueError, match="the prompt is empty"):
            llm.generate("")
        with pytest.raises(ValueError, match=r"has 200 tokens, but .* can have 200"):
            llm.generate([list(range(4, 204))])
        with pytest.raises(ValueError, match="token id 999999"):
            llm.generate([999999])
        with pytest.raises(ValueError, match="2 sampling parameters for 1 prompts"):
            llm.generate("a", [SamplingParams()] * 2)
        output = llm.generate([list(range(4, 190))])[0].outputs[0]
        assert (len(output.token_ids), output.finish_reason) == (14, "length")
        assert llm.generate([]) == []


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda llm: llm.generate(None),
            "prompts is None, but must be a text, a list of token ids",
        ),
        (lambda llm: llm.generate({"prompt": "a"}), "prompts is {'prompt': 'a'}, but must be"),
        (lambda llm: llm.chat("hi"), "messages is 'hi', but must be a list like"),
        (lambda llm: llm.chat(5), "messages is 5, but must be a list like"),
        (lambda llm: llm.chat([None]), "messages is None, but must be a list like"),
        (lambda llm: llm.tokenize_chat("hi"), "messages is 'hi', but must be a list like"),
        (lambda llm: llm.tokenize_chat(["hi"]), r"messages\[0\] is 'hi', but must be an object"),
        (lambda llm: llm.generate([None]), "a prompt is None, but must be a text or a list of tok"),
        (lambda llm: llm.generate([1.5]), "a prompt is 1.5, but must be a text or a list of token"),
        (lambda llm: llm.generate([1, "a"]), "a token id of a prompt is 'a', but must be an int"),
        (lambda llm: llm.stream(["a", "b"]), "stream takes one prompt, found a list of"),
        (lambda llm: llm.stream(None), "a prompt is None, but must be a text or a list of token"),
        (lambda llm: llm.generate("a", {"n": 3}), "sampling_params is {'n': 3}, but must be Samp"),
        (lambda llm: llm.generate("a", [3]), "sampling_params is 3, but must be SamplingParams"),
        (lambda llm: llm.stream("a", {"n": 3}), "sampling_params is {'n': 3}, but must be Sampl"),
    ],
)
def test_wrong_types_are_one_sentence(make, call, message):
    with make() as llm, pytest.raises(ValueError, match=message):
        call(llm)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seqs": "4"}, "max_num_seqs is '4', but must be an integer"),
        ({"memory_limit": "x"}, "memory_limit is 'x', but must be a number"),
        ({"speculative_config": [1]}, r"speculative_config is \[1\], but must be a Speculative"),
    ],
)
def test_wrong_options_are_one_sentence(options, message):
    with pytest.raises(ValueError, match=message):
        LLM(**options)


def test_options_of_a_draft_are_arguments_too(make):
    make.prepare()
    with LLM(str(make.directory), no_speculation=True) as llm:
        assert llm.config.speculation.no_speculation
    with pytest.raises(ValueError, match="no_speculation and speculative_config are given"):
        LLM(no_speculation=True, speculative_config={"no_speculation": True})
    with pytest.raises(TypeError, match="LLM got the argument 'max_num_seq', expected a flag"):
        LLM(max_num_seq=3)


def test_names_of_flags_are_arguments_too(make):
    make.prepare()
    with LLM(str(make.directory), max_num_batched_tokens=96, no_speculation=True) as llm:
        assert llm.config.chunk_length == 96
    with LLM(str(make.directory), spec_method="ngram") as llm:
        assert llm.config.speculation.method == "ngram"
    with pytest.raises(ValueError, match="max_num_batched_tokens and chunk_length are given"):
        LLM(chunk_length=8, max_num_batched_tokens=96)


def test_an_array_is_a_list_of_ids(make):
    with make() as llm:
        (output,) = llm.generate(np.array([5, 6, 7]), SamplingParams(max_tokens=1))
        assert output.prompt_token_ids == [5, 6, 7]
        assert [type(token) for token in output.prompt_token_ids] == [int] * 3
        pair = llm.generate([np.array([5]), [6]], SamplingParams(max_tokens=1))
        assert [each.prompt_token_ids for each in pair] == [[5], [6]]
        assert list(llm.stream(np.array([5, 6]), SamplingParams(max_tokens=1)))[-1].result


def test_leaving_a_stream_cancels_it(make):
    with make(step_seconds=0.001) as llm:
        for chunk in llm.stream("def", SamplingParams(max_tokens=150)):
            if chunk.token_ids:
                break
        gc.collect()
        assert llm.generate("x", SamplingParams(max_tokens=2))[0].outputs[0].token_ids
        assert llm.call_engine(lambda engine: engine.slots) == {}


def test_prefill_progress(make):
    with make() as llm:
        heard = []
        on_prefill = lambda done, total: heard.append((done, total))  # noqa: E731
        list(llm.stream(list(range(4, 24)), SamplingParams(max_tokens=2), on_prefill=on_prefill))
        assert heard == [(0, 20), (8, 20), (16, 20), (20, 20)]


def test_waiting_for_the_engine_in_a_callback_is_refused(make):
    with make() as llm:
        calls = [
            lambda done, total: llm.call_engine(lambda engine: engine.slots),
            lambda done, total: llm.generate("x", SamplingParams(max_tokens=1)),
            lambda done, total: list(llm.stream("x", SamplingParams(max_tokens=1))),
        ]
        for call in calls:
            heard: list[str] = []

            def on_prefill(done, total, call=call, heard=heard):
                try:
                    call(done, total)
                except RuntimeError as error:
                    heard.append(str(error))

            list(llm.stream([5, 6, 7], SamplingParams(max_tokens=2), on_prefill=on_prefill))
            assert set(heard) == {
                "a callback cannot wait for the engine, since the engine thread runs it"
            }


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_a_forked_process_cannot_use_the_engine(make):
    with make() as llm:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            signal.alarm(30)  # ends the child if it hangs
            try:
                llm.generate("x", SamplingParams(max_tokens=1))
            except RuntimeError as error:
                os.write(write, str(error).encode())
            finally:
                os._exit(0)
        os.close(write)
        with open(read) as pipe:
            told = pipe.read()
        os.waitpid(child, 0)
        assert "which process" in told and told.endswith("load the model after forking")
        assert llm.generate("x", SamplingParams(max_tokens=1))


def test_a_text_far_too_long_is_refused_before_it_is_tokenised(make, monkeypatch):
    """The tokenizer would need a hundred bytes of memory for each byte of the text."""
    template = {"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}
    with make(tokenizer_config=template) as llm:
        text = "x" * (1 << 20)
        turn = {"role": "user", "content": text}
        backend = type(llm.tokenizer._backend)
        monkeypatch.setattr(backend, "encode", lambda *_: pytest.fail("the text is tokenised"))
        for call in (
            lambda: llm.generate(text),
            lambda: llm.stream(text),
            lambda: llm.chat([turn]),
            lambda: llm.stream([turn]),
        ):
            with pytest.raises(ValueError, match="characters, which are at least"):
                call()


@pytest.mark.parametrize("way", [pickle.dumps, copy.copy, copy.deepcopy])
def test_it_cannot_be_pickled_or_copied(make, way):
    """A copy would share the engine, and end it for both."""
    with make() as llm:
        for what in (llm, llm.stream("x")):
            with pytest.raises(TypeError, match="cannot be pickled or copied, since it"):
                way(what)
        params = SamplingParams(max_tokens=2, seed=1)
        (output,) = llm.generate("x", params)
        for value in (params, output):
            assert pickle.loads(pickle.dumps(value)) == value


def test_chat_has_one_bos(make):
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    with make(tokenizer_config={"chat_template": template, "add_bos_token": True}) as llm:
        message = {"role": "user", "content": "hello"}
        ids = llm.tokenize_chat([message])
        assert ids.count(llm.tokenizer.bos_token_id) == 1
        one = llm.chat([message], SamplingParams(max_tokens=3))
        two = llm.chat([[message], [message]], SamplingParams(max_tokens=3))
        assert [output.prompt_token_ids for output in [*one, *two]] == [ids] * 3
        chunks = list(llm.stream([message], SamplingParams(max_tokens=3)))
        assert chunks[-1].result.prompt_token_ids == ids


def test_no_chat_template(make):
    with make() as llm, pytest.raises(ChatTemplateError, match="has no chat template"):
        llm.chat([{"role": "user", "content": "hello"}])


def test_an_engine_error_reaches_the_caller(make):
    with make() as llm:
        make.engines[0]().fail_on["decode"] = RuntimeError("device says no")
        with pytest.raises(RuntimeError, match="device says no"):
            llm.generate("def", SamplingParams(max_tokens=5))
        assert llm.generate("def", SamplingParams(max_tokens=5))


def test_close_and_drop_free_the_engine(make):
    llm = make()
    llm.close()
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("x")
    other = make()
    del other
    gc.collect()
    assert [engine() for engine in make.engines] == [None, None]


def test_the_missing_extension_is_one_error(monkeypatch, tmp_path):
    monkeypatch.delitem(sys.modules, "cpmcu.C", raising=False)
    monkeypatch.delitem(vars(cpmcu), "C", raising=False)
    monkeypatch.setenv("CPMCU_EXTENSION_DIR", str(tmp_path))
    with pytest.raises(ImportError, match="compiled module"):
        LLM(str(tmp_path))


def test_wrong_prompts_of_a_conversation_and_a_stream(make):
    with make() as llm:
        for messages, message in (
            ([], r"messages is \[\], but must have at least one message"),
            ([{"role": "user"}], r"messages\[0\].content is missing, expected a text"),
        ):
            with pytest.raises(ValueError, match=message):
                llm.chat(messages)
        for prompts in (["a", "b"], [[1, 2], [3]]):
            with pytest.raises(ValueError, match="stream takes one prompt, found a list of 2"):
                llm.stream(prompts)
