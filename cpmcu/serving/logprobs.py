"""Formats log-probabilities of outputs and prompts for the endpoints."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from cpmcu.outputs import TokenLogprobs
from cpmcu.serving.protocol.base import PromptLogprob, PromptLogprobs
from cpmcu.serving.protocol.completion import CompletionLogprobs
from cpmcu.text.token_text import TokenTexts

LOWEST = -9999.0  # stands for minus infinity, which JSON cannot represent
_GAP = 16  # maximum number of characters of a prompt between the texts of two tokens

Scored = tuple[int, TokenLogprobs | None]  # (token id, its score; None for the first token)


def scored(entries: Sequence[TokenLogprobs] | None) -> list[Scored]:
    """Returns (token id, log-probabilities) for each token of an output."""
    return [(entry.token_id, entry) for entry in entries or ()]


def by_id(token: int) -> str:
    """Returns a token's unique name (vLLM's return_tokens_as_token_ids)."""
    return f"token_id:{token}"


def of_prompt(
    texts: TokenTexts, scores: Sequence[TokenLogprobs | None], count: int | None
) -> PromptLogprobs | None:
    """Returns vLLM's `prompt_logprobs` with the `count` likeliest tokens; None if `count` is None.

    The rank of the prompt's own token is known only if it is among the likeliest tokens.
    """
    if count is None:
        return None
    found: PromptLogprobs = []
    for entry in scores:
        if entry is None:
            found.append(None)
            continue
        ranks = {token: i + 1 for i, (token, _) in enumerate(entry.top)}
        tokens = {entry.token_id: entry.logprob, **dict(entry.top[:count])}
        found.append(
            {
                str(token): PromptLogprob(
                    logprob=max(logprob, LOWEST),
                    rank=ranks.get(token),
                    decoded_token=texts.text_of(token),
                )
                for token, logprob in tokens.items()
            }
        )
    return found


def entries(
    texts: TokenTexts,
    scores: Sequence[TokenLogprobs],
    *,
    as_ids: bool = False,
    with_ids: bool = False,
    with_chosen: bool = False,
) -> list[dict[str, Any]]:
    """Returns the tokens of an answer as /v1/chat/completions and /v1/responses have them.

    `as_ids`: names tokens by their ids. `with_ids`: adds `id`, as /completion has it.
    `with_chosen`: top_logprobs begin with the chosen token, whatever the others are.
    """

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return ({"id": token} if with_ids else {}) | {
            "token": by_id(token) if as_ids else texts.text_of(token),
            "logprob": max(logprob, LOWEST),
            "bytes": list(texts.bytes_of(token)),
        }

    def tops(score: TokenLogprobs) -> list[tuple[int, float]]:
        others = [top for top in score.top if top[0] != score.token_id]
        return [(score.token_id, score.logprob), *others]

    return [
        {
            **entry(score.token_id, score.logprob),
            "top_logprobs": [entry(*top) for top in (tops(score) if with_chosen else score.top)],
        }
        for score in scores
    ]


class Logprobs:
    """Log-probabilities of one choice in the format of /v1/completions, with text offsets.

    `echo`: the prompt's text, with which the choice's text starts. `num_echoed`: tokens of the
    prompt, which are written first. `skip_special`: the text omits special tokens. `as_ids`: names
    tokens by their ids.
    """

    def __init__(
        self,
        texts: TokenTexts,
        wanted: int | None,
        *,
        echo: str = "",
        num_echoed: int = 0,
        skip_special: bool = True,
        as_ids: bool = False,
    ) -> None:
        self._texts = texts
        self._wanted = wanted
        self._echo = echo
        self._left = num_echoed
        self._skip_special = skip_special
        self._name = by_id if as_ids else texts.spelling_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def write(self, entries: Sequence[Scored]) -> CompletionLogprobs | None:
        """Formats the next tokens. Returns None if log-probabilities were not requested."""
        if self._wanted is None:
            return None
        offsets = []
        for token, _ in entries:
            shown = not self._texts.is_special(token)
            if self._left:
                offsets.append(self._find(token, shown))
            else:
                offsets.append(self._offset)
                if shown or not self._skip_special:
                    self._offset += len(self._decoder.decode(self._texts.bytes_of(token)))
        return CompletionLogprobs(
            tokens=[self._name(token) for token, _ in entries],
            token_logprobs=[None if e is None else max(e.logprob, LOWEST) for _, e in entries],
            top_logprobs=[self._top(entry, self._wanted) for _, entry in entries],
            text_offset=offsets,
        )

    def _find(self, token: int, shown: bool) -> int:
        """Returns the offset of the prompt's next token in the echoed text, and advances past it.

        The echoed text is the request's own. It may spell special tokens by name. It lacks a
        special token or space that the tokenizer added. Some characters may belong to no token.
        """
        text = self._texts.text_of(token)
        if shown:
            text = self._decoder.decode(self._texts.bytes_of(token))
        begin = self._offset
        found = self._echo.find(text, begin, begin + _GAP + len(text))
        if self._echo.startswith(text.removeprefix(" "), begin) and found != begin:
            text, found = text.removeprefix(" "), begin
        if found >= 0 and (shown or not self._echo[begin:found].strip()):
            begin, self._offset = found, found + len(text)
        self._left -= 1
        if not self._left:
            self._offset = len(self._echo)
        return begin

    def _top(self, entry: TokenLogprobs | None, count: int) -> dict[str, float] | None:
        """Returns the chosen token and the `count` likeliest ones, each under a unique name."""
        if entry is None:
            return None
        owners = {self._name(entry.token_id): entry.token_id}
        found: dict[str, float] = {}
        for token, logprob in ((entry.token_id, entry.logprob), *entry.top[:count]):
            name = self._name(token)
            if owners.setdefault(name, token) != token:
                name = by_id(token)
            found.setdefault(name, max(logprob, LOWEST))
        return found
