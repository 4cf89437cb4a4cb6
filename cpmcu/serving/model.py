"""A loaded model with what the server needs beside it. Imports no web framework."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from pathlib import Path

from cpmcu.chat_template import ChatTemplate
from cpmcu.config import EngineConfig
from cpmcu.llm import LLM
from cpmcu.loading.progress import LogProgress
from cpmcu.serving.config import ServerConfig
from cpmcu.serving.reasoning_parsers.base import ReasoningParser
from cpmcu.serving.reasoning_parsers.registry import find_reasoning_parser
from cpmcu.serving.tool_parsers.registry import ToolFormat, find_tool_format
from cpmcu.shipped import shipped_model
from cpmcu.text.files import read_text
from cpmcu.verification import is_lossy

logger = logging.getLogger(__name__)


class Progress(LogProgress):
    """Logs the progress of loading every few seconds."""

    def __init__(self) -> None:
        super().__init__()
        self._total = 0
        self._next = 0.0

    def start(self, total_bytes: int, what: str) -> None:
        """Starts a new progress of `total_bytes`."""
        super().start(total_bytes, what)
        self._total, self._next = total_bytes, time.monotonic() + 2.0

    def update(self, done_bytes: int) -> None:
        """Logs the percentage if two seconds have passed since the last line."""
        super().update(done_bytes)
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + 2.0
            logger.info("loading: %.0f%%", 100 * done_bytes / max(self._total, 1))


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    """A loaded model with its chat template and output parsers."""

    llm: LLM
    template: ChatTemplate | None
    reasoning_parser: type[ReasoningParser] | None
    tool_format: ToolFormat | None

    @classmethod
    def load(
        cls,
        engine_config: EngineConfig,
        config: ServerConfig,
        before_weights: Callable[[LLM], None] | None = None,
    ) -> Model:
        """Loads the model. Slow, so the server runs it on its own thread.

        `before_weights` is that of LLM.

        Raises the exceptions of LLM. If the chat template cannot be read or compiled, raises
        OSError or ValueError before loading the model.
        """
        start = time.perf_counter()
        own = _own_template(config.chat_template)
        options = dataclasses.asdict(engine_config)
        llm = LLM(progress=Progress(), before_weights=before_weights, **options)
        try:
            model = cls.of(llm, config, own)
        except Exception:
            llm.close()
            raise
        strategy = engine_config.speculation.strategy
        lossy = f" (lossy: {strategy})" if is_lossy(strategy) else ""
        logger.info(
            "%s is ready after %.1f s: %d slots, at most %d tokens a sequence, %s, %.2f GB",
            served_names(engine_config, config)[0],
            time.perf_counter() - start,
            llm.max_num_seqs,
            llm.max_length,
            f"draft {llm.draft_spec.method}{lossy}" if llm.draft_spec else "no draft",
            sum(row["bytes"] for row in llm.memory_plan()) / 1e9,
        )
        return model

    @classmethod
    def of(cls, llm: LLM, config: ServerConfig, own_template: str | None = None) -> Model:
        """Adds to an LLM what the server needs. `own_template`: source of --chat-template.

        Raises OSError or ValueError for a chat template that cannot be read or compiled.
        """
        template = llm.chat_template
        if own_template is not None:
            template = ChatTemplate(own_template, llm.tokenizer.special_tokens)
        source, tool_source = (
            (None, None) if template is None else (template.source, template.tool_source)
        )
        return cls(
            llm,
            template,
            find_reasoning_parser(config.reasoning_parser, source),
            find_tool_format(config.tool_call_parser, tool_source),
        )


def model_root(engine_config: EngineConfig) -> str:
    """The model as it was given: a path or a repository's name; else the shipped model's path."""
    return str(shipped_model()) if engine_config.model is None else engine_config.model


def served_names(engine_config: EngineConfig, config: ServerConfig) -> tuple[str, ...]:
    """Names under which requests may ask for the model; responses have the first one.

    Without --served-model-name: the last part of the path or repository name, and the whole of it.
    """
    root = model_root(engine_config)
    own = (Path(root).name or root, root) if engine_config.model is not None else (Path(root).name,)
    return tuple(dict.fromkeys(config.served_model_name or own))


def _own_template(path: str | None) -> str | None:
    """Returns the source of --chat-template after compiling it once; None without the flag."""
    if path is None:
        return None
    try:
        source = read_text(path, "its file")
        ChatTemplate(source, {})
    except OSError as error:
        raise OSError(f"--chat-template {path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"--chat-template {path}: {error}") from error
    return source
