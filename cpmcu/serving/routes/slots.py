"""/props and /slots: the server's settings and slots under llama.cpp's names."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

import cpmcu
from cpmcu.serving.protocol.base import ERRORS
from cpmcu.serving.replies import service_of

router = APIRouter(tags=["server"], responses={503: ERRORS[503]})


@router.get("/props")
async def props(request: Request) -> dict[str, Any]:
    """The model, its context length, chat template, and default sampling parameters."""
    service = service_of(request)
    model, llm = service.model, service.model.llm
    special = llm.tokenizer.special_tokens
    stated = llm.generation_config
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    return {
        "default_generation_settings": {
            "n_ctx": llm.max_length,
            "params": {name: stated[name] for name in names if name in stated},
        },
        "total_slots": llm.max_num_seqs,
        "model_alias": service.names[0],
        "model_path": service.root,
        "chat_template": "" if model.template is None else model.template.source,
        "bos_token": special.get("bos_token") or "",
        "eos_token": special.get("eos_token") or "",
        "build_info": f"cpmcu {cpmcu.__version__}",
        "modalities": {"vision": False, "audio": False},
    }


@router.get("/slots")
async def slots(request: Request) -> list[dict[str, Any]]:
    """The slots; those in use come first."""
    service = service_of(request)
    llm = service.model.llm
    running = llm.engine_load().running
    return [
        {"id": i, "n_ctx": llm.max_length, "is_processing": i < running}
        for i in range(llm.max_num_seqs)
    ]
