"""Keys of pages: a chain of hashes over token ids. A key stands for all tokens up to its page."""

from __future__ import annotations

from collections.abc import Callable

import xxhash

Hash = Callable[[bytes], bytes]  # returns 16 bytes

xxh3_128: Hash = xxhash.xxh3_128_digest


def root_key(seed: str, salt: str, hash_bytes: Hash = xxh3_128) -> bytes:
    """The key before the first page. Prefixes of other models or other salts are never shared."""
    return hash_bytes(f"{len(seed)}:{seed}{salt}".encode())


def page_keys(
    data: bytes, page_size: int, root: bytes, hash_bytes: Hash = xxh3_128
) -> list[tuple[bytes, bytes]]:
    """Returns (key, token ids) of each full page, in order. `data`: token ids of 4 bytes."""
    width = 4 * page_size
    keys: list[tuple[bytes, bytes]] = []
    key = root
    for begin in range(0, len(data) - width + 1, width):
        page = data[begin : begin + width]
        key = hash_bytes(key + page)
        keys.append((key, page))
    return keys
