"""Times the overhead of HTTP per streamed token, and the tokens/s of several clients.

    python scripts/bench/bench_server.py [--model DIR] [--draft-model-path DIR] [--device cpu] ...

Takes the flags of the engine and of speculation, like `python -m cpmcu.server`. With a draft,
everything is measured with and without it. The server runs in this process, so `LLM.stream` and the
server's stream alternate on one engine. The clients are another process. Prompts and events have
token ids (`return_token_ids`), so the tokenizer need not fit the model. A keep-alive connection is
measured separately: only there a packet may be delayed by a missing acknowledgement (Nagle's
algorithm). The prefix cache is off. Prints Markdown tables.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import http.client
import itertools
import json
import multiprocessing
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

from cpmcu import LLM, SamplingParams
from cpmcu.benchmarks.speculation import has_draft
from cpmcu.config import EngineConfig
from cpmcu.errors import sentence
from cpmcu.flags import FlagParser
from cpmcu.flags.engine import add_engine_flags, engine_config, without_hits

PROMPT = '"""Reads a table of numbers from a file and prints its columns."""\n\nimport sys\n'


@dataclasses.dataclass(frozen=True, slots=True)
class Stream:
    """One streamed request: the arrival of each burst of tokens, in seconds after sending."""

    times: list[float]
    bursts: list[list[int]]

    @property
    def tokens(self) -> list[int]:
        return list(itertools.chain(*self.bursts))

    @property
    def seconds_per_token(self) -> float:
        """Seconds from the first burst to the last, per token after the first burst."""
        return (self.times[-1] - self.times[0]) / (len(self.tokens) - len(self.bursts[0]))


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """LLM.stream and the server, alternating: medians in seconds, half the interquartile range."""

    direct: float  # seconds per token
    served: float
    overhead: float
    spread: float
    direct_first: float  # seconds to the first token
    served_first: float
    tokens_per_event: float


@dataclasses.dataclass(frozen=True, slots=True)
class KeptAlive:
    """Medians of requests over one connection, in seconds."""

    health: float  # GET /health, whole request
    one_token: float  # POST for one token, whole request
    direct_first: float  # first token of LLM.stream, alternating with `first`
    first: float  # first streamed content of the server
    above: float  # median difference of these pairs


# ---- the clients' process


def connect(port: int) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    connection.connect()
    return connection


def post(connection: http.client.HTTPConnection, body: dict[str, Any]) -> http.client.HTTPResponse:
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    return connection.getresponse()


def stream_over_http(
    port: int,
    prompt: list[int],
    num_tokens: int,
    connection: http.client.HTTPConnection | None = None,
) -> Stream:
    """Sends a request to /v1/completions, over a new connection by default."""
    body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "return_token_ids": True}
    used = connection or connect(port)
    events: list[tuple[float, bytes]] = []
    begin = time.perf_counter()
    reply = post(used, body)
    while line := reply.readline():
        if line.startswith(b"data: {"):
            events.append((time.perf_counter() - begin, line))
    if connection is None:
        used.close()
    bursts = []
    for _, line in events:  # afterwards, so that JSON parsing is not timed
        event = json.loads(line.removeprefix(b"data: "))
        if "choices" not in event:
            raise RuntimeError(f"the server answered with {event}")
        bursts.append(event["choices"][0]["token_ids"])
    if reply.status != 200 or not events:
        raise RuntimeError(f"the server answered with status {reply.status}")
    return Stream([seconds for seconds, _ in events], bursts)


_kept: http.client.HTTPConnection | None = None  # the keep-alive connection of this process


def over_kept(port: int, what: str, prompt: list[int], num_tokens: int) -> float:
    """Times a request over the keep-alive connection: "health", "one_token" or "first" content."""
    global _kept
    if _kept is None:
        _kept = connect(port)
    if what == "first":
        return stream_over_http(port, prompt, num_tokens, _kept).times[0]
    begin = time.perf_counter()
    if what == "health":
        _kept.request("GET", "/health")
        _kept.getresponse().read()
    else:
        post(_kept, {"prompt": prompt, "max_tokens": 1, "temperature": 0}).read()
    return time.perf_counter() - begin


def crowd(port: int, prompts: list[list[int]], num_tokens: int) -> float:
    """Returns tokens/s of concurrent clients, one a prompt, from first request to last token."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        begin = time.perf_counter()
        jobs = [pool.submit(stream_over_http, port, prompt, num_tokens) for prompt in prompts]
        tokens = sum(len(job.result().tokens) for job in jobs)
        return tokens / (time.perf_counter() - begin)


