"""Builds the ASGI application from the modules of `routes` and the middleware."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.middleware.cors import CORSMiddleware

import cpmcu
from cpmcu.serving import routes
from cpmcu.serving.config import ServerConfig
from cpmcu.serving.errors import add_handlers
from cpmcu.serving.http.auth import Authentication
from cpmcu.serving.http.connection import OneLength
from cpmcu.serving.http.limits import BodyLimit
from cpmcu.serving.http.origins import Origins, is_loopback
from cpmcu.serving.http.paths import Paths
from cpmcu.serving.http.request_log import RequestLog
from cpmcu.serving.protocol.base import ERRORS
from cpmcu.serving.service import Service
from cpmcu.verification import is_lossy

# Lists, objects and members of a body outside messages, such as tool schemas.
_OTHER_PARTS = 1 << 14
_ERROR = "#/components/schemas/ErrorResponse"


def create_app(service: Service) -> FastAPI:
    """Creates the application of a service. The service may still be loading.

    Raises the exceptions of ServerConfig.keys.
    """
    config = service.config
    app = FastAPI(title="cpmcu", version=cpmcu.__version__, docs_url="/docs", redoc_url=None)
    app.state.service = service
    public: set[str] = set()
    for module in routes.modules():
        app.include_router(module.router)
        public.update(getattr(module, "PUBLIC", ()))
    add_handlers(app)
    keys = config.keys()
    # A request passes the middleware in reverse order: the last one added runs first.
    app.add_middleware(
        BodyLimit,
        max_bytes=config.max_body_mib << 20,
        max_values=config.max_body_values,
        max_parts=8 * config.max_messages + _OTHER_PARTS,
        seconds=config.body_timeout,
    )
    app.add_middleware(Authentication, keys=keys, public=public)
    if config.cors_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.cors_origin),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],  # OpenAI's client sends a dozen headers of its own
            expose_headers=["X-Request-Id", "X-Verify-Strategy"],
        )
    app.add_middleware(Origins, hosts=_hosts(config, keys), origins=config.cors_origin)
    strategy = service.verify_strategy
    lossy = {"x-verify-strategy": f"{strategy}; lossy"} if is_lossy(strategy) else {}
    app.add_middleware(RequestLog, headers=lossy)
    app.add_middleware(OneLength)
    app.add_middleware(Paths, root=config.root_path)
    keyless = public if keys else None
    app.openapi = lambda: _openapi(app, keyless, config.root_path)  # type: ignore[method-assign]
    return app


def _hosts(config: ServerConfig, keys: Collection[str]) -> Sequence[str] | None:
    """The names that Host may have; None: any. If there are keys, any: a page knows no key."""
    if config.allowed_hosts:
        return config.allowed_hosts
    return () if is_loopback(config.host) and not keys and not config.uds else None


def _openapi(app: FastAPI, public: Collection[str] | None, root_path: str) -> dict[str, Any]:
    """The OpenAPI schema, without status 422, which this server never sends.

    `public`: the paths that need no API key; None if the server has no keys.
    """
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        schemes = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
        if root_path:
            schema["servers"] = [{"url": root_path}]
        schema["components"]["securitySchemes"] = schemes
        for path, operations in schema["paths"].items():
            for operation in operations.values():
                operation["responses"].pop("422", None)
                if public is not None and path not in public:
                    operation["security"] = [{name: []} for name in schemes]
                    missing = {
                        "description": ERRORS[401]["description"],
                        "content": {"application/json": {"schema": {"$ref": _ERROR}}},
                    }
                    operation["responses"].setdefault("401", missing)
        app.openapi_schema = schema
    return app.openapi_schema
