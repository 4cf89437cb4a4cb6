"""Times the disk tier of the prefix cache alone: pages from files into host memory.

    python scripts/bench/bench_disk_tier.py [--pages 468] [--page-bytes 2097152] [--repeats 7]

No model of that page size is needed: the shipped model lends its engine for host memory. The files
lie in the system's page cache, so reading them is bound by copies and by Python. Beside the tier,
the same number of threads read the same files without any check, into the same memory:

    into new memory      as `bench_prefix.py` measures the rate of a disk: file.read()
    into host memory     os.preadv into blocks that were written before
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cpmcu import LLM, SpeculativeConfig
from cpmcu.engine.prefix.disk import DiskStore
from cpmcu.engine.prefix.disk_tier import NUM_THREADS, DiskTier
from cpmcu.engine.prefix.host import HostMemory
from cpmcu.engine.prefix.index import PrefixIndex
from cpmcu.engine.prefix.keys import page_keys, root_key

PAGE = 64  # tokens
FINGERPRINT = "0" * 32


class NoDevice:
    """A device without free pages: what is read stays in host memory."""

    num_free_pages = 0
    pages = SimpleNamespace(has_copies=False)


class Bench:
    """A disk tier, and the keys of one long prompt."""

    def __init__(self, engine: Any, folder: Path, args: argparse.Namespace) -> None:
        self.engine, self.folder, self.page_bytes = engine, folder, args.page_bytes
        ids = random.Random(1).choices(range(30_000), k=args.pages * PAGE)
        data = b"".join(token.to_bytes(4, "little") for token in ids)
        self.keys = page_keys(data, PAGE, root_key("", ""))
        self.host = HostMemory(engine, self.page_bytes).tier(
            (args.pages + 64) * self.page_bytes, "the benchmark"
        )
        self.views = [self.host.view(self.host.take()) for _ in self.keys]
        for view in self.views:  # writing gets the memory from the system before it is timed
            view[:] = os.urandom(4096) * (self.page_bytes // 4096)

    def open_tier(self) -> DiskTier:
        """Returns a new disk tier over the same folder, as a restart makes it."""
        store = DiskStore(self.folder, FINGERPRINT, self.page_bytes, 1 << 40)
        tier = DiskTier(store)
        free = list(range(len(self.keys)))
        none = HostMemory(self.engine, 0).tier(0, "")
        device: Any = NoDevice()
        tier.bind(device, PrefixIndex(), self.host, none, free.pop, none.take, lambda entry: None)
        return tier

    def write(self) -> float:
        """Writes all pages. Returns seconds."""
        from cpmcu.engine.prefix.disk_tier import digest_of

        store = DiskStore(self.folder, FINGERPRINT, self.page_bytes, 1 << 40)
        index, parent = PrefixIndex(), None
        begin = time.perf_counter()
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            done = []
            for (key, tokens), view in zip(self.keys, self.views):
                digest = digest_of(parent)
                done.append(pool.submit(store.write, key, digest, tokens, view))
                parent = index.add(key, parent, tokens)
        assert all(future.result() for future in done)
        return time.perf_counter() - begin

    def read(self) -> float:
        """Reads all pages through a tier. Returns seconds."""
        tier = self.open_tier()
        begin = time.perf_counter()
        found = tier.begin_reading(self.keys, None)
        while tier.tick(0, 0):
            tier.wait(0.1)
        seconds = time.perf_counter() - begin
        assert len(found) == tier.num_read == len(self.keys), f"{tier.num_read} pages were read"
        tier.close()
        return seconds

    def plain(self, read: Callable[[Path, memoryview], None]) -> float:
        """Reads all files with `read` and as many threads. Returns seconds."""
        names = [f"{key.hex()}.safetensors" for key, _ in self.keys]
        begin = time.perf_counter()
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            paths = [self.folder / FINGERPRINT / name for name in names]
            list(pool.map(read, paths, self.views))
        return time.perf_counter() - begin


def into_new_memory(path: Path, view: memoryview) -> None:
    with open(path, "rb", buffering=0) as file:
        file.read()


def into_host_memory(path: Path, view: memoryview) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.preadv(fd, [view], 4096)
    os.close(fd)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pages", type=int, default=468)
    parser.add_argument("--page-bytes", type=int, default=2 << 20)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--disk", default=None, help="folder for the files (default: /tmp)")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="cpmcu-disk-tier-", dir=args.disk))

    def measure(engine: Any) -> dict[str, list[float]]:
        bench = Bench(engine, folder, args)
        times: dict[str, list[float]] = {"written by threads": [bench.write()]}
        for i in range(args.repeats + 1):
            for name, seconds in (
                ("into new memory", bench.plain(into_new_memory)),
                ("into host memory", bench.plain(into_host_memory)),
                ("disk tier", bench.read()),
            ):
                if i > 0:
                    times.setdefault(name, []).append(seconds)
        bench.host.close()
        return times

    try:
        with LLM(device="cpu", speculative_config=SpeculativeConfig(no_speculation=True)) as llm:
            found = llm.call_engine(measure)
    finally:
        shutil.rmtree(folder)
    num_bytes = args.pages * args.page_bytes
    print(f"{args.pages} pages of {args.page_bytes:,} bytes, {NUM_THREADS} threads, medians")
    print("| what | ms | least, ms | GB/s |\n|---|---:|---:|---:|")
    for name, seconds in found.items():
        middle = statistics.median(seconds)
        cells = [name, f"{1e3 * middle:.0f}", f"{1e3 * min(seconds):.0f}"]
        print("| " + " | ".join([*cells, f"{num_bytes / middle / 1e9:.2f}"]) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
