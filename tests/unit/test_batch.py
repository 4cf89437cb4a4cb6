"""`cpmcu run --batch` and `--json`: forms of lines, errors, resuming, continuous batching."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from story import Stage, told
from tokenizers_for_tests import byte_level

from cpmcu import SamplingParams, cli
from cpmcu.batch.lines import BatchRequest, answered, read_request, request_lines, sampling_of
from cpmcu.batch.run import BatchRun
from cpmcu.ui.display import Display
from tests.unit.test_cli import needs_engine, run


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Stage:
    return Stage(monkeypatch, tmp_path / "story")


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def results(path: Path) -> dict[Any, Any]:
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    return {line.get("custom_id", line["id"]): line for line in lines}


def test_forms() -> None:
    own = read_request(b'{"id": 7, "prompt": "a", "max_tokens": 3, "logit_bias": {"5": 2}}')
    assert (own.id, own.url) == (7, None)
    params = sampling_of(own, SamplingParams(temperature=0.5, max_tokens=9))
    assert (params.temperature, params.max_tokens, params.logit_bias) == (0.5, 3, {5: 2})
    body = {"messages": [{"role": "user", "content": "a"}]}
    line = {"custom_id": "x", "method": "POST", "url": "/v1/chat/completions", "body": body}
    read = read_request(json.dumps(line).encode())
    assert read == BatchRequest("x", body, "/v1/chat/completions")
    grammar = {"json_schema": {"type": "object"}}
    params = sampling_of(BatchRequest(1, {"grammar": grammar}), SamplingParams())
    assert params.grammar is not None and params.grammar.kind == "json_schema"


OPENAI = {"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "it is not JSON: Expecting property name"),
        (b"\xff", "it is not JSON: 'utf-8' codec can't decode"),
        ([1], r"it is \[1\], expected a JSON object"),
        ({"prompt": "a"}, "there is no id"),
        ({"id": None, "prompt": "a"}, "id is null, expected a text or an integer"),
        (True, "it is true, expected a JSON object"),
        ({"id": 1.5, "prompt": "a"}, "id is 1.5, expected a text or an integer"),
        ({"id": 1}, "there are no prompt and no messages"),
        ({"id": 1, "prompt": "a", "messages": []}, "there are a prompt and messages"),
        ({"id": 1, "prompt": "a", "max_token": 3}, "'max_token'; did you mean max_tokens"),
        (OPENAI | {"method": "GET"}, "method is 'GET', expected 'POST'"),
        (OPENAI | {"url": "/v1/embeddings"}, "url is '/v1/embeddings', expected one of /v1/chat"),
        (OPENAI | {"body": []}, r"body is \[\], expected an object"),
        (OPENAI | {"body": {"stream": True}}, "stream is true"),
        (OPENAI | {"n": 1}, "unknown member 'n', expected body, custom_id"),
        ({"custom_id": "x"}, "there is no url"),
    ],
)
def test_lines_that_are_no_requests(line: Any, message: str) -> None:
    text = line.encode() if isinstance(line, str) else line
    with pytest.raises(ValueError, match=message):
        read_request(text if isinstance(text, bytes) else json.dumps(line).encode())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -1}, "temperature is -1"),
        ({"grammar": {"yaml": ""}}, "grammar is .*, expected an object with one of json_schema"),
        ({"logit_bias": {"a": 1}}, "logit_bias names 'a', expected token ids"),
    ],
)
def test_sampling_that_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sampling_of(BatchRequest(1, fields), SamplingParams())


def test_an_output_file_that_was_cut_off(tmp_path: Path) -> None:
    path = write(
        tmp_path / "out", {"id": 1, "text": "é"}, {"id": "a", "custom_id": "b", "response": {}}
    )
    whole = path.read_text()
    assert answered(path) == {1, "b"}
    path.write_text(whole + '{"id": 3, "te')
    assert answered(path) == {1, "b"}
    assert path.read_text() == whole
    path.write_text("# notes\n")
    with pytest.raises(ValueError, match="line 1 is '# notes', expected a result of a batch"):
        answered(path)
    assert path.read_text() == "# notes\n"
    path.write_text("notes without a newline at the end")
    with pytest.raises(ValueError, match="line 1 is 'notes without a newline"):
        answered(path)
    assert path.read_text() == "notes without a newline at the end"
    for request in ({"id": 1, "prompt": "a"}, {**OPENAI, "custom_id": "b"}):
        write(path, request)
        with pytest.raises(ValueError, match=r"line 1 is .* expected a result of a batch"):
            answered(path)


def test_one_file_for_requests_and_results_is_refused(tmp_path: Path, capsys) -> None:
    """A request that is taken for its own result would never be answered."""
    source = write(tmp_path / "in", {"id": 1, "prompt": "a"})
    (tmp_path / "link").symlink_to(source)
    before = source.read_text()
    for output in (source, tmp_path / "link"):
        assert cli.main(["--batch", str(source), "--output", str(output)]) == 1
        assert f"--output is {output}, the file of --batch" in capsys.readouterr().err
    assert source.read_text() == before


@pytest.mark.parametrize("read", [request_lines, answered])
def test_a_long_file_that_is_no_batch_is_refused_in_little_memory(read: Any, tmp_path: Path):
    """The file has 2 GiB of zero bytes in one line."""
    path = tmp_path / "sparse"
    os.close(os.open(path, os.O_CREAT))
    os.truncate(path, 2 << 30)
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"line 1 (has more than 16 MiB|is '\\x00)"):
        lines = read(path)
        next(lines())
    assert tracemalloc.get_traced_memory()[1] < 200 << 20
    tracemalloc.stop()


def test_a_pipe_without_end_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("cpmcu.batch.lines._MOST_HELD", 1 << 20)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = subprocess.Popen(["sh", "-c", f"yes '{{}}' >'{pipe}'"], stderr=subprocess.DEVNULL)
    with pytest.raises(ValueError, match="needs more than 1 MiB of memory, since it can be read"):
        request_lines(pipe)
    writer.wait(10)


def test_requests_of_a_pipe(stage: Stage, tmp_path: Path) -> None:
    """A pipe is read once, for the number of its lines and for its requests."""
    stage.prepare()
    pipe, output = tmp_path / "pipe", tmp_path / "out"
    os.mkfifo(pipe)
    writer = threading.Thread(target=write, args=(pipe, {"id": 1, "prompt": "the"}, {"id": 2}))
    writer.start()
    arguments = ["-m", "m", "--batch", str(pipe), "--output", str(output), "-n", "6"]
    assert cli.main(arguments) == 1  # because of the second line
    writer.join()
    assert list(results(output)) == [1]
    command = [sys.executable, "-m", "cpmcu", "run", "no/model", "--batch"]
    for name, message in (("-", "no/model"), (str(tmp_path / "none"), "No such file")):
        piped = subprocess.run([*command, name], input="{}", capture_output=True, text=True)
        assert message in piped.stderr


def test_an_output_that_is_no_file(stage: Stage, tmp_path: Path, capsys) -> None:
    """A device has no results of an earlier run. /dev/full, if read, would never end."""
    stage.prepare()
    source = write(tmp_path / "in", {"id": 1, "prompt": "the"})
    arguments = ["-m", "m", "--batch", str(source), "-n", "6", "--output"]
    assert cli.main([*arguments, "/dev/full"]) == 1
    assert "No space left on device" in capsys.readouterr().err
    command = [sys.executable, "-c", "from pathlib import Path; from cpmcu.batch.lines import *; "]
    command[-1] += "print(answered(Path('/dev/stdout')))"
    piped = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert piped.stdout == "set()\n", piped.stderr


def test_requests_share_steps(stage: Stage, tmp_path: Path, capsys) -> None:
    lines = [{"id": i, "prompt": [5] * (i + 1), "max_tokens": 9} for i in range(20)]
    source, output = write(tmp_path / "in", *lines), tmp_path / "out"
    with stage(max_num_seqs=4, step_seconds=0.005) as llm:
        batch = BatchRun(Display(plain=True), llm, SamplingParams(), llm.tokenize, set())
        assert batch.run(request_lines(source), output)
        engine = stage.engines[0]()
        assert engine is not None
        steps = [slots for name, slots in engine.log if name == "decode"]
        assert max(map(len, steps)) == 4
        assert len(steps) < 20 * 8
    found = results(output)
    assert list(range(20)) == sorted(found)
    assert all(found[i]["token_ids"] == told(i + 1, 9) for i in range(20))
    assert "20 answered, 180 tokens in " in capsys.readouterr().err


def test_bad_lines_and_resuming(stage: Stage, tmp_path: Path, capsys) -> None:
    stage.prepare()
    source, output = tmp_path / "in", tmp_path / "out"
    write(source, {"id": "a", "prompt": "the"}, "no object", {"id": "a", "prompt": "quick"})
    with open(source, "a") as file:
        file.write('\n{"id": "b", "prompt": "fox", "max_tokens": 3, "n": 2}\n')
        file.write('{"id": "c", "prompt": "fox", "messages": 1}\n{"id": "d", "prompt": ""}\n')
        file.write('{"id": "e", "messages": ["hello"]}\n{"id": "g", "messages": []}\n')
    arguments = ["-m", "m", "--batch", str(source), "--output", str(output), "-n", "6"]
    assert cli.main(arguments) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    for message in (
        "line 2: it is 'no object', expected a JSON object",
        "line 3: its id 'a' is also that of line 1",
        "line 6: there are a prompt and messages",
        "line 7: the prompt is empty",
        "line 8: messages is no list of objects",
        "line 9: messages is [], but must have at least one message",
        "2 answered, 6 failed, 12 tokens in",
    ):
        assert message in shown.err
    found = results(output)
    length = len(byte_level().encode("the").ids)
    assert found["a"]["token_ids"] == told(length, 6)  # the flags are the defaults
    assert [each["token_ids"] for each in found["b"]["outputs"]] == [found["b"]["token_ids"]] * 2
    assert found["b"]["usage"]["completion_tokens"] == 6
    before = output.read_text()
    write(source, {"id": "f", "prompt": "dog"}, {"id": "a", "prompt": "the"})
    assert cli.main(arguments) == 0
    assert "1 answered, 1 skipped" in capsys.readouterr().err
    assert output.read_text().startswith(before) and len(results(output)) == 3


def test_ctrl_c_keeps_the_results(stage: Stage, tmp_path: Path, capsys, monkeypatch) -> None:
    stage.prepare(step_seconds=0.001)
    source, output = tmp_path / "in", tmp_path / "out"
    write(source, *({"id": i, "prompt": "the"} for i in range(40)))
    arguments = ["-m", "m", "--batch", str(source), "--output", str(output), "-n", "9"]
    finish = BatchRun._finish
    count = iter(range(5))

    def interrupted(batch: BatchRun, job: Any) -> None:
        finish(batch, job)
        if next(count, None) is None:
            raise KeyboardInterrupt

    monkeypatch.setattr(BatchRun, "_finish", interrupted)
    assert cli.main(arguments) == 130
    assert "stopped" in capsys.readouterr().err
    assert len(results(output)) == 6
    monkeypatch.setattr(BatchRun, "_finish", finish)
    assert cli.main(arguments) == 0
    assert len(results(output)) == 40


def test_json_of_one_prompt_and_of_several(stage: Stage, capsys) -> None:
    stage.prepare()
    arguments = ["-m", "m", "--json", "-n", "5", "--seed", "3", "--num-outputs", "2"]
    assert cli.main([*arguments, "-p", "the"]) == 0
    one = json.loads(capsys.readouterr().out)
    assert one["token_ids"] == told(len(byte_level().encode("the").ids), 5)
    assert (one["finish_reason"], one["seed"]) == ("length", 3)
    assert one["usage"]["completion_tokens"] == 10 and one["timings"]["prefill_s"] >= 0
    assert [output["text"] for output in one["outputs"]] == [one["text"]] * 2
    assert cli.main([*arguments, "-p", "the", "-p", "fox jumps"]) == 0
    first, second = json.loads(capsys.readouterr().out)["results"]
    assert first["text"] == one["text"]
    assert second["usage"]["prompt_tokens"] == len(byte_level().encode("fox jumps").ids)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-p", "a", "-p", "b"], "-p is given 2 times without --json"),
        (["--num-outputs", "2"], "--num-outputs is 2 without --json"),
        (["--output", "x"], "--output is given without --batch"),
        (["--batch", "x", "-p", "y"], "a prompt is given with --batch"),
        (["--batch", "x", "--json"], "--json is given with --batch"),
        (["--batch", "x", "--chat"], "--batch is given with --chat"),
        (["--json", "--chat"], "--json is given with --chat"),
    ],
)
def test_flags_that_do_not_go_together(arguments: list[str], message: str, capsys) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_files_that_cannot_be_opened(tmp_path: Path, capsys) -> None:
    source = write(tmp_path / "in", {"id": 1, "prompt": "a"})
    for arguments, name in (
        (["--batch", str(tmp_path / "none")], tmp_path / "none"),
        (["--batch", str(source), "--output", str(tmp_path / "no" / "out")], tmp_path / "no/out"),
    ):
        assert cli.main(arguments) == 1
        assert capsys.readouterr().err == f"cpmcu: {name}: No such file or directory\n"


@needs_engine
def test_openais_lines_and_answers_of_a_run(tmp_path: Path) -> None:
    """A prompt has the same text in a batch, in OpenAI's form and alone."""
    pytest.importorskip("fastapi")
    body = {"prompt": "def f(n):", "max_tokens": 12, "temperature": 0}
    line = {"custom_id": "o", "method": "POST", "url": "/v1/completions", "body": body}
    wrong = {**line, "custom_id": "w", "body": {**body, "model": "gpt-5"}}
    own = {"id": "p", "prompt": "def f(n):", "max_tokens": 12, "temperature": 0, "logprobs": 1}
    source = write(tmp_path / "in", line, own, wrong)
    done = run("--device", "cpu", "--batch", str(source))
    assert done.returncode == 1
    assert "line 3: The model 'gpt-5' is not served here" in done.stderr
    lines = [json.loads(text) for text in done.stdout.splitlines()]
    found = {each.get("custom_id", each["id"]): each for each in lines}
    assert found.keys() == {"o", "p"}
    assert found["o"]["response"]["status_code"] == 200 and found["o"]["error"] is None
    alone = run("--device", "cpu", "-p", "def f(n):", "-n", "12", "--temp", "0", "--json")
    text = json.loads(alone.stdout)["text"]
    assert found["p"]["text"] == text
    assert found["o"]["response"]["body"]["choices"][0]["text"] == text
    assert len(found["p"]["logprobs"]) == 12 and found["p"]["logprobs"][0]["top"][0]["text"]
