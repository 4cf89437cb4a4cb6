"""Pages of the prefix cache on disk: the right bytes or none, whatever happens to the files."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import random
import resource
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cpmcu.engine.prefix import disk
from cpmcu.engine.prefix.disk import DiskStore
from cpmcu.engine.prefix.fingerprint import model_fingerprint

PAGE, STATE = 20_000, 3_000
FINGERPRINT = "0123456789abcdef" * 2
FILE = 24_096  # of a page without a state: its header takes 4,096 bytes
ROOMY = 1 << 30


def pattern(seed: int, size: int) -> memoryview:
    return memoryview(np.random.default_rng(seed).bytes(size))


def identity(number: int) -> tuple[bytes, bytes, bytes]:
    """Key, parent and tokens of page `number`."""
    digests = [hashlib.blake2b(b"%d" % n, digest_size=16).digest() for n in (number, number - 1)]
    return digests[0], digests[1], np.arange(number, number + 64, dtype="<i4").tobytes()


def open_store(directory: Path, limit: int = ROOMY, state_bytes: int = STATE) -> DiskStore:
    return DiskStore(directory, FINGERPRINT, PAGE, limit, state_bytes)


def write(store: DiskStore, number: int, *, state: bool = False) -> bool:
    extra = pattern(number + 10**6, STATE) if state else None
    return store.write(*identity(number), pattern(number, PAGE), extra)


def read(store: DiskStore, number: int, *, state: bool = False) -> bool:
    """Is the page there? If so with the right bytes."""
    page, extra = np.zeros(PAGE, np.uint8), np.zeros(STATE, np.uint8)
    found = store.read(*identity(number), memoryview(page), memoryview(extra) if state else None)
    if found:
        assert page.tobytes() == pattern(number, PAGE)
        assert not state or extra.tobytes() == pattern(number + 10**6, STATE)
    return found


def file_of(directory: Path, number: int) -> Path:
    return directory / FINGERPRINT / f"{identity(number)[0].hex()}.safetensors"


def names(directory: Path) -> set[str]:
    return {path.name for path in (directory / FINGERPRINT).iterdir()}


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


# ---- what is written is read


def test_round_trip(tmp_path: Path) -> None:
    store = open_store(tmp_path / "new" / "folder")
    assert identity(1)[0] not in store
    assert not read(store, 1)
    assert write(store, 1) and write(store, 2, state=True)
    assert write(store, 1)  # a second time
    for opened in (store, open_store(tmp_path / "new" / "folder")):
        assert identity(1)[0] in opened and identity(2)[0] in opened
        assert opened.num_pages == 2
        assert opened.num_bytes == 2 * FILE + STATE
        assert read(opened, 1) and read(opened, 2) and read(opened, 2, state=True)


def test_a_page_without_a_state_is_no_page_with_one(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert write(store, 1)
    assert not read(store, 1, state=True)
    assert read(store, 1)
    assert write(store, 1, state=True)  # the state comes later
    assert read(store, 1, state=True)
    assert write(store, 1)  # and stays
    assert read(store, 1, state=True)
    assert (store.num_pages, store.num_bytes) == (1, FILE + STATE)


def test_the_safetensors_library_reads_the_files(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    write(open_store(tmp_path), 1, state=True)
    with safetensors.safe_open(file_of(tmp_path, 1), "np") as file:
        assert file.get_tensor("page").tobytes() == pattern(1, PAGE)
        assert file.get_tensor("state").tobytes() == pattern(10**6 + 1, STATE)
        key, parent, tokens = (part.hex() for part in identity(1))
        metadata = file.metadata()
    assert (metadata["key"], metadata["parent"], metadata["tokens"]) == (key, parent, tokens)
    assert metadata["fingerprint"] == FINGERPRINT


def test_only_the_user_may_read(tmp_path: Path) -> None:
    write(open_store(tmp_path), 1)
    assert file_of(tmp_path, 1).stat().st_mode & 0o777 == 0o600
    assert (tmp_path / FINGERPRINT).stat().st_mode & 0o777 == 0o700


def test_buffers_of_other_sizes_are_refused(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with pytest.raises(ValueError, match=r"data has 5 bytes, expected 20000"):
        store.write(*identity(1), memoryview(b"12345"))
    with pytest.raises(ValueError, match=r"state has 20000 bytes, expected 3000"):
        store.write(*identity(1), pattern(1, PAGE), pattern(1, PAGE))


def test_remove_all(tmp_path: Path) -> None:
    store, other = open_store(tmp_path), open_store(tmp_path)
    write(store, 1)
    write(other, 2)
    store.remove_all()
    assert not names(tmp_path)
    assert (store.num_pages, store.num_bytes) == (0, 0)
    assert not read(store, 1) and not read(other, 2)
    assert other.num_pages == 0


def test_what_is_being_written_is_removed_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, replace = open_store(tmp_path), os.replace

    def remove_all_first(source: Path, target: Path) -> None:
        store.remove_all()
        replace(source, target)

    monkeypatch.setattr(os, "replace", remove_all_first)
    assert not write(store, 1)
    assert not names(tmp_path)
    assert store.num_pages == 0


# ---- the limit


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    store = open_store(tmp_path, limit=3 * FILE)
    for number in (1, 2, 3):
        assert write(store, number)
    assert read(store, 1)
    assert write(store, 2)  # is there: counts as a use
    assert write(store, 4)
    assert [identity(n)[0] in store for n in (1, 2, 3, 4)] == [True, True, False, True]
    assert store.num_bytes == 3 * FILE == sum(f.stat().st_size for f in (tmp_path.rglob("*.saf*")))


def test_the_order_outlives_a_restart(tmp_path: Path) -> None:
    store = open_store(tmp_path, limit=3 * FILE)
    for number in (1, 2, 3):
        write(store, number)
    read(store, 1)
    store = open_store(tmp_path, limit=3 * FILE)
    write(store, 4)
    assert [identity(n)[0] in store for n in (1, 2, 3, 4)] == [True, False, True, True]
    store = open_store(tmp_path, limit=2 * FILE + 5)  # a lower limit holds from the start
    assert [identity(n)[0] in store for n in (1, 3, 4)] == [True, False, True]
    assert store.num_pages == 2 and len(names(tmp_path)) == 2


def test_pages_of_other_models_count_and_go_when_they_are_older(tmp_path: Path) -> None:
    old = DiskStore(tmp_path, "f" * 32, PAGE, ROOMY)
    for number in (1, 2):
        write(old, number)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / file_of(tmp_path, 1).name).write_bytes(bytes(FILE))
    store = open_store(tmp_path, limit=4 * FILE)
    assert (store.num_pages, store.num_bytes) == (0, 0)
    for number in (3, 4):
        write(store, number)
    assert read(old, 1)
    store = open_store(tmp_path, limit=4 * FILE)
    write(store, 5)
    assert read(store, 3) and read(store, 4) and read(store, 5)
    assert read(old, 1) and not read(old, 2)
    write(store, 6)  # page 1 is older by what was seen last
    assert read(store, 3) or read(store, 4)
    assert len(names(tmp_path)) + len(list((tmp_path / ("f" * 32)).iterdir())) == 4
    assert len(list((tmp_path / "notes").iterdir())) == 1


@pytest.mark.parametrize("fingerprint", ["", "..", "a/b", "f" * 31, "F" * 32])
def test_a_fingerprint_is_a_folders_name(tmp_path: Path, fingerprint: str) -> None:
    with pytest.raises(ValueError, match=r"expected 32 hex digits"):
        DiskStore(tmp_path, fingerprint, PAGE, ROOMY)


def test_a_page_above_the_limit_is_not_written(tmp_path: Path) -> None:
    store = open_store(tmp_path, limit=FILE - 1)
    assert not write(store, 1)
    assert not names(tmp_path)


def test_ten_thousand_files_are_found_at_once(tmp_path: Path) -> None:
    folder = tmp_path / FINGERPRINT
    folder.mkdir()
    for number in range(10_000):
        os.close(os.open(folder / f"{number:032x}.safetensors", os.O_CREAT))
    (folder / "notes.txt").write_text("not a page")
    (folder / f"{10_001:032x}.safetensors").mkdir()
    best = 9.0
    for _ in range(3):
        start = time.perf_counter()
        store = open_store(tmp_path)
        best = min(best, time.perf_counter() - start)
    assert store.num_pages == 10_000
    assert best < 0.2


# ---- damage


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
    if part == 0:  # a file under another name
        os.replace(file_of(tmp_path, 1), file_of(tmp_path, 9))
    assert not store.read(*asked, memoryview(bytearray(PAGE)))
    (line,) = warnings(caplog)
    expected = ["key is", "parent is", "holds other tokens"][part]
    assert expected in line
    assert stored[2].hex()[:32] not in line  # a prompt is not for the log


def test_another_fingerprint_has_another_folder(tmp_path: Path) -> None:
    write(open_store(tmp_path), 1)
    other = DiskStore(tmp_path, "f" * 32, PAGE, ROOMY, STATE)
    assert other.num_pages == 0
    assert not read(other, 1)
    os.replace(file_of(tmp_path, 1), tmp_path / ("f" * 32) / file_of(tmp_path, 1).name)
    assert not read(other, 1)  # a file that somebody moved


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

    fail(errno.ENOMEM)  # says nothing about the file
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
import tests.unit.test_prefix_disk as t
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
        "import resource, sys\nfrom pathlib import Path\nimport tests.unit.test_prefix_disk as t\n"
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


# ---- several at once


def test_two_stores_on_one_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = open_store(tmp_path, limit=4 * FILE), open_store(tmp_path, limit=4 * FILE)
    assert write(one, 1)
    assert read(two, 1)  # is asked for though it is not known
    assert identity(1)[0] in two
    file_of(tmp_path, 1).unlink()
    assert not read(one, 1) and identity(1)[0] not in one
    assert write(two, 1)  # known, and gone: written again
    assert read(one, 1)
    for number in (2, 3):
        assert write(one, number) and write(two, number + 10)
    monkeypatch.setattr(disk.time, "monotonic", lambda now=time.monotonic: now() + 61)
    assert write(one, 4)  # looks at the folder again
    assert one.num_bytes == 4 * FILE and len(names(tmp_path)) == 4
    assert not warnings(caplog)


def test_a_folder_that_goes_comes_back(tmp_path: Path) -> None:
    store = open_store(tmp_path / "cache")
    write(store, 1)
    file_of(tmp_path / "cache", 1).unlink()
    (tmp_path / "cache" / FINGERPRINT).rmdir()
    (tmp_path / "cache").rmdir()
    assert not read(store, 1)
    assert write(store, 1) and read(store, 1)


def test_readers_and_writers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stores = [open_store(tmp_path, limit=12 * FILE) for _ in range(2)]
    end, hits, failures = time.monotonic() + 1.5, [0] * 6, []

    def work(worker: int) -> None:
        generator = random.Random(worker)
        store = stores[worker % 2]
        try:
            while time.monotonic() < end:
                number, state = generator.randrange(20), generator.random() < 0.5
                if generator.random() < 0.5:
                    write(store, number, state=state)
                else:
                    hits[worker] += read(store, number, state=state)
                if generator.random() < 0.005:
                    store.remove_all()
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert sum(hits) > 50
    assert not warnings(caplog)
    assert all(name.endswith(".safetensors") for name in names(tmp_path))
    for store in stores:
        assert store.num_bytes <= 12 * FILE
        for number in range(20):
            read(store, number)
        assert store.num_bytes == sum(
            (tmp_path / FINGERPRINT / name).stat().st_size for name in names(tmp_path)
        )


# ---- the model's fingerprint


def checkpoint(directory: Path, seed: int = 0, change: int | None = None) -> Path:
    """Two tensors of 1 MB in one file; `change` flips a byte of the tensors."""
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "llama"}')
    data = bytearray(pattern(seed, 2 << 20))
    if change is not None:
        data[change] ^= 1
    header = {
        name: {"dtype": "U8", "shape": [1 << 20], "data_offsets": [n << 20, (n + 1) << 20]}
        for n, name in enumerate("ab")
    }
    raw = json.dumps(header).encode()
    raw = struct.pack("<Q", len(raw)) + raw
    (directory / "model.safetensors").write_bytes(raw + data)
    np.save(directory / "token_counts.npy", np.arange(10))
    return directory


def test_equal_models_have_one_fingerprint(tmp_path: Path) -> None:
    one, two = checkpoint(tmp_path / "one"), checkpoint(tmp_path / "two")
    (two / "README.md").write_text("a note")
    first = model_fingerprint([one], {"dtype": "bfloat16", "rope": {"b": 1, "a": [2]}})
    assert first == model_fingerprint([two], {"rope": {"a": [2], "b": 1}, "dtype": "bfloat16"})
    assert len(first) == 32 and int(first, 16) >= 0


def test_other_models_have_others(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model")
    tuned = checkpoint(tmp_path / "tuned", seed=1)  # equal shapes, other values
    middle = checkpoint(tmp_path / "middle", change=(1 << 19) + 100)  # one tensor's middle
    found = [model_fingerprint([path], {}) for path in (model, tuned, middle)]
    found += [model_fingerprint([model, path], {}) for path in (model, tuned)]
    found += [model_fingerprint([tuned, model], {}), model_fingerprint([model], {"dtype": "f16"})]
    (model / "config.json").write_text('{"model_type": "qwen2"}')
    found.append(model_fingerprint([model], {}))
    np.save(model / "token_counts.npy", np.arange(1, 11))
    found.append(model_fingerprint([model], {}))
    os.replace(model / "model.safetensors", model / "other.safetensors")
    found.append(model_fingerprint([model], {}))
    (model / "other.safetensors").write_bytes(b"\xff" * 50)  # damaged: the loader says so
    found.append(model_fingerprint([model], {}))
    assert len(set(found)) == len(found)


def test_a_large_model_takes_no_time(tmp_path: Path) -> None:
    ranges = [[n * 40_000_000, (n + 1) * 40_000_000] for n in range(400)]
    tensors = {f"t{n}": {"data_offsets": offsets} for n, offsets in enumerate(ranges)}
    raw = json.dumps(tensors).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(16_000_000_000)  # a hole
    start = time.perf_counter()
    model_fingerprint([tmp_path], {})
    assert time.perf_counter() - start < 0.1
