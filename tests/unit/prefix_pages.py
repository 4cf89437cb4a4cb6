"""Writes and reads test pages of the prefix cache on disk."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

import numpy as np
import pytest

from cpmcu.engine.prefix.disk import DiskStore

PAGE, STATE = 20_000, 3_000
FINGERPRINT = "0123456789abcdef" * 2
FILE = 24_096  # bytes of a page's file without a state; the header takes 4,096
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
    """Is the page in the store? If so, checks its bytes."""
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
