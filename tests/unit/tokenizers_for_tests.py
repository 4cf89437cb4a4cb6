"""Small tokenizers of common kinds, made without a download."""

from __future__ import annotations

import functools
import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer

TEXT = (
    "def hello(name):\n    return f'Hello, {name}!'\n" * 3
    + "Unicode: naïve café, 你好世界, 今天天气很好, 🙂🚀👩‍👩‍👧, Ελληνικά, हिन्दी. "
    + "The quick brown fox jumps over the lazy dog. " * 3
)
SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")


@functools.cache
def byte_level() -> Tokenizer:
    """As in GPT-2, Llama 3, Qwen: a token is a piece of UTF-8 and may end inside a character."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=400,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


@functools.cache
def byte_fallback() -> Tokenizer:
    """As in Llama 2 and MiniCPM: a space is ▁, unknown characters are byte tokens."""
    pieces = ["<unk>", *SPECIAL, *(f"<0x{i:02X}>" for i in range(256)), "▁"]
    pieces += sorted({c for c in TEXT if c.isascii() and not c.isspace()}) + ["你", "é"]
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("▁", "t"), ("▁t", "he"), ("hell", "o")]
    merges += [("▁", "hello"), ("▁", "a"), ("o", "x")]
    pieces += ["".join(pair) for pair in merges]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return tokenizer


def write_directory(path: Path, tokenizer: Tokenizer, **config: object) -> Path:
    """A checkpoint directory with only a tokenizer."""
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    fields = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}, **config}
    (path / "tokenizer_config.json").write_text(json.dumps(fields), encoding="utf-8")
    return path
