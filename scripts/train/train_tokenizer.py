"""Trains a byte-level BPE tokenizer on a folder of text and writes it in Hugging Face's format.

    python scripts/train/train_tokenizer.py --corpus FOLDER --out DIR

Byte-level BPE has a token for each of the 256 bytes, so it can represent any text. A word includes
at most one leading space or punctuation mark. Line breaks and runs of spaces are separate tokens,
so a word at the start of a line is the same token at every indentation.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path

from corpus import add_corpus_arguments, corpus_from_arguments
from directory import add_out_arguments, check_out
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer

from cpmcu.convert.output import new_directory

SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")  # ids 0 to 4

SPLIT_PATTERN = "|".join(
    (
        r"[^\s\p{L}\p{N}]?\p{L}+",  # a word with one mark before it: (self  .append  _name
        r" \p{L}+",  # a word with the space before it
        r"\p{N}",  # one digit
        r" ?[^\s\p{L}\p{N}]+",  # a run of punctuation
        r"[\r\n]+",  # a run of line breaks
        r" +",  # a run of spaces
        r"\t+",  # a run of tabs
        r"\s",  # any other white space
    )
)

# ChatML. The tokenizer's post-processor adds BOS to encoded texts, so a rendered conversation is
# encoded without special tokens: the template writes BOS itself.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Trains a tokenizer of `vocab_size` tokens; of fewer if the text is too short."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS],
        max_token_length=32,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, directory: Path, max_length: int = 2048) -> None:
    """Writes tokenizer.json, tokenizer_config.json and special_tokens_map.json."""
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    added = {
        str(index): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for index, token in enumerate(SPECIAL_TOKENS)
    }
    names = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": "<unk>",
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": True,
        "add_eos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "added_tokens_decoder": added,
        "chat_template": CHAT_TEMPLATE,
        **names,
    }
    for name, content in (("tokenizer_config.json", config), ("special_tokens_map.json", names)):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_corpus_arguments(parser)
    parser.add_argument("--vocab-size", type=int, default=4096)
    add_out_arguments(parser)
    args = parser.parse_args()
    check_out(args, holds="tokenizer.json")

    train, validation = corpus_from_arguments(args)
    tokenizer = train_tokenizer((document.text for document in train), args.vocab_size)
    if tokenizer.get_vocab_size() != args.vocab_size:
        sys.exit(
            f"the corpus gives only {tokenizer.get_vocab_size()} tokens of {args.vocab_size}: "
            "use more text or a smaller --vocab-size"
        )
    with new_directory(args.out) as directory:
        write_tokenizer(tokenizer, directory)

    held_out = [document.text for document in validation] or [document.text for document in train]
    tokens = sum(len(e.ids) for e in tokenizer.encode_batch(held_out, add_special_tokens=False))
    size = sum(len(text.encode()) for text in held_out)
    print(f"{args.out}: {len(train)} files, {size / tokens:.2f} bytes per token on held-out files")


if __name__ == "__main__":
    main()
