"""`--needle`: does sparse attention find in a long text what dense attention finds?

Each text states numbers of names at eight depths. The model is asked for each of these numbers. All
questions about a text share its prefill through the prefix cache. Decoding is greedy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from cpmcu.benchmarks.needle_text import NeedleText, make_text, statement
from cpmcu.benchmarks.progress import BenchProgress
from cpmcu.config import EngineConfig, SpeculativeConfig
from cpmcu.llm import LLM
from cpmcu.sampling import SamplingParams
from cpmcu.sparse_options import SparseOptions

DEPTHS = 8


@dataclasses.dataclass(frozen=True, slots=True)
class NeedleRow:
    """Answers about the texts of one length."""

    context: int  # tokens of the text
    attention: str  # "dense" or "sparse"
    asked: int  # number of questions at each depth
    found: list[int]  # number of right answers at each depth


def run_needle(
    config: EngineConfig, lengths: Sequence[int], num_texts: int, progress: BenchProgress
) -> dict[str, Any]:
    """Asks the model about `num_texts` texts of each length. Returns a JSON object.

    Raises ValueError if the model cannot have sparse attention, or a length is too small.
    """
    longest = max(lengths)
    config = dataclasses.replace(
        config,
        max_model_len=config.max_model_len or longest + 64,
        prefix_cache=True,
        speculative_config=SpeculativeConfig(no_speculation=True),
    )
    changes: dict[str, Any] = {field.name: None for field in dataclasses.fields(SparseOptions)}
    dense = dataclasses.replace(config, **changes | {"apply_sparse": False})
    rows = []
    for attention, chosen in (
        ("sparse", dataclasses.replace(config, apply_sparse=True)),
        ("dense", dense),
    ):
        with LLM(progress=progress.loading(), **dataclasses.asdict(chosen)) as llm:
            for length in lengths:
                progress.note(f"{attention} attention, {num_texts} texts of {length} tokens")
                rows.append(_row(llm, attention, length, num_texts))
            model, dtype = llm.directory.name, llm.spec.dtype
    rows.sort(key=lambda row: row.context)
    return {
        "model": model,
        "dtype": dtype,
        "depths": [(i + 0.5) / DEPTHS for i in range(DEPTHS)],
        "rows": [dataclasses.asdict(row) for row in rows],
    }


def _row(llm: LLM, attention: str, length: int, num_texts: int) -> NeedleRow:
    found = np.zeros(DEPTHS, int)
    for seed in range(num_texts):
        rng = np.random.default_rng([length, seed])
        text = make_text(_plain(llm), llm.tokenize("")[:1], length, DEPTHS, rng)
        found += [_answers(llm, text, i) for i in range(DEPTHS)]
    return NeedleRow(length, attention, num_texts, found.tolist())


def _plain(llm: LLM) -> Any:
    return lambda text: llm.tokenizer.encode(text, add_special_tokens=False)


def _answers(llm: LLM, text: NeedleText, i: int) -> bool:
    """Does the answer to question i begin with the number?"""
    expected = len(_plain(llm)(statement("", text.answers[i])))
    params = SamplingParams(temperature=0.0, repetition_penalty=1.0, max_tokens=expected)
    output = llm.generate(text.ids + text.questions[i], params)[0].outputs[0]
    return output.text.strip().startswith(text.answers[i])


def needle_table(result: dict[str, Any]) -> str:
    """The result as a Markdown table."""
    depths = [f"{100 * depth:.0f} %" for depth in result["depths"]]
    lines = [
        f"{result['model']}, {result['dtype']}: numbers found by the depth of their statement",
        "",
        f"| context | attention | found | {' | '.join(depths)} |",
        "|---:|---|---:|" + "---:|" * len(depths),
    ]
    for row in result["rows"]:
        asked = row["asked"]
        share = sum(row["found"]) / (asked * len(depths))
        each = " | ".join(f"{count}/{asked}" for count in row["found"])
        lines.append(f"| {row['context']} | {row['attention']} | {100 * share:.1f} % | {each} |")
    return "\n".join(lines)
