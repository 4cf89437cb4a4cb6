"""--config and --plugin: flags from files, and code that is imported before flags are parsed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from story import Stage

from cpmcu import bench, cli
from cpmcu.cli import _configs, make_parser
from cpmcu.flags.startup import import_plugin, prepare, read_file
from tests.unit.test_cli import run

PLUGIN = '''
"""A family and a drafter whose options are flags."""
import dataclasses
from plugin_width import WIDTH
from cpmcu.drafters.options import DrafterOptions, register_options
from cpmcu.models.common import read_spec
from cpmcu.models.registry import register_model
from cpmcu.options import option

@register_options("startup_toy")
@dataclasses.dataclass(frozen=True, kw_only=True)
class ToyOptions(DrafterOptions):
    startup_toy_width: int = option(WIDTH, "width of the toy", least=1)

@register_model("StartupToyForCausalLM")
def build(config, options):
    return read_spec({**config, "hidden_size": config["dim"]}, options)
'''


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "plugin_width.py").write_text("WIDTH = 3\n")
    path = tmp_path / "startup_toy.py"
    path.write_text(PLUGIN)
    return path


def parsed(verb: str, path: Path, *arguments: str) -> tuple[Any, Any, Any]:
    words = [*arguments, "--config", str(path)]
    file = prepare(words, verb)
    parser = make_parser(verb)
    return _configs(parser, parser.parse_args(words, file=file), verb)


FLAGS: dict[str, Any] = {
    "model": "/file/model",
    "max_model_len": 64,
    "num-generate": 7,
    "temperature": 0.5,
    "prefix-cache": False,
    "use_stream": True,
    "stop": ["a", "b"],
    "seed": None,
    "speculative-config": {"method": "ngram"},
}
YAML = """
model: /file/model
max_model_len: 64
num-generate: 7
temperature: 0.5
prefix-cache: no
use_stream: yes
stop: [a, b]
seed:
speculative-config: {method: ngram}
"""


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_flags_of_a_file_and_those_of_the_command_line(suffix: str, tmp_path: Path) -> None:
    if suffix == "yaml":
        pytest.importorskip("yaml")
    path = tmp_path / f"flags.{suffix}"
    path.write_text(YAML if suffix == "yaml" else json.dumps(FLAGS))
    options, config, params = parsed("run", path)
    assert (config.model, config.max_model_len, config.prefix_cache) == ("/file/model", 64, False)
    assert (params.max_tokens, params.temperature, params.seed) == (7, 0.5, None)
    assert tuple(params.stop) == ("a", "b") and options.use_stream is True
    assert config.speculation.method == "ngram"
    typed = ("-n", "9", "--stop", "c", "--model-path", "mine", "--prefix-cache")
    _, config, params = parsed("run", path, *typed)
    assert (params.max_tokens, tuple(params.stop), params.temperature) == (9, ("c",), 0.5)
    assert (config.model, config.prefix_cache) == ("mine", True)


def test_words_win_over_the_model_and_prompt_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "flags.json"
    path.write_text(json.dumps({"model": "/file/model", "prompt-text": "of the file"}))
    for words, model, prompt in (
        ((), "/file/model", "of the file"),
        (("a prompt",), "/file/model", "a prompt"),
        (("./other",), "./other", "of the file"),
        (("other", "a prompt"), "other", "a prompt"),
    ):
        options, config, _ = parsed("run", path, *words)
        assert (config.model, options.prompt_text[0]) == (model, prompt)
    assert parsed("plan", path, "other")[1].model == "other"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max-model-length": 1}, "unknown flag 'max-model-length'; did you mean max-model-len?"),
        ({"help": True}, "unknown flag 'help'"),
        ({"config": "x"}, "config cannot stand in a file of flags"),
        ({"max_model_len": "x"}, "--max-model-len: expected an integer, found 'x'"),
        ({"max_model_len": [1, 2]}, "--max-model-len is [1, 2], expected one value"),
        ({"stop": [None]}, "--stop is None, expected a text, a number, yes or no"),
        ({"device": "tpu"}, "--device: invalid choice: 'tpu'"),
        ({"prefix-cache": "perhaps"}, "expected yes or no, found 'perhaps'"),
    ],
)
def test_wrong_flags_of_a_file(
    values: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "flags.json"
    path.write_text(json.dumps(values))
    for main in (cli.main, bench.main):
        if "stop" in values and main is bench.main:
            continue
        with pytest.raises(SystemExit) as exit_:
            main(["--config", str(path)])
        shown = capsys.readouterr().err
        assert exit_.value.code == 2
        assert f": {path}: " in shown and message in shown and shown.count("\n") == 1


def test_files_that_are_no_mapping(tmp_path: Path) -> None:
    path = tmp_path / "flags.json"
    for text, message in (("[1]", "expected a mapping of flags"), ("{", "cannot be read")):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_file(str(path))
    with pytest.raises(ValueError, match="expected a file with"):
        read_file("flags.toml")
    with pytest.raises(OSError, match="none"):
        read_file(str(tmp_path / "none.json"))


def test_yaml_without_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    path = tmp_path / "flags.yml"
    path.write_text("n: 1\n")
    with pytest.raises(ImportError, match=r"pip install 'cpmcu\[yaml\]', or write it as JSON"):
        read_file(str(path))


def test_a_plugin_registers_a_family_and_flags(plugin: Path) -> None:
    """Each case runs in a process of its own, because registrations stay."""
    shown = run("--list", "--plugin", str(plugin), "--startup_toy_width", "5")
    assert shown.returncode == 0, shown.stderr
    assert "StartupToyForCausalLM" in shown.stdout and str(plugin) in shown.stdout
    for program in ("run", "chat", "serve", "bench"):
        command = [sys.executable, "-m", "cpmcu", program, "--plugin", str(plugin)]
        wrong = subprocess.run(
            [*command, "--startup-toy-width=x"], capture_output=True, text=True, timeout=120
        )
        assert wrong.returncode == 2
        assert "--startup-toy-width: expected an integer, found 'x'" in wrong.stderr


def test_plugins_of_a_file(plugin: Path, tmp_path: Path, capsys) -> None:
    path = tmp_path / "flags.json"
    path.write_text(json.dumps({"plugin": str(tmp_path / "missing.py")}))
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--config", str(path)])
    assert exit_.value.code == 1
    assert "the plugin " in capsys.readouterr().err


def test_a_plugin_that_is_no_plugin(tmp_path: Path, capsys) -> None:
    path = tmp_path / "plugin.txt"
    path.write_text("x = 1")
    with pytest.raises(SystemExit):
        cli.main(["--plugin", str(path)])
    assert (
        "expected a file that ends in .py or .so, or the name of a module"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import no_such_module", "No module named 'no_such_module'"),
        ("1 / 0", "division by zero"),
        ("def f(:", "invalid syntax"),
    ],
)
def test_a_plugin_that_fails(text: str, message: str, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv("CPMCU_DEBUG", raising=False)
    path = tmp_path / "broken.py"
    path.write_text(text)
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--plugin", str(path)])
    shown = capsys.readouterr().err
    assert exit_.value.code == 1
    assert f"the plugin {path} cannot be imported: {message}" in shown and shown.count("\n") == 1


def test_a_folder_is_no_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python imports any folder as an empty package."""
    (tmp_path / "startup_folder").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"a folder without __init__\.py"):
        import_plugin("startup_folder")
    (tmp_path / "startup_folder" / "inner.py").touch()
    import_plugin("startup_folder.inner")


def test_a_plugin_by_its_modules_name(plugin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(plugin.parent)
    (plugin.parent / "named_plugin.py").write_text("LOADED = True\n")
    import_plugin("named_plugin")
    assert sys.modules["named_plugin"].LOADED
    with pytest.raises(ImportError, match="no_such_plugin"):
        import_plugin("no_such_plugin")


def test_a_run_with_a_file_of_flags(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Stage(monkeypatch, tmp_path / "story").prepare()
    path = tmp_path / "flags.json"
    path.write_text(json.dumps({"model": "m", "num-generate": 5, "json": True}))
    assert cli.main(["the", "--config", str(path)], "run") == 0
    assert len(json.loads(capsys.readouterr().out)["token_ids"]) == 5
