"""The server process: socket, loading thread, imports meanwhile, and shutdown."""

from __future__ import annotations

import errno
import gc
import ipaddress
import logging
import os
import signal
import socket
import sys
import threading
from concurrent.futures import Future
from pathlib import Path

from cpmcu.config import EngineConfig
from cpmcu.errors import sentence
from cpmcu.loading import exiting
from cpmcu.serving import logs
from cpmcu.serving.config import ServerConfig
from cpmcu.serving.model import Model

logger = logging.getLogger("cpmcu.server")

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Maximum wait for the loading thread; enough unless the files come from a network.
_HEAD_START_SECONDS = 1.0
SWITCH_SECONDS = 0.0005


def run(config: ServerConfig, engine_config: EngineConfig) -> int:
    """Serves until SIGTERM or Ctrl-C. Returns the exit status.

    The web framework is imported while weights are read. Both signals are ignored afterwards, so a
    second one cannot interrupt the exit. Raises OSError if the server cannot listen on the address,
    ImportError if a package is missing, and the exceptions of ServerConfig.keys.
    """
    # Limits the time that the engine's thread waits for the GIL while another thread holds it.
    sys.setswitchinterval(SWITCH_SECONDS)
    logs.configure(config.log_format, config.log_level)
    keys = config.keys()  # a file that cannot be read ends the program before anything else
    listener = listen_on_path(config.uds) if config.uds else listen(config.host, config.port)
    if not keys and not config.uds:
        warn_if_open(listener)
    gc.disable()  # imports leave little garbage, and collections would take 0.1 s of the start
    loading: Future[Model] = Future()
    reads_weights = threading.Event()
    thread = threading.Thread(
        target=_load,
        args=(loading, reads_weights, engine_config, config),
        name="cpmcu-load",
        daemon=True,
    )
    status = 0
    try:
        thread.start()
        # The thread needs the GIL until it reads weights, and imports would take it.
        reads_weights.wait(_HEAD_START_SECONDS)
        status = _serve(listener, loading, engine_config, config)
    finally:
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        if config.uds:
            Path(config.uds).unlink(missing_ok=True)
    if thread.is_alive():  # the thread cannot be stopped and must not outlive the interpreter
        logging.shutdown()
        os._exit(status)
    return status


def _load(
    loading: Future[Model],
    reads_weights: threading.Event,
    engine_config: EngineConfig,
    config: ServerConfig,
) -> None:
    """Loads the model, on its own thread. Logs why it cannot be loaded."""
    try:
        with exiting.waited_for():
            model = Model.load(engine_config, config, lambda llm: reads_weights.set())
    except Exception as error:
        shown = error if os.environ.get("CPMCU_DEBUG") else None
        logger.error("the model cannot be loaded: %s", sentence(error), exc_info=shown)
        loading.set_exception(error)
    else:
        loading.set_result(model)
    finally:
        reads_weights.set()


def _serve(
    listener: socket.socket,
    loading: Future[Model],
    engine_config: EngineConfig,
    config: ServerConfig,
) -> int:
    """Builds the application and serves, with the model as soon as it is loaded."""
    if _has_failed(loading):
        return 1
    from cpmcu.serving.http.server import make_server  # takes 0.6 s
    from cpmcu.serving.service import Service

    server = make_server(Service(engine_config, config))
    gc.freeze()  # keeps later collections, which hold the GIL, short
    gc.enable()
    try:
        for number in _SIGNALS:  # uvicorn's own handlers cover only a part of the run
            signal.signal(number, server.handle_exit)
        loading.add_done_callback(server.loaded)
        if not server.should_exit:
            server.run(sockets=[listener])
    finally:
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        server.service.close()
    return 1 if _has_failed(loading) else 0


def _has_failed(loading: Future[Model]) -> bool:
    return loading.done() and loading.exception() is not None


_TRY = (
    "/v1/chat/completions -H 'Content-Type: application/json' "
    """-d '{"messages": [{"role": "user", "content": "Hello"}]}'"""
)


def listen_on_path(path: str) -> socket.socket:
    """Returns a listening Unix domain socket and logs it. Raises OSError if listening fails.

    A socket that a server left behind is replaced; any other file stays.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if Path(path).is_socket():
            if listener.connect_ex(path) == 0:
                reason = "another server listens there; stop it or give another --uds"
                raise OSError(errno.EADDRINUSE, reason)
            Path(path).unlink()
        elif Path(path).exists():
            raise OSError(errno.EEXIST, "it is no socket, expected a socket or a new path")
        listener.bind(path)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {path}: {error.strerror or error}") from error
    logger.info("listening on the Unix domain socket %s", path)
    logger.info("to try: curl --unix-socket %s http://localhost%s", path, _TRY)
    return listener


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
        taken = error.errno == errno.EADDRINUSE
        hint = "; give another --port, or 0 for a free one" if taken else ""
        raise OSError(f"cannot listen on {host} port {port}: {error.strerror}{hint}") from error
    shown = f"[{host}]" if family == socket.AF_INET6 else host
    address = f"http://{shown}:{listener.getsockname()[1]}"
    logger.info("listening on %s", address)
    logger.info("to try: curl %s%s", address, _TRY)
    return listener


def warn_if_open(listener: socket.socket) -> None:
    """Logs a warning if other machines may reach a listening socket."""
    address = listener.getsockname()[0]
    if not ipaddress.ip_address(address).is_loopback:
        logger.warning(
            "other machines can use this server without an API key, since it listens on %s: give "
            "--api-key KEY, or --host 127.0.0.1",
            address,
        )
