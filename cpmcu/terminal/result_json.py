"""A RequestOutput as a JSON object, for `cpmcu run --json` and batch files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cpmcu.outputs import CompletionOutput, RequestOutput, Timings, TokenLogprobs

LOWEST = -9999.0  # stands for minus infinity, which JSON cannot represent


def result_object(result: RequestOutput) -> dict[str, Any]:
    """The members of one prompt's result. The suffix `_s` means seconds.

    The first output's members are at the top. If there are several outputs, `outputs` has all.
    """
    found = _output(result.outputs[0])
    found["seed"] = result.seed
    usage = result.usage
    found["usage"] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "cached_tokens": usage.cached_tokens,
    }
    if result.prompt_logprobs is not None:
        found["prompt_logprobs"] = [
            None if entry is None else _logprob(entry) for entry in result.prompt_logprobs
        ]
    if len(result.outputs) > 1:
        found["outputs"] = [_output(output) for output in result.outputs]
    return found


def _output(output: CompletionOutput) -> dict[str, Any]:
    found: dict[str, Any] = {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "timings": _timings(output.timings),
    }
    if output.logprobs is not None:
        found["logprobs"] = _logprobs(output.logprobs)
    if output.spec_decode_metrics is not None:
        found["speculation"] = output.spec_decode_metrics.to_dict()
    return found


def _timings(timings: Timings) -> dict[str, Any]:
    return {
        "queue_s": timings.queue_s,
        "prefill_s": timings.prefill_s,
        "decode_s": timings.decode_s,
        "grammar_s": timings.grammar_s,
        "time_to_first_token_s": timings.time_to_first_token_s,
        "decode_steps": timings.decode_steps,
        "prompt_tokens_per_s": timings.prompt_tokens_per_s,
        "decode_tokens_per_s": timings.decode_tokens_per_s,
    }


def _logprobs(entries: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
    return [_logprob(entry) for entry in entries]


def _logprob(entry: TokenLogprobs) -> dict[str, Any]:
    return {
        "token_id": entry.token_id,
        "text": entry.text,
        "logprob": max(entry.logprob, LOWEST),
        "top": [
            {"token_id": token, "text": text, "logprob": max(logprob, LOWEST)}
            for text, (token, logprob) in zip(entry.top_texts, entry.top)
        ],
    }
