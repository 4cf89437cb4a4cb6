"""Text corpora: reads folders, drops duplicates, splits by content, packs a token stream.

The result depends on the contents of the files only, not on their order or time. The same folder
gives the same split and, with the same seed, the same stream.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import random
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cpmcu.loading.index import check_file
from cpmcu.loading.model_files import model_files

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BOS_ID = 1
EOS_ID = 2
IM_START_ID = 3
IM_END_ID = 4


@dataclass(frozen=True, slots=True)
class TextFormat:
    """Special tokens of the token stream. The defaults are those of this recipe's tokenizer."""

    bos: int | None = BOS_ID  # before every document; None: no token
    eos: int | None = EOS_ID  # after every document; None: no token
    im_start: int | None = IM_START_ID  # ChatML turns; None: no chat examples
    im_end: int | None = IM_END_ID
    special_text: bool = False  # parse special tokens in the text

    @classmethod
    def of(cls, tokenizer: Tokenizer, eos: int | None, special_text: bool = False) -> TextFormat:
        """Reads the special tokens of any tokenizer. `eos`: that of the model's config.json."""
        plain = tokenizer.encode("x", add_special_tokens=False).ids
        framed = tokenizer.encode("x").ids
        bos = framed[0] if framed[:1] != plain[:1] else None
        im_start = tokenizer.token_to_id("<|im_start|>")
        im_end = tokenizer.token_to_id("<|im_end|>")
        if im_end is None:
            im_start = None
        return cls(bos, eos, im_start, im_end, special_text)

    def frame(self, ids: Sequence[int]) -> list[int]:
        """Returns a document's tokens with BOS before and EOS after them."""
        head = [] if self.bos is None else [self.bos]
        return [*head, *ids, *([] if self.eos is None else [self.eos])]


RECIPE_FORMAT = TextFormat()

# A paragraph starts at an unindented line after an empty line. In source code this is a top-level
# definition.
_PARAGRAPH = re.compile(r"(?<=\n\n)(?=\S)")


@dataclass(frozen=True, slots=True)
class Document:
    """One text file of the corpus."""

    name: str  # path relative to its folder
    text: str
    digest: str  # sha256 of the text, hex


def read_corpus(
    folders: Sequence[Path],
    extensions: Sequence[str] = (".py",),
    exclude: Sequence[str] = (),
    max_kib: int = 512,
) -> list[Document]:
    """Reads the UTF-8 text files under `folders`, sorted by content digest.

    `exclude`: shell patterns of single path components ("site-packages", "*_pb2.py"). Skips files
    that are empty, larger than `max_kib`, not UTF-8, or equal to an earlier one. Empty
    `extensions` accept every file name.
    """
    seen: dict[str, Document] = {}
    for folder in folders:
        if not folder.is_dir():
            raise SystemExit(f"corpus folder {folder} does not exist or is not a folder")
        for path in sorted(folder.rglob("*")):
            relative = path.relative_to(folder)
            if extensions and path.suffix not in extensions:
                continue
            if any(fnmatch(part, pattern) for part in relative.parts for pattern in exclude):
                continue
            if not path.is_file() or not 0 < path.stat().st_size <= max_kib * 1024:
                continue
            try:
                text = path.read_bytes().decode("utf-8")
            except UnicodeDecodeError:
                continue
            text = text.replace("\r\n", "\n").strip("\n") + "\n"
            digest = hashlib.sha256(text.encode()).hexdigest()
            seen.setdefault(digest, Document(relative.as_posix(), text, digest))
    if not seen:
        raise SystemExit(f"no usable text in {', '.join(map(str, folders))}")
    return [seen[digest] for digest in sorted(seen)]


def read_tokenizer(model: Path) -> Tokenizer:
    """The tokenizer of a directory in Hugging Face format or of a GGUF file."""
    import tokenizers

    build = model_files(model).build_tokenizer
    if build is not None:
        return build()
    path = model / "tokenizer.json"
    check_file(path)
    return tokenizers.Tokenizer.from_file(str(path))


def split(
    documents: Iterable[Document], validation_permille: int = 20
) -> tuple[list[Document], list[Document]]:
    """Returns (train, validation). The side of a file depends only on its digest."""
    train: list[Document] = []
    validation: list[Document] = []
    for document in documents:
        held_out = int(document.digest[:8], 16) % 1000 < validation_permille
        (validation if held_out else train).append(document)
    return train, validation


def pieces(text: str, rng: random.Random, keep: float = 0.4) -> list[str]:
    """Cuts a text at paragraph starts, at each with probability `keep`."""
    starts = [match.start() for match in _PARAGRAPH.finditer(text) if rng.random() < keep]
    bounds = [0, *starts, len(text)]
    return [text[a:b].rstrip("\n") + "\n" for a, b in pairwise(bounds) if b > a]


def cuts(text: str, rng: random.Random, mean_length: int = 160) -> list[str]:
    """Cuts a text at random characters.

    The parts are tokenised separately. So the model learns token boundaries of prompts that end
    after a space or within a word.
    """
    parts = []
    start = 0
    while start < len(text):
        length = 1 + int(rng.expovariate(1 / mean_length))
        parts.append(text[start : start + length])
        start += length
    return parts


