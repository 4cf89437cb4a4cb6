"""Loads a running server through HTTP, and checks its answers.

    python tmp/http_load.py streams --url http://127.0.0.1:8000 --clients 32 --prompt-tokens 1024 --max-tokens 256
    python tmp/http_load.py agents  --url http://127.0.0.1:8000 --clients 64 --seconds 60 [--pid SERVER_PID]

Needs httpx or aiohttp, else nothing but the standard library. `streams`: every client sends
--rounds streamed completions one after the other. `agents`: conversations that grow, over chat,
responses and messages, with pauses and with cancellations; exit status 1 if anything failed.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import random
import statistics
import sys
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

try:
    import aiohttp
except ModuleNotFoundError:
    aiohttp = None
    import httpx


class HttpStatus(Exception):
    pass


class Client:
    """Posts a body and yields the lines of the answer."""

    def __init__(self, url: str, key: str) -> None:
        self.url = url
        self.headers = {"Authorization": f"Bearer {key}", "anthropic-version": "2023-06-01"}

    async def __aenter__(self) -> Client:
        if aiohttp:
            self.session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None, sock_read=300),
                read_bufsize=1 << 20,
            )
        else:
            self.session = httpx.AsyncClient(
                timeout=httpx.Timeout(300), limits=httpx.Limits(max_connections=None)
            )
        return self

    async def __aexit__(self, *_: object) -> None:
        await (self.session.close() if aiohttp else self.session.aclose())

    @asynccontextmanager
    async def lines(self, path: str, body: dict[str, Any]) -> AsyncIterator[AsyncIterator[str]]:
        url = self.url + path
        if aiohttp:
            async with self.session.post(url, json=body, headers=self.headers) as answer:
                if answer.status != 200:
                    raise HttpStatus(f"{answer.status}: {(await answer.text())[:300]}")

                async def read() -> AsyncIterator[str]:
                    async for line in answer.content:
                        yield line.decode().rstrip("\n")

                yield read()
        else:
            async with self.session.stream("POST", url, json=body, headers=self.headers) as answer:
                if answer.status_code != 200:
                    await answer.aread()
                    raise HttpStatus(f"{answer.status_code}: {answer.text[:300]}")
                yield answer.aiter_lines()


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return answer.read().decode()


def metric(text: str, name: str) -> float:
    values = [line.split()[-1] for line in text.splitlines() if line.startswith(name + "{")]
    values += [line.split()[-1] for line in text.splitlines() if line.startswith(name + " ")]
    return sum(map(float, values))


def percentile(values: list[float], share: float) -> float:
    values = sorted(values)
    return values[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


def resident_mib(pid: int | None) -> float:
    if pid is None:
        return float("nan")
    with open(f"/proc/{pid}/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmRSS"))


# ---- streams


async def one_stream(
    client: Client, args: argparse.Namespace, prompt: list[int], start_at: float, into: dict[str, Any]
) -> None:
    body = {
        "prompt": prompt,
        "max_tokens": args.max_tokens,
        "ignore_eos": True,
        "temperature": args.temperature,
        "seed": 1,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    await asyncio.sleep(max(0.0, start_at - time.perf_counter()))
    begin = time.perf_counter()
    arrivals: list[tuple[float, int]] = []
    finish, usage, done = None, None, False
    async with client.lines("/v1/completions", body) as lines:
        async for line in lines:
            if not line.startswith("data: "):
                continue
            now = time.perf_counter()
            if line == "data: [DONE]":
                done = True
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise HttpStatus(line)
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                count = chunk["usage"]["completion_tokens"]
                if count > (arrivals[-1][1] if arrivals else 0):
                    arrivals.append((now, count))
                finish = choice.get("finish_reason") or finish
    if not done or finish != "length" or usage["completion_tokens"] != args.max_tokens:
        raise HttpStatus(f"incomplete: done {done}, finish {finish}, usage {usage}")
    into["first"].append(arrivals[0][0] - begin)
    for (before, old), (now, new) in zip(arrivals, arrivals[1:]):
        # a chunk of k tokens: one gap, and k - 1 tokens that came with it
        into["gap"].append(now - before)
        into["gap_per_token"] += [(now - before) / (new - old)] * (new - old)
    into["spans"].append((arrivals[0][0], arrivals[-1][0], arrivals[-1][1] - arrivals[0][1]))
    into["begin"].append(begin)
    into["end"].append(arrivals[-1][0])
    into["tokens"] += arrivals[-1][1]


def steady_rate(spans: list[tuple[float, float, int]]) -> float:
    """Tokens/s between the last first token and the first end, if the streams overlap."""
    low, high = max(s[0] for s in spans), min(s[1] for s in spans)
    if high <= low:
        return float("nan")
    return sum(tokens / (end - begin) for begin, end, tokens in spans if end > begin)


async def streams(args: argparse.Namespace) -> int:
    rng = random.Random(args.seed)
    vocabulary = args.vocabulary
    failures: collections.Counter[str] = collections.Counter()

    def prompt(tokens: int) -> list[int]:
        return [rng.randrange(100, vocabulary) for _ in range(tokens)]

    async with Client(args.url, args.api_key) as client:
        for round_number in range(-args.warm_up, args.rounds):
            into: dict[str, Any] = collections.defaultdict(list)
            into["tokens"] = 0
            start_at = time.perf_counter() + 0.2
            jobs = [
                one_stream(client, args, prompt(args.prompt_tokens), start_at, into)
                for _ in range(args.clients)
            ]
            late: dict[str, Any] = collections.defaultdict(list)
            late["tokens"] = 0
            if args.intruder_tokens:
                short = argparse.Namespace(**{**vars(args), "max_tokens": 2})
                at = start_at + args.intruder_after
                jobs.append(one_stream(client, short, prompt(args.intruder_tokens), at, late))
            for result in await asyncio.gather(*jobs, return_exceptions=True):
                if isinstance(result, BaseException):
                    failures[f"{type(result).__name__}: {result}"] += 1
            name = f"warm-up {round_number + args.warm_up}" if round_number < 0 else f"round {round_number}"
            if not into["begin"]:
                print(name, "no stream ended well")
                continue
            wall = max(into["end"]) - min(into["begin"])
            ms = {key: [value * 1e3 for value in into[key]] for key in ("first", "gap", "gap_per_token")}
            median = statistics.median(ms["gap"]) if ms["gap"] else float("nan")
            p99 = percentile(ms["gap"], 0.99)
            print(
                f"{name}: {args.clients} clients, {args.prompt_tokens} + {args.max_tokens} tokens: "
                f"{into['tokens'] / wall:.0f} tokens/s with prompts, "
                f"{steady_rate(into['spans']):.0f} tokens/s decoding; "
                f"between chunks median {median:.2f} ms, p99 {p99:.2f}, p99.9 "
                f"{percentile(ms['gap'], 0.999):.2f}, most {max(ms['gap'], default=0):.2f}, "
                f"p99/median {p99 / median:.2f}; "
                f"a token's time median {percentile(ms['gap_per_token'], 0.5):.2f}; "
                f"first token p50 {percentile(ms['first'], 0.5):.1f} ms, p99 {percentile(ms['first'], 0.99):.1f}",
                flush=True,
            )
            if late["first"]:
                print(f"  a prompt of {args.intruder_tokens} tokens beside: first token {late['first'][0] * 1e3:.0f} ms")
    for text, count in failures.items():
        print(f"FAILED {count} times: {text}")
    return 1 if failures else 0


# ---- agents

TOOL = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
WORDS = "the file has a function which reads the state of an agent and writes it back 🙂 naïve 你好".split()


def prose(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(WORDS, k=words))


class Incomplete(Exception):
    pass


async def chat_turn(client: Client, body: dict[str, Any], cut: int | None) -> str | None:
    """Returns the answer's text, or None if the client left after `cut` events."""
    text, finish, done, usage, events = "", None, False, None, 0
    async with client.lines("/v1/chat/completions", body) as lines:
        async for line in lines:
            if not line.startswith("data: "):
                continue
            events += 1
            if events == cut:
                return None
            if line == "data: [DONE]":
                done = True
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise HttpStatus(line)
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                text += choice["delta"].get("content") or ""
                finish = choice.get("finish_reason") or finish
    if not done or usage is None or finish not in ("stop", "length", "tool_calls"):
        raise Incomplete(f"chat: done {done}, usage {usage}, finish {finish}")
    if finish == "length" and usage["completion_tokens"] != body["max_tokens"]:
        raise Incomplete(f"chat: length after {usage} of {body['max_tokens']}")
    return text


