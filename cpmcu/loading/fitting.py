"""Fits an engine into the memory of its device.

Unless the user gives them, `max_num_seqs` and `chunk_length` are chosen: the usual numbers, or
smaller ones if a sequence could not have USEFUL_TOKENS otherwise. If the KV cache cannot hold all
positions of the model, buffers are made for the length that it holds. No choice changes the text.

If the model does not fit, or if it leaves little room for a context, a sentence names the fields
that help.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from cpmcu.config import USUAL_CHUNK, USUAL_SEQS, EngineConfig

logger = logging.getLogger(__name__)

USEFUL_TOKENS = 4096  # tokens of a context that serves a conversation
_LEAST_CHUNK = 512  # shorter chunks make prompts slow
_STEPS = 6  # steps of the binary search for a length

# (configuration, n) -> the longest sequence of an engine whose buffers are made for n tokens. n = 0
# means all positions. Raises MemoryError if the model does not fit, ValueError for a configuration
# that the model cannot have.
Plan = Callable[[EngineConfig, int], int]


@dataclass(frozen=True, slots=True)
class Fit:
    """A configuration that fits."""

    config: EngineConfig  # max_num_seqs and chunk_length are numbers
    max_model_len: int  # maximum number of tokens of a sequence
    sized_for: int  # tokens of a sequence that buffers are made for; 0: the model's positions


def fit(config: EngineConfig, most_tokens: int, plan: Plan, linear_method: str) -> Fit:
    """Completes the configuration. `most_tokens`: positions of the model.

    `linear_method`: that of most of the model's matrices. Raises MemoryError if the model does not
    fit, with the fields that would make it fit.
    """
    wanted = config.max_model_len or min(most_tokens, USEFUL_TOKENS)
    best: Fit | None = None
    first_error: MemoryError | None = None
    for candidate in _candidates(config):
        try:
            found = _sized(candidate, most_tokens, plan)
        except MemoryError as error:
            first_error = first_error or error
            continue
        if best is None or found.max_model_len > best.max_model_len:
            best = found
        if best.max_model_len >= wanted:
            break
    if best is None:
        assert first_error is not None
        advice = _advice(config, most_tokens, wanted, plan) or _no_flag(linear_method)
        raise MemoryError(f"{first_error}. {advice}") from first_error
    _report(config, best)
    if best.max_model_len < wanted:
        advice = _advice(best.config, most_tokens, wanted, plan)
        logger.warning(
            "memory holds only %d tokens of a sequence. %s",
            best.max_model_len,
            advice or _no_flag(linear_method),
        )
    return best


def _candidates(config: EngineConfig) -> Iterator[EngineConfig]:
    """Configurations from the usual one to the smallest."""
    seqs, chunk = config.max_num_seqs or USUAL_SEQS, config.chunk_length or USUAL_CHUNK
    yield replace(config, max_num_seqs=seqs, chunk_length=chunk)
    while config.max_num_seqs is None and seqs > 1:
        seqs //= 2
        yield replace(config, max_num_seqs=seqs, chunk_length=chunk)
    while config.chunk_length is None and chunk > _LEAST_CHUNK:
        chunk //= 2
        yield replace(config, max_num_seqs=seqs, chunk_length=chunk)


def _sized(config: EngineConfig, most_tokens: int, plan: Plan) -> Fit:
    """Finds the length for which buffers and KV cache fill the memory."""
    held, sized_for = plan(config, 0), 0
    if config.max_model_len or held >= most_tokens:
        return Fit(config, held, 0)
    least, most = held, most_tokens  # buffers of shorter sequences leave more room for the cache
    for _ in range(_STEPS):
        middle = (least + most + 1) // 2
        found = plan(config, middle)
        if found > held:
            held, sized_for = found, middle
        if found == middle:
            least = middle
        else:
            most = middle
    return Fit(config, held, sized_for)


def _report(config: EngineConfig, found: Fit) -> None:
    """Logs what is smaller than usual."""
    chosen = found.config
    if config.max_num_seqs is None and chosen.max_num_seqs != USUAL_SEQS:
        logger.info("max_num_seqs is %s, as memory is short", chosen.max_num_seqs)
    if config.chunk_length is None and chosen.chunk_length != USUAL_CHUNK:
        logger.info("chunk_length is %s, as memory is short", chosen.chunk_length)


# ---- advice


def _changes(config: EngineConfig) -> Iterator[tuple[str, EngineConfig]]:
    """Yields (what a user writes, the configuration with it), those that change no text first."""
    if (config.max_num_seqs or 1) > 1:
        yield "max_num_seqs 1", replace(config, max_num_seqs=1)
    if (config.chunk_length or 0) > _LEAST_CHUNK:
        yield f"chunk_length {_LEAST_CHUNK}", replace(config, chunk_length=_LEAST_CHUNK)
    if not config.speculation.no_speculation:
        without = config.speculation.but(no_speculation=True)
        yield "no_speculation", replace(config, speculative_config=without)
    if config.kv_cache_dtype == "auto":
        yield "kv_cache_dtype fp8_e4m3", replace(config, kv_cache_dtype="fp8_e4m3")
    if config.lm_head_quant == "none":
        yield "lm_head_quant w4", replace(config, lm_head_quant="w4")


def _advice(config: EngineConfig, most_tokens: int, wanted: int, plan: Plan) -> str:
    """A sentence with the fields that make room for `wanted` tokens, or else for as many as can be.

    Returns "" if the model does not fit with any of them.
    """
    smallest = replace(list(_candidates(config))[-1], max_model_len=0)

    def length(tried: EngineConfig) -> int:
        try:
            return _sized(tried, most_tokens, plan).max_model_len
        except (MemoryError, ValueError):
            return 0

    as_it_is = length(smallest)
    rest = f". Without more, max_model_len can be {as_it_is}" if config.max_model_len else ""
    alone = {text: length(changed) for text, changed in _changes(smallest)}
    enough = [f"{text} (up to {held} tokens)" for text, held in alone.items() if held >= wanted]
    if enough:
        fitting = f"A sequence of {wanted} tokens fits with {' or '.join(enough)}"
        return fitting + rest * bool(as_it_is)
    useful: list[str] = []
    tried, held = smallest, as_it_is
    for text in alone:
        changed = dict(_changes(tried))[text]
        found = length(changed)
        if held and found <= held:
            continue
        useful.append(text)
        tried, held = changed, found
        if held >= wanted:
            return f"A sequence of {wanted} tokens fits with {_listed(useful)}"
    if not held:
        return ""
    return f"A sequence can have at most {held} tokens" + f", with {_listed(useful)}" * bool(useful)


def _listed(texts: list[str]) -> str:
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if texts[1:] else texts)


def _no_flag(linear_method: str) -> str:
    smaller = "a smaller model or a format of fewer bits"
    if linear_method == "dense":
        smaller = "a checkpoint in 4 bits, about 0.3 of the memory of 16 bits,"
    return f"No flag makes room on one device: use {smaller} or several GPUs (tensor_parallel_size)"