def chat_examples(document: Document) -> Iterator[tuple[str, str]]:
    """Yields (user, assistant) pairs from documented Python functions: docstring -> source."""
    if not document.name.endswith(".py"):
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about invalid escapes in the sources
            tree = ast.parse(document.text)
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef):
            continue
        docstring = ast.get_docstring(node)
        source = ast.get_source_segment(document.text, node)
        if docstring and source and len(source) < 2500:
            first_line = docstring.strip().split("\n")[0]
            yield f"Write the Python function `{node.name}`. {first_line}", source


def encode(
    tokenizer: Tokenizer, texts: Sequence[str], special_text: bool = False
) -> list[list[int]]:
    """Returns token ids without BOS. Special tokens are parsed only if `special_text`."""
    previous = tokenizer.encode_special_tokens
    tokenizer.encode_special_tokens = not special_text
    try:
        encoded = tokenizer.encode_batch(list(texts), add_special_tokens=False)
    finally:
        tokenizer.encode_special_tokens = previous
    return [encoding.ids for encoding in encoded]


@dataclass(frozen=True, slots=True)
class TokenStream:
    """Concatenated documents, each as BOS, its tokens, EOS."""

    ids: np.ndarray  # [T] uint16, or uint32 for a vocabulary above 65536
    starts: np.ndarray  # [documents] int64, position of each BOS

    @classmethod
    def pack(cls, sequences: Sequence[Sequence[int]]) -> TokenStream:
        lengths = np.array([len(sequence) for sequence in sequences], dtype=np.int64)
        starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
        ids = np.fromiter((t for s in sequences for t in s), np.uint32, count=int(lengths.sum()))
        small = len(ids) == 0 or ids.max() < 1 << 16
        return cls(ids.astype(np.uint16) if small else ids, starts)

    def __add__(self, other: TokenStream) -> TokenStream:
        starts = np.concatenate([self.starts, other.starts + len(self.ids)])
        return TokenStream(np.concatenate([self.ids, other.ids]), starts)


def plain_stream(
    tokenizer: Tokenizer, documents: Sequence[Document], form: TextFormat = RECIPE_FORMAT
) -> TokenStream:
    """Returns the stream of whole files in digest order, for the validation loss."""
    encoded = encode(tokenizer, [document.text for document in documents], form.special_text)
    return TokenStream.pack([form.frame(ids) for ids in encoded])


def training_stream(
    tokenizer: Tokenizer,
    documents: Sequence[Document],
    seed: int,
    pieces_share: float = 1.0,
    form: TextFormat = RECIPE_FORMAT,
) -> TokenStream:
    """Returns the shuffled stream of whole files, short documents of them, and chat examples.

    Because of the short documents, the model has seen `def name(` directly after BOS.
    `pieces_share`: the share of files that are also cut into short documents.
    """
    rng = random.Random(seed)
    encoded = encode(tokenizer, [document.text for document in documents], form.special_text)
    sequences = [form.frame(ids) for ids in encoded]

    parts: list[str] = []
    part_of: list[int] = []  # index of the short document that a part belongs to
    count = 0
    for document in documents:
        if rng.random() >= pieces_share:
            continue
        for piece in pieces(document.text, rng):
            # One in three short documents is cut at random characters.
            cut = cuts(piece, rng) if rng.random() < 1 / 3 else [piece]
            parts.extend(cut)
            part_of.extend([count] * len(cut))
            count += 1
    short: list[list[int]] = [[] for _ in range(count)]
    encoded = encode(tokenizer, parts, form.special_text)
    for index, ids in zip(part_of, encoded, strict=True):
        short[index].extend(ids)
    sequences += [form.frame(ids) for ids in short]

    pairs = []
    if form.im_start is not None and form.im_end is not None:
        pairs = [pair for document in documents for pair in chat_examples(document)]
    users = encode(tokenizer, [f"user\n{user}" for user, _ in pairs])
    answers = encode(tokenizer, [f"assistant\n{answer}" for _, answer in pairs])
    newline = encode(tokenizer, ["\n"])[0]
    for user, answer in zip(users, answers, strict=True):
        question = [form.im_start, *user, form.im_end, *newline]
        reply = [form.im_start, *answer, form.im_end, *newline]
        sequences.append(form.frame([*question, *reply]))

    rng.shuffle(sequences)
    return TokenStream.pack(sequences)


def add_corpus_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that select a corpus."""
    group = parser.add_argument_group("corpus")
    folders = {"type": Path, "nargs": "+", "required": True, "help": "folders of text"}
    group.add_argument("--corpus", "--text", dest="corpus", **folders)
    group.add_argument("--extensions", nargs="*", default=[".py"], help="file name endings to read")
    group.add_argument("--exclude", nargs="*", default=[], help="patterns of path components")
    group.add_argument("--max-kib", type=int, default=512, help="skip larger files")
    group.add_argument(
        "--validation-permille", type=int, default=20, help="share of files held out, in permille"
    )


def corpus_from_arguments(args: argparse.Namespace) -> tuple[list[Document], list[Document]]:
    documents = read_corpus(args.corpus, args.extensions, args.exclude, args.max_kib)
    return split(documents, args.validation_permille)
