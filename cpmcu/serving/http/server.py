"""uvicorn with the application: time limits, and a graceful shutdown."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import time
from concurrent.futures import Future

import uvicorn

from cpmcu.serving.app import create_app
from cpmcu.serving.http.connection import with_deadlines
from cpmcu.serving.model import Model
from cpmcu.serving.service import Service

logger = logging.getLogger("cpmcu.server")

_KEEP_ALIVE_SECONDS = 65  # longer than clients keep idle connections, so the client closes first
_LAST_WORDS_SECONDS = 5.0  # time to send the responses that were aborted at the deadline
_HASTY_SECONDS = 1.0  # the same after a second Ctrl-C
_CUT_OFF_SECONDS = 0.5  # time to send errors to the requests still open


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


class Server(uvicorn.Server):
    """uvicorn's server with a shutdown deadline for requests. It stops if loading fails."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self.service = service

    def loaded(self, loading: Future[Model]) -> None:
        """Takes the loaded model, on any thread, or stops if loading failed."""
        if loading.exception() is not None:
            self.should_exit = True
            return
        self.service.take(loading.result())
        gc.freeze()  # keeps later collections, which hold the GIL, short

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
