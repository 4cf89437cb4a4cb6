"""Limits of chat templates: time, memory, and size of the output."""

from __future__ import annotations

import json
import resource
import time

import pytest
from tokenizers_for_tests import byte_level, write_directory

from cpmcu.chat_template import ChatTemplate, ChatTemplateError
from cpmcu.text import template_sandbox
from cpmcu.text.template_sandbox import MAX_SECONDS, MAX_SIZE
from cpmcu.tokenizer import Tokenizer

USER = [{"role": "user", "content": "Hi"}]
DOUBLE = "{% for i in range(99) %}{% set ns.a = ns.a + ns.a %}{% endfor %}"


def render(source: str, messages=USER, /, **variables) -> str:
    return ChatTemplate(source, {}).render(messages, **variables)


def refusal(source: str, messages=USER) -> str:
    """The error message; the rendering must use little time and memory."""
    before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.thread_time()
    with pytest.raises(ChatTemplateError) as error:
        render(source, messages)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10  # KiB
    assert time.thread_time() - begin < 2 * MAX_SECONDS
    message = str(error.value)
    assert len(message) < 400 and message.isprintable()
    return message


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10**9 }}",
        "{{ 10**9 * 'a' }}",
        "{{ ([0] * 10**9) | length }}",
        "{% set ns = namespace(a='a') %}" + DOUBLE,
        "{% set ns = namespace(a=[1]) %}" + DOUBLE,
        "{% set x = 'a' %}" + "{% set x = x ~ x %}" * 99,
        "{% set x = 'a' %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 99,
        "{% set x = ['a'] %}" + "{% set x = [x, x] %}" * 99 + "{{ x == x }}",
        "{% macro f(s) %}{{ s }}{{ s }}{% endmacro %}{% set x = 'a' %}" + "{% set x = f(x) %}" * 99,
        "{{ ('a' * 99999) | replace('a', 'b' * 99999) }}",
        "{{ ('a' * 99999).replace('', 'b' * 99999) }}",
        "{{ (['a'] * 9999) | join('b' * 99999) }}",
        "{{ ('b' * 99999).join(['a'] * 9999) }}",
        "{{ range(9999) | map('string') | join('b' * 9999) }}",
        "{{ '%s%s' % ('a' * 999999, 'a' * 999999) }}",
        "{{ '%s' | format([['a' * 9999] * 999] * 9) }}",
        "{{ '{0}{0}{0}{0}'.format('a' * 999999) }}",
        "{{ '{}'['format']([['a' * 9999] * 999]) }}",
        "{{ [['a' * 9999] * 999] }}",
        "{{ [['a' * 9999] * 999] | tojson }}",
        "{{ [['a' * 9999] * 999] | string }}",
        "{% for i in range(99999) %}{{ 'a' * 999 }}{% endfor %}",
    ],
)
def test_size(source: str) -> None:
    message = refusal(source)
    assert "it makes more than" in message or "it processes more than" in message


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("{{ '%1000000000d' % 1 }}", "width"),
        ("{{ '%*d' % (10**9, 1) }}", "width"),
        ("{{ '{:1000000000}'.format(1) }}", "width"),
        ("{{ '{:{}}'.format(1, 10**9) }}", "width"),
        ("{{ 'a' | center(10**10) }}", "center"),
        ("{{ 'a'.ljust(10**10) }}", "ljust"),
        ("{{ 'a' | indent(10**9) }}", "indent"),
        ("{{ messages | tojson(indent=10**9) }}", "tojson"),
        ("{{ ['a'] | batch(10**9, 'x') | list }}", "batch"),
        ("{{ 'aaaa' | slice(10**9) | list }}", "slice"),
        ("{{ 1.5 | round(10**9, 'ceil') }}", "rounds"),
        ("{{ 'a\\t'.expandtabs(10**10) }}", "expandtabs"),
        ("{{ (1).to_bytes(10**10, 'big') }}", "to_bytes"),
        ("{{ strftime_now('%Y' * 99) }}", "strftime_now"),
        ("{{ 10 ** 99999999 }}", "bits"),
        ("{{ 10**9999 * 10**9999 * 10**9999 * 10**9999 * 10**9999 }}", "bits"),
        ("{{ '9' * 9999 | int }}{{ 9 ** 9999 }}", "digits"),
        ("{{ ('(' * 99999) | urlize }}", "urlize"),
        ("{% for i in range(10**9) %}{% endfor %}", "range"),
        ("{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "recursion"),
        ("{{ raise_exception('no\\n\\x1b[31m' * 99) }}", r"no \x1b[31m"),
    ],
)
def test_other_limits(source: str, word: str) -> None:
    assert word in refusal(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) + f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    ],
)
def test_time(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.2)
    assert "it takes longer than 0.2 s" in refusal(source)


