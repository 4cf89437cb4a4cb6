"""Compiles grammars for a tokenizer and computes the masks of the tokens that may come next.

llguidance does the parsing (https://github.com/guidance-ai/llguidance). A mask has ceil(V / 32)
words of 32 bits. Token t is allowed if bit t % 32 of word t / 32 is set.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cpmcu.checks import one_line, shown
from cpmcu.engine.json_schema import endless_reference, one_of_is_any_of, simplified
from cpmcu.grammar import Grammar, GrammarError
from cpmcu.tokenizer import Tokenizer

Words = npt.NDArray[np.uint32]

_CACHE_SIZE = 64  # number of compiled grammars that are stored
_UNSAID = "\ue000"  # a private-use character that occurs in no text
_MAX_REASON = 300  # characters of llguidance's message that an error quotes
_TRIAL_TOKENS = 16  # tokens that each new grammar reads at once, since some errors appear only then
_NO_TEXT = "NoExtensionBias"  # word in llguidance's message for a grammar that no text fits
_MAX_FORCED = 8192  # bytes without a choice; the time of a mask grows with them


class GrammarCompiler:
    """Compiles grammars for one tokenizer and a vocabulary of `vocab_size` tokens. Thread-safe.

    Raises ImportError if llguidance is missing and ValueError if it cannot read the tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        try:
            import llguidance
        except ImportError as error:
            raise ImportError(
                "a grammar needs the llguidance package: pip install 'cpmcu[grammar]'"
            ) from error
        self._library: Any = llguidance
        size = max(vocab_size, tokenizer.vocab_size)  # either vocabulary may be larger
        eos = [token for token in tokenizer.eos_token_ids if token < vocab_size]
        source = tokenizer.to_json()
        make = functools.partial(llguidance.LLTokenizer, n_vocab=size)
        # This tokenizer knows special tokens by name: a Lark grammar may refer to them.
        self._named = functools.cache(lambda: make(source, eos_token=eos or None))
        try:
            self._tokenizer = make(
                without_names(source), eos_token=eos or list(self._named().eos_tokens)
            )
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library's panics are not subclasses of Exception
            raise ValueError(
                f"the model's tokenizer.json cannot be used with a grammar: {one_line(error)}"
            ) from error
        self._num_words = -(-vocab_size // 32)
        self._lock = threading.Lock()
        self._compiled: OrderedDict[Grammar, _Compiled] = OrderedDict()
        self._failed: deque[tuple[Grammar, _Compiled]] = deque()

    def start(self, grammar: Grammar) -> GrammarState:
        """The state of an empty output.

        Compiling a large grammar may take a second; recent grammars are cached. Raises ValueError
        for a grammar that is invalid or that llguidance does not support.
        """
        with self._lock:
            self._drop_failed()
            compiled = self._compiled.get(grammar)
            if compiled is None:
                matcher = self._compile(grammar)
                compiled = _Compiled(matcher, _can_roll_back(matcher.deep_copy()))
                self._compiled[grammar] = compiled
                if len(self._compiled) > _CACHE_SIZE:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(grammar)
            matcher = compiled.matcher.deep_copy()
        return GrammarState(
            matcher,
            self._tokenizer,
            self._num_words,
            functools.partial(self._failed.append, (grammar, compiled)),
            can_roll_back=compiled.can_roll_back,
        )

    def _drop_failed(self) -> None:
        """Drops grammars with a failed copy: all copies share a lexer, which then fails for all.

        A grammar fails on the engine thread, which must not wait for the compilation of another.
        """
        while self._failed:
            grammar, compiled = self._failed.popleft()
            if self._compiled.get(grammar) is compiled:
                del self._compiled[grammar]

    def _compile(self, grammar: Grammar) -> Any:
        source = self._source(grammar)
        matcher = self._library.LLMatcher(self._tokenizer, source, log_level=0)
        if matcher.is_error() and "unknown special token" in matcher.get_error():
            matcher = self._library.LLMatcher(self._named(), source, log_level=0)
        matcher.compute_bitmask()  # the first call builds much of the lexer
        reason = matcher.get_error() if matcher.is_error() else _trial(matcher.deep_copy())
        if reason:
            name, part = self._culprit(grammar)
            raise ValueError(f"the {name} cannot be used: {_why(part, reason)}")
        return matcher

    def _culprit(self, grammar: Grammar) -> tuple[str, Grammar]:
        """The unusable grammar, which is `grammar` or one of its parts, and its name in errors."""
        if grammar.kind != "composed":
            return grammar.kind.replace("_", " "), grammar
        _, parts = grammar.parts()
        for label, part in parts.items():
            matcher = self._library.LLMatcher(self._tokenizer, self._source(part), log_level=0)
            if matcher.is_error() or _trial(matcher):
                of = f" of {label}" if len(parts) > 1 and part.kind != "composed" else ""
                name, found = self._culprit(part)
                return name + of, found
        return "grammar", grammar

    def _source(self, grammar: Grammar) -> str:
        if grammar.kind == "composed":
            return json.dumps({"grammars": self._members(grammar)})
        return self._simple_source(grammar)

    def _members(self, grammar: Grammar, label: str | None = None) -> list[dict[str, Any]]:
        """A grammar as llguidance's list of named grammars. The first one is the start."""
        name = {} if label is None else {"name": label}
        if grammar.kind == "composed":
            start, parts = grammar.parts()
            members = [{**name, "lark_grammar": start}]
            for part_label, part in parts.items():
                members += self._members(part, part_label)
        elif grammar.kind == "lark":
            members = [{**name, "lark_grammar": grammar.source}]
        else:
            (member,) = json.loads(self._simple_source(grammar))["grammars"]
            members = [{**member, **name}]
        names = [member["name"] for member in members if "name" in member]
        if len(set(names)) < len(names):
            raise ValueError("two parts of a grammar have the same name")
        return members

    def _simple_source(self, grammar: Grammar) -> str:
        make = self._library.LLMatcher
        if grammar.kind == "json_schema":
            options = {"coerce_one_of": True} if one_of_is_any_of(grammar.source) else None
            source = simplified(grammar.source)
            return str(make.grammar_from_json_schema(source, defaults=options))
        if grammar.kind == "regex":
            return str(make.grammar_from_regex(grammar.source))
        if grammar.kind == "choice":
            texts = [re.escape(text) for text in json.loads(grammar.source)]
            return str(make.grammar_from_regex("|".join(texts)))
        return str(make.grammar_from_lark(grammar.source))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Compiled:
    """A compiled grammar, of which each output has a copy."""

    matcher: Any
    can_roll_back: bool


class GrammarState:
    """The state of one output in its grammar. Not thread-safe.

    `can_roll_back`: the matcher can take a token back. One whose rules have `max_tokens` or `stop`
    cannot; a drafted token is then consumed by a copy, which is slower.
    """

    def __init__(
        self,
        matcher: Any,
        tokenizer: Any,
        num_words: int,
        on_failure: Callable[[], None] = lambda: None,
        *,
        can_roll_back: bool = True,
    ) -> None:
        self._matcher = matcher
        self._can_roll_back = can_roll_back
        self._on_failure = on_failure
        self._eos = frozenset(tokenizer.eos_tokens)
        self._num_words = num_words
        self._buffer = np.zeros(-(-tokenizer.vocab_size // 32), np.uint32)
        self.stopped = False  # True: no token may follow
        self.seconds = 0.0  # total time of `masks`

    @property
    def num_words(self) -> int:
        """Words of a mask."""
        return self._num_words

    def accept(self, token: int) -> None:
        """Advances by an emitted token.

        Raises GrammarError if the grammar forbids the token or has become too complex.
        """
        if token in self._eos and self._matcher.is_accepting():
            self.stopped = True
            return
        if self.stopped or not self._matcher.consume_token(token):
            reason = _reason(self._matcher)
            if self.stopped or "satisfy the grammar" in reason:
                reason = f"token {token} was drawn, but the grammar does not allow it here{reason}"
                raise GrammarError(reason)
            raise self._failure(self._matcher)
        self.stopped = self._matcher.is_stopped()

    def masks(self, tokens: Sequence[int], parents: Sequence[int]) -> dict[int, Words]:
        """Node -> mask of the tokens that may follow it, for a tree of drafted tokens.

        Node 0 is the root, which has been accepted; a parent precedes its children. Nodes that
        are unreachable or end the output have no mask: their sampled tokens are not used. If the
        grammar forces the text, only the usual tokenisation of that text is allowed. Raises
        GrammarError if the grammar has become too complex.
        """
        begin = time.perf_counter()
        children: list[list[int]] = [[] for _ in tokens]
        for node in range(1, len(tokens)):
            if tokens[node] >= 0:
                children[parents[node]].append(node)
        masks: dict[int, Words] = {}

        def visit(node: int, matcher: Any) -> None:
            masks[node] = mask = self._mask(matcher)
            if matcher.is_error():
                raise self._failure(matcher)
            for child in children[node]:
                token = tokens[child]
                if token in self._eos or not int(mask[token // 32]) >> token % 32 & 1:
                    continue
                after = matcher if self._can_roll_back else matcher.deep_copy()
                after.consume_token(token)
                if not after.is_stopped():
                    visit(child, after)
                if self._can_roll_back:
                    matcher.rollback(1)

        if not self.stopped:
            visit(0, self._matcher)
        if self._matcher.is_error():
            raise self._failure(self._matcher)
        self.seconds += time.perf_counter() - begin
        return masks

    def _failure(self, matcher: Any) -> GrammarError:
        self._on_failure()
        return GrammarError(f"the grammar cannot be followed{_reason(matcher)}")

    def _mask(self, matcher: Any) -> Words:
        matcher.unsafe_compute_mask_ptr(self._buffer.ctypes.data, self._buffer.nbytes)
        mask: Words = self._buffer[: self._num_words].copy()
        return mask


def without_names(tokenizer: str) -> str:
    """A tokenizer.json whose special tokens match no text; their ids stay.

    Otherwise llguidance would tokenise forced text that looks like a special token as that token,
    and the grammar would reject it. llguidance also treats added tokens like <...> as special.
    """
    data = json.loads(tokenizer)
    model = data["model"]
    merges = _merges(model)
    data["added_tokens"] = _added(data, merges)
    renamed: dict[str, str] = {}
    for token in data["added_tokens"]:
        if _is_named(token):
            name = token["content"]
            renamed[name] = token["content"] = _UNSAID + name
            token["special"] = True
    if merges:
        model["merges"] = [merge for merge in merges if "".join(merge) not in renamed]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {renamed.get(name, name): i for name, i in model["vocab"].items()}
    else:  # the vocabulary of a Unigram model
        model["vocab"] = [[renamed.get(name, name), score] for name, score in model["vocab"]]
    if model.get("unk_token") in renamed:
        model["unk_token"] = renamed[model["unk_token"]]
    return json.dumps(data)


def named_tokens(tokenizer: str) -> dict[str, int]:
    """Returns the ids of the tokens that `without_names` hides, by name. No text matches them."""
    data = json.loads(tokenizer)
    added = _added(data, _merges(data["model"]))
    return {token["content"]: token["id"] for token in added if _is_named(token)}


def _merges(model: dict[str, Any]) -> list[tuple[str, ...]]:
    """The merges of a tokenizer.json's model."""
    found = model.get("merges") or []
    return [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in found]


def _added(data: dict[str, Any], merges: Sequence[tuple[str, ...]]) -> list[dict[str, Any]]:
    """The added tokens, except parts of merges, which are ordinary text."""
    pieces = {piece for merge in merges for piece in merge}
    return [token for token in data.get("added_tokens") or [] if token["content"] not in pieces]


def _is_named(token: dict[str, Any]) -> bool:
    name = token["content"]
    return bool(token["special"] or (name.startswith("<") and name.endswith(">")))


def pack_masks(masks: Sequence[dict[int, Words]], num_nodes: int) -> tuple[list[int], Words]:
    """Packs masks of trees with `num_nodes` nodes for the engine.

    Returns (mask index of each node of each tree, -1 without a mask; masks [M, ceil(V / 32)]).
    """
    rows = [-1] * (len(masks) * num_nodes)
    words: list[Words] = []
    for tree, found in enumerate(masks):
        for node, mask in found.items():
            rows[tree * num_nodes + node] = len(words)
            words.append(mask)
    return rows, np.stack(words) if words else np.zeros((0, 0), np.uint32)


def _trial(matcher: Any) -> str:
    """Consumes a few tokens. Returns the reason if the grammar cannot be used, else "".

    An excessive repetition, for example, fails only when a token is consumed.
    """
    for _ in range(_TRIAL_TOKENS):
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_error():
            return str(matcher.get_error())
        forced = len(matcher.compute_ff_bytes())
        if forced > _MAX_FORCED:
            return f"it forces {forced} bytes without a choice, but at most {_MAX_FORCED} can be"
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        if matcher.is_stopped() or not len(allowed):
            return ""
        if not matcher.consume_token(int(allowed[len(allowed) // 2])):
            return str(matcher.get_error())
    return ""


def _can_roll_back(matcher: Any) -> bool:
    """Whether a matcher can take a token back, found by a token that its grammar allows."""
    mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
    if len(allowed):
        matcher.consume_token(int(allowed[-1]))
        matcher.rollback(1)
    return not matcher.is_error()


def _why(grammar: Grammar, reason: str) -> str:
    """Returns why a grammar cannot be used. `reason`: llguidance's message."""
    if not reason.startswith(_NO_TEXT):
        return _sentence(reason)
    reference = endless_reference(grammar.source) if grammar.kind == "json_schema" else None
    if reference is None:
        return f"{_sentence(reason)}, expected a grammar that some text matches"
    return (
        f'a "$ref" is {shown(reference)}, which leads back to itself, expected a schema of values'
    )


def _sentence(error: str) -> str:
    """The reasons in a message of llguidance, without its drawing of the source position."""
    if error.startswith(_NO_TEXT):
        return "no text matches it"
    lines = [line.strip().rstrip(":") for line in error.splitlines() if line.strip()]
    reasons = [line.removeprefix("error:").strip() for line in lines if line.startswith("error:")]
    return ": ".join(line[:_MAX_REASON] for line in [*lines[:1], *reasons])


def _reason(matcher: Any) -> str:
    return f": {_sentence(matcher.get_error())}" if matcher.is_error() else ""
