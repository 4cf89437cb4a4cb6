"""Scripted texts: characters split over tokens, stop strings, reasoning, tool calls."""

from __future__ import annotations

import json
import re

import pytest

from tests.e2e.conftest import SCRIPTS, TEMPLATE
from tests.e2e.harness import Server, cue, start, write_scripted


def ask(scripted: Server, script: str, **fields):
    messages = [{"role": "user", "content": cue(script)}]
    return scripted.client().chat.completions.create(
        model="scripted", messages=messages, temperature=0, **fields
    )


def streamed(scripted: Server, script: str, **fields):
    """Returns (content, reasoning, calls by index, finish reason, pieces) of a streamed answer."""
    content, reasoning, calls, finish, pieces = "", "", {}, None, []
    for chunk in ask(scripted, script, stream=True, **fields):
        for choice in chunk.choices:
            delta = choice.delta
            assert "\ufffd" not in (delta.content or "")
            content += delta.content or ""
            reasoning += getattr(delta, "reasoning_content", None) or ""
            pieces.append(delta.content or "")
            for call in delta.tool_calls or []:
                assert (call.index in calls) == (call.id is None) == (call.function.name is None)
                name, arguments = calls.get(call.index, (call.function.name, ""))
                calls[call.index] = (name, arguments + call.function.arguments)
                pieces.append(call.function.arguments)
            assert finish is None, "a chunk follows the finish reason"
            finish = choice.finish_reason
    calls = {index: (name, json.loads(given)) for index, (name, given) in calls.items()}
    return content, reasoning, calls, finish, pieces


def test_characters_split_over_tokens(scripted):
    whole = ask(scripted, "story").choices[0]
    assert whole.message.content == SCRIPTS["story"]
    assert whole.finish_reason == "stop"
    content, _, _, finish, pieces = streamed(scripted, "story")
    assert (content, finish) == (SCRIPTS["story"], "stop")
    assert len(pieces) > 5


def test_every_length_of_a_split_text(scripted):
    """Streamed and whole texts are equal for every last token."""
    for limit in range(1, 40, 3):
        whole = ask(scripted, "story", max_tokens=limit, extra_body={"return_token_ids": True})
        text = whole.choices[0].message.content
        pieces = [
            chunk.choices[0].delta.content or ""
            for chunk in ask(scripted, "story", max_tokens=limit, stream=True)
        ]
        assert "".join(pieces) == text
        assert SCRIPTS["story"].startswith(text.rstrip("\ufffd"))
        assert whole.usage.completion_tokens == limit == len(whole.choices[0].token_ids)
        assert whole.choices[0].finish_reason == "length"


def test_bytes_of_logprobs_join_to_the_text(scripted):
    choice = ask(scripted, "story", logprobs=True, top_logprobs=2).choices[0]
    entries = choice.logprobs.content
    assert b"".join(bytes(e.bytes) for e in entries[:-1]) == SCRIPTS["story"].encode()
    assert entries[-1].token == "</s>"
    assert all(entry.top_logprobs[0].bytes == entry.bytes for entry in entries)
    assert sum(len(entry.bytes) == 1 for entry in entries) > 20


@pytest.mark.parametrize("stop", ["einmal", "好", "👩‍👧", " ", ["zzz", "世界", "界！"]])
def test_stop_strings_across_bursts(scripted, stop):
    stops = [stop] if isinstance(stop, str) else stop
    ends = [(SCRIPTS["story"].find(s) + len(s), -len(s)) for s in stops if s in SCRIPTS["story"]]
    end, length = min(ends)
    expected = SCRIPTS["story"][: end + length]
    choice = ask(scripted, "story", stop=stop).choices[0]
    assert (choice.message.content, choice.finish_reason) == (expected, "stop")
    assert choice.stop_reason == SCRIPTS["story"][end + length : end]
    content, _, _, finish, _ = streamed(scripted, "story", stop=stop)
    assert (content, finish) == (expected, "stop")


def test_bursts_are_full(scripted):
    """The model is its own draft, so these tests have bursts of five tokens."""
    reply = ask(scripted, "story", extra_body={"return_metrics": True})
    found = reply.metrics["speculative_decoding"]
    assert found["draft_acceptance_rate"] > 0.9
    assert found["num_spec_tokens"] == 4
    assert reply.metrics["speculate_metrics"]["average_accept_length"] > 4.5


def test_reasoning_is_separated_from_content(scripted):
    message = ask(scripted, "think").choices[0].message
    assert message.reasoning_content == message.reasoning == "So, 🤔 two\nand two."
    assert message.content == "Four, 四."
    content, reasoning, _, finish, _ = streamed(scripted, "think")
    assert (content, reasoning, finish) == (message.content, message.reasoning_content, "stop")