def test_nothing_is_computed_while_compiling() -> None:
    begin = time.thread_time()
    ChatTemplate("{{ 'a' * 10**10 }}{{ 'a' | center(10**10) }}{% if false %}x{% endif %}", {})
    assert time.thread_time() - begin < 1


def test_a_large_conversation_may_make_a_large_prompt() -> None:
    messages = [{"role": "user", "content": "x" * 20_000, "name": "é"} for _ in range(60)]
    source = (
        "{% set ns = namespace(all='', n=0) %}{% for m in messages %}"
        "{% set ns.all = ns.all + '<' ~ m.role + '>' + m.content | trim %}{% set ns.n = ns.n + 1 %}"
        "{% endfor %}{{ ns.all }}{{ ns.n }}{{ messages | tojson }}"
    )
    found = render(source, messages)
    assert len(found) > 2 * 60 * 20_000 > MAX_SIZE
    assert found.startswith("<user>x") and "60[{" in found


def test_helpers_work_as_in_jinja() -> None:
    for source, expected in {
        "{{ [1, 'a', none] }}{{ {'a': (1, 2)} }}": "[1, 'a', None]{'a': (1, 2)}",
        "{{ 1 ~ 'a' ~ none ~ x }}": "1aNone",
        "{{ 'a-b'.split('-') | join('+') }}{{ 'b' in 'abc' }}{{ ' a '.strip() * 3 }}": "a+bTrueaaa",
        "{{ '%s is %d' % ('a', 3) }}{{ '{} {x}'.format(1, x='2') }}": "a is 31 2",
        "{{ 'a\nb' | indent(2) }}{{ [3, 1] | sort | tojson(indent=1) }}": "a\n  b[\n 1,\n 3\n]",
        "{{ {'get': 1}.get('get') }}{{ {'a': {'b': 2}}.a.b }}{{ {'items': 1}['items'] }}": "121",
        "{% macro f(a, b=2) %}{{ a }}{{ b }}{% endmacro %}{{ f(1) }}{{ f(1, b=3) }}": "1213",
        "{% for k, v in {'a': [1]}.items() %}{{ k }}{{ v[0] }}{{ loop.index }}{% endfor %}": "a11",
        "{{ messages | map(attribute='role') | list }}{{ messages[0].content }}": "['user']Hi",
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}": "1",
        "{% for m in messages recursive %}{{ m.role }}{% endfor %}{{ 7 // 2 % 2 }}": "user1",
        "{{ 'x' if x is defined else 'y' }}{{ (x | default([])) + [1] }}": "y[1]",
    }.items():
        assert render(source) == expected, source


def test_the_file_is_named(tmp_path) -> None:
    directory = write_directory(tmp_path, byte_level(), chat_template="{% if %}")
    tokenizer = Tokenizer.from_directory(directory)
    with pytest.raises(ChatTemplateError, match=rf"^{tmp_path}: the chat template is malformed"):
        ChatTemplate.from_directory(directory, tokenizer)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ChatTemplateError, match=r"chat_template\.jinja cannot be read: .*utf-8"):
        ChatTemplate.from_directory(directory, tokenizer)


def test_a_long_message_is_cut() -> None:
    with pytest.raises(ChatTemplateError) as error:
        render("x", [json.loads('{"content": "' + "x" * 100_000 + '"}')])
    assert len(str(error.value)) < 200