async def response_turn(client: Client, body: dict[str, Any], cut: int | None) -> str | None:
    text, last, number = "", None, 0
    async with client.lines("/v1/responses", body) as lines:
        async for line in lines:
            if not line.startswith("data: "):
                continue
            event = json.loads(line[6:])
            if event["type"] == "error":
                raise HttpStatus(line)
            if event["sequence_number"] != number:
                raise Incomplete(f"responses: event {event['sequence_number']} instead of {number}")
            number += 1
            if number == cut:
                return None
            if event["type"] == "response.output_text.delta":
                text += event["delta"]
            last = event
    if last is None or last["type"] not in ("response.completed", "response.incomplete"):
        raise Incomplete(f"responses: last event {last and last['type']}: {str(last)[:300]}")
    response = last["response"]
    whole = "".join(
        part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"]
    )
    if whole != text:
        raise Incomplete("responses: the deltas are not the text")
    if last["type"] == "response.incomplete" and (
        response["incomplete_details"]["reason"] != "max_output_tokens"
        or response["usage"]["output_tokens"] != body["max_output_tokens"]
    ):
        raise Incomplete(f"responses: {response['incomplete_details']} {response['usage']}")
    return text


async def message_turn(client: Client, body: dict[str, Any], cut: int | None) -> str | None:
    text, kinds, reason, open_blocks = "", [], None, set()
    async with client.lines("/v1/messages", body) as lines:
        async for line in lines:
            if not line.startswith("data: "):
                continue
            event = json.loads(line[6:])
            if event["type"] == "error":
                raise HttpStatus(line)
            kinds.append(event["type"])
            if len(kinds) == cut:
                return None
            if event["type"] == "content_block_start":
                open_blocks.add(event["index"])
            elif event["type"] == "content_block_stop":
                open_blocks.remove(event["index"])
            elif event["type"] == "content_block_delta" and event["delta"]["type"] == "text_delta":
                text += event["delta"]["text"]
            elif event["type"] == "message_delta":
                reason = event["delta"]["stop_reason"]
    if not kinds or kinds[-1] != "message_stop" or open_blocks or reason is None:
        raise Incomplete(f"messages: last {kinds[-1:]}, open {open_blocks}, reason {reason}")
    return text


