"""Structured output through LLM: it matches the grammar, and speculation changes no token."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

from cpmcu import LLM, Grammar, SamplingParams  # noqa: E402
from cpmcu.serving.request_grammar import after_thinking  # noqa: E402
from tests.engine.harness import SHIPPED  # noqa: E402
from tests.reference.engines import extension_or_skip  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from test_llm_engine import FewerPages  # noqa: E402

extension_or_skip()
pytestmark = pytest.mark.slow  # sanitizer runs cover masks in test_masked_steps.py

SHAPE = {"spec_num_iter": 4, "spec_topk_per_iter": 4, "spec_tree_size": 16}
DRAFTS: dict[str, dict[str, Any]] = {
    "eagle2": {"draft_model_path": str(SHIPPED.parent / "tiny-python-eagle2"), **SHAPE},
    "eagle3": {"draft_model_path": str(SHIPPED.parent / "tiny-python-eagle3"), **SHAPE},
    "model": {"draft_model_path": str(SHIPPED.parent / "tiny-python-draft"), **SHAPE},
    "ngram": {"method": "ngram", "num_speculative_tokens": 3},
}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "été"]}, "maxItems": 3},
        "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/point"}]},
    },
    "required": ["name", "age", "tags", "next"],
    "additionalProperties": False,
    "$defs": {
        "point": {
            "type": "object",
            "properties": {"x": {"type": "boolean"}, "y": {"const": "up"}},
            "required": ["x", "y"],
            "additionalProperties": False,
        }
    },
    "x-guidance": {"whitespace_flexible": False},
}
NAME = r"[a-z_]{3,9}\([a-z]{0,6}\)"
CHOICES = ["def", "define", "class", "import os", "你好"]
GRAMMARS = {
    "schema": Grammar.json_schema(SCHEMA),
    "object": Grammar.json_object(),
    "regex": Grammar.regex(NAME),
    "choice": Grammar.choice(CHOICES),
    "lark": Grammar.lark('start: "[" item ("," item)* "]"\nitem: NAME | start\nNAME: /[a-z]{2,6}/'),
    "none": None,
}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "repetition_penalty": 1.0},
    "seeded": {"temperature": 1.0, "top_p": 0.95, "seed": 11, "repetition_penalty": 1.0},
    "all": {
        "temperature": 0.9,
        "top_p": 0.9,
        "top_k": 60,
        "min_p": 0.01,
        "seed": 12,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "presence_penalty": 0.2,
        "logit_bias": {20: 2.0, 300: -3.0},
        "logprobs": 2,
    },
}
PROMPTS = ["def hello(", "The answer as JSON: ", "import json\n\nprint(json.dumps("]
CASES = [
    (PROMPTS[i % 3], SamplingParams(grammar=grammar, max_tokens=70, **fields))
    for i, (grammar, fields) in enumerate(
        (grammar, fields) for fields in SAMPLINGS.values() for grammar in GRAMMARS.values()
    )
]


def load(device: str, draft: dict[str, Any], **options: Any) -> LLM:
    settings = {"memory_limit": 0.1, "num_threads": 1, "max_num_seqs": 5, "max_model_len": 512}
    return LLM(str(SHIPPED), device=device, speculative_config=draft, **{**settings, **options})


@pytest.fixture(scope="module")
def plain(device: str) -> Iterator[LLM]:
    with load(device, {"no_speculation": True}) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(plain: LLM) -> list[Any]:
    """The output of each case when it runs alone, without speculation."""
    return [shown(plain.generate(prompt, params)) for prompt, params in CASES]


def shown(outputs: list[Any]) -> list[Any]:
    return [
        (c.token_ids, c.text, c.finish_reason, c.stop_reason, c.logprobs)
        for output in outputs
        for c in output.outputs
    ]


def check_form(grammar: Grammar | None, text: str, finish_reason: str) -> None:
    if grammar is None or finish_reason == "length":
        return
    assert finish_reason == "stop"
    if grammar == GRAMMARS["schema"]:
        jsonschema.validate(json.loads(text), SCHEMA)
    elif grammar == GRAMMARS["object"]:
        assert isinstance(json.loads(text), dict)
    elif grammar == GRAMMARS["regex"]:
        assert re.fullmatch(NAME, text)
    elif grammar == GRAMMARS["choice"]:
        assert text in CHOICES
    else:
        json.loads(re.sub(r"[a-z]+", '"name"', text))


def test_outputs_match_the_grammar(expected: list[Any]) -> None:
    finished = set()
    for (_, params), ((_, text, finish_reason, _, _),) in zip(CASES, expected):
        check_form(params.grammar, text, finish_reason)
        if finish_reason == "stop" and params.grammar is not None:
            finished.add(params.grammar)
    assert finished >= {GRAMMARS[name] for name in ("schema", "object", "regex", "choice")}


@pytest.mark.parametrize("kind", DRAFTS)
def test_speculation_changes_no_token(device: str, expected: list[Any], kind: str) -> None:
    """All cases at once in five slots, so outputs with and without a grammar share steps."""
    prompts, params = zip(*CASES)
    with load(device, DRAFTS[kind]) as llm:
        outputs = llm.generate(prompts, params)
        for case, output, wanted in zip(CASES, outputs, expected):
            assert shown([output]) == wanted, case
        assert shown(llm.generate(prompts[:6], params[:6])) == shown(outputs[:6])
        metrics = [output.outputs[0].spec_decode_metrics for output in outputs]
        held = [m for (_, p), m in zip(CASES, metrics) if p.grammar is not None]
        accepted = sum(m.num_accepted_draft_tokens for m in held)
        steps = sum(m.num_spec_steps for m in held)
        assert 1 + accepted / steps > (1.05 if kind == "ngram" else 1.5)


def test_together_without_speculation(plain: LLM, expected: list[Any]) -> None:
    prompts, params = zip(*CASES)
    outputs = plain.generate(prompts, params)
    assert [shown([output]) for output in outputs] == expected
    for (_, p), output in zip(CASES, outputs):
        assert (output.timings.grammar_s > 0) == (p.grammar is not None)


THOUGHT = ("def", "return")  # tags that the shipped model writes by itself
THINKING_PROMPTS = ["def read(path):\n", "def fib(n):\n    if n < 2:\n", "def size(self):\n    "]


@pytest.mark.parametrize("as_token", [False, True])
def test_a_grammar_after_reasoning(device: str, plain: LLM, as_token: bool) -> None:
    """Greedy reasoning has the tokens of an output without a grammar. A draft changes no token."""
    end = plain.tokenizer.id_of("return") if as_token else None
    answer = Grammar.regex(r"[a-z]{2,5}\([a-z]{0,3}\)")
    grammar = after_thinking(answer, THOUGHT, (None, end), begun=True)
    held = [
        SamplingParams(grammar=grammar, max_tokens=60, **{**fields, "seed": seed})
        for seed, fields in enumerate((SAMPLINGS["greedy"], SAMPLINGS["seeded"], SAMPLINGS["all"]))
        for _ in THINKING_PROMPTS
    ]
    prompts = THINKING_PROMPTS * 3
    expected = plain.generate(prompts, held)
    finished = 0
    for prompt, params, output in zip(prompts, held, expected):
        reasoning, tag, text = output.text.partition(THOUGHT[1])
        if output.outputs[0].finish_reason == "stop":
            assert re.fullmatch(r"\s{0,4}[a-z]{2,5}\([a-z]{0,3}\)", text)
            finished += 1
        if params.temperature == 0:
            free = plain.generate(prompt, dataclasses.replace(params, grammar=None))[0]
            assert free.text.startswith(reasoning + tag)
    assert finished >= 4
    for kind in ("eagle2", "ngram"):
        with load(device, DRAFTS[kind]) as llm:
            outputs = llm.generate(prompts, held)
        assert shown(outputs) == shown(expected)
        metrics = [output.outputs[0].spec_decode_metrics for output in outputs]
        assert sum(m.num_accepted_draft_tokens for m in metrics if m is not None) > 20


def test_hot_samples_match_the_grammar(device: str) -> None:
    """At a high temperature, output without a grammar would be random."""
    with load(device, DRAFTS["eagle2"]) as llm:
        for name in ("schema", "regex", "choice"):
            params = [
                SamplingParams(
                    grammar=GRAMMARS[name], max_tokens=150, temperature=2.0, top_p=1.0, seed=seed
                )
                for seed in range(7)
            ]
            for output in llm.generate([PROMPTS[1]] * 7, params):
                assert output.outputs[0].finish_reason == "stop"
                check_form(GRAMMARS[name], output.text, "stop")


def test_streams_choices_and_stops(device: str, plain: LLM) -> None:
    base = SamplingParams(grammar=GRAMMARS["schema"], max_tokens=80, **SAMPLINGS["seeded"])
    variants = [
        dataclasses.replace(base, n=3),
        dataclasses.replace(base, stop=["age"]),
        dataclasses.replace(base, max_tokens=1),
        dataclasses.replace(base, max_tokens=7),
        dataclasses.replace(base, ignore_eos=True),
        dataclasses.replace(base, ignore_eos=True, grammar=Grammar.regex("[a-c]{1,40}")),
    ]
    with load(device, DRAFTS["eagle2"]) as llm:
        for params in variants:
            wanted = shown(plain.generate(PROMPTS[1], params))
            assert shown(llm.generate(PROMPTS[1], params)) == wanted
            chunks = list(llm.stream(PROMPTS[1], params))
            for index, (tokens, text, *_) in enumerate(wanted):
                mine = [chunk for chunk in chunks if chunk.index == index]
                assert [token for chunk in mine for token in chunk.token_ids] == tokens
                assert "".join(chunk.text for chunk in mine) == text
        conversation = [{"role": "user", "content": "Say yes or no."}]
        answers = SamplingParams(grammar=Grammar.choice(["yes", "no"]), **SAMPLINGS["seeded"])
        assert llm.chat(conversation, answers)[0].text in ("yes", "no")
        assert shown(llm.chat(conversation, answers)) == shown(plain.chat(conversation, answers))


def test_pages_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A preempted sequence keeps its grammar state."""
    from cpmcu.loading.loader import load_model

    def load_with_fewer_pages(*arguments: Any, **options: Any) -> Any:
        loaded = load_model(*arguments, **options)
        return dataclasses.replace(loaded, engine=FewerPages(loaded.engine, 4))

    grammar = Grammar.regex("([a-z ]+, ?)+[0-9]")
    params = SamplingParams(grammar=grammar, max_tokens=90, **SAMPLINGS["seeded"])
    prompts = [[5 + i] * (20 + 9 * i) for i in range(4)]
    with load("cpu", {"no_speculation": True}) as llm:
        wanted = shown(llm.generate(prompts, params))
    monkeypatch.setattr("cpmcu.loading.loader.load_model", load_with_fewer_pages)
    with load("cpu", DRAFTS["ngram"]) as llm:
        assert shown(llm.generate(prompts, params)) == wanted
        assert llm.call_engine(lambda engine: engine.most_sequences_added) > len(prompts)


def test_errors_come_before_anything_runs(plain: LLM) -> None:
    steps = plain.call_engine(lambda engine: engine.counters["steps"])
    params = [
        SamplingParams(max_tokens=5),
        SamplingParams(max_tokens=5, grammar=Grammar.regex("(")),
    ]
    with pytest.raises(ValueError, match="the regex cannot be used: "):
        plain.generate(PROMPTS[:2], params)
    with pytest.raises(ValueError, match="the json schema cannot be used: Invalid type"):
        list(plain.stream("x", SamplingParams(grammar=Grammar.json_schema({"type": "car"}))))
    assert plain.call_engine(lambda engine: engine.counters["steps"]) == steps


def test_logit_bias_cannot_violate_the_grammar(plain: LLM) -> None:
    allowed = [plain.tokenizer.encode(text, add_special_tokens=False)[0] for text in "ab"]
    params = SamplingParams(
        grammar=Grammar.regex("[ab]"),
        logit_bias={**dict.fromkeys(allowed, -1e38), 20: 1e38},
        max_tokens=4,
        **SAMPLINGS["seeded"],
    )
    assert plain.generate("x", params)[0].text in ("a", "b")
