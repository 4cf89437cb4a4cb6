"""Base of all requests: strict types, sampling fields, and the check of other fields."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Set
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field

from cpmcu.checks import shown
from cpmcu.grammar import Grammar
from cpmcu.sampling import SEED_LIMIT
from cpmcu.serving import request_grammar as grammar
from cpmcu.serving.errors import ApiError, refused
from cpmcu.serving.request_grammar import Names

logger = logging.getLogger(__name__)

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOPS = 64
MAX_STOP_LENGTH = 1024
MAX_BIASES = 4096
MAX_SALT_LENGTH = 1024
MAX_BAD_WORDS = 1024
MAX_NAMED = 8  # maximum number of wrong values that an error names

# Unsupported fields that change the output -> their neutral values, which are accepted.
REFUSED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "beam_width": (1,),
    "chat_template": (),
    "documents": ([],),
    "dry_multiplier": (0, 0.0),
    "dynatemp_range": (0, 0.0),
    "enable_thinking": (),
    "early_stopping": (False,),
    "function_call": (),
    "functions": ([],),
    "guided_whitespace_pattern": (),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "max_tool_calls": (),
    "media_io_kwargs": ({},),
    "min_new_tokens": (0,),
    "mirostat": (0,),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "post_sampling_probs": (False,),
    "prefix": ("",),
    "priority": (0,),
    "repeat_penalty": (1, 1.0),
    "whitespace_pattern": (),
    "spaces_between_special_tokens": (True,),
    "stop_regex": ([],),
    "suffix": ("",),
    "thinking": (),
    "thinking_budget": (),
    "thinking_token_budget": (-1,),
    "top_a": (0, 0.0),
    "top_n_sigma": (-1, -1.0, 0, 0.0),
    "typical_p": (1, 1.0),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "web_search_options": (),
    "xtc_probability": (0, 0.0),
}
# Fields that cannot change the output here. They are ignored without a log line.
IGNORED = {
    "cache_prompt",
    "guided_decoding_backend",
    "metadata",
    "prediction",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "request_id",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
    "verbosity",
}
_REASONS = {
    "suffix": "/v1/completions fills gaps",
    "thinking_budget": "thinking_token_budget limits the reasoning of chats and responses",
    "thinking_token_budget": "a text is not split into reasoning and content",
    "post_sampling_probs": "log-probabilities are the model's, before sampling",
    "use_beam_search": "an output has one continuation; ask for n outputs, or for logprobs",
}

_logged: set[str] = set()

T = TypeVar("T")


class _FailFast(FailFast):
    """Makes the validator usable in a union, whose members must have hashes."""

    __hash__ = object.__hash__


# A list whose validation stops at the first wrong element: a body may have many.
Items = Annotated[list[T], _FailFast()]


class ApiModel(BaseModel):
    """Strict types: a string is not converted to a number, nor a number to a string."""

    model_config = ConfigDict(strict=True, protected_namespaces=())


class RequestModel(ApiModel):
    """A request. Undeclared fields are stored for `check_extra`."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    ignored_fields: ClassVar[Set[str]] = IGNORED
    refused_fields: ClassVar[Mapping[str, tuple[Any, ...]]] = REFUSED

    def check_extra(self) -> None:
        """Logs unknown fields once. Raises ApiError (400) for a field that changes the output."""
        for name, value in (self.model_extra or {}).items():
            if name in self.ignored_fields or value is None:
                continue
            if name in self.refused_fields:
                # In Python True == 1; in JSON true is not 1.
                neutral = any(
                    value == each and isinstance(value, bool) == isinstance(each, bool)
                    for each in self.refused_fields[name]
                )
                if not neutral:
                    reason = _REASONS.get(name)
                    why = "" if reason is None else f": {reason}"
                    raise refused(name, f"{name} is not supported by this server{why}.")
            elif name not in _logged and len(_logged) < 1000:
                _logged.add(name)
                logger.warning("unknown request field %.64r is ignored", name)