def bodies(kind: str, system: str, turns: list[dict[str, str]], tokens: int, tools: bool) -> dict[str, Any]:
    common: dict[str, Any] = {"stream": True, "temperature": 0.7, "seed": 5}
    if kind == "chat":
        body = common | {
            "messages": [{"role": "system", "content": system}, *turns],
            "max_tokens": tokens,
            "stream_options": {"include_usage": True},
        }
        if tools:
            function = {"name": "read_file", "description": "Reads.", "parameters": TOOL}
            body["tools"] = [{"type": "function", "function": function}]
    elif kind == "responses":
        body = common | {"instructions": system, "input": turns, "max_output_tokens": tokens}
        body["store"] = False
        if tools:
            body["tools"] = [{"type": "function", "name": "read_file", "parameters": TOOL}]
    else:
        body = common | {"system": system, "messages": turns, "max_tokens": tokens}
        if tools:
            body["tools"] = [{"name": "read_file", "input_schema": TOOL}]
    return body


TURNS = {"chat": chat_turn, "responses": response_turn, "messages": message_turn}


async def agent(
    client: Client, number: int, args: argparse.Namespace, until: float, counts: collections.Counter[str]
) -> None:
    rng = random.Random(args.seed * 1000 + number)
    system = prose(random.Random(number % 4), args.system_words)  # four shared system messages
    while time.perf_counter() < until:
        kind = rng.choice(tuple(TURNS))
        turns: list[dict[str, str]] = []
        for _ in range(rng.randint(2, args.turns)):
            if time.perf_counter() >= until:
                return
            turns.append({"role": "user", "content": prose(rng, rng.randint(3, args.turn_words))})
            body = bodies(kind, system, turns, rng.randint(4, args.max_tokens), rng.random() < 0.5)
            cut = rng.randint(2, 20) if rng.random() < args.cancel else None
            hang_up = rng.uniform(0, 0.5) if rng.random() < args.cancel / 2 else None
            try:
                turn = TURNS[kind](client, body, cut)
                text = await (turn if hang_up is None else asyncio.wait_for(turn, hang_up))
            except asyncio.TimeoutError:
                text = None
            except Exception as error:  # counted; the agent goes on
                counts[f"FAILED {kind}: {type(error).__name__}: {str(error)[:300]}"] += 1
                await asyncio.sleep(0.2)
                break
            if text is None:
                counts["cancelled"] += 1
                turns.pop()
                if not turns:
                    break
                continue
            counts["answers"] += 1
            counts[kind] += 1
            turns.append({"role": "assistant", "content": text or "."})
            await asyncio.sleep(rng.expovariate(1 / args.pause))


