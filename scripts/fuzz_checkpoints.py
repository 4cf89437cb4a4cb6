"""Loads and uses damaged checkpoints: each must work or be refused with one sentence.

    python scripts/fuzz_checkpoints.py [--count 10000] [--first 0] [--jobs 2]
    python scripts/fuzz_checkpoints.py --first 1234 --count 1 --keep /tmp/recipe-1234

Recipe N (scripts/checkpoint_damage.py) damages a tiny valid checkpoint. A worker process loads the
result as the server does, renders its chat template, and generates a few tokens. Failures are: a
worker that dies, or exceeds --patience seconds of CPU time or --memory-mib; an exception that is
not one of cpmcu's types; a message that is not one short line or names no file. Without failures
the exit status is 0.
"""

from __future__ import annotations

import argparse
import collections
import logging
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import threading
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))

import checkpoint_damage as recipes

MAX_MESSAGE = 2000  # characters
NAMELESS = ("MemoryError", "OutputError")  # errors that need not name a file
KINDS = (
    ValueError,
    FileNotFoundError,
    MemoryError,
    RuntimeError,
)  # these types exactly, or cpmcu's own


class Result(NamedTuple):
    """The result of a recipe."""

    number: int
    damages: list[str]
    outcome: str  # "works", or the type of the exception
    message: str
    wrong: str  # the failure; empty: none


class _Strict(logging.Handler):
    """Formats every record, so a record that cannot be formatted raises."""

    def emit(self, record: logging.LogRecord) -> None:
        record.getMessage()


# ---- in a worker


def work(connection: Connection, bases: list[Path], scratch: Path) -> None:
    """Receives recipe numbers and sends results, until None."""
    logging.basicConfig(level=logging.INFO, handlers=[_Strict()])
    os.environ["HF_HUB_OFFLINE"] = "1"
    while (asked := connection.recv()) is not None:
        number, memory_mib = asked
        directory = scratch / str(number)
        damages = recipes.damage(number, bases, directory)
        before = _reset_peak_mib()
        outcome, message, wrong = "works", "", ""
        try:
            use(directory, number)
        except BaseException as error:  # a Rust panic is not an Exception
            outcome, message = type(error).__name__, str(error)
            wrong = fault(error, directory)
            if wrong:
                wrong += "".join(traceback.format_exception(error, limit=-6))[-3000:]
        grown = _peak_mib() - before
        if grown > memory_mib:
            wrong = wrong or f"took {grown} MiB"
        shutil.rmtree(directory)
        connection.send(Result(number, damages, outcome, message, wrong))


def use(directory: Path, number: int) -> None:
    """Loads the checkpoint as the server does, and answers a conversation."""
    from cpmcu import Grammar, SamplingParams
    from cpmcu.config import EngineConfig, SpeculativeConfig
    from cpmcu.serving.config import ServerConfig
    from cpmcu.serving.service import Service

    draft = directory / recipes.DRAFT
    frequent = 64 if (draft / "token_counts.npy").exists() else 0
    speculation = (
        SpeculativeConfig(draft_model_path=str(draft), spec_num_iter=2, frspec_vocab_size=frequent)
        if draft.exists()
        else None
    )
    config = EngineConfig(
        model=str(directory / recipes.TARGET),
        speculative_config=speculation,
        device="cpu",
        num_threads=1,
        memory_limit=0.2,
        max_num_seqs=1,
        chunk_length=64,
        max_model_len=128,
    )
    service = Service(config, ServerConfig())
    try:
        service.load()
        model = service.model
        ids = [1, 2, 3]
        if model.template is not None:
            messages = [{"role": "user", "content": "Hi"}]
            tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
            for given in (None, tools):
                text = model.template.render(messages, tools=given)
            ids = model.llm.tokenizer.encode(text, add_special_tokens=False)[:64] or ids
        model.llm.tokenizer.encode("Hello 你好 </s>")
        grammar = Grammar.regex("[a-z]+") if number % 4 == 0 else None
        for params in (SamplingParams(max_tokens=4, grammar=grammar), SamplingParams(max_tokens=4)):
            model.llm.generate([i % 200 for i in ids], params)
    finally:
        service.close()


