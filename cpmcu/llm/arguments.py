"""The arguments of `LLM` and its methods: engine options, prompts, sampling parameters."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from cpmcu.checks import listed, shown
from cpmcu.config import EngineConfig, SpeculativeConfig, speculation_fields

Prompt = str | list[int]


def _field_of(name: str, given: Mapping[str, Any]) -> str:
    """The field that an argument sets: its own name, or that of one of its flags."""
    flag = "--" + name.replace("_", "-")
    of_draft = (field for field, _ in speculation_fields().values())
    for field in (*dataclasses.fields(EngineConfig), *of_draft):
        if field.name in (name, "model"):  # the model is an argument of its own
            continue
        if flag in (field.metadata.get("flags") or ()):
            if field.name in given:
                raise ValueError(f"{name} and {field.name} are given, expected one of them")
            return field.name
    return name


def config_of(model: str | None, options: dict[str, Any]) -> EngineConfig:
    """The configuration of LLM's arguments: fields of EngineConfig and of SpeculativeConfig.

    Raises TypeError for other names, ValueError for a field that is given twice.
    """
    options = {_field_of(name, options): value for name, value in options.items()}
    draft = options.pop("speculative_config", None)
    given = {name: options.pop(name) for name in speculation_fields() if name in options}
    if isinstance(draft, Mapping):
        draft = SpeculativeConfig.from_mapping(draft)
    if given and draft is not None:
        raise ValueError(
            f"{', '.join(given)} and speculative_config are given, expected one of them: "
            "speculative_config takes all options of a draft"
        )
    if given:
        draft = SpeculativeConfig(**given)
    known = {field.name for field in dataclasses.fields(EngineConfig)}
    if unknown := sorted(options.keys() - known):
        raise TypeError(
            f"LLM got the argument {unknown[0]!r}, expected a flag of `cpmcu run --help-all`, such "
            "as max_num_seqs"
        )
    return EngineConfig(model=model, speculative_config=draft, **options)


def wrong_params(found: object) -> ValueError:
    """The error for `sampling_params` of another type."""
    return ValueError(
        f"sampling_params is {shown(found)}, but must be SamplingParams for all prompts, or a list "
        "of them with one for each"
    )


def as_list(prompts: Any) -> list[Prompt]:
    """Wraps a single prompt into a list. Raises ValueError for what is no prompt."""
    if isinstance(prompts, str):
        return [prompts]
    prompts = listed("prompts", prompts, "a text, a list of token ids, or a list of either")
    return [prompts] if prompts and isinstance(prompts[0], numbers.Integral) else prompts


def check_one_prompt(prompt: Any) -> None:
    """Raises ValueError for a list of prompts, where one prompt is expected."""
    if isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], str | list | tuple):
        raise ValueError(
            f"stream takes one prompt, found a list of {len(prompt)}; call it for each of them, or "
            "generate for all"
        )


def is_list_of_lists(messages: Any) -> bool:
    """Is this a list of conversations, not one conversation?"""
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        return False
    return bool(messages) and not hasattr(messages[0], "keys")


def check_conversation(messages: Any) -> None:
    """Raises ValueError unless there is a message, and each that needs a content has one."""
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        found = f"messages is {shown(messages)}"
        raise ValueError(f'{found}, but must be a list like [{{"role": "user", "content": ...}}]')
    if not len(messages):
        raise ValueError("messages is [], but must have at least one message")
    for i, message in enumerate(messages):
        if not hasattr(message, "keys"):
            raise ValueError(
                f"messages[{i}] is {shown(message)}, but must be an object with role and content"
            )
        if message.get("role") in ("user", "system", "developer") and "content" not in message:
            raise ValueError(f"messages[{i}].content is missing, expected a text")