@pytest.mark.parametrize("choices", [1, 2])
def test_tokens_of_reasoning(scripted, choices):
    body = {"model": "scripted", "input": cue("think"), "temperature": 0}
    same = scripted.post("/v1/responses", body).json()["usage"]["output_tokens_details"]
    whole = ask(scripted, "think", n=choices).usage
    assert whole.completion_tokens_details.reasoning_tokens == choices * same["reasoning_tokens"]
    options = {"include_usage": True, "continuous_usage_stats": True}
    for hidden in (False, True):  # hidden reasoning counts the same tokens
        fields = {"extra_body": {"include_reasoning": not hidden}, "n": choices}
        chunks = list(ask(scripted, "think", stream=True, stream_options=options, **fields))
        assert chunks[-1].usage.completion_tokens_details == whole.completion_tokens_details
        counts = [chunk.usage.completion_tokens_details.reasoning_tokens for chunk in chunks]
        assert counts[0] == 0 and counts == sorted(counts)
        assert len(set(counts)) > (1 if hidden else 3)
    assert ask(scripted, "story").usage.completion_tokens_details.reasoning_tokens == 0
    chunks = list(ask(scripted, "think", stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == same["reasoning_tokens"]


def test_thinking_that_the_prompt_began(scripted):
    begun = [{"role": "assistant", "content": "<think>\nOh, " + cue("muse")}]
    reply = scripted.client().chat.completions.create(
        model="scripted",
        messages=begun,
        temperature=0,
        extra_body={"continue_final_message": True},
    )
    message = reply.choices[0].message
    assert (message.reasoning_content, message.content) == ("Quite a while…", "Done thinking.")


def test_thinking_can_be_left_in_or_out(scripted):
    body = {"separate_reasoning": False}
    assert ask(scripted, "think", extra_body=body).choices[0].message.content == SCRIPTS["think"]
    body = {"include_reasoning": False}
    message = ask(scripted, "think", extra_body=body).choices[0].message
    assert (message.content, message.reasoning_content) == ("Four, 四.", None)


ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 9, "minimum": 0}},
    "required": ["a"],
    "additionalProperties": False,
}
CALL = {"type": "function", "function": {"name": "add", "parameters": ADD}}
FORCED = [
    {"tools": [CALL], "tool_choice": {"type": "function", "function": {"name": "add"}}},
    {"tools": [CALL], "tool_choice": "required", "parallel_tool_calls": False},
]


@pytest.mark.parametrize("fields", FORCED, ids=["named", "required"])
def test_reasoning_before_a_forced_call(scripted, fields):
    choice = ask(scripted, "think", **fields).choices[0]
    assert choice.message.reasoning_content == "So, 🤔 two\nand two."
    (call,) = choice.message.tool_calls
    assert (call.function.name, choice.message.content) == ("add", None)
    arguments = json.loads(call.function.arguments)
    assert 0 <= arguments.pop("a") <= 9 and not arguments
    content, reasoning, calls, finish, _ = streamed(scripted, "think", **fields)
    assert (content, reasoning) == ("", choice.message.reasoning_content)
    assert calls == {0: ("add", json.loads(call.function.arguments))}
    assert finish == choice.finish_reason == "tool_calls"
    cut = ask(scripted, "think", max_tokens=14, **fields).choices[0]
    assert cut.finish_reason == "length" and cut.message.tool_calls is None
    assert choice.message.reasoning_content.startswith(cut.message.reasoning_content)


def test_reasoning_before_structured_output(scripted):
    body = {"guided_regex": "[a-z]{2}!"}
    message = ask(scripted, "think", extra_body=body).choices[0].message
    assert message.reasoning_content == "So, 🤔 two\nand two."
    assert re.fullmatch("[a-z]{2}!", message.content)
    # The template has no reasoning tags, or the request leaves no place for reasoning.
    assert re.fullmatch(
        "[a-z]{2}!", ask(scripted, "story", extra_body=body).choices[0].message.content
    )
    for more in ({"separate_reasoning": False}, {"include_reasoning": False}):
        message = ask(scripted, "think", extra_body={**body, **more}).choices[0].message
        assert re.fullmatch("[a-z]{2}!", message.content) and message.reasoning_content is None


