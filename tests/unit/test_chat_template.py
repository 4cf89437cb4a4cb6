"""Chat templates: helper functions and error messages."""

from __future__ import annotations

import datetime

import pytest
from tokenizers_for_tests import byte_level, write_directory

from cpmcu.chat_template import ChatTemplate, ChatTemplateError
from cpmcu.tokenizer import Tokenizer

CHATML = (
    "{%- for m in messages %}\n"
    "    {{- '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}\n"
    "{%- endfor %}\n"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
USER = [{"role": "user", "content": "Hi"}]


def render(source: str, messages=USER, /, **variables) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, **variables)


def test_chatml():
    assert render(CHATML) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert render(CHATML, add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"


def test_blocks_are_trimmed():
    assert render("  {% if true %}\nx\n  {% endif %}\ny") == "x\ny"


def test_content_parts_are_joined():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert "onetwo" in render(CHATML, [{"role": "user", "content": parts}])
    with pytest.raises(ChatTemplateError, match="must be of type text, found 'image_url'"):
        render(CHATML, [{"role": "user", "content": [{"type": "image_url"}]}])


def test_tojson_leaves_html_alone():
    assert render("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'
    assert render("{{ {'a': 1} | tojson(indent=2) }}") == '{\n  "a": 1\n}'


def test_helpers():
    assert render("{{ strftime_now('%Y') }}") == str(datetime.datetime.now().year)
    assert (
        render("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}")
        == "1"
    )
    assert render("{% generation %}{{ bos_token }}{% endgeneration %}!") == "<s>!"
    assert render("{{ enable_thinking }}", enable_thinking=False) == "False"


def test_variables_may_have_any_name():
    variables = {"self": 1, "args": 2, "messages": 3, "not a name": 4}
    assert render("{{ messages[0].content }}{{ args }}", **variables) == "Hi2"


def test_documents_are_none_unless_given():
    source = "{{ documents is none }} {{ documents }}"
    assert render(source) == "True None"
    assert render(source, documents=["a"]) == "False ['a']"


@pytest.mark.parametrize("content", [None, [{"type": "text", "text": "x"}]])
def test_keys_with_value_none_are_dropped(content):
    message = {"role": "assistant", "content": content, "tool_calls": None}
    source = "{{ messages[0].content }}{{ messages[0].tool_calls is defined }}"
    assert render(source, [message]) == ("x" if content else "") + "False"
    assert "tool_calls" in message  # the caller's message is unchanged


def test_a_refusal_is_one_sentence():
    with pytest.raises(
        ChatTemplateError, match="failed for this conversation: roles must alternate"
    ):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[5]['content'] }}",
        "{{ 1 / 0 }}",
        "{{ messages.append(1) }}",  # immutable
        "{{ ''.__class__.__mro__ }}",  # sandboxed
        "{{ none + 'x' }}",
    ],
)
def test_every_failure_is_a_template_error(source):
    with pytest.raises(ChatTemplateError, match="the chat template failed"):
        render(source)


def test_malformed():
    with pytest.raises(ChatTemplateError, match="malformed in line 2"):
        render("x\n{% if %}")
    with pytest.raises(ChatTemplateError, match="must be a mapping with a role"):
        render(CHATML, ["Hi"])


def test_from_directory(tmp_path):
    def load(**config):
        directory = write_directory(tmp_path, byte_level(), **config)
        return ChatTemplate.from_directory(directory, Tokenizer.from_directory(directory))

    assert load() is None
    assert load(chat_template="{{ bos_token }}one").render(USER) == "<s>one"
    named = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "plain"},
    ]
    assert load(chat_template=named).render(USER) == "plain"
    assert load(chat_template=named).render(USER, tools=[{"type": "function"}]) == "tools"
    (tmp_path / "chat_template.jinja").write_text("from a file", encoding="utf-8")
    assert load(chat_template="{{ bos_token }}one").render(USER) == "from a file"


def test_several_templates(tmp_path):
    def load(**config):
        directory = write_directory(tmp_path, byte_level(), **config)
        template = ChatTemplate.from_directory(directory, Tokenizer.from_directory(directory))
        return [template.render(USER, tools=tools) for tools in (None, [{"type": "function"}])]

    assert load(chat_template={"default": "plain", "tool_use": "tools"}) == ["plain", "tools"]
    folder = tmp_path / "additional_chat_templates"
    folder.mkdir()
    (folder / "tool_use.jinja").write_text("file with tools")
    assert load(chat_template="plain") == ["plain", "file with tools"]
    (tmp_path / "chat_template.jinja").write_text("file")
    assert load(chat_template="plain") == ["file", "file with tools"]
    (tmp_path / "chat_template.jinja").unlink()
    (folder / "tool_use.jinja").unlink()
    (folder / "default.jinja").write_text("default file")
    named = {"default": "plain", "tool_use": "tools"}
    assert load(chat_template=named) == ["default file"] * 2  # files override the config


@pytest.mark.parametrize("found", [5, ["x"], [{"name": "default"}], {"default": None}, [5, {}]])
def test_values_that_are_not_templates(found, tmp_path):
    directory = write_directory(tmp_path, byte_level(), chat_template=found)
    with pytest.raises(ChatTemplateError, match=r"tokenizer_config.json: chat_template is .*text"):
        ChatTemplate.from_directory(directory, Tokenizer.from_directory(directory))
