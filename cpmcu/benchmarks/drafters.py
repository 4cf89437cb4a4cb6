"""Compares drafters on the same requests: `cpmcu bench --drafters`.

| prompts | text | decoding |
|---|---|---|
| copy | Python code twice, then its first lines | greedy |
| new | the first lines of Python code | sampled with a fixed seed |

Each drafter must give the tokens of plain decoding. All drafters are therefore compared on the same
text. Each row drafts a chain of fixed length. Tokens/s counts the time from the first token of a
request to its last, in the fastest of `REPEATS` runs.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpmcu.benchmarks.progress import BenchProgress
from cpmcu.config import EngineConfig, SpeculativeConfig
from cpmcu.shipped import shipped_draft, shipped_model

if TYPE_CHECKING:
    from cpmcu.llm import LLM
    from cpmcu.outputs import CompletionOutput

logger = logging.getLogger(__name__)

REPEATS = 3
NUM_STEPS = 3  # tokens that a draft network drafts in a step
LOOKED_UP = 5  # tokens that n-gram look-up or the hierarchy drafts in a step
PLAIN = "none"
# Values of spec_layer_shift: a block draft reads layers further up or down.
SHIFTS = (-1, 0, 1)

_CHAIN = {"num_speculative_tokens": NUM_STEPS}
_FILLED = {
    "mtp_strategy": "with_ngram",
    "num_model_steps": NUM_STEPS,
    "num_speculative_tokens": LOOKED_UP,
}
DRAFTERS: Mapping[str, Mapping[str, Any]] = {  # name of a row -> speculative configuration
    PLAIN: {"no_speculation": True},
    "n-gram": {"method": "ngram", "num_speculative_tokens": LOOKED_UP},
    "MTP 1": {"method": "mtp", "num_speculative_tokens": 1},
    "MTP 3": {"method": "mtp", **_CHAIN},
    "MTP 3 + n-gram": {"method": "mtp", **_FILLED},
    "EAGLE-2": {"method": "eagle", **_CHAIN},
    "EAGLE-3": {"method": "eagle3", **_CHAIN},
    "small model": {"method": "model", **_CHAIN},
    "hierarchical": {"method": "hierarchical", "num_speculative_tokens": LOOKED_UP},
}

CODE = (
    '''class Stack:
    """A stack of items with a limit."""

    def __init__(self, limit=None):
        self.items = []
        self.limit = limit

    def push(self, item):
        if self.limit is not None and len(self.items) >= self.limit:
            raise OverflowError("the stack is full")
        self.items.append(item)
''',
    '''def read_table(path, separator=","):
    """Return the rows of a text file as lists of strings."""
    rows = []
    with open(path, encoding="utf-8") as file:
        for line in file:
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            rows.append(line.split(separator))
    return rows
''',
    """import unittest


class PathTest(unittest.TestCase):
    def test_join(self):
        self.assertEqual(join("a", "b"), "a/b")
        self.assertEqual(join("a", ""), "a/")
        self.assertEqual(join("", "b"), "b")
        self.assertRaises(TypeError, join, None)
