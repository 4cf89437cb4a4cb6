"""Roles that a template does not know: the instructions reach the model all the same."""

from __future__ import annotations

import pytest

from cpmcu.chat_template import ChatTemplate
from cpmcu.serving.chat.conversation import render
from cpmcu.serving.protocol.chat import ChatMessage

# Like Qwen3.5's template, it refuses other roles and a later system message.
STRICT = """{%- for m in messages %}{%- if m.role == 'system' %}{%- if not loop.first %}
{{- raise_exception('system must be first') }}{%- endif %}
{%- elif m.role not in ('user', 'assistant') %}{{- raise_exception('unknown role') }}{%- endif %}
{{- '[' + m.role + ']' + m.content }}{%- endfor %}"""
# Like Qwen2.5's template, it leaves other roles out.
LENIENT = """{%- for m in messages %}{%- if m.role in ('system', 'user', 'assistant') %}
{{- '[' + m.role + ']' + m.content }}{%- endif %}{%- endfor %}"""
ANY = "{%- for m in messages %}{{- '[' + m.role + ']' + m.content }}{%- endfor %}"


def shown(source: str, *pairs: str) -> str:
    """The prompt; a pair is a role and a content with a space between them."""
    messages = []
    for pair in pairs:
        role, _, content = pair.partition(" ")
        messages.append(ChatMessage(role=role, content=content))
    return render(
        ChatTemplate(source, {}),
        messages,
        tools=[],
        variables={},
        add_generation_prompt=True,
        continue_final_message=False,
    )


@pytest.mark.parametrize(
    ("source", "pairs", "prompt"),
    [
        (STRICT, ("developer Be brief.", "user Hi"), "[system]Be brief.[user]Hi"),
        (LENIENT, ("developer Be brief.", "user Hi"), "[system]Be brief.[user]Hi"),
        (ANY, ("developer Be brief.", "user Hi"), "[developer]Be brief.[user]Hi"),
        (STRICT, ("system A", "developer B", "user Hi"), "[system]A\n\nB[user]Hi"),
        (ANY, ("system A", "system B", "user Hi"), "[system]A\n\nB[user]Hi"),
        (
            STRICT,
            ("user a", "assistant b", "developer c", "user d"),
            "[user]a[assistant]b[user]c\n\nd",
        ),
        (STRICT, ("user a", "system c", "assistant b"), "[user]a\n\nc[assistant]b"),
        (
            STRICT,
            ("system s", "user a", "assistant b", "system c", "user d", "user e"),
            "[system]s[user]a[assistant]b[user]c\n\nd[user]e",
        ),
        (LENIENT, ("user a", "system c", "user d"), "[user]a[system]c[user]d"),
    ],
)
def test_every_instruction_reaches_the_prompt(
    source: str, pairs: tuple[str, ...], prompt: str
) -> None:
    assert shown(source, *pairs) == prompt


def test_arguments_are_text_for_a_template_that_adds_them_to_text() -> None:
    source = """{%- for m in messages %}{%- if m.tool_calls %}{%- for c in m.tool_calls %}
{{- '<' + c.function.name + ' ' + c.function.arguments + '>' }}{%- endfor %}{%- endif %}
{%- if m.content is not none %}{{- '[' + m.role + ']' + m.content }}{%- endif %}{%- endfor %}"""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x":  1}'}}
    messages = [
        ChatMessage.model_validate(message)
        for message in (
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "a", "content": "2"},
        )
    ]
    found = render(
        ChatTemplate(source, {}),
        messages,
        tools=[],
        variables={},
        add_generation_prompt=False,
        continue_final_message=False,
    )
    assert found == '[user]Hi<f {"x":  1}>[tool]2'


@pytest.mark.parametrize("between", ["", "\n\n"])
def test_a_template_joins_parts_in_its_own_way(between: str) -> None:
    source = (
        "{%- for m in messages %}{%- if m.content is string %}{{- m.content }}{%- else %}"
        "{%- for p in m.content %}{{- p.text }}{%- if not loop.last %}{{- BETWEEN }}{%- endif %}"
        "{%- endfor %}{%- endif %}{%- endfor %}"
    ).replace("BETWEEN", repr(between))
    parts = [{"type": "text", "text": text} for text in ("A", "B")]
    message = ChatMessage.model_validate({"role": "user", "content": parts})
    assert ChatTemplate(source, {}).render([message.to_template()]) == f"A{between}B"
    assert ChatTemplate(ANY, {}).render([message.to_template()]) == "[user]AB"
