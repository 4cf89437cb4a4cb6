"""The server's log has no line for each write to a client that has left."""

from __future__ import annotations

import subprocess
import sys

LEAVING = """
import asyncio, logging, socket, struct
from cpmcu.serving import logs

async def main():
    written = asyncio.get_running_loop().create_future()

    class Server(asyncio.Protocol):
        def connection_made(self, transport):
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
            for _ in range(20):  # without a turn of the loop
                transport.write(b"data")
            written.set_result(None)

    server = await asyncio.get_running_loop().create_server(Server, "127.0.0.1", 0)
    client = socket.create_connection(server.sockets[0].getsockname())
    await written
    server.close()

if CONFIGURED:
    logs.configure("text", "info")
asyncio.run(main())
logging.getLogger("asyncio").warning("something else")
"""


def errors_of(configured: bool) -> str:
    command = [sys.executable, "-c", f"CONFIGURED = {configured}\n{LEAVING}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return done.stderr


def test_writes_to_a_client_that_has_left() -> None:
    assert "socket.send() raised exception" in errors_of(configured=False)
    said = errors_of(configured=True)
    assert "socket.send()" not in said
    assert said.count("something else") == 1