# ---- the server's process


@contextlib.contextmanager
def serving(config: EngineConfig) -> Iterator[tuple[LLM, int]]:
    """Starts a server as `python -m cpmcu.server` does. Returns (engine, port)."""
    from cpmcu.serving import runtime
    from cpmcu.serving.config import ServerConfig
    from cpmcu.serving.http.server import make_server
    from cpmcu.serving.service import Service

    sys.setswitchinterval(runtime.SWITCH_SECONDS)
    service = Service(config, ServerConfig())
    try:
        service.load()
    except Exception as error:
        raise SystemExit(f"the model cannot be loaded: {sentence(error)}") from error
    server = make_server(service)
    gc.freeze()
    listener = runtime.listen("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield service.model.llm, listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()
        service.close()


def stream_directly(llm: LLM, prompt: list[int], num_tokens: int) -> Stream:
    """One request to LLM.stream."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    begin = time.perf_counter()
    timed = [(time.perf_counter() - begin, chunk) for chunk in llm.stream(prompt, params)]
    return Stream([seconds for seconds, _ in timed], [chunk.token_ids for _, chunk in timed])


def compare(
    llm: LLM, port: int, clients: Executor, prompt: list[int], num_tokens: int, repeats: int
) -> Comparison:
    """Sends one request alternately to LLM.stream and over HTTP, after one warm-up of each."""
    pairs = []
    for _ in range(repeats + 1):
        direct = stream_directly(llm, prompt, num_tokens)
        served = clients.submit(stream_over_http, port, prompt, num_tokens).result()
        if direct.tokens != served.tokens:
            raise RuntimeError("the server's tokens differ from those of LLM.stream")
        pairs.append((direct, served))
    del pairs[0]
    differences = [b.seconds_per_token - a.seconds_per_token for a, b in pairs]
    low, overhead, high = statistics.quantiles(differences, n=4)
    return Comparison(
        direct=statistics.median(a.seconds_per_token for a, _ in pairs),
        served=statistics.median(b.seconds_per_token for _, b in pairs),
        overhead=overhead,
        spread=(high - low) / 2,
        direct_first=statistics.median(a.times[0] for a, _ in pairs),
        served_first=statistics.median(b.times[0] for _, b in pairs),
        tokens_per_event=statistics.mean(len(b.tokens) / len(b.bursts) for _, b in pairs),
    )


def compare_kept(
    llm: LLM, port: int, clients: Executor, prompt: list[int], repeats: int
) -> KeptAlive:
    """Times requests over one kept-alive connection, after a warm-up."""

    def kept(what: str) -> float:
        return clients.submit(over_kept, port, what, prompt, 8).result()

    pairs, others = [], []
    for _ in range(repeats + 1):
        pairs.append((stream_directly(llm, prompt, 8).times[0], kept("first")))
        others.append((kept("health"), kept("one_token")))
    del pairs[0], others[0]
    return KeptAlive(
        health=statistics.median(health for health, _ in others),
        one_token=statistics.median(one_token for _, one_token in others),
        direct_first=statistics.median(direct for direct, _ in pairs),
        first=statistics.median(served for _, served in pairs),
        above=statistics.median(served - direct for direct, served in pairs),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """Measurements with one kind of speculation."""

    compared: Comparison
    kept: KeptAlive
    speeds: list[float]  # tokens/s for each number of clients


def measure(config: EngineConfig, args: argparse.Namespace) -> Found:
    """Loads the model and measures."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn) as clients, serving(config) as (llm, port):
        ids = llm.tokenize(PROMPT)
        compared = compare(llm, port, clients, ids, args.num_tokens, args.repeats)
        kept = compare_kept(llm, port, clients, ids, 3 * args.repeats)
        speeds = []
        for count in args.clients:
            prompts = [ids[i % len(ids) :] + ids[: i % len(ids)] for i in range(count)]
            crowds = [clients.submit(crowd, port, prompts, args.num_tokens) for _ in range(3)]
            # The first run selects kernels for this batch size, so it is not counted.
            speeds.append(statistics.mean(each.result() for each in crowds[1:]))
    return Found(compared, kept, speeds)


def overhead_row(name: str, found: Comparison) -> list[str]:
    micro = [found.direct, found.served, found.overhead, found.spread]
    milli = [found.direct_first, found.served_first]
    cells = [name, f"{found.tokens_per_event:.2f}"]
    cells += [f"{1e6 * seconds:.1f}" for seconds in micro]
    return cells + [f"{1e3 * seconds:.2f}" for seconds in milli]


def kept_row(name: str, found: KeptAlive) -> list[str]:
    return [name, *(f"{1e3 * seconds:.2f}" for seconds in dataclasses.astuple(found))]


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def client_counts(text: str) -> list[int]:
    counts = [int(part) for part in text.split(",")]
    if min(counts) < 1:
        raise argparse.ArgumentTypeError(f"expected numbers of at least 1, found {text!r}")
    return counts


def at_least_two(text: str) -> int:
    if int(text) < 2:
        raise argparse.ArgumentTypeError(f"expected at least 2, found {text!r}")
    return int(text)


def main() -> None:
    parser = FlagParser(prog="bench_server.py", description=__doc__.splitlines()[0])
    group = parser.add_argument_group("benchmark")
    group.add_argument(
        "--num-tokens", type=at_least_two, default=256, help="new tokens of a request"
    )
    group.add_argument("--repeats", type=at_least_two, default=7, help="pairs of requests compared")
    group.add_argument(
        "--clients", type=client_counts, default=[1, 2, 4, 8], help="comma list, for tokens/s"
    )
    add_engine_flags(parser, {"prefix_cache": False})
    args = parser.parse_args()
    try:
        config = without_hits(engine_config(args), args)
    except ValueError as error:
        parser.error(str(error))

    plain = dataclasses.replace(
        config, speculative_config=dataclasses.replace(config.speculation, no_speculation=True)
    )
    found = {"off": measure(plain, args)}
    if has_draft(config):
        found["on"] = measure(config, args)
    header = ["speculation", "tokens/event", "`LLM.stream`, µs/token", "server, µs/token"]
    header += ["overhead, µs/token", "±", "`LLM.stream`, ms to first token", "server, ms"]
    rows = [overhead_row(name, each.compared) for name, each in found.items()]
    sys.stdout.write(table(header, rows) + "\n")
    header = ["kept-alive connection, ms", "GET /health", "one token, whole"]
    header += ["`LLM.stream`'s first token", "first streamed content", "above `LLM.stream`"]
    rows = [kept_row(f"speculation {name}", each.kept) for name, each in found.items()]
    sys.stdout.write(table(header, rows) + "\n")
    header = ["tokens/s", *(f"{n} client{'s' * (n > 1)}" for n in args.clients)]
    rows = [
        [f"speculation {name}", *(f"{speed:.0f}" for speed in each.speeds)]
        for name, each in found.items()
    ]
    sys.stdout.write(table(header, rows))


if __name__ == "__main__":
    main()
