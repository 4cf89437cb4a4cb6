"""Damaged files of the prefix cache: a read returns the right bytes or nothing."""

from __future__ import annotations

import errno
import json
import logging
import os
import random
import resource
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cpmcu.engine.prefix import disk
from cpmcu.engine.prefix.disk import DiskStore
from tests.unit.prefix_pages import (
    FILE,
    FINGERPRINT,
    PAGE,
    ROOMY,
    STATE,
    file_of,
    identity,
    names,
    open_store,
    pattern,
    read,
    warnings,
    write,
)


def damaged_copies(good: bytes) -> Iterator[bytes]:
    yield b""
    header = 8 + struct.unpack("<Q", good[:8])[0]
    for length in (1, 7, 8, 9, 200, header - 1, header, header + 1, header + PAGE - 1):
        yield good[:length]
    for length in (header + PAGE, header + PAGE + 1, len(good) - 1):
        yield good[:length]
    yield good + b"x"
    yield bytes(len(good))
    for length in (0, 1 << 20, 1 << 63):
        yield struct.pack("<Q", length) + good[8:]
    generator = random.Random(7)
    places = [generator.randrange(len(good)) for _ in range(130)]
    places += [generator.randrange(1_600) for _ in range(70)]  # the header
    for place in places:
        copy = bytearray(good)
        copy[place] ^= 1 << generator.randrange(8)
        yield bytes(copy)


def test_damage_gives_no_page_or_the_right_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path)
    write(store, 1, state=True)
    path = file_of(tmp_path, 1)
    good = path.read_bytes()
    refused = 0
    for damaged in damaged_copies(good):
        caplog.clear()
        path.write_bytes(damaged)
        if read(store, 1, state=True):
            assert not warnings(caplog)
            continue
        refused += 1
        (line,) = warnings(caplog)
        assert str(path) in line and line.endswith("the file is removed")
        assert not path.exists()
        assert store.num_pages == store.num_bytes == 0
    assert refused > 150


def test_damage_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store(tmp_path)
    path = file_of(tmp_path, 1)
    write(store, 1)
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    assert not read(store, 1)
    write(store, 1)
    path.write_bytes(path.read_bytes()[:100])
    assert not read(store, 1)
    first, second = warnings(caplog)
    assert f"{path}: checksum of the page is " in first
    assert f"{path}: is 100 bytes long, expected 24096 or 27096; " in second


@pytest.mark.parametrize("part", [0, 1, 2])
def test_another_page_at_the_place_is_refused(
    tmp_path: Path, part: int, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path)
    stored = list(identity(1))
    asked = list(stored)
    asked[part] = identity(9)[part]
    store.write(*stored, pattern(1, PAGE))
    if part == 0:  # the file has another key's name
        os.replace(file_of(tmp_path, 1), file_of(tmp_path, 9))
    assert not store.read(*asked, memoryview(bytearray(PAGE)))
    (line,) = warnings(caplog)
    expected = ["key is", "parent is", "holds other tokens"][part]
    assert expected in line
    assert stored[2].hex()[:32] not in line  # the log must not show prompts


def test_a_header_may_be_spelled_in_another_way(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path)
    write(store, 1)
    path = file_of(tmp_path, 1)
    raw = path.read_bytes()
    begin = 8 + struct.unpack("<Q", raw[:8])[0]
    content = json.loads(raw[8:begin])
    text = json.dumps(dict(reversed(content.items()))).encode().ljust(begin - 8)
    path.write_bytes(raw[:8] + text + raw[begin:])
    assert read(store, 1) and not warnings(caplog)
    path.write_bytes(raw[:8] + text + raw[begin:-1] + b"\0")
    assert not read(store, 1)
    (line,) = warnings(caplog)
    assert "checksum of the page" in line


def test_a_directory_in_place_of_a_file_stops_no_other_page(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path)
    file_of(tmp_path, 1).mkdir()
    assert not write(store, 1) and not write(store, 1)
    (line,) = warnings(caplog)
    assert f"{file_of(tmp_path, 1)}: cannot be written: " in line
    assert write(store, 2) and read(store, 2)
    assert store.num_bytes == FILE
    assert names(tmp_path) == {file_of(tmp_path, number).name for number in (1, 2)}


def test_another_fingerprint_has_another_folder(tmp_path: Path) -> None:
    write(open_store(tmp_path), 1)
    other = DiskStore(tmp_path, "f" * 32, PAGE, ROOMY, STATE)
    assert other.num_pages == 0
    assert not read(other, 1)
    os.replace(file_of(tmp_path, 1), tmp_path / ("f" * 32) / file_of(tmp_path, 1).name)
    assert not read(other, 1)  # somebody moved the file from another folder


