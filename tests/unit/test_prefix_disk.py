"""Pages of the prefix cache on disk: written pages are read back, within the size limit."""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
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
    assert write(store, 2)  # the page is there, so this counts as a use
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
    write(store, 6)  # when last seen, page 1 was older
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
        start = time.process_time()  # not the time of other programs
        store = open_store(tmp_path)
        best = min(best, time.process_time() - start)
    assert store.num_pages == 10_000
    assert best < 0.2


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
    assert write(two, 1)  # the page is known, but its file is gone: it is written again
    assert read(one, 1)
    for number in (2, 3):
        assert write(one, number) and write(two, number + 10)
    monkeypatch.setattr(disk.time, "monotonic", lambda now=time.monotonic: now() + 301)
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


def test_a_write_from_before_all_pages_were_removed_leaves_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    before = store.generation
    store.remove_all()
    key, parent, tokens = identity(1)
    data = pattern(1, PAGE)
    assert not store.write(key, parent, tokens, data, generation=before)
    assert names(tmp_path) == set()
    assert store.write(key, parent, tokens, data, generation=store.generation)
    assert read(store, 1)


def test_a_folder_that_is_gone_has_no_pages_to_remove(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path)
    assert write(store, 1)
    shutil.rmtree(tmp_path / FINGERPRINT)
    store.remove_all()
    assert store.num_pages == 0 and not warnings(caplog)
    assert write(store, 1) and read(store, 1)
