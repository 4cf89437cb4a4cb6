"""What HTTP and SSE add to a token, and how tokens/s grow with clients.

    python scripts/bench/bench_server.py [--tokens N] [--clients 1,2,4,8] [flags of cpmcu.server]

First `LLM.stream` in this process, then `python -m cpmcu.server` with the same model, flags and
prompt. A time per token is from the first chunk of a stream to its last, divided by the tokens in
between; the median of `--repeats` streams counts. The clients are threads of this process.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import http.client
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from cpmcu import LLM, SamplingParams
from cpmcu.engine_flags import engine_config
from cpmcu.server import make_parser

PROMPT = [7 + i % 1000 for i in range(64)]


def in_process(flags: list[str], tokens: int, repeats: int) -> float:
    """Seconds per token of LLM.stream."""
    config = engine_config(make_parser().parse_args(flags))
    params = SamplingParams(temperature=0, repetition_penalty=1, max_tokens=tokens, ignore_eos=True)
    times = []
    with LLM(**dataclasses.asdict(config)) as llm:
        for _ in range(repeats + 1):
            marks = [(time.perf_counter(), len(c.token_ids)) for c in llm.stream(PROMPT, params)]
            times.append(_per_token(marks))
    return statistics.median(times[1:])  # the first one captures graphs


def over_http(port: int, tokens: int) -> list[tuple[float, int]]:
    """(time, tokens) of each chunk of one stream."""
    body = {"prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    body |= {"repetition_penalty": 1, "stream": True, "return_token_ids": True}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(response.read().decode())
    lines = []
    while line := response.readline():
        if line.startswith(b"data: {"):
            lines.append((time.perf_counter(), line))
    connection.close()
    return [(at, len(json.loads(line[6:])["choices"][0]["token_ids"])) for at, line in lines]


def _per_token(marks: list[tuple[float, int]]) -> float:
    return (marks[-1][0] - marks[0][0]) / sum(count for _, count in marks[1:])


def run_clients(port: int, clients: int, tokens: int, repeats: int) -> tuple[float, float]:
    """(median seconds per token of a stream, tokens/s of all clients together)."""
    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        for _ in pool.map(lambda _: over_http(port, tokens), range(clients)):
            pass  # captures graphs
        begin = time.perf_counter()
        streams = list(pool.map(lambda _: over_http(port, tokens), range(clients * repeats)))
        seconds = time.perf_counter() - begin
    total = sum(count for marks in streams for _, count in marks)
    return statistics.median(map(_per_token, streams)), total / seconds


def start(flags: list[str], log: Path) -> tuple[subprocess.Popen[bytes], int]:
    """The server's process, ready, and its port."""
    command = [sys.executable, "-m", "cpmcu.server", *flags, "--port", "0"]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    while "is ready after" not in log.read_text():
        if process.poll() is not None:
            raise RuntimeError(log.read_text())
        time.sleep(0.1)
    found = re.search(r"listening on http://[^ ]*:(\d+)", log.read_text())
    assert found is not None
    return process, int(found[1])


def main() -> None:
    """Prints one line for LLM.stream and one for each number of clients."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--clients", default="1,2,4,8")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options, flags = parser.parse_known_args()
    clients = [int(part) for part in options.clients.split(",")]

    alone = in_process(flags, options.tokens, options.repeats)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        process, port = start(flags, Path(folder) / "log")
        try:
            for count in clients:
                each, rate = run_clients(port, count, options.tokens, options.repeats)
                rows.append({"clients": count, "us_per_token": 1e6 * each, "tokens_per_s": rate})
        finally:
            process.terminate()
            process.wait()
    if options.json:
        print(json.dumps({"stream_us_per_token": 1e6 * alone, "rows": rows}, indent=2))
        return
    print("| clients | us/token of a stream | over LLM.stream | tokens/s together |")
    print("|---:|---:|---:|---:|")
    print(f"| LLM.stream | {1e6 * alone:.1f} | | {1 / alone:.1f} |")
    for row in rows:
        more = row["us_per_token"] - 1e6 * alone
        print(
            f"| {row['clients']} | {row['us_per_token']:.1f} | {more:+.1f} us | "
            f"{row['tokens_per_s']:.1f} |"
        )


if __name__ == "__main__":
    main()