class StreamOptions(RequestModel):
    """Options of a stream."""

    include_usage: bool | None = Field(False, description="Send usage in a last chunk")
    continuous_usage_stats: bool | None = Field(
        False, description="With include_usage: send the usage so far in every chunk"
    )


class JsonSchema(RequestModel):
    """A named schema."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(RequestModel):
    """OpenAI's format of the answer."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | bool | None = Field(
        None, alias="schema", description="The schema, in llama.cpp's place"
    )

    # A structural tag's format; its older form has the next two fields.
    format: dict[str, Any] | None = None
    structures: Items[dict[str, Any]] | None = None
    triggers: Items[str] | None = None

    @property
    def structural_tag(self) -> dict[str, Any] | None:
        """The structural tag, if this is one."""
        if self.type != "structural_tag":
            return None
        names = ("format", "structures", "triggers")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    @property
    def schema_given(self) -> dict[str, Any] | bool | None:
        """The schema, from the one of the two fields that has it."""
        named = None if self.json_schema is None else self.json_schema.schema_
        return self.schema_ if named is None else named


class StructuredOutputs(RequestModel):
    """vLLM's constraint of the answer."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Items[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None

    def fields(self) -> dict[str, Any]:
        """Maps each kind of grammar to its source; None if the request does not use that kind."""
        found: dict[str, Any] = {"json": self.json_, "regex": self.regex}
        found |= {"choice": self.choice, "grammar": self.grammar}
        found["structural_tag"] = self.structural_tag
        return found | {"json_object": self.json_object or None}


def few_biases(value: Any) -> Any:
    """Checks the number of entries before each entry is validated."""
    if isinstance(value, dict | list) and len(value) > MAX_BIASES:
        raise ValueError(f"have at most {MAX_BIASES} token ids")
    return value


class SamplingRequest(RequestModel):
    """The fields that choose the tokens of an output."""

    model: str | None = Field(None, description="An id of /v1/models; optional")
    temperature: float | None = Field(
        None, ge=0, description="0: greedy; default: value of generation_config.json, else 0"
    )
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, description="0 or -1: all tokens")
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(
        None, ge=-(1 << 63), lt=SEED_LIMIT, description="64 bits; -1: a random one"
    )
    min_tokens: int | None = Field(None, ge=0, description="Least tokens of an output")
    stop: str | Items[str] | None = None
    stop_token_ids: Items[int] | None = None
    ignore_eos: bool = False
    repetition_penalty: float | None = Field(None, gt=0)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Annotated[dict[str, float] | None, BeforeValidator(few_biases)] = Field(
        None, description="Token id -> bias"
    )
    allowed_token_ids: Items[int] | None = Field(None, description="The only tokens to draw")
    bad_words: Items[str] | None = Field(None, max_length=MAX_BAD_WORDS)
    include_stop_str_in_output: bool | None = Field(
        False, description="The text ends with the stop text or token"
    )
    cache_salt: str | None = Field(
        None,
        min_length=1,
        max_length=MAX_SALT_LENGTH,
        description="Cached prompts are shared only with requests of the same salt",
    )


class GenerationRequest(SamplingRequest):
    """The fields that chat and text completions share."""

    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    n_predict: int | None = Field(
        None, ge=-1, description="llama.cpp's name of max_tokens; -1: up to the context length"
    )
    best_of: int | None = Field(None, ge=1, description="Must equal n")
    skip_special_tokens: bool = True
    stop_regex: str | Items[str] | None = Field(
        None, description="SGLang's: the output ends with the first match of a pattern"
    )
    prompt_logprobs: int | None = Field(
        None,
        ge=-1,
        le=MAX_LOGPROBS,
        description="Log-probabilities of the prompt, with so many likeliest tokens each; -1: most",
    )
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, description="Keep so many tokens of the prompt, the last; -1: all that fit"
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="The end that truncate_prompt_tokens cuts; default: left"
    )
    logprob_token_ids: Items[int] | None = Field(
        None,
        max_length=MAX_LOGPROBS,
        description="With logprobs: report these tokens in place of the likeliest",
    )
    return_tokens_as_token_ids: bool | None = Field(
        None, description="Name the tokens of log-probabilities token_id:N"
    )
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Items[str] | None = None
    guided_grammar: str | None = None
    json_schema: dict[str, Any] | bool | str | None = Field(None, description="As guided_json")
    regex: str | None = Field(None, description="As guided_regex")
    grammar: str | None = Field(None, description="A grammar in GBNF")
    ebnf: str | None = Field(None, description="As grammar")
    return_metrics: bool | None = Field(
        None, description="Add `metrics`: draft acceptance and timings"
    )
    timings_per_token: bool = Field(False, description="Add llama.cpp's `timings`, also to chunks")
    return_progress: bool = Field(
        False, description="In a stream: send chunks with `prompt_progress` during prefill"
    )
    return_token_ids: bool = Field(False, description="Add the token ids of each choice")

    @property
    def num_choices(self) -> int:
        """Number of outputs of each prompt."""
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        """True if the stream must end with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """True if each chunk must have the usage so far."""
        options = self.stream_options
        return self.include_usage and options is not None and bool(options.continuous_usage_stats)

    def check_stream(self) -> None:
        """Raises ApiError (400) for fields that exclude `stream` or need it."""
        if self.stream and self.prompt_logprobs:
            raise refused("prompt_logprobs", "prompt_logprobs are not given in a stream.")
        if self.stream_options is None:
            return
        self.stream_options.check_extra()
        if self.stream_options.model_fields_set and not self.stream:
            raise refused("stream_options", "stream_options need stream: true.")

    @property
    def grammar_field(self) -> str | None:
        """The field that a grammar may come from; None: there is none."""
        names = (*grammar.FIELDS, "structured_outputs")
        given = (name for name in (*names, "response_format") if getattr(self, name) is not None)
        return next(given, None)

    def _grammar(self, format_field: str, names: Names) -> Grammar | None:
        sources = {name: getattr(self, name) for name in grammar.FIELDS}
        if self.structured_outputs is not None:
            self.structured_outputs.check_extra()
            named = self.structured_outputs.fields().items()
            sources |= {f"structured_outputs.{kind}": source for kind, source in named}
        guided = grammar.from_guided(sources, names=names)
        formatted = grammar.from_response_format(self.response_format, format_field, names=names)
        if guided and formatted and guided != formatted:
            raise refused(
                format_field,
                f"{format_field} and {self.grammar_field} exclude each other: give one.",
            )
        return guided or formatted

    def num_prompt_logprobs(self, most: int) -> int | None:
        """Likeliest tokens for each token of the prompt; None: no log-probabilities.

        `most`: the number that the server gives at a position.
        """
        return most if self.prompt_logprobs == -1 else self.prompt_logprobs

    @property
    def wants_logprobs(self) -> bool:
        """True if the tokens of the output must have log-probabilities."""
        return False

    @property
    def token_limit(self) -> int | None:
        """Maximum number of new tokens; None: up to the context length."""
        raise NotImplementedError

    @property
    def limit_field(self) -> str:
        """The field that `token_limit` comes from."""
        raise NotImplementedError

    @property
    def predict_limit(self) -> int | None:
        """The limit of `n_predict`; None: up to the context length."""
        return None if self.n_predict in (None, -1) else max(1, self.n_predict)

    def truncated(self, ids: list[int], max_length: int) -> list[int]:
        """The tokens of a prompt that `truncate_prompt_tokens` and `truncation_side` keep."""
        if self.truncate_prompt_tokens is None:
            return ids
        most = self.truncate_prompt_tokens
        if most == -1:
            most = max(1, max_length - max(1, self.token_limit or 1))
        start = 0 if self.truncation_side == "right" else max(0, len(ids) - most)
        return ids[start : start + most]

    def sampling_fields(
        self, format_field: str = "response_format", names: Names = dict
    ) -> dict[str, Any]:
        """Returns the arguments of SamplingParams, without max_tokens and logprobs.

        `format_field`: the client's name of response_format, for errors. `names`: those of special
        tokens (LLM.named_tokens).
        Raises ApiError (400) for errors that the types of the fields do not catch.
        """
        if self.logprob_token_ids and not self.wants_logprobs:
            raise refused("logprob_token_ids", "logprob_token_ids need logprobs.")
        if self.best_of not in (None, self.num_choices):
            raise refused("best_of", "best_of is not supported unless it equals n.")
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "seed": self.seed,
            "n": self.num_choices,
            "min_tokens": self.min_tokens or 0,
            "stop": self._stops(),
            "stop_regex": self._stop_regex(),
            "stop_token_ids": tuple(self.stop_token_ids or ()),
            "ignore_eos": self.ignore_eos,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty or 0.0,
            "frequency_penalty": self.frequency_penalty or 0.0,
            "logit_bias": self._bias(),
            "skip_special_tokens": self.skip_special_tokens,
            "allowed_token_ids": self.allowed_token_ids or None,
            "logprob_token_ids": self.logprob_token_ids or None,
            "bad_words": tuple(self.bad_words or ()),
            "include_stop_str_in_output": bool(self.include_stop_str_in_output),
            "cache_salt": self.cache_salt or "",
            "grammar": self._grammar(format_field, names),
        }

    def _stops(self) -> tuple[str, ...]:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_LENGTH for stop in stops):
            raise ApiError(
                400,
                f"stop may hold at most {MAX_STOPS} texts of at most {MAX_STOP_LENGTH} characters.",
                param="stop",
                code="invalid_value",
            )
        return tuple(stops)

    def _stop_regex(self) -> tuple[str, ...]:
        if self.stop_regex and not grammar.available():
            raise grammar.missing("stop_regex")
        found = self.stop_regex or ()
        return (found,) if isinstance(found, str) else tuple(found)

    def _bias(self) -> dict[int, float] | None:
        if not self.logit_bias:
            return None
        known = (key.isascii() and key.isdigit() and len(key) < 10 for key in self.logit_bias)
        wrong = [key for key, fits in zip(self.logit_bias, known, strict=True) if not fits]
        if wrong:
            raise ApiError(
                400,
                f"logit_bias has {'the key' if len(wrong) == 1 else 'the keys'} "
                f"{', '.join(map(shown, wrong[:MAX_NAMED]))}, but must map token ids to numbers.",
                param="logit_bias",
                code="invalid_value",
            )
        return {int(key): value for key, value in self.logit_bias.items()}