async def agents(args: argparse.Namespace) -> int:
    counts: collections.Counter[str] = collections.Counter()
    start = time.perf_counter()
    until = start + args.seconds
    memory = [resident_mib(args.pid)]

    async def watch() -> None:
        while time.perf_counter() < until:
            await asyncio.sleep(min(args.seconds / 6, 30))
            memory.append(resident_mib(args.pid))
            good = {k: v for k, v in counts.items() if not k.startswith("FAILED")}
            failed = sum(v for k, v in counts.items() if k.startswith("FAILED"))
            print(
                f"{time.perf_counter() - start:.0f} s: {good}, failed {failed}, "
                f"resident {memory[-1]:.0f} MiB",
                flush=True,
            )

    async with Client(args.url, args.api_key) as client:
        await asyncio.gather(
            watch(), *(agent(client, i, args, until, counts) for i in range(args.clients))
        )
        await asyncio.sleep(2)
    text = get(args.url + "/metrics")
    left = {
        name: metric(text, name)
        for name in ("vllm:num_requests_running", "vllm:num_requests_waiting")
    }
    memory.append(resident_mib(args.pid))
    half = memory[len(memory) // 2]
    print(
        f"resident: start {memory[0]:.0f} MiB, half {half:.0f}, end {memory[-1]:.0f}: "
        f"grew {memory[-1] - memory[0]:+.0f}, in the second half {memory[-1] - half:+.0f} MiB"
    )
    print("left in the engine:", left, "; health:", get(args.url + "/health") or "ok")
    failures = {text: count for text, count in counts.items() if text.startswith("FAILED")}
    for text, count in failures.items():
        print(f"{count} times {text}")
    bad = bool(failures) or any(left.values()) or not counts["answers"]
    print("FAILED" if bad else "PASSED", dict(counts - collections.Counter(failures)))
    return int(bad)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("mode", choices=("streams", "agents"))
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=None, help="default: 256; agents 96")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=30000, help="prompts: random ids from 100 to this")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--warm-up", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--intruder-tokens", type=int, default=0, help="a long prompt beside the streams")
    parser.add_argument("--intruder-after", type=float, default=1.5, help="seconds after the others")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--pid", type=int, default=None, help="the server's process, for its memory")
    parser.add_argument("--system-words", type=int, default=600)
    parser.add_argument("--turn-words", type=int, default=120)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--pause", type=float, default=0.5, help="mean seconds between turns")
    parser.add_argument("--cancel", type=float, default=0.15, help="share of turns that are cancelled")
    args = parser.parse_args()
    args.max_tokens = args.max_tokens or (256 if args.mode == "streams" else 96)
    return asyncio.run(streams(args) if args.mode == "streams" else agents(args))


if __name__ == "__main__":
    sys.exit(main())