""",
    '''def find(tree, key):
    """Return the node of a binary search tree with this key, or None."""
    node = tree.root
    while node is not None:
        if key == node.key:
            return node
        node = node.left if key < node.key else node.right
    return None
''',
)


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """A prompt and how its tokens are drawn."""

    prompt: str
    temperature: float
    seed: int


def _copying(code: str, seed: int) -> Request:
    begin = "\n".join(code.split("\n")[:2])
    return Request(f"{code}\n\n{code}\n\n{begin}", 0.0, seed)


def _new(code: str, seed: int) -> Request:
    return Request("\n".join(code.split("\n")[:4]) + "\n", 0.8, seed)


PROMPTS: Mapping[str, list[Request]] = {
    "copy": [_copying(code, seed) for seed, code in enumerate(CODE)],
    "new": [_new(code, seed) for seed, code in enumerate(CODE)],
}


@dataclasses.dataclass(frozen=True, slots=True)
class DrafterRow:
    """A drafter on one kind of prompts."""

    drafter: str
    prompts: str  # name of the kind of prompts, a key of PROMPTS
    drafted: int  # tokens of one draft
    tokens_per_s: float
    mean_accept_length: float  # tokens a step, the target's own included; 1 without a draft
    # Entry i: share of the steps that accepted at least the first i + 1 drafted tokens.
    acceptance_per_position: list[float]
    tokens: int  # emitted tokens of all requests
    # The mean accept length of the small model in a hierarchy; 0 for other drafters.
    inner_accept_length: float


def available(config: EngineConfig) -> dict[str, Mapping[str, Any]]:
    """The rows of `DRAFTERS` for this target: those whose draft ships, and an MTP head of its own.

    Raises ValueError if the configuration names a draft.
    """
    from cpmcu.drafters.finding import drafts_by_default
    from cpmcu.drafters.registry import registered_drafters
    from cpmcu.loading.hub import resolve_model

    if config.speculation != SpeculativeConfig():
        raise ValueError("--drafters compares drafters, but a flag of speculation is given, too")
    target = shipped_model() if config.model is None else resolve_model(config.model)
    known = registered_drafters()
    own_head = shipped_draft(target) is None and drafts_by_default(target)
    return {
        name: options
        for name, options in DRAFTERS.items()
        if options.get("method", "ngram") in known
        and (_ships(target, options) or (own_head and options["method"] == "mtp"))
    }


def _ships(target: Path, options: Mapping[str, Any]) -> bool:
    method = options.get("method", "ngram")
    if method == "hierarchical":  # the small model with a head
        model = shipped_draft(target, method)
        return model is not None and shipped_draft(model) is not None
    return method == "ngram" or shipped_draft(target, method) is not None


def shifted(config: EngineConfig) -> dict[str, SpeculativeConfig]:
    """Rows of `bench --tap-shift`: the named block draft, reading other layers of the target.

    Raises ValueError if no draft is named.
    """
    speculation = config.speculation
    if speculation.draft_model_path is None:
        raise ValueError("--tap-shift is given without --draft-model-path, expected a block draft")
    return {PLAIN: SpeculativeConfig(no_speculation=True)} | {
        f"layers {shift:+d}": speculation.but(spec_layer_shift=shift) for shift in SHIFTS
    }


def run_drafters(
    config: EngineConfig,
    tokens: int,
    progress: BenchProgress,
    found: Mapping[str, SpeculativeConfig] | None = None,
) -> dict[str, Any]:
    """Measures rows with `tokens` tokens of each request. Returns a JSON object.

    `found`: row -> speculative configuration; None: what is available for the target. A draft
    that cannot read shifted layers is left out, with a warning.
    """
    from cpmcu.llm import LLM

    rows: list[DrafterRow] = []
    plain: dict[str, list[list[int]]] = {}
    described: dict[str, Any] = {}
    if found is None:
        found = {
            name: SpeculativeConfig.from_mapping(row) for name, row in available(config).items()
        }
    for i, (name, speculation) in enumerate(found.items(), 1):
        progress.note(f"{name}, {i} of {len(found)}")
        drafted = dataclasses.replace(config, speculative_config=speculation, prefix_cache=False)
        try:
            llm = LLM(progress=progress.loading(), **dataclasses.asdict(drafted))
        except ValueError as error:
            if not speculation.options.get("spec_layer_shift"):
                raise
            logger.warning("%s is left out: %s", name, error)
            continue
        with llm:
            described = {"model": llm.directory.name, "dtype": llm.spec.dtype}
            for kind, requests in PROMPTS.items():
                outputs = [_fastest(llm, request, tokens) for request in requests]
                texts = [list(output.token_ids) for output in outputs]
                if plain.setdefault(kind, texts) != texts:
                    raise RuntimeError(f"{name}: the tokens differ from those of plain decoding")
                depth = 0 if llm.draft_spec is None else llm.draft_spec.depth
                rows.append(_row(name, kind, depth, outputs))
    return {
        **described,
        "tokens_per_request": tokens,
        "repeats": REPEATS,
        "rows": [dataclasses.asdict(row) for row in rows],
    }


def _fastest(llm: LLM, request: Request, tokens: int) -> CompletionOutput:
    from cpmcu.sampling import SamplingParams

    params = SamplingParams(
        temperature=request.temperature,
        top_p=1.0,
        repetition_penalty=1.0,
        seed=request.seed,
        max_tokens=tokens,
        ignore_eos=True,
    )
    runs = [llm.generate(request.prompt, params)[0].outputs[0] for _ in range(REPEATS)]
    return min(runs, key=lambda run: run.timings.decode_s)


def _row(name: str, kind: str, depth: int, outputs: list[CompletionOutput]) -> DrafterRow:
    histogram = [0] * (depth + 1)
    inner_steps = inner_tokens = 0
    for output in outputs:
        metrics = output.spec_decode_metrics
        for accepted, steps in enumerate(metrics.acceptance_histogram if metrics else ()):
            histogram[accepted] += steps
        if metrics:
            inner_steps += metrics.num_inner_steps
            inner_tokens += metrics.num_inner_tokens
    steps = sum(histogram)
    accepted = sum(count * length for length, count in enumerate(histogram))
    seconds = sum(output.timings.decode_s for output in outputs)
    tokens = sum(len(output.token_ids) for output in outputs)
    return DrafterRow(
        drafter=name,
        prompts=kind,
        drafted=depth,
        tokens_per_s=(tokens - len(outputs)) / seconds,
        mean_accept_length=1 + accepted / max(steps, 1),
        acceptance_per_position=[sum(histogram[i:]) / max(steps, 1) for i in range(1, depth + 1)],
        tokens=tokens,
        inner_accept_length=inner_tokens / max(inner_steps, 1),
    )


def drafters_table(result: dict[str, Any]) -> list[str]:
    """Markdown lines: a table for each kind of prompts."""
    lines = [
        f"{len(CODE)} requests of {result['tokens_per_request']} tokens, the fastest of "
        f"{result['repeats']} runs each",
    ]
    titles = {
        "copy": "prompts that copy (greedy)",
        "new": "prompts that do not (temperature 0.8)",
    }
    for kind, title in titles.items():
        rows = [row for row in result["rows"] if row["prompts"] == kind]
        plain = rows[0]["tokens_per_s"]
        lines += ["", f"{title}:", "", "| drafter | drafted | tok/s | ÷ none | accept length | "]
        lines[-1] += "acceptance per position |"
        lines += ["|---|---:|---:|---:|---:|---|"]
        for row in rows:
            length = f"{row['mean_accept_length']:.2f}"
            if row["inner_accept_length"]:
                length += f" (inner {row['inner_accept_length']:.2f})"
            shares = " ".join(f"{share:.2f}" for share in row["acceptance_per_position"])
            lines.append(
                f"| {row['drafter']} | {row['drafted']} | {row['tokens_per_s']:.0f} | "
                f"{row['tokens_per_s'] / plain:.2f} | {length} | {shares} |"
            )
    return lines
