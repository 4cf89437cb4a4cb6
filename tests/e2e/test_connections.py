"""Connections: socket options, keep-alive, and slow requests."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from cpmcu.config import EngineConfig
from cpmcu.serving import runtime
from cpmcu.serving.config import ServerConfig
from cpmcu.serving.http.server import Server, make_server
from cpmcu.serving.service import Service

BODY = b'{"prompt": "x"}'
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
GET = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"


@contextlib.contextmanager
def serving(**options: object) -> Iterator[tuple[Server, tuple[str, int]]]:
    """The server as `python -m cpmcu.server` runs it, without its model, and its address."""
    server = make_server(Service(EngineConfig(device="cpu"), ServerConfig(**options)))
    listener = runtime.listen(server.service.config.host, 0)
    address = listener.getsockname()[:2]
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield server, address
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def impatient() -> Iterator[tuple[str, int]]:
    with serving(header_timeout=1.5, body_timeout=1.5) as (_, address):
        yield address


def connect(address: tuple[str, int]) -> socket.socket:
    return socket.create_connection(address, timeout=60)


def read_reply(connection: socket.socket) -> tuple[bytes, bytes]:
    """Head and body of one response."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += connection.recv(65536)
    head, _, body = received.partition(b"\r\n\r\n")
    lengths = [line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
    while len(body) < int(lengths[0].split(b":")[1]):
        body += connection.recv(65536)
    return head, body


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_replies_do_not_wait_for_acknowledgements(host):
    """Nagle's algorithm would hold back the second packet of a reply for 40 ms."""
    if host == "::1" and not socket.has_ipv6:
        pytest.skip("needs IPv6")
    try:
        running = serving(host=host)
        server, address = running.__enter__()
    except OSError as error:
        pytest.skip(f"needs {host}: {error}")
    with contextlib.ExitStack() as stack:
        stack.push(running)
        first, second = (stack.enter_context(connect(address)) for _ in range(2))
        for connection in (first, second, first):
            connection.sendall(GET)
            assert read_reply(connection)[0].startswith(b"HTTP/1.1 200")
        connections = list(server.server_state.connections)
        assert len(connections) == 2
        for connection in connections:
            accepted = connection.transport.get_extra_info("socket")
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_late_headers_are_refused(impatient):
    with connect(impatient) as connection:
        connection.sendall(POST)
        head, body = read_reply(connection)
        assert head.startswith(b"HTTP/1.1 408")
        error = json.loads(body)["error"]
        assert error["message"] == "The request's headers did not arrive within 1.5 s."
        assert connection.recv(1) == b""


def test_headers_that_never_end_are_refused(impatient):
    """The limit applies to all headers together, not to each line."""
    begin = time.monotonic()
    with connect(impatient) as connection:
        connection.sendall(b"GET /version HTTP/1.1\r\n")
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - begin < 60:
                connection.sendall(b"X-Slow: 1\r\n")
                time.sleep(0.02)
        assert time.monotonic() - begin < 60


def test_a_connection_without_a_request_is_closed(impatient):
    """A browser opens idle connections. An unsolicited response would answer its next request."""
    with connect(impatient) as connection:
        assert connection.recv(1) == b""


def test_headers_of_a_later_request_are_timed_too(impatient):
    with connect(impatient) as connection:
        connection.sendall(GET)
        assert read_reply(connection)[0].startswith(b"HTTP/1.1 200")
        time.sleep(2)  # idle: no request has begun
        connection.sendall(GET)
        assert read_reply(connection)[0].startswith(b"HTTP/1.1 200")
        connection.sendall(GET[:10])
        assert read_reply(connection)[0].startswith(b"HTTP/1.1 408")


def test_a_late_body_is_refused(impatient):
    with connect(impatient) as connection:
        connection.sendall(POST + b"Content-Length: 15\r\n\r\n" + BODY[:7])
        head, body = read_reply(connection)
        assert head.startswith(b"HTTP/1.1 408")
        assert b"connection: close" in head.lower()
        error = json.loads(body)["error"]
        assert error["message"] == "The request body did not arrive within 1.5 s."
        assert connection.recv(1) == b""


def test_an_unread_body_does_not_hold_the_connection(impatient):
    """The answer precedes the body, whose sender continues slowly."""
    begin = time.monotonic()
    with connect(impatient) as connection:
        connection.sendall(
            b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n"
        )
        assert read_reply(connection)[0].startswith(b"HTTP/1.1 404")
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - begin < 60:
                connection.sendall(b"x")
                time.sleep(0.02)
        assert time.monotonic() - begin < 60


def test_a_body_in_pieces_that_comes_in_time_is_read(impatient):
    with connect(impatient) as connection:
        connection.sendall(POST)
        for piece in (b"Content-Length: 15\r\n\r\n", BODY[:7], BODY[7:]):
            time.sleep(0.1)
            connection.sendall(piece)
        assert read_reply(connection)[0].startswith(b"HTTP/1.1 503")  # there is no model
        connection.sendall(GET + GET)  # the second waits for the first
        assert read_reply(connection)[0].startswith(b"HTTP/1.1 200")
