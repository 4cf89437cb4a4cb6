"""KV pages on disk: the last tier of the prefix cache, which a restart finds again.

A file is written under a hidden name and then renamed, so it always holds a whole page. A page is
used only after its header and checksum have been compared. Files hold the tokens of prompts, so
only the user who wrote them may read them. Other processes may use the same folder. The entries in
memory may therefore be out of date; a failed read corrects them.

The limit applies to the whole directory. Every model and build has its own folder in it. Files in
folders of other models are evicted like the own ones, so unused folders do not fill the disk.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cpmcu.engine.prefix.page_file import (
    BadPageFileError,
    PageName,
    file_bytes,
    read_page,
    write_page,
)
from cpmcu.errors import sentence

logger = logging.getLogger(__name__)

PAUSE_SECONDS = 60.0  # time without writes after a write that failed
LOOK_SECONDS = 300.0  # time between two looks at what other processes wrote and removed

_PAGE_FILE = re.compile(r"([0-9a-f]{32})\.safetensors")
_TEMPORARY_FILE = re.compile(r"\.[0-9a-f]{32}\.[0-9a-f]{16}\.tmp")
_FINGERPRINT = re.compile(r"[0-9a-f]{32}")
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(slots=True)
class _Entry:
    size: int
    used: int  # time of its last use, by time.time_ns()
    # Whether a state follows the page; the size tells for files that were found.
    has_state: bool = False


@dataclass(frozen=True, slots=True)
class _OtherFile:
    """A page of another fingerprint."""

    path: Path
    size: int
    used: int


class DiskStore:
    """KV pages on disk: a file a page, by key. All methods may be called from several threads.

    Buffers are C-contiguous. The lock protects the bookkeeping only; no file is read or written
    under it.
    """

    def __init__(
        self,
        directory: Path,
        fingerprint: str,
        page_bytes: int,
        limit_bytes: int,
        state_bytes: int = 0,
    ) -> None:
        """Raises ValueError if the directory cannot be made or written."""
        if not _FINGERPRINT.fullmatch(fingerprint):
            raise ValueError(f"fingerprint is {fingerprint!r}, expected 32 hex digits")
        self._folder = directory / fingerprint
        self._fingerprint = fingerprint
        self._page_bytes = page_bytes
        self._state_bytes = state_bytes
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # least recently used first
        self._num_bytes = 0  # bytes of all entries
        self._others: deque[_OtherFile] = deque()  # least recently used first
        self._others_bytes = 0
        self._reserved = 0  # bytes of files that are being written
        self._generation = 0  # number of calls of remove_all so far
        self._last_time = 0
        self._writing_fails = False
        # Values of time.monotonic() from which a write, a warning and a look at the folder are due
        # again.
        self._write_again = 0.0
        self._complain_again = 0.0
        self._look_again = 0.0
        try:
            self._make_folder()
            self._probe()
            self._look()
        except OSError as error:
            raise ValueError(
                f"{self._folder}: cannot be written ({error.strerror or error}), expected a "
                "directory for the pages of the prefix cache"
            ) from error
        self._evict()

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries  # one operation of a dict: needs no lock

    @property
    def has_states(self) -> bool:
        """Have sequences a state of their own, beside pages?"""
        return self._state_bytes > 0

    def may_have_state(self, key: bytes) -> bool:
        """Has the file of this page a state, as far as is known?"""
        entry = self._entries.get(key)
        return entry is not None and entry.has_state

    @property
    def num_pages(self) -> int:
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @property
    def generation(self) -> int:
        """The number of times that all pages were removed."""
        return self._generation

    def write(
        self,
        key: bytes,
        parent: bytes,
        tokens: bytes,
        data: memoryview,
        state: memoryview | None = None,
        generation: int | None = None,
    ) -> bool:
        """Writes a page and removes the least recently used pages beyond the limit.

        True if the page is on disk. False also if all pages were removed after `generation`, which
        is the present one by default.
        """
        if generation is None:
            generation = self._generation
        page = _bytes_of(data, self._page_bytes, "data")
        if state is not None:
            state = _bytes_of(state, self._state_bytes, "state")
        if self._touch(key, needs_state=state is not None):
            return True
        if time.monotonic() < self._write_again:
            return False
        name = PageName(self._fingerprint, key, parent, tokens)
        sizes = [len(page)] if state is None else [len(page), len(state)]
        size = file_bytes(name, sizes)
        if size > self._limit_bytes:
            return False
        with self._lock:
            if generation != self._generation:
                return False
            self._reserved += size
        written, used = False, 0
        try:
            try:
                if time.monotonic() >= self._look_again:
                    self._look()
                self._evict()
                used = self._write_file(name, page, state)
            except FileNotFoundError:  # somebody removed the folder, or the temporary file
                self._make_folder()
                used = self._write_file(name, page, state)
            written = True
        except IsADirectoryError as error:  # a directory: other pages can be written
            self._complain(f"{self._path(key)}: cannot be written: {sentence(error)}")
            return False
        except OSError as error:
            self._writing_failed(error)
            return False
        finally:
            with self._lock:
                self._reserved -= size
                there = written and generation == self._generation
                if there:
                    self._set(key, _Entry(size, used, state is not None))
        if not there:  # remove_all came in between
            _remove(self._path(key))
        self._writing_worked()
        return there

    def read(
        self,
        key: bytes,
        parent: bytes,
        tokens: bytes,
        into: memoryview,
        state: memoryview | None = None,
    ) -> bool:
        """Reads a page into `into`, and its state into `state` unless None.

        True if all of it was found.

        After False, the contents of the buffers are undefined. A damaged or foreign file is
        removed.
        """
        found, has_state = self.read_found(key, parent, tokens, into, state)
        return found and (state is None or has_state)

    def read_found(
        self,
        key: bytes,
        parent: bytes,
        tokens: bytes,
        into: memoryview,
        state: memoryview | None,
    ) -> tuple[bool, bool]:
        """Reads a page as `read` does, and its state if the file has it:

        (page found, state found).
        """
        page = _bytes_of(into, self._page_bytes, "into")
        if state is not None:
            state = _bytes_of(state, self._state_bytes, "state")
        name = PageName(self._fingerprint, key, parent, tokens)
        path = self._path(key)
        generation = self._generation
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                size, has_state = read_page(fd, name, page, state, self._state_bytes)
                used = self._now()
                # The file may be another user's, or the disk read-only.
                with contextlib.suppress(OSError):
                    os.utime(fd, ns=(used, used))
            finally:
                os.close(fd)
        except FileNotFoundError:
            self._forget(key)
            return False, False
        except BadPageFileError as error:
            self._discard(key, str(error))
            return False, False
        except OSError as error:
            if error.errno == errno.EIO:
                self._discard(key, sentence(error))
            else:
                self._complain(f"{path}: cannot be read: {sentence(error)}")
            return False, False
        with self._lock:
            if generation == self._generation:
                self._set(key, _Entry(size, used, has_state))
        self._evict()  # another process may have written the file: the total has grown
        return True, state is not None and has_state

    def remove_all(self) -> None:
        """Removes all pages of this fingerprint, including those that other processes wrote."""
        with self._lock:
            self._generation += 1
            self._entries = OrderedDict()
            self._num_bytes = 0
        try:
            left = [
                p for p in (Path(f.path) for _, f in _page_files(self._folder)) if not _remove(p)
            ]
        except FileNotFoundError:  # somebody removed the folder
            return
        except OSError as error:
            logger.warning("%s: pages cannot be removed: %s", self._folder, sentence(error))
            return
        if left:
            logger.warning("%s: %d pages cannot be removed", self._folder, len(left))

    # ---- bookkeeping

    def _now(self) -> int:
        """The time, later than at every earlier call. So files keep the order of their use."""
        with self._lock:
            self._last_time = max(time.time_ns(), self._last_time + 1)
            return self._last_time

    def _set(self, key: bytes, entry: _Entry) -> None:
        """Adds or replaces an entry as the most recently used one. The caller holds the lock."""
        before = self._entries.get(key)
        self._num_bytes += entry.size - (before.size if before else 0)
        self._entries[key] = entry
        self._entries.move_to_end(key)

    def _forget(self, key: bytes) -> None:
        with self._lock:
            if entry := self._entries.pop(key, None):
                self._num_bytes -= entry.size

    def _touch(self, key: bytes, *, needs_state: bool) -> bool:
        """Is the page on disk? If so, marks it as used now."""
        entry = self._entries.get(key)
        if entry is None or (needs_state and not entry.has_state):
            return False
        used = self._now()
        try:
            os.utime(self._path(key), ns=(used, used))
        except FileNotFoundError:
            self._forget(key)
            return False
        except OSError:
            pass
        with self._lock:
            if self._entries.get(key) is not entry:
                return key in self._entries
            entry.used = used
            self._entries.move_to_end(key)
        return True

    def _evict(self) -> None:
        """Removes the least recently used files until the files being written have room."""
        paths: list[str | Path] = []
        with self._lock:
            while self._num_bytes + self._others_bytes + self._reserved > self._limit_bytes:
                first = next(iter(self._entries.items()), None)
                if self._others and (not first or self._others[0].used < first[1].used):
                    other = self._others.popleft()
                    self._others_bytes -= other.size
                    paths.append(other.path)
                elif first:
                    del self._entries[first[0]]
                    self._num_bytes -= first[1].size
                    paths.append(self._path(first[0]))
                else:
                    break
        for path in paths:
            _remove(path)

    # ---- files

    def _path(self, key: bytes) -> str:
        return f"{self._folder}/{key.hex()}.safetensors"

    def _make_folder(self) -> None:
        self._folder.parent.mkdir(parents=True, exist_ok=True)
        self._folder.mkdir(mode=0o700, exist_ok=True)

    def _probe(self) -> None:
        """Raises OSError if no file can be made in the folder.

        A full disk raises nothing: it may have room later.
        """
        try:
            path, fd = self._open_temporary(bytes(16))
        except OSError as error:
            if error.errno not in _FULL:
                raise
            return
        os.close(fd)
        _remove(path)

    def _open_temporary(self, key: bytes) -> tuple[Path, int]:
        """Creates and locks a temporary file.

        The lock ends with the process, so an unlocked file has no writer.
        """
        path = self._folder / f".{key.hex()}.{secrets.token_hex(8)}.tmp"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):  # without locks, files of dead processes stay
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return path, fd

    def _write_file(self, name: PageName, page: memoryview, state: memoryview | None) -> int:
        """Writes a page file. Returns the time of its renaming, which counts as its first use."""
        temporary, fd = self._open_temporary(name.key)
        try:
            write_page(fd, name, page, state)
            used = self._now()
            os.utime(fd, ns=(used, used))
            os.replace(temporary, self._path(name.key))
        except BaseException:
            _remove(temporary)
            raise
        finally:
            os.close(fd)
        return used

    def _look(self) -> None:
        """Adds the files that the folder holds already. Raises OSError."""
        self._look_again = time.monotonic() + LOOK_SECONDS
        start = self._now()
        generation = self._generation
        found: dict[bytes, _Entry] = {}
        for key, file in _page_files(self._folder):
            if status := _status(file):
                whole = self._page_bytes + self._state_bytes
                has_state = self._state_bytes > 0 and status.st_size > whole
                found[key] = _Entry(status.st_size, min(status.st_mtime_ns, start), has_state)
        others = sorted(self._other_files(), key=lambda file: file.used)
        with self._lock:
            if generation != self._generation:
                return
            for key, known in self._entries.items():
                if known.used >= start:  # used since `start`: the file that was seen is older
                    found[key] = known
                elif key in found and found[key].size == known.size:
                    found[key].used = max(found[key].used, known.used)
            self._entries = OrderedDict(sorted(found.items(), key=lambda item: item[1].used))
            self._num_bytes = sum(entry.size for entry in found.values())
            self._others = deque(others)
            self._others_bytes = sum(file.size for file in others)

    def _other_files(self) -> Iterator[_OtherFile]:
        with os.scandir(self._folder.parent) as folders:
            names = {folder.name for folder in folders if folder.is_dir(follow_symlinks=False)}
        for name in names - {self._fingerprint}:
            if not _FINGERPRINT.fullmatch(name):
                continue
            with contextlib.suppress(OSError):  # the file belongs to another user, or is gone
                for _, file in _page_files(self._folder.parent / name):
                    if status := _status(file):
                        yield _OtherFile(Path(file.path), status.st_size, status.st_mtime_ns)

    # ---- what goes wrong

    def _discard(self, key: bytes, what: str) -> None:
        path = self._path(key)
        self._forget(key)
        end = "the file is removed" if _remove(path) else "the file cannot be removed"
        logger.warning("prefix cache: %s: %s; %s", path, what, end)

    def _complain(self, what: str) -> None:
        """Logs what is wrong with one file, at most once in PAUSE_SECONDS."""
        with self._lock:
            now = time.monotonic()
            told = now < self._complain_again
            if not told:
                self._complain_again = now + PAUSE_SECONDS
        if not told:
            logger.warning("prefix cache: %s", what)

    def _writing_failed(self, error: OSError) -> None:
        with self._lock:
            told, self._writing_fails = self._writing_fails, True
            self._write_again = time.monotonic() + PAUSE_SECONDS
        if not told:
            logger.warning(
                "prefix cache: %s: pages cannot be written: %s; tried again every %g s",
                self._folder,
                sentence(error),
                PAUSE_SECONDS,
            )

    def _writing_worked(self) -> None:
        with self._lock:
            if not self._writing_fails or time.monotonic() < self._write_again:
                return
            self._writing_fails = False
        logger.info("prefix cache: %s: pages are written again", self._folder)


def _bytes_of(buffer: memoryview, size: int, name: str) -> memoryview:
    view = buffer.cast("B")
    if len(view) != size:
        raise ValueError(f"{name} has {len(view)} bytes, expected {size}")
    return view


def _page_files(folder: Path) -> Iterator[tuple[bytes, os.DirEntry[str]]]:
    """Key and file of each page, from the file names. Removes temporary files of dead processes."""
    with os.scandir(folder) as files:
        for file in files:
            if match := _PAGE_FILE.fullmatch(file.name):
                yield bytes.fromhex(match[1]), file
            elif _TEMPORARY_FILE.fullmatch(file.name):
                _remove_unless_locked(Path(file.path))


def _status(file: os.DirEntry[str]) -> os.stat_result | None:
    """The status of a regular file; None if it is gone or of another kind."""
    with contextlib.suppress(FileNotFoundError):
        if file.is_file(follow_symlinks=False):
            return file.stat(follow_symlinks=False)
    return None


def _remove(path: str | Path) -> bool:
    """Removes a file. Returns whether it is gone."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError:
        return False
    return True


def _remove_unless_locked(path: Path) -> None:
    """Removes a temporary file if its lock is free: its process is dead."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
        finally:
            os.close(fd)