class PromptLogprob(ApiModel):
    """vLLM's entry for one candidate token at one position of the prompt."""

    logprob: float
    rank: int | None = Field(description="1: the likeliest; null: beyond the number requested")
    decoded_token: str


# One entry a prompt token: token id -> score, the prompt's own token first. First entry: null.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class ErrorInfo(ApiModel):
    """The description of an error."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None
    n_prompt_tokens: int | None = Field(None, description="Only of a prompt that is too long")
    n_ctx: int | None = Field(None, description="Most tokens of prompt and output together")


class ErrorResponse(ApiModel):
    """An error in OpenAI's format."""

    error: ErrorInfo


class PromptTokensDetails(ApiModel):
    """Prompt tokens that were found in the prefix cache."""

    cached_tokens: int = 0


class UsageInfo(ApiModel):
    """Token counts. The prompt is counted once for any n."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails = PromptTokensDetails()


class CompletionTokensDetails(ApiModel):
    """Tokens of the outputs up to the end of their reasoning."""

    reasoning_tokens: int = 0


class ChatUsage(UsageInfo):
    """Token counts of a chat."""

    completion_tokens_details: CompletionTokensDetails = CompletionTokensDetails()


ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorResponse, "description": "The request is invalid"},
    401: {"model": ErrorResponse, "description": "No valid API key"},
    404: {"model": ErrorResponse, "description": "No such model"},
    408: {"model": ErrorResponse, "description": "The body did not arrive in time"},
    413: {"model": ErrorResponse, "description": "The body is too large"},
    429: {"model": ErrorResponse, "description": "The queue is full: try again later"},
    500: {"model": ErrorResponse, "description": "The server failed"},
    503: {"model": ErrorResponse, "description": "The model is loading, or the server stops"},
}
