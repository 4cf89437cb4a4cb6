"""Fill in the middle: the prompt of a model that was trained to fill a gap between two texts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from cpmcu.serving.errors import ApiError
from cpmcu.tokenizer import Tokenizer

# Tokens that precede the text before the gap, the text after the gap, and the filling.
_NAMES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),  # CodeLlama
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
)
_FILE = ("<|file_sep|>", "<file_sep>")
# Tokens that end a filling, as an end-of-sequence token does.
_ENDS = ("<|fim_pad|>", "<fim_pad>", "<|repo_name|>", "<|file_sep|>", "<file_sep>", "\u2581<EOT>")


@dataclasses.dataclass(frozen=True, slots=True)
class Fill:
    """The tokens of one tokenizer for gaps."""

    tokenizer: Tokenizer
    names: tuple[int, int, int]
    file: int | None
    ends: tuple[int, ...]

    def prompt(
        self, before: str | Sequence[int], after: str, files: Sequence[tuple[str, str]] = ()
    ) -> list[int]:
        """The tokens of a prompt for the gap between two texts. `files`: (name, text) of others."""
        encode = self.tokenizer.encode
        prefix, suffix, middle = self.names
        found = encode("", add_special_tokens=True)
        for name, text in files:
            found += [] if self.file is None else [self.file]
            found += encode(f"{name}\n{text}\n", add_special_tokens=False)
        if files and self.file is not None:
            found.append(self.file)
        if isinstance(before, str):
            before = encode(before, add_special_tokens=False)
        return [*found, prefix, *before, suffix, *encode(after, add_special_tokens=False), middle]


def find_fill(tokenizer: Tokenizer, param: str) -> Fill:
    """The tokenizer's tokens for gaps. Raises ApiError (400) for `param` if there are none."""
    for names in _NAMES:
        ids = tuple(map(tokenizer.id_of, names))
        if None not in ids:
            known = [tokenizer.id_of(name) for name in _FILE]
            ends = [tokenizer.id_of(name) for name in _ENDS]
            return Fill(
                tokenizer,
                ids,  # type: ignore[arg-type]
                next((token for token in known if token is not None), None),
                tuple(token for token in ends if token is not None),
            )
    raise ApiError(
        400,
        f"{param} needs a model that fills gaps, but this one's tokenizer has no tokens such as "
        f"{_NAMES[0][0]}.",
        param=param,
        code="unsupported_value",
    )
