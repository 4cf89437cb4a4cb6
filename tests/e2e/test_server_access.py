"""API keys and origins."""

from __future__ import annotations

import socket
import time

import httpx
import pytest

from cpmcu.serving.runtime import listen_on_path
from tests.e2e.calls import CHAT, HELLO, error_of
from tests.e2e.harness import start


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
    with socket.create_connection(("127.0.0.1", limited.port), timeout=60) as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n"
        connection.sendall(head.encode())
        assert connection.recv(1000).startswith(b"HTTP/1.1 401")


def test_pages_of_other_sites_change_nothing(server, limited):
    asked = {"Origin": "https://evil.example"}
    reply = server.post("/reset_prefix_cache", {}, **asked)
    assert reply.status_code == 403
    assert "--cors-origin" in reply.json()["error"]["message"]
    reply = server.post("/v1/messages", {}, **asked)
    assert reply.status_code == 403 and reply.json()["type"] == "error"
    own = {"Origin": server.url}
    assert server.post("/reset_prefix_cache", {}, **own).status_code == 200
    behind_tls = {"Origin": "https://me.example", "X-Forwarded-Host": "me.example"}
    assert server.post("/reset_prefix_cache", {}, **behind_tls).status_code == 200
    same = {"Origin": "https://me.example", "Sec-Fetch-Site": "same-origin"}
    assert server.post("/reset_prefix_cache", {}, **same).status_code == 200
    assert server.get("/v1/models", **asked).status_code == 200
    allowed = {"Origin": "https://example.org", "Authorization": "Bearer first"}
    assert limited.post("/reset_prefix_cache", {}, **allowed).status_code == 200
    other = {**allowed, "Origin": "https://evil.example"}
    assert limited.post("/reset_prefix_cache", {}, **other).status_code == 403


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example"])
def test_names_that_lead_to_this_machine(server, host):
    """DNS rebinding: a page of this site would read the answers."""
    reply = server.get("/v1/models", Host=host)
    assert reply.status_code == 403
    assert "--allowed-hosts" in reply.json()["error"]["message"]


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "[::1]:80", "a.localhost"])
def test_names_of_this_machine(server, limited, host):
    assert server.get("/v1/models", Host=host).status_code == 200
    assert limited.get("/health", Host="any.example").status_code == 200  # it has keys


def test_a_socket_instead_of_a_port(tmp_path):
    path = tmp_path / "cpmcu.sock"
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(path))
    stale.close()
    with start("--uds", str(path), ready=False) as running:
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://any.example", timeout=60) as client:
            while client.get("/health").status_code != 200:
                time.sleep(0.05)
            body = {"prompt": "a", "max_tokens": 2}
            assert client.post("/completions", json=body).json()["usage"]["completion_tokens"] == 2
        with pytest.raises(OSError, match="another server listens there; stop it"):
            listen_on_path(str(path))
        assert running.stop() == 0 and not path.exists()
    (tmp_path / "file").write_text("kept")
    with pytest.raises(OSError, match=r"cannot listen on .*it is no socket, expected"):
        listen_on_path(str(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "kept"


def raw(port: int, request: str) -> str:
    """Sends bytes as they are; returns everything up to the end of the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(request.encode())
        received = b""
        while part := connection.recv(1 << 16):
            received += part
    return received.decode()


def test_a_target_with_a_host(server):
    request = f"GET {server.url}/version?a=1 HTTP/1.1\r\nHost: other\r\nConnection: close\r\n\r\n"
    assert raw(server.port, request).startswith("HTTP/1.1 200")
    request = request.replace(server.url, "http://evil.example")
    assert raw(server.port, request).startswith("HTTP/1.1 403")


def test_a_body_with_two_lengths_ends_the_connection(server):
    request = (
        "POST /reset_prefix_cache HTTP/1.1\r\nHost: localhost\r\nContent-Length: 6\r\n"
        "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    )
    smuggled = "GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
    answered = raw(server.port, request + smuggled)
    assert answered.startswith("HTTP/1.1 200") and answered.count("HTTP/1.1") == 1


@pytest.mark.parametrize("path", ["/chat/completions", "/completions", "/models"])
def test_paths_without_v1(server, path):
    found, known = (server.get(f"{prefix}{path}") for prefix in ("", "/v1"))
    assert found.status_code == known.status_code != 404
    assert server.get("/modelsx").status_code == 404
