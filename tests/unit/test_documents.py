"""Documents have a limited length. Source and documents use the field's terms."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

MOST_LINES_OF_THE_README = 150
MOST_WORDS = {
    "docs/server.md": 2500,
    "docs/server_flags.md": 1000,
    "docs/responses.md": 1300,
    "docs/benchmarks.md": 2500,
    "docs/speculation.md": 2000,
    "docs/prefix_cache.md": 770,
    "docs/messages.md": 1000,
    "docs/tools.md": 900,
    "docs/adding_parser.md": 800,
    "docs/gpus.md": 1200,
    **dict.fromkeys(
        [
            "docs/architecture.md",
            "docs/request.md",
            "docs/performance.md",
            "docs/adding_model.md",
            "docs/adding_quant.md",
            "docs/adding_drafter.md",
            "docs/adding_block.md",
            *(f"docs/kernels/{path.name}" for path in sorted((DOCS / "kernels").glob("*.md"))),
        ],
        1500,
    ),
}
MOST_HOME_MADE_TERMS = 40

# Home-made term -> the word to use. No ordinary sentence of source or documents needs these.
TERMS = {
    r"\bproducts?\b": "GEMM",
    r"\bgemm_chain\w*|\bchains? of GEMMs\b|\blinks? of a chain\b": "fused layer kernel, stage",
    r"\bblocks? of threads\b|\bthread blocks?\b": "CTA",
    r"\bmulti-?processors?\b": "SM",
    r"\bslabs?\b": "warp tile",
    r"\bsixteens?\b": "m16 tile",
    r"\binbox(es)?\b": "DSMEM receive buffer",
    r"\btaps?\b": "auxiliary hidden states",
    r"\btickets?\b": "step counter",
    r"\bmirror(s|ed)?\b": "pinned staging buffer",
    r"\bby turns\b": "interleaved",
    r"\bplanted\b": "synthetic acceptance",
    r"\bhalf[- ]done\b": "open masked step",
    r"\bpending (tokens?|rows?)\b|\bseed_pending\b": "accepted tokens",
    r"\bcatch(es|ing)? up\b": "process the accepted tokens",
    r"(?<!clock )(?<!\.)\bcycles?\b": "speculative step",
    r"\bis_shown\b|\bkeep_shown\b|\bkept_tokens?\b": "is_special, keep_special_tokens",
    r"\bkNotYet\b": "ready flag",
}
# Outside the engine these words are right: a cell of a printed table, digits of a number.
TERMS_OF_THE_ENGINE = {
    r"\bcells?\b": "KV entry, position",
    r"\btold\b": "ready flag",
    r"\bdigits\b": "nibble planes",
    r"\bapart\b": "rope pair stride",
    r"\bturned\b": "rotated",
}


@pytest.mark.parametrize("name", sorted(MOST_WORDS))
def test_a_document_has_at_most_so_many_words(name: str) -> None:
    words = len((ROOT / name).read_text("utf-8").split())
    assert words <= MOST_WORDS[name], f"{name} has {words} words"


def test_the_readme_has_at_most_150_lines() -> None:
    lines = len((ROOT / "README.md").read_text("utf-8").splitlines())
    assert lines <= MOST_LINES_OF_THE_README, f"README.md has {lines} lines"


def test_every_document_begins_with_a_title_and_names_files_on_one_line() -> None:
    """A formatter of C++ source once broke a README: its title became `#state`."""
    pages = [path for folder in ("csrc", "cpmcu", "docs") for path in (ROOT / folder).rglob("*.md")]
    assert len(pages) > 80
    for page in [ROOT / "README.md", *pages]:
        text = page.read_text("utf-8")
        assert re.match(r"# \S", text), f"{page} begins with {text[:20]!r}, expected '# TITLE'"
        broken = re.search(r"\{$", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.M)
        assert broken is None, f"{page} has a line that ends in an open brace"


def test_every_page_of_the_notebook_is_in_its_table() -> None:
    table = (DOCS / "notebook" / "README.md").read_text("utf-8")
    pages = {path.name for path in (DOCS / "notebook").glob("*.md")} - {"README.md"}
    assert pages == set(re.findall(r"\]\((\w+\.md)\)", table))


def test_the_glossary_is_alphabetical() -> None:
    text = (DOCS / "glossary.md").read_text("utf-8")
    terms = [term.lower() for term in re.findall(r"^\| (.+?) \|", text, re.MULTILINE)][1:]
    assert len(terms) > 50
    assert terms == sorted(terms)


def checked_files() -> Iterator[Path]:
    """Source files, and the documents about the current state (not the notebook)."""
    yield ROOT / "README.md"
    for folder, suffixes in (
        (ROOT / "csrc", (".h", ".cpp", ".cu", ".cuh", ".md")),
        (ROOT / "cpmcu", (".py", ".md")),
        (DOCS, (".md",)),
    ):
        for path in sorted(folder.rglob("*")):
            notes = path.is_relative_to(DOCS / "notebook") or path == DOCS / "glossary.md"
            if path.suffix in suffixes and not notes:
                yield path


def home_made_terms() -> list[str]:
    """A message for each home-made term: its place, the term, the word to use, and the line."""
    found = []
    for path in checked_files():
        terms = TERMS if path.is_relative_to(ROOT / "cpmcu") else TERMS | TERMS_OF_THE_ENGINE
        text = path.read_text("utf-8")
        lines = text.splitlines()
        for term, word in terms.items():
            for match in re.finditer(term, text, re.IGNORECASE):
                row = text.count("\n", 0, match.start())
                place = f"{path.relative_to(ROOT)}:{row + 1}"
                found.append(f"{place}: {match[0]!r} -> {word}: {lines[row].strip()}")
    return found


def test_home_made_terms_are_rare() -> None:
    found = home_made_terms()
    assert len(found) <= MOST_HOME_MADE_TERMS, "\n".join([f"{len(found)} terms:", *found])