def fault(error: BaseException, directory: Path) -> str:
    """Returns the fault of a refusal; empty: none."""
    message = str(error)
    kind = type(error)
    if kind not in KINDS and not kind.__module__.startswith("cpmcu."):
        return f"{kind.__module__}.{kind.__name__} is not a type of refusal\n"
    if len(message) > MAX_MESSAGE:
        return f"the message has {len(message)} characters\n"
    if not message or re.search(r"[\x00-\x1f\x7f]|Traceback", message):
        return "the message is not one line of text\n"
    names = {path.name for path in directory.rglob("*")} | {directory.name}
    names |= {"config.json", "tokenizer.json", "chat template", "chat_template"}
    if kind.__name__ not in NAMELESS and not any(name in message for name in names):
        return "the message names no file\n"
    return ""


def _reset_peak_mib() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return _peak_mib()


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _peak_mib() -> int:
    status = Path("/proc/self/status").read_text()
    return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) >> 10


# ---- in the main process


class Pool:
    """Sends recipes to workers and replaces a worker that dies or hangs."""

    def __init__(self, options: argparse.Namespace, root: Path) -> None:
        self.options = options
        self.root = root
        self.bases = recipes.write_bases(root / "bases")
        self.numbers = iter(range(options.first, options.first + options.count))
        self.results: list[Result] = []
        self.lock = threading.Lock()

    def run(self) -> list[Result]:
        threads = [
            threading.Thread(target=self._serve, args=(i,)) for i in range(self.options.jobs)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self.results

    def _serve(self, job: int) -> None:
        context = multiprocessing.get_context("spawn")
        process: Any = None
        for number in self._each():
            if process is None or not process.is_alive():
                ours, theirs = context.Pipe()
                scratch = self.root / f"job-{job}"
                shutil.rmtree(scratch, ignore_errors=True)
                scratch.mkdir()
                process = context.Process(target=work, args=(theirs, self.bases, scratch))
                process.start()
                theirs.close()
            ours.send((number, self.options.memory_mib))
            result = None
            try:
                if self._waits(ours, process.pid):
                    result = ours.recv()
                wrong = f"took more than {self.options.patience:g} s"
            except EOFError:
                process.join()
                wrong = f"the process died with status {process.exitcode}"
            if result is None:
                process.kill()
                process.join()
                damages = recipes.damage(number, self.bases, self.root / f"again-{job}")
                shutil.rmtree(self.root / f"again-{job}")
                result = Result(number, damages, "none", "", wrong)
            self._note(result)
        if process is not None and process.is_alive():
            ours.send(None)
            process.join()

    def _waits(self, connection: Connection, pid: int) -> bool:
        """Waits for a result; False after a timeout. Counts CPU time more than wall time."""
        patience = self.options.patience
        cpu_before, begin = _cpu_seconds(pid), time.monotonic()
        while not connection.poll(1.0):
            if (
                _cpu_seconds(pid) - cpu_before > patience
                or time.monotonic() - begin > 10 * patience
            ):
                return False
        return True

    def _each(self) -> Any:
        while True:
            with self.lock:
                number = next(self.numbers, None)
            if number is None:
                return
            yield number

    def _note(self, result: Result) -> None:
        with self.lock:
            self.results.append(result)
            if result.wrong:
                print(f"recipe {result.number}: {', '.join(result.damages)}")
                print(f"  {result.outcome}: {result.message[:300]!r}\n  {result.wrong}", flush=True)
            if self.options.verbose:
                print(result.number, result.damages, result.outcome, result.message, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=10_000, help="number of recipes")
    parser.add_argument("--first", type=int, default=0, help="number of the first recipe")
    parser.add_argument("--jobs", type=int, default=2, help="worker processes")
    parser.add_argument("--patience", type=float, default=30, help="seconds for one recipe")
    parser.add_argument("--memory-mib", type=int, default=512, help="memory for one recipe")
    parser.add_argument("--keep", type=Path, help="only write the first recipe's directory here")
    parser.add_argument("--verbose", action="store_true", help="print every result")
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as root:
        if options.keep:
            bases = recipes.write_bases(Path(root))
            print(", ".join(recipes.damage(options.first, bases, options.keep)))
            return 0
        results = Pool(options, Path(root)).run()
    outcomes = collections.Counter(result.outcome for result in results)
    for outcome, count in outcomes.most_common():
        print(f"{count:6} {outcome}")
    wrong = sum(bool(result.wrong) for result in results)
    print(f"{len(results)} recipes in {time.monotonic() - began:.0f} s, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
