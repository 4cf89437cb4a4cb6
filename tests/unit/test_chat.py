"""A conversation in the terminal: messages, commands, and the prompts that the model gets."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys

import pytest
from story import STORY, Stage

from cpmcu import cli
from cpmcu.llm import LLM
from cpmcu.terminal import chat
from cpmcu.ui import lines
from tests.unit.test_cli import needs_engine, run

TEMPLATE = {
    "chat_template": "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if messages[-1].content == 'no' %}{{ raise_exception('not so') }}{% endif %}"
}


@pytest.fixture
def stage(monkeypatch, tmp_path):
    return Stage(monkeypatch, tmp_path / "story")


class Talk:
    """Runs a chat with typed messages. An exception in the list is raised instead."""

    def __init__(self, stage, monkeypatch):
        stage.prepare(tokenizer_config=TEMPLATE)
        self.seen = []
        self._monkeypatch = monkeypatch
        tokenize = LLM.tokenize_chat
        monkeypatch.setattr(
            LLM,
            "tokenize_chat",
            lambda llm, m, *rest: self.seen.append(list(m)) or tokenize(llm, m, *rest),
        )

    def __call__(self, *messages: object, flags: tuple[str, ...] = ()) -> int:
        typed = iter(messages)

        def ask() -> str:
            for message in typed:
                if isinstance(message, BaseException):
                    raise message
                return message
            raise EOFError

        self._monkeypatch.setattr(chat, "message_reader", lambda commands: ask)
        return cli.main(["--model", "m", "--chat", "--num-generate", "4", *flags])


@pytest.fixture
def talk(stage, monkeypatch):
    return Talk(stage, monkeypatch)


def test_a_conversation(talk, capsys):
    assert talk("one", "", "no", "two", "/new", "three", "/reset", "four", "x" * 900) == 0
    assert [len(messages) for messages in talk.seen] == [1, 3, 3, 1, 1, 3]
    assert talk.seen[2][1]["role"] == "assistant" and talk.seen[2][1]["content"] in STORY
    shown = capsys.readouterr().err
    assert "not so" in shown
    assert shown.count("the conversation is forgotten") == 2
    assert "the model holds 200; /reset starts over" in shown


def test_a_message_too_long_to_tokenise_is_refused(talk, capsys):
    assert talk("x" * (1 << 20), "one") == 0
    shown = capsys.readouterr().err
    assert "characters, which are at least" in shown and "can have 200; /reset starts over" in shown


def test_one_line_of_statistics_for_each_answer(talk, capsys):
    talk("one", "two")
    shown = [line for line in capsys.readouterr().err.splitlines() if "prefill: " not in line]
    assert sum("first after" in line for line in shown) == 2
    assert len(shown) == 4  # loading, the hint, two answers
    talk("one", flags=("--stats",))
    assert "\nprefill  " in capsys.readouterr().err


def test_the_first_message(talk, capsys, tmp_path):
    talk("two", flags=("--prompt-text", "one"))
    assert [messages[-1]["content"] for messages in talk.seen] == ["one", "two"]
    assert "> one\n" in capsys.readouterr().err
    (tmp_path / "first").write_text("from a file\n")
    talk(flags=("--prompt-file", str(tmp_path / "first")))
    assert talk.seen[-1][-1]["content"] == "from a file"


def test_a_system_prompt_outlives_a_reset(talk):
    talk("one", "/reset", "two", flags=("--system-prompt", "Be brief."))
    system = {"role": "system", "content": "Be brief."}
    assert [messages[0] for messages in talk.seen] == [system, system]
    assert len(talk.seen[1]) == 2


def test_help_and_unknown_commands_do_not_reach_the_model(talk, capsys):
    talk("/help", "/stat", "/nonsense at all", "/etc/passwd is what?", " /help", "/exit", "never")
    assert [messages[-1]["content"] for messages in talk.seen] == ["/etc/passwd is what?", "/help"]
    shown = capsys.readouterr().err
    for command in ("/help", "/reset", "/save", "/stats", "/exit"):
        assert f"  {command}" in shown
    assert "there is no command /stat; did you mean /stats? /help lists them" in shown
    assert "there is no command /nonsense; /help lists them" in shown


def test_stats(talk, capsys):
    talk("/stats", "one", "/stats")
    shown = capsys.readouterr().err
    assert "there is no answer yet" in shown
    assert shown.count("\nprefill  ") == 1 and "4 tokens, finish reason length, seed " in shown


def test_save(talk, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").write_text("precious")
    talk("one 你好", "/save a.json", "two", "/save a.json", "/save taken", "/save no/dir", "/save")
    saved = json.loads((tmp_path / "a.json").read_text("utf-8"))
    assert [message["role"] for message in saved["messages"]] == ["user", "assistant"] * 2
    assert saved["messages"][0]["content"] == "one 你好"
    assert saved["model"] == "story"
    assert (tmp_path / "taken").read_text() == "precious"
    assert len(list(tmp_path.glob("chat-*.json"))) == 1
    shown = capsys.readouterr().err
    assert "taken exists, expected a new file" in shown
    assert "no/dir: No such file or directory" in shown


def test_ctrl_c_while_waiting(talk, capsys, monkeypatch):
    assert talk("one", KeyboardInterrupt()) == 130  # stdin is not a terminal
    monkeypatch.setattr(cli.Display, "asks", True)
    assert talk("one", KeyboardInterrupt(), "two") == 0
    assert len(talk.seen[-1]) == 3
    assert "Ctrl-D or /exit leaves" in capsys.readouterr().err


def test_a_second_ctrl_c_does_not_end_the_chat(talk, monkeypatch):
    pressed = iter([KeyboardInterrupt()])

    def summary(self: object, result: object, **options: object) -> None:
        for each in pressed:
            raise each

    monkeypatch.setattr(cli.Display, "asks", True)
    monkeypatch.setattr(cli.Display, "summary", summary)
    assert talk("two", "three", flags=("--prompt-text", "one")) == 0
    assert [messages[-1]["content"] for messages in talk.seen] == ["one", "two", "three"]


def test_an_answer_stopped_before_its_first_text_is_dropped(talk, monkeypatch):
    stream = LLM.stream

    def interrupted(self, ids, *arguments, **options):
        if len(talk.seen) == 1:
            raise KeyboardInterrupt
        return stream(self, ids, *arguments, **options)

    monkeypatch.setattr(LLM, "stream", interrupted)
    assert talk("one", "two") == 0
    assert talk.seen[1] == [{"role": "user", "content": "two"}]


def test_a_template_is_needed_before_weights_are_read(stage, capsys):
    stage.prepare()
    for flags in (["--chat"], ["--system-prompt", "x"], ["--use-chat-template"]):
        assert cli.main(["--model", "m", *flags]) == 1
        shown = capsys.readouterr().err
        assert "story has no chat template, which a conversation needs" in shown
    assert stage.engines == []


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("a\nb\n", ["a", "b"]),
        ('"""a\nb"""\nc\n', ["a\nb", "c"]),
        ('"""\na\n\nb\n"""\n', ["a\n\nb"]),
        ('"""a"""\n', ["a"]),
        ('"""a\nb', ["a\nb"]),
        ('say """a\n', ['say """a']),
    ],
)
def test_messages_of_several_lines(text, messages, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    read = lines.message_reader(())
    found = []
    with pytest.raises(EOFError):
        while True:
            found.append(lines.unquoted(read()))
    assert found == messages


def test_a_line_without_end_is_refused(monkeypatch):
    monkeypatch.setattr(lines, "MOST_BYTES", 1 << 20)
    with open("/dev/zero", encoding="utf-8") as endless:
        monkeypatch.setattr("sys.stdin", endless)
        with pytest.raises(ValueError, match="a line of stdin has more than 1 MiB"):
            lines.message_reader(())()


@needs_engine
def test_chat_with_the_shipped_model_through_a_pipe():
    flags = ("--chat", "--device", "cpu", "--num-generate", "5")
    result = run(*flags, stdin="hello\n/stats\n/exit\nnever")
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("finish reason") == 2
    damaged = run(*flags, stdin="caf\udce9\n", PYTHONIOENCODING="utf-8:strict")
    assert damaged.returncode == 1 and "stdin is not UTF-8 text" in damaged.stderr
    damaged = run(*flags, stdin="caf\udce9\nb\n", PYTHONIOENCODING="utf-8:surrogateescape")
    assert damaged.returncode == 0 and "must be Unicode text" in damaged.stderr
    assert "finish reason" in damaged.stderr


@needs_engine
def test_a_closed_pipe_is_no_error():
    command = f"{sys.executable} -m cpmcu chat --device cpu --num-generate 50"
    result = subprocess.run(
        f"(printf 'a\\nb\\nc\\nd\\n' | {command}; echo status $? >&2) | head -1",
        shell=True,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "CPMCU_DEBUG": ""},
    )
    assert "status 0" in result.stderr
    assert "Traceback" not in result.stderr and "Exception" not in result.stderr
