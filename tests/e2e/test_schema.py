"""Requests generated from the OpenAPI schema: every answer conforms to the schema."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings

schemathesis = pytest.importorskip("schemathesis")

from schemathesis import GenerationMode  # noqa: E402
from schemathesis.checks import not_a_server_error  # noqa: E402
from schemathesis.config import SchemathesisConfig  # noqa: E402
from schemathesis.specs.openapi.checks import (  # noqa: E402
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
OPERATIONS = (
    "post /ping",
    "post /v1/chat/completions",
    "post /v1/chat/completions/batch",
    "post /v1/chat/completions/input_tokens",
    "post /v1/completions",
    "post /v1/embeddings",
    "post /infill",
    "post /completion",
    "post /apply-template",
    "post /invocations",
    "get /props",
    "get /slots",
    "post /v1/responses",
    "post /v1/responses/input_tokens",
    "get /v1/responses/{response_id}",
    "delete /v1/responses/{response_id}",
    "post /v1/responses/{response_id}/cancel",
    "get /v1/responses/{response_id}/input_items",
    "post /v1/messages",
    "post /v1/messages/count_tokens",
    "get /v1/models",
    "get /v1/models/{name}",
    "post /tokenize",
    "post /detokenize",
    "get /tokenizer_info",
    "get /health",
    "get /load",
    "get /version",
    "get /metrics",
    "get /ping",
    "post /reset_prefix_cache",
)
KEY = {"Authorization": "Bearer first"}
# The coverage phase is off: it tries hundreds of combinations of each operation.
CONFIG = SchemathesisConfig.from_dict({"phases": {"coverage": {"enabled": False}}})


@pytest.fixture(scope="module")
def api(limited):
    return schemathesis.openapi.from_url(f"{limited.url}/openapi.json", headers=KEY, config=CONFIG)


def modes(operation: str) -> list[GenerationMode]:
    """Valid requests and, if the schema excludes any, invalid ones."""
    has_body = operation.startswith("post") and operation != "post /ping"
    return list(GenerationMode) if has_body else [GenerationMode.POSITIVE]


@pytest.mark.parametrize(
    ("operation", "mode"),
    [(operation, mode) for operation in OPERATIONS for mode in modes(operation)],
)
def test_operation(api, operation, mode):
    method, path = operation.split()
    cases = api[path][method].as_strategy(generation_mode=mode)

    @settings(
        max_examples=12,
        deadline=None,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases)
    def run(case):
        case.call_and_validate(headers=KEY, checks=CHECKS)

    run()


def test_every_operation_is_described(limited):
    paths = limited.get("/openapi.json", **KEY).json()["paths"]
    found = {f"{method} {path}" for path, methods in paths.items() for method in methods}
    assert found == set(OPERATIONS)
    for path, methods in paths.items():
        for operation in methods.values():
            assert "422" not in operation["responses"]
            assert ("401" in operation["responses"]) == (path not in ("/health", "/ping"))
