"""The ASGI application: routes found by scanning, errors, limits, keys, logs."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.middleware.cors import CORSMiddleware

import cpmcu
from cpmcu.serving import routes
from cpmcu.serving.auth import Authentication
from cpmcu.serving.errors import add_handlers
from cpmcu.serving.limits import BodyLimit
from cpmcu.serving.logs import RequestLog
from cpmcu.serving.service import Service


def create_app(service: Service) -> FastAPI:
    """The application around a service, which may still be loading.

    Raises what ServerConfig.keys does.
    """
    config = service.config
    app = FastAPI(title="cpmcu", version=cpmcu.__version__, docs_url="/docs", redoc_url=None)
    app.state.service = service
    public: set[str] = set()
    for module in routes.modules():
        app.include_router(module.router)
        public.update(getattr(module, "PUBLIC", ()))
    add_handlers(app)
    # The last one added is the first that a request meets.
    app.add_middleware(BodyLimit, max_bytes=config.max_body_mib << 20)
    app.add_middleware(Authentication, keys=config.keys(), public=public)
    if config.cors_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.cors_origin),
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type", "X-Request-Id"],
            expose_headers=["X-Request-Id"],
        )
    app.add_middleware(RequestLog)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


def _openapi(app: FastAPI) -> dict[str, Any]:
    """The schema, with keys, and without the 422 that is never sent here."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        bearer = {"bearer": {"type": "http", "scheme": "bearer"}}
        schema.setdefault("components", {})["securitySchemes"] = bearer
        for path in schema["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
                operation["security"] = [{}, {"bearer": []}]
        app.openapi_schema = schema
    return app.openapi_schema
