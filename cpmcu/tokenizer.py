"""Text to token ids and back, from a checkpoint directory's own tokenizer files."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from cpmcu.checks import FieldError, PromptTooLongError, is_installed, one_line, shown
from cpmcu.errors import about, one_sentence
from cpmcu.loading.index import check_file
from cpmcu.loading.model_files import model_files
from cpmcu.text.token_length import longest_token

if TYPE_CHECKING:
    import tokenizers

# Keys of the special tokens in tokenizer_config.json. Chat templates use the same names.
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
# BaseExceptions that do not come from the called library.
_NOT_ERRORS = (KeyboardInterrupt, SystemExit, GeneratorExit)
# For longer inputs the interpreter lock is released. This costs 20 µs more.
_LONG_TEXT = 1024  # characters
_LONG_IDS = 512
_PIECE = 1 << 15  # ids that are converted to Python integers in one go
_MOST_TEXTS = 1 << 18  # maximum number of texts of single tokens that are remembered
# Modules through which transformers reads tokenizer.model -> their packages.
_SENTENCEPIECE = {"sentencepiece": "sentencepiece", "google.protobuf": "protobuf"}
# Files that transformers' tokenizers read token texts from.
_VOCABULARIES = ("*.model", "*.spm", "*.tiktoken", "*vocab*", "tekken.json")
# Fields of a token in added_tokens_decoder of tokenizer_config.json.
_ADDED = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")


def eos_ids(configs: Mapping[str, Mapping[str, Any]], vocab_size: int = 1 << 31) -> tuple[int, ...]:
    """End-of-sequence ids in config files; `configs`: file name -> content.

    Raises ValueError if eos_token_id is neither a token id nor a list of token ids.
    """
    found: list[int] = []
    for file, config in configs.items():
        stated = config.get("eos_token_id")
        ids = [] if stated is None else stated if isinstance(stated, list) else [stated]
        if not all(type(token) is int and 0 <= token < vocab_size for token in ids):
            raise ValueError(
                f"{file}: eos_token_id is {shown(stated)}, expected an integer or a list of "
                f"integers from 0 to {vocab_size - 1}, the ids of the vocabulary"
            )
        found += ids
    return tuple(dict.fromkeys(found))


class _Backend(Protocol):
    """Interface to a tokenizer library."""

    def encode(self, text: str, special: bool, max_length: int | None) -> list[int]: ...
    def longest_token(self) -> int | None: ...
    def decode(self, ids: list[int], skip_special: bool) -> str: ...
    def id_of(self, token: str) -> int | None: ...
    def piece(self, token_id: int) -> str | None: ...
    def size(self) -> int: ...
    def to_json(self) -> str: ...
    def special_tokens(self) -> dict[str, Any]: ...


class Tokenizer:
    """A checkpoint's tokenizer with its special tokens and end-of-sequence ids."""

    def __init__(
        self, backend: _Backend, config: dict[str, Any], eos_token_ids: Sequence[int] = ()
    ) -> None:
        self._backend = backend
        # Texts of single tokens, indexed by `skip_special_tokens`.
        self._texts: tuple[dict[int, str], dict[int, str]] = ({}, {})
        self.config = config  # contents of tokenizer_config.json
        self.special_tokens = {
            name: _content(name, config[name]) for name in _SPECIAL if config.get(name) is not None
        }
        self.bos_token_id = self._special_id("bos_token")
        own_eos = self._special_id("eos_token")
        own = [] if own_eos is None else [own_eos]
        self.eos_token_ids = tuple(dict.fromkeys([*eos_token_ids, *own]))

    @classmethod
    @one_sentence()
    def from_directory(cls, directory: str | Path) -> Tokenizer:
        """Reads the tokenizer of a checkpoint directory or GGUF file.

        End-of-sequence ids come from generation_config.json, config.json and the tokenizer, in
        that order. Raises FileNotFoundError if there are no tokenizer files. Raises ImportError if
        the files need transformers and it is missing. Raises ValueError for unreadable files.
        """
        with about(Path(directory)):
            return cls._read(Path(directory))

    @classmethod
    def _read(cls, directory: Path) -> Tokenizer:
        files = model_files(directory)
        config = files.json("tokenizer_config.json")
        # Older checkpoints keep special tokens in special_tokens_map.json.
        if "added_tokens_decoder" not in config:
            config = _filled(config, files.json("special_tokens_map.json"))
        file = directory / "tokenizer.json"
        backend: _Backend
        if files.build_tokenizer is not None:
            backend = _FastBackend(directory, files.build_tokenizer, config, {})
        elif os.path.lexists(file):
            check_file(file)
            added = files.json("added_tokens.json")
            backend = _FastBackend(file, functools.partial(_from_file, file), config, added)
        else:
            backend = _TransformersBackend(directory)
        config = _filled(config, backend.special_tokens())
        names = ("generation_config.json", "config.json")
        eos = eos_ids({name: files.json(name) for name in names})
        return cls(backend, config, eos)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added tokens included. The model's vocabulary may be padded."""
        return self._backend.size()

    def encode(
        self, text: str, *, add_special_tokens: bool = True, max_length: int | None = None
    ) -> list[int]:
        """Token ids of `text`.

        `add_special_tokens` adds the tokens that the tokenizer puts around a text, such as the
        begin-of-sequence token. Raises ValueError if `text` holds half of a surrogate pair or
        makes more than `max_length` tokens. Long texts release the interpreter lock.
        """
        if max_length is not None:
            self.check_length(text, max_length)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise FieldError(
                f"the prompt holds {_not_unicode(text[error.start])}, but must be Unicode text",
                field="prompt",
            ) from error
        return self._backend.encode(text, add_special_tokens, max_length)

    def check_length(self, text: str, max_length: int) -> None:
        """Raises ValueError if the character count alone implies more than `max_length` tokens."""
        if len(text) <= max_length:
            return
        longest = self._longest_token
        least = 0 if longest is None else -(-len(text) // longest)
        if least > max_length:
            raise PromptTooLongError(
                f"the prompt has {len(text)} characters, which are at least {least} tokens, but "
                f"prompt and output together can have {max_length}",
                tokens=least,
                most=max_length,
                at_least=True,
            )

    @functools.cached_property
    def _longest_token(self) -> int | None:
        return self._backend.longest_token()  # scans the whole vocabulary

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`; invalid UTF-8 bytes become U+FFFD."""
        if len(ids) != 1:
            return self._backend.decode(list(ids), skip_special_tokens)
        token, texts = ids[0], self._texts[skip_special_tokens]
        text = texts.get(token)
        if text is None:
            text = self._backend.decode([token], skip_special_tokens)
            if len(texts) < _MOST_TEXTS:
                texts[token] = text
        return text

    def is_special(self, token_id: int) -> bool:
        """Does `decode` skip this token by default?"""
        return self.decode([token_id]) != self.decode([token_id], skip_special_tokens=False)

    def id_of(self, token: str) -> int | None:
        """Id of the token that the vocabulary spells `token`; None if there is no such token."""
        return self._backend.id_of(token)

    def piece(self, token_id: int) -> str | None:
        """The vocabulary's spelling of a token; None if the id has no token."""
        return self._backend.piece(token_id)

    def to_json(self) -> str:
        """The tokenizer as tokenizer.json text. Raises ValueError if it has no such form."""
        return self._backend.to_json()

    def _special_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._backend.id_of(token)


class _FastBackend:
    """A tokenizer of the tokenizers library; `path` is its file, `make` builds it."""

    def __init__(
        self,
        path: Path,
        make: Callable[[], tokenizers.Tokenizer],
        config: dict[str, Any],
        added: dict[str, Any],
    ) -> None:
        self._path = path
        try:
            self._tokenizer = make()
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            self._add(config, added)
        except (ValueError, *_NOT_ERRORS):  # raised by this module
            raise
        except BaseException as error:  # the library's panics are not subclasses of Exception
            raise ValueError(
                f"{path} is not a tokenizer that can be read: {one_line(error)}"
            ) from error
        self._tokenizer.encode_special_tokens = bool(config.get("split_special_tokens"))
        # On each side of a text, tokenizer_config.json overrides the file's post-processor.
        first, last = self._stated(config, "bos_token"), self._stated(config, "eos_token")
        self._frame: tuple[list[int], list[int]] | None = None
        try:
            begin, end = self._own_frame()  # most panicking tokenizers panic here
        except RuntimeError as error:
            raise ValueError(str(error)) from error
        if first is not None or last is not None:
            self._frame = (begin if first is None else first, end if last is None else last)

    def encode(self, text: str, special: bool, max_length: int | None) -> list[int]:
        first, last = self._frame or ([], [])
        own = special and self._frame is None
        with self._panics():
            if len(text) < _LONG_TEXT:
                ids = self._tokenizer.encode(text, add_special_tokens=own).ids
                return [*first, *ids, *last] if special else list(ids)
            # Unlike `encode`, this call releases the interpreter lock.
            (found,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=own)
        length = len(found) + (len(first) + len(last) if special else 0)
        if max_length is not None and length > max_length:
            raise PromptTooLongError(
                f"the prompt has {length} tokens, but prompt and output together can have "
                f"{max_length}",
                tokens=length,
                most=max_length,
            )
        ids = _ids_of(found)
        return [*first, *ids, *last] if special else ids

    def decode(self, ids: list[int], skip_special: bool) -> str:
        if len(ids) < _LONG_IDS:  # runs for every token: `_panics` would take longer than decoding
            try:
                return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special))
            except _NOT_ERRORS:
                raise
            except BaseException as error:
                raise self._failed(error) from error
        with self._panics():
            (text,) = self._tokenizer.decode_batch([ids], skip_special_tokens=skip_special)
            return str(text)

    @contextmanager
    def _panics(self) -> Iterator[None]:
        """Turns the library's exceptions and panics (BaseException) into RuntimeError."""
        try:
            yield
        except _NOT_ERRORS:
            raise
        except BaseException as error:
            raise self._failed(error) from error

    def _failed(self, error: BaseException) -> RuntimeError:
        return RuntimeError(f"{self._path}: the tokenizers library failed: {one_line(error)}")

    def longest_token(self) -> int | None:
        return longest_token(self._tokenizer)

    def id_of(self, token: str) -> int | None:
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def piece(self, token_id: int) -> str | None:
        found: str | None = self._tokenizer.id_to_token(token_id)
        return found

    def size(self) -> int:
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def to_json(self) -> str:
        return str(self._tokenizer.to_str())

    def special_tokens(self) -> dict[str, Any]:
        return {}  # tokenizer.json does not name the roles of special tokens

    def _add(self, config: dict[str, Any], added: dict[str, Any]) -> None:
        """Adds the tokens that only files beside tokenizer.json list, and marks special tokens.

        A token is skipped if it would get another id than the listed one.
        """
        from tokenizers import AddedToken

        stated: dict[int, AddedToken] = {}
        try:
            for name, number in added.items():
                stated[int(number)] = AddedToken(name)
            for number, fields in (config.get("added_tokens_decoder") or {}).items():
                known = {key: value for key, value in fields.items() if key in _ADDED}
                stated[int(number)] = AddedToken(**known)
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(
                "the added tokens beside tokenizer.json, in added_tokens.json or "
                f"tokenizer_config.json, cannot be read: {one_line(error)}"
            ) from error
        own, missing = self._tokenizer.get_added_tokens_decoder(), []
        size = self.size()
        for number, token in sorted(stated.items(), key=lambda item: item[0]):
            same = number in own and own[number].content == token.content
            if same and (own[number].special or not token.special):
                continue
            found = self.id_of(token.content)
            if found == number or (found is None and number == size):
                missing.append(token)
                size += found is None
        self._tokenizer.add_tokens(missing)
        names = [_content(name, config[name]) for name in _SPECIAL if config.get(name) is not None]
        more = config.get("additional_special_tokens") or []
        if not isinstance(more, (list, dict)):
            raise ValueError(
                f"tokenizer_config.json: additional_special_tokens is {shown(more)}, expected a "
                "list"
            )
        names += [_content("additional_special_tokens", token) for token in more]
        # Tokens already special in tokenizer.json keep their other properties (strip, normalise).
        own = self._tokenizer.get_added_tokens_decoder()
        marked = {token.content for token in own.values() if token.special}
        self._tokenizer.add_special_tokens(
            [name for name in names if name not in marked and self.id_of(name) is not None]
        )

    def _stated(self, config: dict[str, Any], name: str) -> list[int] | None:
        """Tokens that add_bos_token or add_eos_token adds; None if the config does not say."""
        adds = config.get(f"add_{name}")
        token = self.id_of(_content(name, config[name])) if config.get(name) is not None else None
        if adds is None or (adds and token is None):
            return None
        return [token] if adds and token is not None else []

    def _own_frame(self) -> tuple[list[int], list[int]]:
        """Token ids that the file's post-processor adds (before, after) a text."""
        text, framed = (self.encode("a", special, None) for special in (False, True))
        for begin in range(len(framed) - len(text) + 1):
            if framed[begin : begin + len(text)] == text:
                return framed[:begin], framed[begin + len(text) :]
        return [], []


class _TransformersBackend:
    """Reads directories without tokenizer.json (sentencepiece models) through transformers."""

    def __init__(self, directory: Path) -> None:
        names = ("tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json")
        found = [directory / name for name in names if os.path.lexists(directory / name)]
        if not found:
            raise FileNotFoundError(
                f"{directory} has no tokenizer: neither tokenizer.json nor {', '.join(names)}"
            )
        if not any(next(directory.glob(pattern), None) for pattern in _VOCABULARIES):
            raise FileNotFoundError(
                f"{directory} has {found[0].name} but no vocabulary, expected tokenizer.json (or "
                "tokenizer.model, vocab.json, vocab.txt): the download may be incomplete"
            )
        for file in found:
            check_file(file)
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise ImportError(
                f"{directory} has no tokenizer.json, so its tokenizer needs the transformers "
                "package: pip install 'cpmcu[hf]'"
            ) from error
        missing = [name for name in _SENTENCEPIECE if not is_installed(name)]
        if missing and directory / "tokenizer.model" in found:
            raise ImportError(
                f"{directory} has tokenizer.model and no tokenizer.json, which needs "
                f"{' and '.join(_SENTENCEPIECE[name] for name in missing)}: pip install 'cpmcu[hf]'"
            )
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(
                str(directory), trust_remote_code=False, local_files_only=True
            )
        except Exception as error:
            raise ValueError(
                f"transformers cannot read the tokenizer in {directory}: {one_line(error)}"
            ) from error

    def encode(self, text: str, special: bool, max_length: int | None) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=special))

    def longest_token(self) -> int | None:
        return None  # a piece may stand for more characters than its spelling has

    def decode(self, ids: list[int], skip_special: bool) -> str:
        return str(
            self._tokenizer.decode(
                ids, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
            )
        )

    def id_of(self, token: str) -> int | None:
        # For an unknown spelling, transformers returns the id of the unknown token.
        found = self._tokenizer.convert_tokens_to_ids(token)
        if isinstance(found, int) and self._tokenizer.convert_ids_to_tokens(found) == token:
            return found
        return None

    def piece(self, token_id: int) -> str | None:
        found = self._tokenizer.convert_ids_to_tokens(token_id)
        return found if isinstance(found, str) else None

    def size(self) -> int:
        return len(self._tokenizer)

    def to_json(self) -> str:
        fast = getattr(self._tokenizer, "backend_tokenizer", None)
        if fast is None:
            raise ValueError("the model's tokenizer has no tokenizer.json, which a grammar needs")
        return str(fast.to_str())

    def special_tokens(self) -> dict[str, Any]:
        stated = self._tokenizer.special_tokens_map
        return {name: stated[name] for name in _SPECIAL if name in stated}


def _ids_of(encoding: Any) -> list[int]:
    """Token ids of a text, converted in pieces so that other threads can run in between."""
    if len(encoding) <= _PIECE:
        return list(encoding.ids)
    encoding.truncate(_PIECE)
    return [token for piece in (encoding, *encoding.overflowing) for token in piece.ids]


def _filled(config: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """`config`, with missing and null keys taken from `more`."""
    return {**more, **{key: value for key, value in config.items() if value is not None}}


def _content(name: str, token: Any) -> str:
    """Text of a special token, which a config holds as a string or as an AddedToken object.

    Raises ValueError for any other value.
    """
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str) or not _is_unicode(text):
        raise ValueError(
            f"tokenizer_config.json or special_tokens_map.json: {name} has {shown(token)}, "
            "expected a token's text or an object with its content"
        )
    return text


def _not_unicode(character: str) -> str:
    """Describes half of a surrogate pair. Python reads a wrong byte of a terminal as such a one."""
    found = f"{character!r}, half of a surrogate pair"
    if "\udc80" <= character <= "\udcff":
        found += f" or the byte 0x{ord(character) - 0xDC00:02x} that is not UTF-8"
    return found


def _is_unicode(text: str) -> bool:
    """Is `text` free of unpaired surrogates?"""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _from_file(path: Path) -> tokenizers.Tokenizer:
    import tokenizers  # takes 50 ms

    return tokenizers.Tokenizer.from_file(str(path))
