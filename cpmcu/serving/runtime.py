"""The server process: socket, event loop, loading thread and graceful shutdown."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time

import uvicorn

from cpmcu.config import EngineConfig
from cpmcu.errors import sentence
from cpmcu.serving import logs
from cpmcu.serving.app import create_app
from cpmcu.serving.config import ServerConfig
from cpmcu.serving.connection import with_deadlines
from cpmcu.serving.service import Service

logger = logging.getLogger("cpmcu.server")

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_KEEP_ALIVE_SECONDS = 65  # longer than clients keep idle connections, so the client closes first
SWITCH_SECONDS = 0.0005
_LAST_WORDS_SECONDS = 5.0  # time to send the responses that were aborted at the deadline
_HASTY_SECONDS = 1.0  # the same after a second Ctrl-C
_CUT_OFF_SECONDS = 0.5  # time to send errors to the requests still open


def run(config: ServerConfig, engine_config: EngineConfig) -> int:
    """Serves until SIGTERM or Ctrl-C. Returns the exit status.

    Both signals are ignored afterwards, so a second one cannot interrupt the exit. Raises OSError
    if the server cannot listen on the address, and the exceptions of ServerConfig.keys.
    """
    # Limits the time that the engine's thread waits for the GIL while the event loop holds it.
    sys.setswitchinterval(SWITCH_SECONDS)
    logs.configure(config.log_format, config.log_level)
    server = make_server(Service(engine_config, config))
    for number in _SIGNALS:  # uvicorn's own handlers cover only a part of the run
        signal.signal(number, server.handle_exit)
    loader = threading.Thread(target=server.load, name="cpmcu-load", daemon=True)
    try:
        listener = listen(config.host, config.port)
        loader.start()
        server.run(sockets=[listener])
    finally:
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        server.service.close()
    status = 1 if server.failed else 0
    if loader.is_alive():  # the thread cannot be stopped and must not outlive the interpreter
        logging.shutdown()
        os._exit(status)
    return status


def make_server(service: Service) -> Server:
    """Creates the server of a service, which may still be loading.

    Raises the exceptions of ServerConfig.keys.
    """
    config = service.config
    uvicorn_config = uvicorn.Config(
        create_app(service),
        http=with_deadlines(config.header_timeout, config.body_timeout),
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=int(config.shutdown_timeout + _LAST_WORDS_SECONDS) + 2,
    )
    return Server(uvicorn_config, service)


_TRY = (
    "/v1/chat/completions -H 'Content-Type: application/json' "
    """-d '{"messages": [{"role": "user", "content": "Hello"}]}'"""
)


def listen(host: str, port: int) -> socket.socket:
    """Returns a listening socket and logs its address. Raises OSError if listening fails."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only if the socket's protocol is IPPROTO_TCP, not 0.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {host} port {port}: {error.strerror}") from error
    shown = f"[{host}]" if family == socket.AF_INET6 else host
    address = f"http://{shown}:{listener.getsockname()[1]}"
    logger.info("listening on %s", address)
    logger.info("to try: curl %s%s", address, _TRY)
    return listener


class Server(uvicorn.Server):
    """uvicorn's server with a shutdown deadline for requests. It stops if loading fails."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self.failed = False
        self.service = service

    def load(self) -> None:
        """Loads the model. Runs on its own thread."""
        try:
            self.service.load()
            # Frozen objects keep later collections, which hold the GIL, short.
            gc.collect()
            gc.freeze()
        except Exception as error:
            debug = bool(os.environ.get("CPMCU_DEBUG"))
            shown = error if debug else None
            logger.error("the model cannot be loaded: %s", sentence(error), exc_info=shown)
            self.failed = True
            self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accepts no new requests and waits for the open ones until the deadline."""
        self.service.stop()
        logger.info(
            "stopping: open requests have %g s to finish", self.service.config.shutdown_timeout
        )
        ending = asyncio.create_task(self._end_requests())
        try:
            await super().shutdown(sockets)
            if self.force_exit:  # after a second Ctrl-C uvicorn does not wait
                await ending
        finally:
            ending.cancel()
            self.service.cancel_all()

    async def _end_requests(self) -> None:
        """Ends open requests at the deadline or after a second Ctrl-C.

        A generating request ends with finish reason "abort". Any other, such as one whose body is
        incomplete, gets a 503. A connection that cannot be written to is closed.
        """
        tasks, connections = self.server_state.tasks, self.server_state.connections
        deadline = time.monotonic() + self.service.config.shutdown_timeout
        while time.monotonic() < deadline and not self.force_exit:
            await asyncio.sleep(0.05)
        self.service.cancel_all()
        deadline = time.monotonic() + _LAST_WORDS_SECONDS
        hasty = time.monotonic() + _HASTY_SECONDS
        while connections and time.monotonic() < (hasty if self.force_exit else deadline):
            await asyncio.sleep(0.05)
        for task in list(tasks):
            task.cancel()
        if tasks:
            await asyncio.wait(list(tasks), timeout=_CUT_OFF_SECONDS)
        for connection in list(connections):
            connection.transport.abort()
