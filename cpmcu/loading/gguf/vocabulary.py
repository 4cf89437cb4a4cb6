"""The tokenizer of a GGUF file, as one of the tokenizers library.

`tokenizer.ggml.model` is "gpt2" (byte-level BPE with merges) or "llama" (SentencePiece BPE, whose
merges follow from the scores of the tokens).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cpmcu.checks import shown
from cpmcu.loading.gguf.header import GgufHeader

if TYPE_CHECKING:
    import tokenizers

_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type
# Part of a metadata key -> part of a key of tokenizer_config.json.
_SPECIAL = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
# Splits of a text before BPE, by tokenizer.ggml.pre. None: GPT-2's own.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_SPLITS: dict[str, str | None] = {
    **dict.fromkeys(("gpt-2", "mpt", "olmo", "jais", "smollm", "starcoder", "refact")),
    **dict.fromkeys(("command-r", "codeshell", "exaone")),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "smaug-bpe", "dbrx"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
}
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone")
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "falcon3")  # a known word skips the merges


def tokenizer_config(header: GgufHeader) -> dict[str, Any]:
    """The content of tokenizer_config.json: special tokens, their use, the chat template."""
    get = header.metadata.get
    tokens = get("tokenizer.ggml.tokens") or []
    config: dict[str, Any] = {"added_tokens_decoder": {}}
    for stated, name in _SPECIAL.items():
        number = get(f"tokenizer.ggml.{stated}_token_id")
        if number is not None and 0 <= number < len(tokens):
            config[f"{name}_token"] = tokens[number]
    default = get("tokenizer.ggml.model") == "llama"
    config["add_bos_token"] = get("tokenizer.ggml.add_bos_token", default)
    config["add_eos_token"] = get("tokenizer.ggml.add_eos_token", False)
    templates = {"default": get("tokenizer.chat_template")}
    for name in get("tokenizer.chat_templates") or ():
        templates[name] = get(f"tokenizer.chat_template.{name}")
    known = {name: text for name, text in templates.items() if text}
    if known:
        config["chat_template"] = known
    return config


def build_tokenizer(header: GgufHeader) -> tokenizers.Tokenizer:
    """The tokenizer. Raises ValueError for a kind or a splitting rule that is not known."""
    get = header.metadata.get
    tokens, kind = get("tokenizer.ggml.tokens"), get("tokenizer.ggml.model")
    if not isinstance(tokens, list) or not tokens:
        raise ValueError(
            f"tokenizer.ggml.tokens is {shown(tokens)}, expected the vocabulary of the model"
        )
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if kind == "gpt2":
        made = _byte_level(header, vocabulary)
    elif kind == "llama":
        made = _sentencepiece(header, vocabulary)
    else:
        raise ValueError(
            f"tokenizer.ggml.model is {shown(kind)}, expected gpt2 or llama; a model with another "
            "tokenizer loads from its files in Hugging Face format"
        )
    from tokenizers import AddedToken

    types = get("tokenizer.ggml.token_type") or []
    special = [tokens[i] for i, kind in enumerate(types) if kind == _CONTROL]
    user = [tokens[i] for i, kind in enumerate(types) if kind == _USER_DEFINED]
    made.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special])
    made.add_tokens([AddedToken(token, normalized=False) for token in user])
    return made


def _byte_level(header: GgufHeader, vocabulary: dict[str, int]) -> tokenizers.Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre = header.metadata.get("tokenizer.ggml.pre", "gpt-2")
    if pre not in _SPLITS:
        raise ValueError(
            f"tokenizer.ggml.pre is {shown(pre)}, expected one of: {', '.join(sorted(_SPLITS))}"
        )
    pairs = [tuple(merge.split(" ", 1)) for merge in header.metadata["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=pre in _WHOLE_WORDS))
    split = _SPLITS[pre]
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)]
    if pre not in _SINGLE_DIGITS:
        steps = [] if split is None else [pre_tokenizers.Split(Regex(split), "isolated")]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None))
    made.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if split == _QWEN2:
        made.normalizer = normalizers.NFC()
    made.decoder = decoders.ByteLevel()
    return made


def _sentencepiece(header: GgufHeader, vocabulary: dict[str, int]) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    get = header.metadata.get
    scores = get("tokenizer.ggml.scores") or []
    if len(scores) != len(vocabulary):
        raise ValueError(
            f"tokenizer.ggml.scores has {len(scores)} entries, expected {len(vocabulary)}, one "
            "for each token"
        )
    unknown = get("tokenizer.ggml.unknown_token_id", 0)
    names = {number: token for token, number in vocabulary.items()}
    made = Tokenizer(
        models.BPE(
            vocabulary,
            _merges(vocabulary, scores),
            unk_token=names.get(unknown),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = get("tokenizer.ggml.add_space_prefix", True)
    steps: list[Any] = [normalizers.Prepend("\u2581")] if prefix else []
    made.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "\u2581")])
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if prefix else []),
        ]
    )
    return made


def _merges(vocabulary: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """The merges of SentencePiece: every split of a token into two, best score first."""
    found = []
    for token, number in vocabulary.items():
        splits = [(token[:at], token[at:]) for at in range(1, len(token))]
        known = [pair for pair in splits if pair[0] in vocabulary and pair[1] in vocabulary]
        known.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        found += [(scores[number], pair) for pair in known]
    found.sort(key=lambda entry: -entry[0])
    return [pair for _, pair in found]
