"""The public API: a model that turns prompts into text."""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
import weakref
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from cpmcu.checks import FieldError, PromptTooLongError, integer, listed, of_field, shown
from cpmcu.engine.detokenizer import Decode, Detokenizer
from cpmcu.engine.request import Emit, OnPrefill, Request
from cpmcu.engine.runner import EngineLoad, Runner
from cpmcu.engine.stop_regex import stop_regexes
from cpmcu.engine.stopping import StopStrings, StopTokens
from cpmcu.llm.arguments import (
    as_list,
    check_conversation,
    check_one_prompt,
    config_of,
    is_list_of_lists,
    wrong_params,
)
from cpmcu.llm.streaming import ChunkStream
from cpmcu.outputs import RequestOutput, StreamChunk, TokenLogprobs
from cpmcu.sampling import SamplingParams, ThinkingLimit, to_engine
from cpmcu.shipped import shipped_model
from cpmcu.spec_metrics import AcceptanceCounter
from cpmcu.text.token_text import TokenTexts
from cpmcu.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import TypeVar

    from cpmcu import C
    from cpmcu.chat_template import ChatTemplate, Message
    from cpmcu.engine.bad_words import BadWords
    from cpmcu.engine.grammar import GrammarCompiler, GrammarState
    from cpmcu.engine.min_tokens import MinTokens
    from cpmcu.engine.thinking_budget import ThinkingBudget
    from cpmcu.grammar import Grammar
    from cpmcu.loading.progress import LoadProgress

    T = TypeVar("T")

logger = logging.getLogger(__name__)


