"""Files, pipes and devices that a user names are read up to a limit."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cpmcu.benchmarks.plot import read_kernels
from cpmcu.flags.startup import read_file
from cpmcu.loading.index import read_json
from cpmcu.serving.config import ServerConfig
from cpmcu.serving.model import _own_template
from cpmcu.text.files import read_text


def test_newlines_are_those_of_open(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes("a\r\nb\rc\né".encode())
    assert read_text(path) == path.read_text("utf-8") == "a\nb\nc\né"


def test_a_text_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match=r"^it is not UTF-8 text: .* in position 3"):
        read_text(path, "it")


def test_the_limit_itself_is_allowed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("cpmcu.text.files.MOST_BYTES", 1 << 20)
    path = tmp_path / "text"
    path.write_bytes(b"a" * (1 << 20))
    assert len(read_text(path)) == 1 << 20
    path.write_bytes(b"a" * ((1 << 20) + 1))
    with pytest.raises(ValueError, match="text has more than 1 MiB, expected a shorter text"):
        read_text(path)


READERS = [
    lambda path: read_file(str(path)),
    lambda path: _own_template(str(path)),
    lambda path: ServerConfig(api_key=(f"@{path}",)).keys(),
    read_kernels,
    read_json,
]


@pytest.mark.parametrize("read", READERS)
def test_every_reader_refuses_a_text_without_end(
    read: Callable[[Path], object], tmp_path: Path
) -> None:
    (tmp_path / "endless.json").symlink_to("/dev/zero")
    with pytest.raises(ValueError, match=r"more than 16 MiB|is a device or pipe"):
        read(tmp_path / "endless.json")


def test_a_long_file_is_no_json(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    os.close(os.open(path, os.O_CREAT))
    os.truncate(path, 2 << 30)
    with pytest.raises(ValueError, match="has 2147483648 bytes, expected JSON of at most"):
        read_json(path)
