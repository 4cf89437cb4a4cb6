"""A real server process, and a model with scripted answers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx
import numpy as np
import openai
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from cpmcu.text.token_text import byte_letters
from tests.python_path import python_path
from tests.reference.tiny_checkpoints import random_weights, tiny_config, write_tiny

ROOT = Path(__file__).parents[2]


class Server:
    """A running server. `log`: its log so far."""

    def __init__(self, process: subprocess.Popen[bytes], log_path: Path, port: int) -> None:
        self.process = process
        self._log_path = log_path
        self.url = f"http://127.0.0.1:{port}"
        self.port = port

    @property
    def log(self) -> str:
        return self._log_path.read_text("utf-8", "replace")

    def client(self, key: str = "none", **options: object) -> openai.OpenAI:
        options = {"max_retries": 0, "timeout": 120, **options}
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, **options)

    def async_client(self, key: str = "none") -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=120
        )

    def post(self, path: str, body: object, **headers: str) -> httpx.Response:
        return httpx.post(self.url + path, json=body, headers=headers, timeout=60)

    def get(self, path: str, **headers: str) -> httpx.Response:
        return httpx.get(self.url + path, headers=headers, timeout=60)

    def metric(self, name: str, **headers: str) -> float:
        """Returns the sum of a metric over its labels."""
        text = self.get("/metrics", **headers).text
        found = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        assert found, f"{name} is not among the metrics"
        return sum(map(float, found))

    def wait_idle(self, seconds: float = 60.0, **headers: str) -> None:
        """Waits until no slot is in use."""
        start = time.monotonic()
        while self.metric("vllm:num_requests_running", **headers):
            assert time.monotonic() - start < seconds, "slots are still in use"
            time.sleep(0.02)

    def wait_left(self) -> None:
        """Waits until no slot is in use. No output may have reached its token limit meanwhile."""
        before = self._num_at_limit()
        self.wait_idle()
        assert self._num_at_limit() == before, "a request ran on"

    def _num_at_limit(self) -> float:
        pattern = r'^vllm:request_success_total{[^}]*finished_reason="length"[^}]*} (\S+)$'
        return sum(map(float, re.findall(pattern, self.get("/metrics").text, re.MULTILINE)))

    def leave(self, path: str, body: object, running: int) -> None:
        """Posts a request and disconnects once `running` outputs run."""
        text = json.dumps(body)
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as connection:
            connection.sendall(f"{head}Content-Length: {len(text)}\r\n\r\n{text}".encode())
            start = time.monotonic()
            while self.metric("vllm:num_requests_running") < running:
                assert time.monotonic() - start < 60, "the request does not run"
                time.sleep(0.02)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Sends a signal and returns the exit status."""
        self.process.send_signal(number)
        return self.process.wait(60)


@contextlib.contextmanager
def start(*flags: str, ready: bool = True, environment: Mapping[str, str] = {}) -> Iterator[Server]:
    """Runs `python -m cpmcu.server` on a free port until the end of the block.

    Without a model in `flags` it serves the shipped one, whatever chat model is installed.
    """
    command = [sys.executable, "-m", "cpmcu.server", "--port", "0", "--num-threads", "1"]
    command += ["--device", "cpu", *flags]
    if not any(flag.startswith("--model") for flag in command):
        command += ["--model-path", "tiny-python-minicpm"]
    environment = {**os.environ, "PYTHONPATH": python_path(ROOT), **environment}
    with tempfile.TemporaryDirectory() as folder:
        log_path = Path(folder) / "log"
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=ROOT
            )
        try:
            server = Server(process, log_path, _port(process, log_path))
            if ready:
                _wait_ready(server)
            yield server
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()


def _port(process: subprocess.Popen[bytes], log_path: Path) -> int:
    for _ in range(3000):
        text = log_path.read_text("utf-8", "replace")
        found = re.search(r"listening on (?:http://[\d.]+:(\d+)|the Unix)", text)
        if found:
            return int(found[1] or 0)  # 0: a Unix domain socket
        assert process.poll() is None, f"the server ended: {text}"
        time.sleep(0.02)
    raise AssertionError(f"the server does not listen: {text}")


def _wait_ready(server: Server) -> None:
    for _ in range(3000):
        if httpx.get(server.url + "/health", timeout=60).status_code == 200:
            return
        assert server.process.poll() is None, f"the server ended: {server.log}"
        time.sleep(0.02)
    raise AssertionError(f"the server does not get ready: {server.log}")


# ---- a model with scripted answers

EOS = 2
SPECIAL = ("<unk>", "<s>", "</s>")


def cue(name: str) -> str:
    """Returns the special token that starts script `name`."""
    return f"<|{name}|>"


def write_scripted(
    directory: Path,
    scripts: Mapping[str, str],
    template: str,
    special: Sequence[str] = (),
    **members: object,
) -> Path:
    """Writes a Llama checkpoint that continues `cue(name)` with `scripts[name]` and then ends.

    The layers add nothing to the residual stream, so the last token alone determines the next one.
    If token b follows token a, row b of the head is the embedding of a. No token may occur twice.
    So each text is cut into pieces of 1 to 4 bytes that no other text uses. `special`: texts of
    special tokens. `members`: further ones of config.json.
    """
    letters = {byte: letter for letter, byte in byte_letters().items()}
    vocab = {token: i for i, token in enumerate(SPECIAL)}
    for byte in range(256):
        vocab[letters[byte]] = len(vocab)
    cues = {name: vocab.setdefault(cue(name), len(vocab)) for name in scripts}
    follows: dict[int, int] = {}
    used: set[bytes] = set()
    for name, text in scripts.items():
        last = cues[name]
        for part in re.split(f"({'|'.join(map(re.escape, special))})", text) if special else [text]:
            names = [part] if part in special else []
            for piece in () if names else _cut(part.encode("utf-8"), used) or ():
                names.append("".join(letters[byte] for byte in piece))
            for token in (vocab.setdefault(name, len(vocab)) for name in names):
                follows[last] = token
                last = token
        follows[last] = EOS

    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token in (*SPECIAL, *map(cue, cues), *special)
        ]
    )
    size = {"vocab_size": len(vocab), "hidden_size": 128, "num_hidden_layers": 1, **members}
    config = tiny_config("llama", **size)
    weights = random_weights(config)
    embedding = np.random.default_rng(0).standard_normal((len(vocab), 128)).astype(np.float32)
    head = np.zeros_like(embedding)
    for token, successor in follows.items():
        head[successor] += embedding[token]
    weights["model.embed_tokens.weight"], weights["lm_head.weight"] = embedding, head
    weights["model.norm.weight"][:] = 1
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name][:] = 0
    write_tiny(directory, "llama", weights=weights, **size)
    tokenizer.save(str(directory / "tokenizer.json"))
    fields = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(fields), encoding="utf-8")
    return directory


def _cut(text: bytes, used: set[bytes]) -> list[bytes] | None:
    """Cuts `text` into pieces not in `used` and adds them to it; None if impossible."""
    if not text:
        return []
    for length in range(1, len(text) + 1):
        piece = text[:length]
        if piece in used:
            continue
        used.add(piece)
        rest = _cut(text[length:], used)
        if rest is not None:
            return [piece, *rest]
        used.remove(piece)
    return None