def test_hidden_reasoning_that_the_prompt_began(scripted):
    """The grammar waits for the end of the reasoning, also if the client hides reasoning."""

    def told(**fields) -> tuple[str, str | None]:
        body = {"continue_final_message": True, "guided_regex": "[A-Z][a-z]{2}", **fields}
        messages = [{"role": "assistant", "content": "<think>\nOh, " + cue("muse")}]
        reply = scripted.client().chat.completions.create(
            model="scripted", messages=messages, temperature=0, extra_body=body
        )
        message = reply.choices[0].message
        return message.content, message.reasoning_content

    content, reasoning = told()
    assert reasoning == "Quite a while…"
    assert told(include_reasoning=False) == (content, None)
    raw, reasoning = told(separate_reasoning=False)
    assert raw.startswith("Quite a while…\n</think>\n") and raw.endswith(content)
    assert reasoning is None


@pytest.mark.parametrize("begun", ["<think>\nOh, ", "<think>\n\n</think>\n\n"])
def test_reasoning_begun_or_closed_by_the_prompt_and_a_grammar(scripted, begun):
    reply = scripted.client().chat.completions.create(
        model="scripted",
        messages=[{"role": "assistant", "content": begun + cue("muse")}],
        temperature=0,
        extra_body={"continue_final_message": True, "guided_regex": "[A-Z][a-z]{2}"},
    )
    message = reply.choices[0].message
    assert re.fullmatch("[A-Z][a-z]{2}", message.content)
    assert message.reasoning_content == (None if "</think>" in begun else "Quite a while…")


TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("add", "sub")
]


def test_tool_calls(scripted):
    choice = ask(scripted, "call", tools=TOOLS).choices[0]
    first, second = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see.\n"
    assert (first.function.name, json.loads(first.function.arguments)) == (
        "add",
        {"a": 1, "b": "你"},
    )
    assert (second.function.name, second.function.arguments) == ("sub", "{}")
    assert first.id != second.id
    content, _, calls, finish, _ = streamed(scripted, "call", tools=TOOLS)
    assert calls == {0: ("add", {"a": 1, "b": "你"}), 1: ("sub", {})}
    assert (content, finish) == ("Let me see.\n", "tool_calls")


def test_tool_calls_are_text_unless_tools_are_given(scripted):
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        choice = ask(scripted, "call", **fields).choices[0]
        assert choice.message.content == SCRIPTS["call"]
        assert choice.message.tool_calls is None
        assert choice.finish_reason == "stop"


def test_one_call_only(scripted):
    choice = ask(scripted, "call", tools=TOOLS, parallel_tool_calls=False).choices[0]
    assert [call.function.name for call in choice.message.tool_calls] == ["add"]


def test_a_form_beside_tools(scripted):
    """The model may call a tool. If it answers, the answer has the form."""
    body = {"guided_regex": "[a-z]{2}!"}
    for script in ("story", "think"):
        choice = ask(scripted, script, tools=TOOLS, extra_body=body).choices[0]
        assert re.fullmatch("[a-z]{2}!", choice.message.content) and not choice.message.tool_calls
    assert choice.message.reasoning_content == "So, 🤔 two\nand two."


def test_text_that_is_not_a_call_is_content(scripted):
    choice = ask(scripted, "broken", tools=TOOLS).choices[0]
    assert (choice.message.content, choice.finish_reason) == (SCRIPTS["broken"], "stop")
    content, _, calls, finish, _ = streamed(scripted, "broken", tools=TOOLS)
    assert (content, calls, finish) == (SCRIPTS["broken"], {}, "stop")


@pytest.mark.parametrize("prompt", [cue("tell"), "<think>"])
def test_tags_that_are_special_tokens(special, prompt):
    """Tags are recognised even if they are special tokens or end the prompt.

    Other special tokens are omitted.
    """
    messages = [{"role": "user", "content": prompt}]

    def told(**fields) -> tuple[str, str, list[str]]:
        body = {"messages": messages, "temperature": 0, **fields}
        message = special.post("/v1/chat/completions", body).json()["choices"][0]["message"]
        calls = [call["function"]["name"] for call in message.get("tool_calls") or []]
        return message.get("reasoning_content"), message["content"], calls

    call = '{"name": "f"}'
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert told(tools=tools) == ("So, two.", "Ok.", ["f"])
    assert told() == ("So, two.", "Ok." + call, [])
    assert told(separate_reasoning=False) == (None, "So, two.Ok." + call, [])
    shown = told(tools=tools, skip_special_tokens=False)
    assert shown == ("So, two.", "Ok<|other|>.", ["f"])


