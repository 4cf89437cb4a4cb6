"""Runs a server under random requests and disconnects, and checks its state afterwards.

    python scripts/soak.py [--clients 16] [--duration 600] [--shared-prefixes 24] [server's flags]

Each client sends one request after another: chat or completion, streamed or whole, prompts from one
token to most of the context, all kinds of parameters, some of them invalid. A client disconnects
from every third request before its end. Afterwards no slot and no KV page may be in use, the log
may have no error, and memory may not have grown by more than noise. A fixed request must give the
same text as before. If all checks pass, the exit status is 0.

The prefix cache has 0.25 GB of host memory, unless --prefix-cache-host-gb is given. A larger tier
still fills up during the run, which looks like growth. With --shared-prefixes N, most prompts begin
with a part of one of N prefixes, some of them under a salt. Three checks are added: some prompts
were cached, texts are the same after a reset of the cache, and no page is cached after the reset.

With --agents, the clients are agents instead: conversations with one of four system messages, with
tools, calls and their results, over chat, messages and responses. Sixty-four of them:

    python scripts/soak.py --agents --clients 64 --max-num-seqs 64 --max-queue 512
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import importlib.util
import json
import math
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from cpmcu.flags import FlagParser

try:
    import httpx
except ModuleNotFoundError:  # main reports it, so that --help works without httpx
    httpx = None

SOURCE = Path(__file__).read_text("utf-8")
WORDS = (*SOURCE.split(), "naïve", "你好，世界", "🙂", "👩‍👩‍👧", "\n\n", "\t")
FIXED = {"prompt": "def mean(values):\n", "max_tokens": 80, "temperature": 0.9, "seed": 7}
TOO_LONG = 100_000  # tokens, more than a soaked model's context
PATIENCE = 600.0  # seconds
HOST_GB = "0.25"

Kind = tuple[str, dict[str, Any], int]  # path, body, expected status


# ---- requests


def text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(WORDS, k=words))


def parameters(rng: random.Random, context: int) -> dict[str, Any]:
    """Returns random fields for sampling, length and other options."""
    body: dict[str, Any] = {"max_tokens": int(2 ** rng.uniform(0, 7.5)), "stream": True}
    choices: list[tuple[float, dict[str, Any]]] = [
        (0.3, {"stream": False}),
        (0.6, {"temperature": rng.choice([0, 0.3, 1.0, 1.7])}),
        (0.3, {"top_p": rng.uniform(0.1, 1), "top_k": rng.choice([-1, 1, 5, 50])}),
        (0.2, {"min_p": rng.uniform(0, 0.3)}),
        (0.2, {"presence_penalty": rng.uniform(-2, 2), "frequency_penalty": rng.uniform(-2, 2)}),
        (0.2, {"repetition_penalty": rng.uniform(0.8, 1.5)}),
        (0.2, {"logit_bias": {str(rng.randrange(100, 4000)): rng.uniform(-100, 5)}}),
        (0.4, {"seed": rng.randrange(2**40)}),
        (0.2, {"stop": rng.sample(["\n\n", "return", "self.", "e"], k=rng.randint(1, 3))}),
        (0.3, {"ignore_eos": True}),
        (0.15, {"n": rng.randint(2, 4)}),
        (0.3, {"return_metrics": True}),
        (0.02, {"max_tokens": context // 2, "n": 1}),
    ]
    if importlib.util.find_spec("llguidance"):
        grammars = ({"response_format": {"type": "json_object"}}, {"guided_regex": "[a-c]{3,40}"})
        choices.append((0.1, rng.choice(grammars)))
    for probability, fields in choices:
        if rng.random() < probability:
            body |= fields
    if body["stream"] and rng.random() < 0.5:
        body["stream_options"] = {"include_usage": True}
    return body


def prefix(number: int, context: int) -> list[int]:
    """Token ids:

    the first half, at most, of many prompts. The two prefixes of a pair have a common beginning.
    """
    rng = random.Random(number // 2)
    length = rng.randrange(context // 8, context // 2)
    ids = [rng.randrange(5, 4000) for _ in range(length)]
    return ids if number % 2 else ids[: length // 2] + ids[length // 2 :][::-1]


def share_prefix(rng: random.Random, context: int, num_prefixes: int, kind: Kind) -> Kind:
    """Adds a prefix that other requests have, too."""
    path, body, status = kind
    number = rng.randrange(num_prefixes)
    if status != 200:
        return kind
    if rng.random() < 0.2:
        body |= {"cache_salt": f"salt {rng.randrange(2)}"}
    if "messages" in body:
        system = text(random.Random(number), min(context // 32, 200))
        return (
            path,
            body | {"messages": [{"role": "system", "content": system}, *body["messages"]]},
            200,
        )
    ids = prefix(number, context)
    ids = ids[: rng.randrange(1, len(ids) + 1)] if rng.random() < 0.5 else ids
    tail = [rng.randrange(5, 4000) for _ in range(int(2 ** rng.uniform(0, 6)))]
    return path, body | {"prompt": ids + tail}, 200


def make_request(rng: random.Random, context: int) -> Kind:
    body = parameters(rng, context)
    length = int(2 ** rng.uniform(0, 6)) if rng.random() < 0.7 else rng.randrange(1, context - 200)
    if rng.random() < 0.03:
        wrong = ({"temperature": -1}, {"max_tokens": "5"}, {"n": 0}, {"stop_regex": "("})
        return "/v1/completions", body | {"prompt": "x", **rng.choice(wrong)}, 400
    if rng.random() < 0.02:
        return "/v1/completions", body | {"prompt": [7] * TOO_LONG}, 400
    if rng.random() < 0.35:
        messages = [
            {"role": role, "content": text(rng, 1 + min(length, 300) // 6)}
            for role in ("user", "assistant", "user")[: rng.choice([1, 3])]
        ]
        if rng.random() < 0.2:
            body |= {"logprobs": True, "top_logprobs": rng.randrange(5)}
        return "/v1/chat/completions", body | {"messages": messages}, 200
    if rng.random() < 0.5:
        prompt: Any = text(rng, 1 + min(length, 600) // 4)
    else:
        prompt = [rng.randrange(5, 4000) for _ in range(length)]
        if rng.random() < 0.1:
            prompt = [prompt[:40], prompt[:1]]
    if rng.random() < 0.15:
        body |= {"logprobs": rng.randrange(5), "echo": rng.random() < 0.5}
    return "/v1/completions", body | {"prompt": prompt}, 200


# ---- agents

TOOLS = {
    "read_file": {"type": "object", "properties": {"path": {"type": "string"}}},
    "run": {"type": "object", "properties": {"command": {"type": "string"}}},
}
ENDS = {  # texts in the last event of a stream
    "/v1/messages": ('"message_stop"',),
    "/v1/responses": ('"response.completed"', '"response.incomplete"'),
}
NUM_PROGRAMS = 4  # agents with one system message


def agent_request(rng: random.Random, context: int) -> Kind:
    """A turn of an agent. Turns of one program and interface begin alike."""
    path = rng.choice(["/v1/chat/completions", *ENDS])
    program = rng.randrange(NUM_PROGRAMS)
    session = random.Random(f"{program} {rng.randrange(8)}")
    words = max(4, context // 64)
    system, question = text(random.Random(program), words), text(session, words // 4)
    rounds = [
        (f"call_{i}", session.choice(sorted(TOOLS)), text(session, words // 8))
        for i in range(rng.randrange(4))
    ]
    body: dict[str, Any] = {"stream": rng.random() < 0.7, "temperature": rng.choice([0, 1.0])}
    length = int(2 ** rng.uniform(2, 6))
    forced = importlib.util.find_spec("llguidance") and rng.random() < 0.3
    if path == "/v1/messages":
        turns: list[dict[str, Any]] = [{"role": "user", "content": question}]
        for name, tool, result in rounds:
            use = {"type": "tool_use", "id": name, "name": tool, "input": {"path": "x"}}
            found = {"type": "tool_result", "tool_use_id": name, "content": result}
            turns += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [found]}]
        body |= {"system": system, "messages": turns, "max_tokens": length}
        body["tools"] = [{"name": n, "input_schema": s} for n, s in TOOLS.items()]
        body |= {"tool_choice": {"type": "any"}} if forced else {}
        return path, body, 200
    body |= {"tool_choice": "required"} if forced else {}
    functions = [{"name": name, "parameters": schema} for name, schema in TOOLS.items()]
    if path == "/v1/responses":
        items: list[dict[str, Any]] = [{"role": "user", "content": question}]
        for name, tool, result in rounds:
            call = {"call_id": name, "name": tool, "arguments": '{"path": "x"}'}
            items.append({"type": "function_call", **call})
            items.append({"type": "function_call_output", "call_id": name, "output": result})
        body |= {"instructions": system, "input": items, "store": rng.random() < 0.3}
        body |= {"tools": [{"type": "function", **f} for f in functions]}
        return path, body | {"max_output_tokens": length}, 200
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": question})
    for name, tool, result in rounds:
        function = {"name": tool, "arguments": '{"path": "x"}'}
        call = {"id": name, "type": "function", "function": function}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": name, "content": result})
    body |= {"messages": messages, "max_tokens": length}
    return path, body | {"tools": [{"type": "function", "function": f} for f in functions]}, 200


# ---- clients


class Soak:
    """The clients of one run and their counters."""

    def __init__(
        self, url: str, context: int, seed: int, num_prefixes: int, *, agents: bool = False
    ) -> None:
        self.url = url
        self.make_request = agent_request if agents else make_request
        self.context = context
        self.num_prefixes = num_prefixes
        self.seed = seed
        self.counts: collections.Counter[str] = collections.Counter()
        self.failures: list[str] = []

    async def run(self, clients: int, duration: float) -> None:
        """Runs all clients for a number of seconds."""
        end = time.monotonic() + duration
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self.url, timeout=PATIENCE, limits=limits) as http:
            await asyncio.gather(*(self._client(http, i, end) for i in range(clients)))

    async def fill(self, slots: int) -> None:
        """Uses all pages of all slots once and sends the largest bodies at the same time.

        The system allocates memory at its first use, and the allocator keeps it. Without this
        warm-up, a late peak would count as growth.
        """
        ids = [7 + i % 1000 for i in range(self.context - 8)]
        body = {"max_tokens": 8, "ignore_eos": True, "stream": False}
        bodies = [body | {"prompt": [*ids[i:], *ids[:i]]} for i in range(slots)]
        async with httpx.AsyncClient(base_url=self.url, timeout=PATIENCE) as http:
            await asyncio.gather(*(self._ask(http, "/v1/completions", b, 200) for b in bodies))
            large = [body | {"prompt": [7] * TOO_LONG}] * slots
            await asyncio.gather(*(self._ask(http, "/v1/completions", b, 400) for b in large))
        self.counts.clear()

    async def _client(self, http: httpx.AsyncClient, number: int, end: float) -> None:
        rng = random.Random(self.seed * 1000 + number)
        while time.monotonic() < end:
            kind = self.make_request(rng, self.context)
            if self.num_prefixes and rng.random() < 0.8:
                kind = share_prefix(rng, self.context, self.num_prefixes, kind)
            path, body, expected = kind
            leaves = rng.random() < 1 / 3
            patience = rng.uniform(0, 1.5) ** 2 if leaves else PATIENCE
            try:
                await asyncio.wait_for(self._ask(http, path, body, expected), patience)
            except asyncio.TimeoutError:
                self.counts["left by the client"] += 1
                if not leaves:
                    self.failures.append(f"no answer in {patience:.0f} s: {shown(body)}")
            except httpx.HTTPError as error:
                self.failures.append(f"{type(error).__name__} {error}: {shown(body)}")

    async def _ask(
        self, http: httpx.AsyncClient, path: str, body: dict[str, Any], expected: int
    ) -> None:
        self.counts["requests"] += 1
        async with http.stream("POST", path, json=body) as reply:
            if reply.status_code != expected:
                said = (await reply.aread()).decode("utf-8", "replace")
                self.failures.append(f"status {reply.status_code}: {said[:200]}: {shown(body)}")
                return
            if expected != 200:
                await reply.aread()
                self.counts["refused, as expected"] += 1
                return
            last = ""
            async for line in reply.aiter_lines():
                if line.startswith("data: "):
                    last = line
                    self.counts["events"] += 1
                    if line.startswith('data: {"error"'):
                        self.failures.append(f"{line[:200]}: {shown(body)}")
            if body["stream"] and not any(end in last for end in ENDS.get(path, ("data: [DONE]",))):
                self.failures.append(f"a stream ended with {last[:100]!r}: {shown(body)}")
            self.counts["answered to the end"] += 1


def shown(body: dict[str, Any]) -> str:
    return json.dumps(body)[:300]


# ---- the server


class Watched:
    """A server process, its log, and its memory over time."""

    def __init__(self, flags: list[str], log_path: Path) -> None:
        self.log_path = log_path
        command = [sys.executable, "-m", "cpmcu.server", "--port", "0", "--log-format", "json"]
        command += ["--prefix-cache-host-gb", HOST_GB]
        with log_path.open("wb") as log:
            self.process = subprocess.Popen([*command, *flags], stdout=log, stderr=log)
        self.url = ""
        self.memory: list[tuple[float, float]] = []  # (seconds, MiB)

    def wait_ready(self) -> None:
        """Waits until the model is loaded. Raises RuntimeError if loading fails."""
        while True:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended: {self.log_path.read_text('utf-8')}")
            found = re.search(r"listening on (http://[^\"\s]+)", self.log_path.read_text("utf-8"))
            if found:
                self.url = found[1]
                if httpx.get(self.url + "/health", timeout=60).status_code == 200:
                    return
            time.sleep(0.1)

    async def watch_memory(self, every: float) -> None:
        """Records the resident set size until cancelled."""
        begin = time.monotonic()
        while True:
            status = Path(f"/proc/{self.process.pid}/status").read_text()
            kib = int(re.search(r"^VmRSS:\s+(\d+) kB", status, re.MULTILINE)[1])
            self.memory.append((time.monotonic() - begin, kib / 1024))
            await asyncio.sleep(every)

    def tenths(self) -> list[float]:
        """Returns the median MiB in each tenth of the time."""
        end = self.memory[-1][0] + 1e-9
        parts: list[list[float]] = [[] for _ in range(10)]
        for at, mib in self.memory:
            parts[int(10 * at / end)].append(mib)
        return [statistics.median(part or [math.nan]) for part in parts]

    def slots(self) -> int:
        """Returns the number of slots from the log."""
        found = re.search(r"(\d+) slots", self.log_path.read_text("utf-8"))
        assert found is not None  # logged before /health returns 200
        return int(found[1])

    def metric(self, name: str) -> float:
        """Returns the sum of a metric over its labels."""
        page = httpx.get(self.url + "/metrics", timeout=30).text
        pattern = rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$"
        return sum(map(float, re.findall(pattern, page, re.MULTILINE)))

    def busy(self) -> dict[str, float]:
        """Returns the metrics that must be zero without requests."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        return {name: self.metric(f"vllm:{name}") for name in names}

    def complaints(self) -> list[str]:
        """Returns the log's warnings, errors and lines that are not log lines."""
        found = []
        for line in self.log_path.read_text("utf-8").splitlines():
            try:
                level = json.loads(line)["level"]
            except (ValueError, KeyError, TypeError):
                level = "not a log line"
            if level not in ("debug", "info"):
                found.append(line[:300])
        return found

    def stop(self) -> int:
        """Sends SIGTERM and returns the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


async def drive(server: Watched, soak: Soak, clients: int, duration: float) -> None:
    await soak.fill(server.slots())
    watch = asyncio.create_task(server.watch_memory(max(0.2, min(2.0, duration / 100))))
    try:
        await soak.run(clients, duration)
    finally:
        watch.cancel()


def text_of(url: str, body: dict[str, Any]) -> str:
    reply = httpx.post(url + "/v1/completions", json=body, timeout=120)
    reply.raise_for_status()
    return str(reply.json()["choices"][0]["text"])


def check_shared(server: Watched, context: int, num_prefixes: int) -> dict[str, float]:
    """Checks the prefix cache after all requests. Returns counts that must be zero."""
    bodies = [
        {"prompt": [*prefix(i, context), 5], "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        for i in range(num_prefixes)
    ]
    cached = [text_of(server.url, body) for body in bodies]
    httpx.post(server.url + "/reset_prefix_cache", timeout=60).raise_for_status()
    busy = settle(server)
    left = {"pages cached after a reset": server.metric("cpmcu:prefix_cache_pages")}
    left["share of the pages taken after a reset"] = busy["kv_cache_usage_perc"]
    fresh = []
    for body in bodies:  # they begin alike
        httpx.post(server.url + "/reset_prefix_cache", timeout=60).raise_for_status()
        fresh.append(text_of(server.url, body))
    left["texts that differ after a reset"] = sum(a != b for a, b in zip(cached, fresh))
    return left


def settle(server: Watched, seconds: float = 10.0) -> dict[str, float]:
    """Returns the resources still in use some seconds after all clients disconnected."""
    end = time.monotonic() + seconds
    while any((busy := server.busy()).values()) and time.monotonic() < end:
        time.sleep(0.05)
    return busy


def main() -> int:
    parser = FlagParser(prog="soak.py", description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--duration", type=float, default=600, help="seconds")
    parser.add_argument("--seed", type=int, default=0, help="seed of the requests")
    parser.add_argument(
        "--shared-prefixes", type=int, default=0, help="prefixes that most prompts share"
    )
    parser.add_argument("--agents", action="store_true", help="clients with tools")
    parser.add_argument(
        "--max-growth-mib", type=float, default=16, help="memory growth allowed in the second half"
    )
    parser.add_argument("--log", type=Path, help="file for the server's log")
    args, flags = parser.parse_known_args()
    if httpx is None:
        parser.error("the clients need the package 'httpx': pip install 'cpmcu[dev]'")
    with tempfile.TemporaryDirectory() as folder:
        server = Watched(flags, args.log or Path(folder) / "log")
        try:
            return soak_and_check(server, args)
        finally:
            if server.process.poll() is None:
                server.process.kill()
                server.process.wait()


def soak_and_check(server: Watched, args: argparse.Namespace) -> int:
    server.wait_ready()
    before = text_of(server.url, FIXED)
    context = httpx.get(server.url + "/v1/models", timeout=60).json()["data"][0]["max_model_len"]
    soak = Soak(server.url, context, args.seed, args.shared_prefixes, agents=args.agents)
    asyncio.run(drive(server, soak, args.clients, args.duration))
    busy = settle(server)
    outputs = server.metric("vllm:request_success_total")
    tokens = server.metric("vllm:generation_tokens_total")
    same = text_of(server.url, FIXED) == before
    queries = server.metric("vllm:prefix_cache_queries_total")
    hits = server.metric("vllm:prefix_cache_hits_total")
    evicted = server.metric("cpmcu:prefix_cache_evicted_pages_total")
    if args.shared_prefixes:
        busy |= check_shared(server, context, args.shared_prefixes)
    memory = server.tenths()
    growth = memory[-1] - memory[4]
    status = server.stop()
    complaints = server.complaints()
    rows = [("seconds", f"{server.memory[-1][0]:.0f}"), ("clients", str(args.clients))]
    rows += [(name, str(count)) for name, count in soak.counts.items()]
    rows += [
        ("outputs that ended", f"{outputs:.0f}"),
        ("generated tokens", f"{tokens:.0f}"),
        ("prompt tokens looked up, found cached", f"{queries:.0f}, {hits:.0f}"),
        ("pages that left the device", f"{evicted:.0f}"),
        ("memory in each tenth of the time, MiB", " ".join(f"{mib:.0f}" for mib in memory)),
        ("growth from the fifth to the last, MiB", f"{growth:+.1f}"),
        *((f"{name} at the end", f"{value:g}") for name, value in busy.items()),
        ("wrong answers", str(len(soak.failures))),
        ("warnings and errors in the log", str(len(complaints))),
        ("the fixed request gives the same text", "yes" if same else "no"),
        ("exit status", str(status)),
    ]
    for name, value in rows:
        sys.stdout.write(f"| {name} | {value} |\n")
    for line in (soak.failures + complaints)[:20]:
        sys.stdout.write(line + "\n")
    bad = bool(soak.failures or complaints or any(busy.values()) or status or not same)
    bad = bad or (args.shared_prefixes > 0 and hits == 0)
    return int(bad or growth > args.max_growth_mib)


if __name__ == "__main__":
    sys.exit(main())
