"""API keys and origins."""

from __future__ import annotations

import socket

import httpx
import pytest

from tests.e2e.calls import CHAT, HELLO, error_of


def test_keys(limited):
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic first"}):
        for reply in (
            limited.get("/v1/models", **headers),
            limited.get("/metrics", **headers),
            limited.get("/openapi.json", **headers),
            limited.post(CHAT, HELLO, **headers),
        ):
            error = error_of(reply, 401)
            assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
            assert reply.headers["www-authenticate"] == "Bearer"
    for key in ("first", "second"):
        assert limited.get("/v1/models", Authorization=f"Bearer {key}").status_code == 200
    odd = {b"Authorization": b"Bearer f\xe9"}
    assert httpx.get(limited.url + "/v1/models", headers=odd, timeout=60).status_code == 401
    assert limited.get("/health").status_code == 200
    assert "first" not in limited.log


def test_key_files(tmp_path):
    from cpmcu.serving.config import ServerConfig

    path = tmp_path / "keys"
    path.write_text("# ours\nabc\n\n  def \n")
    assert ServerConfig(api_key=(f"@{path}", "ghi")).keys() == ["abc", "def", "ghi"]
    path.write_text("# nothing\n")
    with pytest.raises(ValueError, match="has no API keys"):
        ServerConfig(api_key=(f"@{path}",)).keys()
    path.write_bytes(b"caf\xe9\n")
    with pytest.raises(ValueError, match=f"{path} is not UTF-8 text"):
        ServerConfig(api_key=(f"@{path}",)).keys()
    for key in ("", "with space", "schlüssel", "tab\t"):
        with pytest.raises(ValueError, match="API key"):
            ServerConfig(api_key=(key,)).keys()


def test_origins(limited):
    asked = {"Origin": "https://example.org", "Access-Control-Request-Method": "POST"}
    asked["Access-Control-Request-Headers"] = "authorization"
    reply = httpx.options(limited.url + CHAT, headers=asked)
    assert reply.status_code == 200
    assert reply.headers["access-control-allow-origin"] == "https://example.org"
    reply = httpx.options(limited.url + CHAT, headers={**asked, "Origin": "https://evil.org"})
    assert "access-control-allow-origin" not in reply.headers
    asked = {"Access-Control-Request-Method": "POST", "Origin": "https://example.org"}
    asked["Access-Control-Request-Headers"] = "authorization, content-type, x-stainless-lang"
    reply = httpx.options(limited.url + CHAT, headers=asked)  # as OpenAI's JavaScript client does
    assert reply.status_code == 200
    assert "x-stainless-lang" in reply.headers["access-control-allow-headers"]


def test_no_origins_by_default(server):
    reply = server.get("/v1/models", Origin="https://example.org")
    assert not [name for name in reply.headers if name.startswith("access-control")]


def test_a_body_is_not_read_without_a_key(limited):
    """The server answers before the body arrives."""
    with socket.create_connection(("127.0.0.1", limited.port), timeout=10) as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"
        connection.sendall(head.encode())
        assert connection.recv(1000).startswith(b"HTTP/1.1 401")