@pytest.mark.parametrize("budget", [0, 1, 3, 100, -1])
@pytest.mark.parametrize("prompt", [cue("tell"), "<think>", "<think>\n"])
def test_a_budget_of_reasoning(special, prompt, budget):
    """The end tag follows the last token of the budget. Reasoning in the prompt counts."""
    body = {"messages": [{"role": "user", "content": prompt}], "temperature": 0, "max_tokens": 60}

    def told(path="/v1/chat/completions", **fields):
        reply = special.post(path, {**body, **fields})
        assert reply.status_code == 200, reply.text
        return reply.json()

    def parts(**fields) -> tuple[str | None, str, list[int]]:
        choice = told(return_token_ids=True, **fields)["choices"][0]
        message = choice["message"]
        return message.get("reasoning_content"), message["content"], choice["token_ids"]

    begin, end = special.post("/tokenize", {"prompt": "<think></think>"}).json()["tokens"]
    free, found = parts()[2], parts(thinking_token_budget=budget)
    if prompt == "<think>\n" and budget >= 0:
        assert found[2].index(end) == min(free.index(end), max(0, budget - 1))
        return
    start = free.index(begin) + 1 if begin in free else 0
    if budget in (-1, 100):
        assert found == parts()
    else:
        assert found[2].index(end) - start == budget
        assert found[2][: start + budget] == free[: start + budget]
        assert found[1].startswith("Ok.")
    for name in ("reasoning_budget_tokens", "thinking_budget_tokens", "thinking_budget"):
        assert parts(**{name: budget}) == found
    items = {"input": prompt, "temperature": 0, "thinking_token_budget": budget}
    (*_, message) = special.post("/v1/responses", items).json()["output"]
    assert message["content"][0]["text"] == found[1]
    if budget > 0:
        thinking = {"type": "enabled", "budget_tokens": budget}
        (*_, block) = told("/v1/messages", thinking=thinking)["content"]
        assert block["text"] == found[1]


def test_a_text_has_no_budget_of_reasoning(scripted):
    body = {"prompt": "a", "max_tokens": 1, "thinking_token_budget": 4}
    reply = scripted.post("/v1/completions", body)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "thinking_token_budget"
    body = {"messages": [{"role": "user", "content": "a"}], "thinking_token_budget": -2}
    assert scripted.post("/v1/chat/completions", body).status_code == 400


def test_tags_that_are_parts_of_tags(tmp_path):
    """MiniCPM5's tokens include <function and <param, without the end of the tag.

    The call may also stand in place of an answer with a form.
    """
    tags = ("<function", "</function>", "<param", "</param>")
    script = '<function name="f"><param name="s">5</param></function>'
    template = TEMPLATE.replace("<tool_call>", '<function name="f"><param name="s">')
    directory = write_scripted(tmp_path, {"tell": script}, template, tags)
    schema = {"type": "object", "properties": {"s": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    with start("--model", str(directory), "--served-model-name", "scripted") as server:
        for body in ({}, {"guided_regex": "[0-9]"}):
            choice = ask(server, "tell", tools=tools, extra_body=body).choices[0]
            (found,) = choice.message.tool_calls
            assert (found.function.name, found.function.arguments) == ("f", '{"s": "5"}')
            assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
            calls = streamed(server, "tell", tools=tools, extra_body=body)[2]
            assert calls == {0: ("f", {"s": "5"})}
        for fields in ({}, {"tools": tools, "tool_choice": "none"}):
            message = ask(server, "tell", extra_body=body, **fields).choices[0].message
            assert re.fullmatch("[0-9]", message.content) and not message.tool_calls


def test_conversation_with_calls_and_results(scripted):
    """Arguments of earlier calls, and null contents, reach the template."""
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Add."}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": cue("story")},
    ]
    reply = scripted.client().chat.completions.create(
        model="scripted", messages=messages, tools=TOOLS, temperature=0
    )
    assert reply.choices[0].message.content == SCRIPTS["story"]


def test_variables_reach_the_template(scripted):
    fields = {"chat_template_kwargs": {"suffix": cue("story"), "messages": "no"}}
    reply = ask(scripted, "call", extra_body=fields)
    assert reply.choices[0].message.content == SCRIPTS["story"]


def test_the_tokenizer_describes_itself(scripted):
    found = scripted.get("/tokenizer_info").json()
    assert (found["bos_token"], found["eos_token"], found["pad_token"]) == ("<s>", "</s>", None)
    assert found["chat_template"] == TEMPLATE


def test_detokenize_is_the_inverse(scripted):
    text = SCRIPTS["story"] + cue("call")
    found = scripted.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["token_strs"][-1] == cue("call")
    assert scripted.post("/detokenize", {"tokens": found["tokens"]}).json()["prompt"] == text
    messages = [{"role": "user", "content": text}]
    assert scripted.post("/tokenize", {"messages": messages}).json()["tokens"] == found["tokens"]