class LLM:
    """A loaded model. `close` it, or use it as a context manager, to free its memory at once.

    * `model`: local directory or Hugging Face repository id. None: the shipped Python code model.
    * `options`: fields of `EngineConfig`. `speculative_config` may also be a dictionary with
      vLLM's keys or the fields of `SpeculativeConfig`.
    * `progress`: receives the progress of loading.
    * `before_weights(llm)`: called when directory, tokenizer and chat template are known and no
      weights are read. An exception that it raises ends loading.

    All methods may be called from several threads. Raises FileNotFoundError or ValueError for an
    unusable checkpoint, MemoryError if the model does not fit into memory, and ImportError if the
    compiled extension is missing.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        progress: LoadProgress | None = None,
        before_weights: Callable[[LLM], None] | None = None,
        **options: Any,
    ) -> None:
        self.config = config_of(None if model is None else str(model), options)
        directory = shipped_model()
        if self.config.model is None and not directory.is_dir():
            raise FileNotFoundError(
                f"the shipped model is not in {directory}; name another with `model`"
            )
        from cpmcu.loading import exiting

        with exiting.waited_for():  # importing runs the extension's code, too
            from cpmcu import C  # the extension: only needed from here on
            from cpmcu.loading.loader import load_model
            from cpmcu.loading.page_cache import make_page_cache

        self._before_weights = before_weights
        loaded = load_model(
            str(directory) if self.config.model is None else self.config.model,
            config=self.config,
            progress=progress,
            before_tensors=self._read_tokenizer,
        )
        self.directory = loaded.directory
        self.hf_config = loaded.hf_config
        self.generation_config = loaded.generation_config
        self.spec = loaded.spec
        self.draft_spec = loaded.draft  # None: the engine has no drafter
        self._check_end_token()
        self._grammars: GrammarCompiler | None = None
        self._grammar_lock = threading.Lock()
        self._memory_plan = loaded.engine.memory_plan()
        # Number of slots; memory may allow fewer than usual.
        self.max_num_seqs = loaded.engine.max_num_seqs
        self._runner = Runner(
            loaded.engine,
            page_size=C.PAGE_SIZE,
            shapes=loaded.shapes,
            cache=make_page_cache(loaded, self.config),
            prefill_seconds=self.config.max_prefill_ms / 1000,
            draft_depth=None if loaded.draft is None else loaded.draft.depth,
        )
        # Also runs at interpreter exit, and when the last reference to the LLM goes.
        self._finalizer = weakref.finalize(self, self._runner.close)
        self._runner.warm_up(C.SamplingConfig(temperature=0.0))

    def __reduce__(self) -> NoReturn:
        """Refuses `pickle`, `copy` and the arguments of multiprocessing."""
        raise TypeError(
            "an LLM cannot be pickled or copied, since it holds a running engine: make one in each "
            "process, or share one server (cpmcu serve)"
        )

    def _read_tokenizer(self, directory: Path) -> None:
        self.directory = directory
        self.tokenizer = Tokenizer.from_directory(directory)
        self.token_texts = TokenTexts(self.tokenizer)
        if self._before_weights is not None:
            self._before_weights(self)

    def _check_end_token(self) -> None:
        """Warns if the tokenizer's end token lies outside the model's vocabulary."""
        name = self.tokenizer.special_tokens.get("eos_token")
        token = None if name is None else self.tokenizer.id_of(name)
        if token is not None and token >= self.spec.vocab_size:
            logger.warning(
                "the tokenizer's eos_token %s has the id %d, but the model's vocabulary has %d "
                "tokens: it ends no output",
                shown(name),
                token,
                self.spec.vocab_size,
            )

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of one sequence, prompt and output together."""
        return self._runner.max_length

    @functools.cached_property
    def chat_template(self) -> ChatTemplate | None:
        """The checkpoint's chat template, or None. Raises ChatTemplateError if it is malformed."""
        from cpmcu.chat_template import ChatTemplate  # loads jinja2

        return ChatTemplate.from_directory(self.directory, self.tokenizer)

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Completes prompts and returns one RequestOutput per prompt, in order.

        * `prompts`: a text, a list of token ids, or a list of texts or of lists of token ids.
        * `sampling_params`: one for all prompts, or a list with one for each. A field at None takes
          its value from the checkpoint's generation_config.json.

        If a prompt is empty or too long, raises ValueError before any prompt runs. Raises
        RuntimeError if the engine fails.
        """
        ids = [self.tokenize(prompt, self.max_length) for prompt in as_list(prompts)]
        return self._generate(ids, sampling_params)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **template_variables: Any,
    ) -> list[RequestOutput]:
        """Answers one conversation, a list of {"role", "content"}, or a list of conversations.

        `template_variables` are passed to the chat template. Returns one RequestOutput per
        conversation. Raises ChatTemplateError (a ValueError) if there is no template or the
        template refuses the conversation. Also raises the errors of `generate`.
        """
        several = is_list_of_lists(messages)
        conversations: Any = messages if several else [messages]
        longest = self.max_length
        prompts = [self.tokenize_chat(c, longest, **template_variables) for c in conversations]
        return self._generate(prompts, sampling_params)

    def stream(
        self,
        prompt: str | Sequence[int] | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        on_prefill: OnPrefill | None = None,
    ) -> ChunkStream:
        """Completes a prompt, or answers a conversation, for a `for` or an `async for` loop.

        Field `result` of the last StreamChunk holds the whole RequestOutput. Leaving the loop early
        cancels the request. `on_prefill(done, total)` gets counts of prompt tokens; the engine
        thread calls it. Raises the errors of `generate`.
        """
        check_one_prompt(prompt)
        if isinstance(prompt, Sequence) and prompt and hasattr(prompt[0], "keys"):
            ids = self.tokenize_chat(prompt, self.max_length)  # type: ignore[arg-type]
        else:
            ids = self.tokenize(prompt, self.max_length)  # type: ignore[arg-type]
        params = self._resolve(sampling_params)

        def complete(chunk: StreamChunk, requests: Sequence[Request], last: bool) -> StreamChunk:
            if chunk.logprobs:
                chunk = dataclasses.replace(chunk, logprobs=self._with_texts(chunk.logprobs))
            if last:
                chunk = dataclasses.replace(chunk, result=self.result(ids, params, requests))
            return chunk

        return ChunkStream(
            lambda emit: self.prepare(ids, params, emit, on_prefill), self._submit_first, complete
        )

    def tokenize(self, prompt: str | Sequence[int], max_length: int | None = None, /) -> list[int]:
        """Token ids of a text prompt, special tokens included. Token ids are returned unchanged.

        Raises ValueError if `prompt` is neither a text nor a list of token ids. Raises
        PromptTooLongError if a long text has more than `max_length` tokens. In most cases, its
        number of characters is enough to know.
        """
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, max_length=max_length)
        ids = listed("a prompt", prompt, "a text or a list of token ids")
        from cpmcu import C

        if C.first_outside(ids, C.MAX_TOKEN_ID) < 0:
            return ids
        return [integer("a token id of a prompt", token) for token in ids]

    def tokenize_chat(
        self,
        messages: Sequence[Message],
        max_length: int | None = None,
        /,
        **template_variables: Any,
    ) -> list[int]:
        """Token ids of a conversation, up to the beginning of the assistant's answer.

        `max_length`: see `tokenize`.

        Raises ChatTemplateError if there is no template or the template refuses the conversation.
        Raises ValueError if there are no messages or a message lacks the content that it needs.
        """
        from cpmcu.chat_template import ChatTemplateError  # loads jinja2

        check_conversation(messages)
        if self.chat_template is None:
            raise ChatTemplateError(
                f"{self.directory} has no chat template; give a plain prompt instead"
            )
        text = self.chat_template.render(messages, **template_variables)
        return self.tokenizer.encode(text, add_special_tokens=False, max_length=max_length)

    def memory_plan(self) -> list[dict[str, Any]]:
        """Device memory, one row per buffer: name, offset, bytes, first, last, group.

        `offset` and `bytes` are in bytes. `first` and `last` bound the use of a scratch buffer.
        """
        return [dict(row) for row in self._memory_plan]

    def prepare(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        emit: Emit,
        on_prefill: OnPrefill | None = None,
        keep_special_tokens: Collection[int] = (),
        *,
        is_streamed: bool = True,
    ) -> list[Request]:
        """Checks a prompt and makes one Request per choice, ready for `submit`.

        `params` must be resolved. Special tokens in `keep_special_tokens` stay in the text.
        `is_streamed` False: only the time of the whole answer matters, not that between tokens.
        Raises ValueError for a prompt that is empty or too long and for an unusable grammar. Raises
        ImportError if the grammar needs a missing package.
        """
        if not prompt:
            raise FieldError(
                "the prompt is empty, but must have at least one token", field="prompt"
            )
        if len(prompt) >= self.max_length:
            raise PromptTooLongError(
                f"the prompt has {len(prompt)} tokens, but prompt and output together can have "
                f"{self.max_length}",
                tokens=len(prompt),
                most=self.max_length,
            )
        vocab_size = int(self.spec.vocab_size)
        from cpmcu import C

        outside = C.first_outside(list(prompt), vocab_size)
        if outside >= 0:
            raise FieldError(
                f"the prompt has token id {prompt[outside]}, but the vocabulary has {vocab_size} "
                "tokens",
                field="prompt",
            )
        room = self.max_length - len(prompt)
        limit = room if params.max_tokens is None else min(room, params.max_tokens)
        eos = () if params.ignore_eos else self.tokenizer.eos_token_ids
        stop_ids = [*eos, *params.stop_token_ids]
        least = self._min_tokens(params.min_tokens, stop_ids)
        banned, bad_words = self._bad_words(params.bad_words)
        with of_field("stop_regex"):
            patterns = stop_regexes(params.stop_patterns, params.n)
        decode: Decode
        if params.skip_special_tokens and keep_special_tokens:
            decode = _decode_with(self.tokenizer, keep_special_tokens)
        else:
            decode = functools.partial(
                self.tokenizer.decode, skip_special_tokens=params.skip_special_tokens
            )
        return [
            Request(
                prompt,
                to_engine(
                    params,
                    index,
                    vocab_size,
                    stop_ids=stop_ids,
                    banned_ids=banned,
                    max_tokens=max(limit, 1),
                ),
                detokenizer=Detokenizer(decode, prompt),
                stop_strings=StopStrings(
                    params.stop_strings,
                    shown=params.include_stop_str_in_output,
                    patterns=patterns[index],
                ),
                stop_tokens=StopTokens(eos, params.stop_token_ids, limit),
                max_tokens=limit,
                emit=emit,
                on_prefill=on_prefill if index == 0 else None,
                index=index,
                want_logprobs=params.logprobs is not None or bool(params.logprob_token_ids),
                prompt_logprobs=params.prompt_logprobs if index == 0 else None,
                acceptance=self._acceptance(),
                grammar=self._start(params.grammar),
                min_tokens=least,
                bad_words=bad_words,
                thinking=self._thinking(params.thinking),
                shows_stop=params.include_stop_str_in_output,
                cache_salt=params.cache_salt,
                is_streamed=is_streamed,
            )
            for index in range(params.n)
        ]

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues prepared requests. Raises RuntimeError if the engine is closed or has failed."""
        self._runner.submit(*requests)

    @property
    def is_open(self) -> bool:
        """Does `submit` accept requests? False if the engine is closed or has failed."""
        return self._runner.is_open

    def engine_load(self) -> EngineLoad:
        """Utilisation of the engine: slots, queue, KV pages."""
        return self._runner.load()

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prompts, on disk too. Running requests go on undisturbed."""
        self._runner.reset_prefix_cache()

    def call_engine(self, function: Callable[[C.Engine], T]) -> T:
        """Runs `function(engine)` on the engine thread between steps. For tools and tests.

        Raises RuntimeError if called from a callback or from a forked process.
        """
        return self._runner.call(function)

    def close(self) -> None:
        """Aborts running requests and frees the engine's memory. May be called repeatedly."""
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @functools.cached_property
    def named_tokens(self) -> dict[str, int]:
        """Returns the ids of special tokens by name. A grammar names them: no text matches them.

        Raises ValueError if the tokenizer has no tokenizer.json.
        """
        from cpmcu.engine.grammar import named_tokens  # loads numpy

        return named_tokens(self.tokenizer.to_json())

    def check_grammar(self, grammar: Grammar) -> None:
        """Raises ValueError for a grammar that no output can have."""
        self._start(grammar)

    def _start(self, grammar: Grammar | None) -> GrammarState | None:
        if grammar is None:
            return None
        with self._grammar_lock:
            if self._grammars is None:
                from cpmcu.engine.grammar import GrammarCompiler  # loads numpy

                self._grammars = GrammarCompiler(self.tokenizer, int(self.spec.vocab_size))
        with of_field("grammar"):
            return self._grammars.start(grammar)

    def _bad_words(self, words: Sequence[str]) -> tuple[list[int], BadWords | None]:
        """Returns (words of one token, words of several). Each word counts after a space, too."""
        found: set[tuple[int, ...]] = set()
        for word in words:
            for text in (word, f" {word.lstrip()}"):
                found.add(tuple(self.tokenizer.encode(text, add_special_tokens=False)))
        alone = [word[0] for word in found if len(word) == 1]
        long = [word for word in found if len(word) > 1]
        if not long:
            return alone, None
        from cpmcu.engine.bad_words import BadWords  # loads numpy

        return alone, BadWords(long, int(self.spec.vocab_size))

    def _thinking(self, limit: ThinkingLimit | None) -> ThinkingBudget | None:
        if limit is None:
            return None
        from cpmcu.engine.thinking_budget import ThinkingBudget  # loads numpy

        end_ids = self.tokenizer.encode(limit.end, add_special_tokens=False)
        decode = functools.partial(self.tokenizer.decode, skip_special_tokens=False)
        return ThinkingBudget(limit, end_ids, decode, int(self.spec.vocab_size))

    def _min_tokens(self, count: int, end_ids: Sequence[int]) -> MinTokens | None:
        if not count:
            return None
        from cpmcu.engine.min_tokens import MinTokens  # loads numpy

        return MinTokens(count, end_ids, int(self.spec.vocab_size))

    def _acceptance(self) -> AcceptanceCounter | None:
        speculation = self.config.speculation
        wanted = speculation.per_request_spec_decode_metrics
        num_spec_tokens = self._runner.draft_depth
        if num_spec_tokens == 0 or wanted == "none":
            return None
        return AcceptanceCounter(
            num_spec_tokens,
            detailed=wanted == "detailed",
            verify_strategy=speculation.verify_strategy,
        )

    def _resolve(self, params: SamplingParams | None) -> SamplingParams:
        if params is not None and not isinstance(params, SamplingParams):
            raise wrong_params(params)
        return (params or SamplingParams()).resolve(self.generation_config)

    def _generate(
        self,
        prompts: list[list[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[RequestOutput]:
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params or SamplingParams()] * len(prompts)
        if not isinstance(sampling_params, Sequence):
            raise wrong_params(sampling_params)
        if len(sampling_params) != len(prompts):
            raise ValueError(
                f"there are {len(sampling_params)} sampling parameters for {len(prompts)} prompts"
            )
        params = [self._resolve(each) for each in sampling_params]
        jobs: list[list[Request]] = []

        def prepare(emit: Emit) -> list[Request]:
            jobs.extend(
                self.prepare(ids, each, emit, is_streamed=False)
                for ids, each in zip(prompts, params)
            )
            return [request for job in jobs for request in job]

        for _ in ChunkStream(prepare, self._submit_first, lambda chunk, requests, last: chunk):
            pass
        return [self.result(*each) for each in zip(prompts, params, jobs)]

    def _submit_first(self, requests: Sequence[Request]) -> None:
        """Submits requests whose chunks the caller waits for."""
        self._runner.check_waiter()
        self.submit(requests)

    def result(
        self, prompt: list[int], params: SamplingParams, requests: Sequence[Request]
    ) -> RequestOutput:
        """The result of prepared requests that have ended; `params` as given to `prepare`.

        Raises the exception of a request that failed.
        """
        assert params.seed is not None  # `resolve` has set it
        outputs = [request.output() for request in requests]
        if params.logprobs is not None:
            outputs = [
                dataclasses.replace(output, logprobs=self._with_texts(output.logprobs or []))
                for output in outputs
            ]
        scores = None
        if params.prompt_logprobs is not None:
            first, *others = requests[0].prompt_logprobs
            scores = [first, *self._with_texts([entry for entry in others if entry is not None])]
        return RequestOutput(prompt, outputs, params.seed, scores)

    def _with_texts(self, entries: Sequence[TokenLogprobs]) -> list[TokenLogprobs]:
        text = self.token_texts.text_of
        return [
            dataclasses.replace(
                entry,
                text=text(entry.token_id),
                top_texts=tuple(text(token) for token, _ in entry.top),
            )
            for entry in entries
        ]


def _decode_with(tokenizer: Tokenizer, keep_special_tokens: Collection[int]) -> Decode:
    """A decoder that skips special tokens, except those in `keep_special_tokens`."""

    @functools.cache
    def is_text(token: int) -> bool:
        return token in keep_special_tokens or not tokenizer.is_special(token)

    return lambda ids: tokenizer.decode(
        [token for token in ids if is_text(token)], skip_special_tokens=False
    )