def test_another_page_size_is_refused(tmp_path: Path) -> None:
    write(open_store(tmp_path), 1)
    other = DiskStore(tmp_path, FINGERPRINT, PAGE - 64, ROOMY)
    assert not other.read(*identity(1), memoryview(bytearray(PAGE - 64)))


def test_a_disk_error_while_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path)
    write(store, 1)

    def fail(number: int) -> None:
        def preadv(*_: object) -> int:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "preadv", preadv)

    fail(errno.ENOMEM)  # the error is not the file's
    assert not read(store, 1) and not read(store, 1)
    assert len(warnings(caplog)) == 1
    assert identity(1)[0] in store
    fail(errno.EIO)
    assert not read(store, 1)
    assert identity(1)[0] not in store
    assert not file_of(tmp_path, 1).exists()


# ---- processes that die, disks that are full

WRITER = """
import sys
from pathlib import Path
import tests.unit.prefix_pages as t
store = t.open_store(Path(sys.argv[1]))
number = 0
while True:
    t.write(store, number % 50, state=True)
    number += 1
    if number % 50 == 0:
        store.remove_all()
    if number == 60:
        sys.stdout.write("started\\n")
        sys.stdout.flush()
"""


def test_a_killed_writer_leaves_whole_pages(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    generator = random.Random(3)
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)],
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
        )
        assert process.stdout is not None
        with process.stdout:
            assert process.stdout.readline() == b"started\n"
            time.sleep(generator.uniform(0, 0.05))
            process.send_signal(signal.SIGKILL)
            process.wait()
        store = open_store(tmp_path)
        found = [number for number in range(50) if identity(number)[0] in store]
        assert all(read(store, number, state=True) for number in found)
        assert not [name for name in names(tmp_path) if name.endswith(".tmp")]
    assert not warnings(caplog)


def test_temporary_files_of_the_dead_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / FINGERPRINT
    folder.mkdir()
    (folder / f".{'a' * 32}.{'b' * 16}.tmp").write_bytes(b"half")
    (folder / ".hidden").write_bytes(b"somebody else's")
    open_store(tmp_path)
    assert names(tmp_path) == {".hidden"}


def test_temporary_files_of_the_living_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, replace, seen = open_store(tmp_path), os.replace, []

    def look_first(source: Path, target: Path) -> None:
        open_store(tmp_path)
        seen.extend(names(tmp_path))
        replace(source, target)

    monkeypatch.setattr(os, "replace", look_first)
    assert write(store, 1)
    assert len(seen) == 1 and seen[0].endswith(".tmp")
    assert read(store, 1)


def test_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    store = open_store(tmp_path)
    write(store, 1)
    writev, calls = os.writev, []

    def full(fd: int, buffers: list[memoryview]) -> int:
        calls.append(fd)
        if len(calls) % 2:
            return os.write(fd, buffers[0][:100])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "writev", full)
    for number in range(2, 20):
        assert not write(store, number)
    assert len(calls) == 2  # no further tries
    (line,) = warnings(caplog)
    assert "No space left on device" in line and str(tmp_path) in line
    assert names(tmp_path) == {file_of(tmp_path, 1).name}
    assert read(store, 1) and write(store, 1)  # reading goes on
    assert store.num_bytes == FILE

    monkeypatch.setattr(os, "writev", writev)
    assert not write(store, 2)
    monkeypatch.setattr(disk.time, "monotonic", lambda now=time.monotonic: now() + 61)
    assert write(store, 2) and write(store, 3)
    assert read(store, 2)
    assert [r.getMessage() for r in caplog.records if "written again" in r.getMessage()]


def test_a_file_size_limit_of_the_system(tmp_path: Path) -> None:
    program = (
        "import resource, sys\nfrom pathlib import Path\nimport tests.unit.prefix_pages as t\n"
        "store = t.open_store(Path(sys.argv[1]))\nassert t.write(store, 1)\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({FILE - 50}, {resource.RLIM_INFINITY}))\n"
        "assert not t.write(store, 2)\nassert t.read(store, 1)\nassert store.num_pages == 1\n"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, cwd=root)
    assert names(tmp_path) == {file_of(tmp_path, 1).name}


def test_a_write_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def short(fd: int, buffers: list[memoryview]) -> int:
        return os.write(fd, buffers[0][:1_777])

    monkeypatch.setattr(os, "writev", short)
    store = open_store(tmp_path)
    assert write(store, 1, state=True) and read(store, 1, state=True)


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for directory in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nothing")):
        with pytest.raises(ValueError, match=r"cannot be written") as error:
            open_store(directory)
        assert str(directory) in str(error.value)


def test_a_directory_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, *_: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ValueError, match=r"cannot be written \(Permission denied\)"):
        open_store(tmp_path)
