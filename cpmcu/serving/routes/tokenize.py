"""/tokenize, /detokenize and /tokenizer_info."""

from __future__ import annotations

import functools
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from cpmcu.serving.chat.conversation import checked, render
from cpmcu.serving.errors import ApiError
from cpmcu.serving.generation import encode
from cpmcu.serving.http import strict_json
from cpmcu.serving.http.limits import check_text
from cpmcu.serving.protocol.base import ERRORS
from cpmcu.serving.protocol.other import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
)
from cpmcu.serving.replies import service_of, written
from cpmcu.serving.service import Service
from cpmcu.text.token_text import TokenTexts

router = APIRouter(
    tags=["tokens"], responses={k: ERRORS[k] for k in (400, 401, 404, 408, 413, 503)}
)


@router.post("/tokenize", response_model=TokenizeResponse)
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """The tokens of a text, or of a conversation rendered by the chat template."""
    service = service_of(request)
    body.check()
    service.check_model(body.model)
    return await service.workers.run(request, body.text_length, _tokenize, service, body)


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> DetokenizeResponse:
    """The text of tokens, including special tokens."""
    service = service_of(request)
    body.check_extra()
    service.check_model(body.model)
    model = service.model
    check_ids(body.tokens, model.llm.spec.vocab_size)
    decode = functools.partial(model.llm.tokenizer.decode, skip_special_tokens=False)
    text = await service.workers.run(request, len(body.tokens), decode, body.tokens)
    return DetokenizeResponse(prompt=text, content=text)


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> TokenizerInfo:
    """The members of tokenizer_config.json, the special tokens and the chat template."""
    model = service_of(request).model
    tokenizer = model.llm.tokenizer
    stated = {name: value for name, value in tokenizer.config.items() if _is_json(value)}
    own: dict[str, Any] = {
        **tokenizer.special_tokens,
        "tokenizer_class": str(stated.get("tokenizer_class") or _CLASS),
        "chat_template": None if model.template is None else model.template.source,
        "max_model_len": model.llm.max_length,
    }
    return TokenizerInfo(**{**stated, **own})


# The class that transformers uses if tokenizer_config.json names none.
_CLASS = "PreTrainedTokenizerFast"


def _is_json(value: Any) -> bool:
    try:
        strict_json.write(value)
    except ValueError:
        return False
    return True


def check_ids(tokens: list[int], vocab_size: int) -> None:
    """Raises ApiError (400) for a token id outside the vocabulary."""
    wrong = next((token for token in tokens if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise ApiError(
            400,
            f"The token id {wrong} is outside the vocabulary of {vocab_size} tokens.",
            param="tokens",
            code="invalid_value",
        )


def _tokenize(service: Service, body: TokenizeRequest) -> Response:
    model = service.model
    if body.messages is None:
        field = "content" if body.prompt is None else "prompt"
        text = str(getattr(body, field))
        check_text(text, field, service.config.max_text_length)
        special = body.add_special if body.prompt is None else body.add_special_tokens is not False
    else:
        messages = checked(body.messages, service.config)
        text = render(
            model.template,
            messages,
            tools=body.tools or [],
            variables=body.chat_template_kwargs or {},
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
        )
        field, special = "messages", bool(body.add_special_tokens)
    tokens = encode(model.llm.tokenizer, text, field, special=special)
    tokenizer = model.llm.tokenizer
    texts = [tokenizer.piece(t) or "" for t in tokens] if body.return_token_strs else None
    shown: list[Any] = tokens
    if body.with_pieces:
        shown = [{"id": token, "piece": _piece(model.llm.token_texts, token)} for token in tokens]
    found = TokenizeResponse.model_construct(
        count=len(tokens),
        max_model_len=model.llm.max_length,
        tokens=shown,
        token_strs=texts,
    )
    return written(found)


def _piece(texts: TokenTexts, token: int) -> str | list[int]:
    """A token's text; its bytes if they are no whole characters."""
    raw = texts.bytes_of(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)
