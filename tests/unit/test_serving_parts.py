"""Parts of the server that need no server: bytes of tokens, flags, prompts of conversations."""

from __future__ import annotations

import dataclasses

import pytest
from tokenizers_for_tests import TEXT, byte_fallback, byte_level, write_directory

from cpmcu import server
from cpmcu.flags import from_flags
from cpmcu.serving.config import ServerConfig
from cpmcu.serving.token_text import TokenTexts
from cpmcu.tokenizer import Tokenizer


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_bytes_of_tokens_join_to_the_text(make, tmp_path):
    tokenizer = Tokenizer.from_directory(write_directory(tmp_path, make()))
    texts = TokenTexts(tokenizer)
    text = TEXT + " €ß"
    ids = tokenizer.encode(text, add_special_tokens=False)
    joined = b"".join(texts.bytes_of(token) for token in ids).decode()
    assert joined.removeprefix(" ") == text
    assert any("\ufffd" in texts.text_of(token) for token in ids)
    end = tokenizer.id_of("</s>")
    assert (texts.text_of(end), texts.is_shown(end)) == ("</s>", False)
    assert all(texts.is_shown(token) for token in ids)
    assert texts.bytes_of(tokenizer.vocab_size + 5) == b""


def test_every_field_of_the_configuration_is_a_flag():
    parser = server.make_parser()
    flags = ["--host", "::1", "--port", "1", "--api-key", "a", "--api-key", "b", "--max_queue", "3"]
    parsed = parser.parse_args([*flags, "--model", "x", "--max-num-seqs", "4", "--return-metrics"])
    config = from_flags(ServerConfig, parsed)
    assert (config.host, config.port, config.api_key, config.max_queue) == ("::1", 1, ("a", "b"), 3)
    assert config.return_metrics
    text = parser.format_help()
    for field in dataclasses.fields(ServerConfig):
        assert f"--{field.name.replace('_', '-')} " in text


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("port", 65536, "port is 65536"),
        ("max_queue", 0, "max_queue is 0"),
        ("max_body_mib", 0, "max_body_mib"),
        ("shutdown_timeout", 0.0, "shutdown_timeout is 0.0"),
        ("ping_interval", float("inf"), "ping_interval"),
        ("cors_origin", ("http://x/y",), "cors_origin"),
    ],
)
def test_configurations_that_cannot_be(field, value, message):
    with pytest.raises(ValueError, match=message):
        ServerConfig(**{field: value})


def test_the_help_needs_no_web_framework():
    import subprocess
    import sys

    program = (
        "import sys\nfrom cpmcu.server import make_parser\nmake_parser()\n"
        "heavy = {'fastapi', 'uvicorn', 'pydantic', 'tokenizers', 'numpy'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
