"""`cpmcu bench --report`: the result of a benchmark as one block to paste into an issue."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cpmcu import __version__
from cpmcu.benchmarks.speculation import rounding
from cpmcu.config import EngineConfig

if TYPE_CHECKING:
    from cpmcu.loading.loader import LoadedModel

HOPPER = "fused layers, TMA and wgmma"
CLUSTERS = "portable kernels (cp.async, mma.sync) with clusters and programmatic launches"
LAUNCHES = "portable kernels (cp.async, mma.sync) with programmatic launches"
PORTABLE = "portable kernels (cp.async, mma.sync)"


def code_path(capability: int, code_capability: int, archs: Sequence[str]) -> str:
    """Names the kernels that a GPU runs. `archs`: what this build is compiled for.

    `code_capability`: compute capability of the code that the GPU runs. A build without sm_90a runs
    portable kernels on Hopper, too.
    """
    if capability == 90 and "90a" in archs:
        return HOPPER
    if code_capability >= 120:
        return LAUNCHES
    return CLUSTERS if code_capability >= 90 else PORTABLE


def device_facts(device: str, index: int, build: Mapping[str, Any]) -> dict[str, Any]:
    """The device, its driver and the kernels that it runs."""
    from cpmcu import C

    if device == "cpu":
        name = f"none: {platform.machine()} CPU, {os.cpu_count()} cores"
        return {"card": name, "cuda": "not used", "code": "the CPU back end"}
    info = C.device_info(index)
    capability, code = info["compute_capability"], int(info["code_capability"])
    number = int(capability.replace(".", ""))
    version = info["driver_version"]
    return {
        "card": f"{info['name']}, {info['sm_count']} SMs, {info['total_bytes'] / 1e9:.1f} GB, "
        f"compute capability {capability}",
        "cuda": f"driver {version // 1000}.{version % 1000 // 10}, nvcc {build.get('nvcc') or '?'}",
        "code": f"{code_path(number, code, build.get('archs', []))}, built for sm_{code}",
    }


def model_facts(loaded: LoadedModel, config: EngineConfig) -> dict[str, Any]:
    """The formats of a model, and what its engine holds."""
    engine = loaded.engine
    rows = engine.memory_plan()
    return {
        "weights_format": weights_format(loaded.hf_config, loaded.spec.linear_method),
        "lm_head_quant": config.lm_head_quant,
        "kv_cache_dtype": config.kv_cache_dtype,
        "memory_limit": config.memory_limit,
        "plan_GB": max(row["offset"] + row["bytes"] for row in rows) / 1e9,
        "max_model_len": engine.max_model_len,
        "max_num_seqs": engine.max_num_seqs,
    }


def weights_format(hf_config: Mapping[str, Any], linear_method: str) -> str:
    """The quantisation as config.json names it, else the engine's linear method."""
    stated = hf_config.get("quantization_config") or {}
    method = stated.get("quant_method") or linear_method
    parts = [str(method)]
    if stated.get("bits"):
        parts.append(f"{stated['bits']} bits")
    if stated.get("group_size"):
        parts.append(f"groups of {stated['group_size']}")
    return ", ".join(parts)


def report(result: Mapping[str, Any]) -> str:
    """A fenced block of Markdown."""
    lines = list(_lines(result))
    width = max(len(name) for name, _ in lines)
    return "\n".join(["```text", *(f"{name:{width}}  {text}" for name, text in lines), "```"])


def _lines(result: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    build = result["build"]
    archs = " ".join(f"sm_{arch}" for arch in build.get("archs", [])) or "the CPU"
    commit = build.get("commit") or "?"
    yield "cpmcu", f"{__version__}, commit {commit}, built for {archs}"
    for name in ("card", "cuda", "code"):
        yield name, result[name]
    yield "bandwidth", f"{result['read_GB_per_s']:.0f} GB/s read"
    limit = result["memory_limit"]
    share = f"{limit:g} of the free memory" if limit <= 1 else f"{limit:g} GB"
    yield (
        "memory",
        f"{result['plan_GB']:.2f} GB planned, limit {share}; {result['max_num_seqs']} sequences, "
        f"{result['max_model_len']} tokens of one",
    )
    yield (
        "model",
        f"{result['model']}, {result['weights_format']}, {result['dtype']}, "
        f"{result['weights_GB']:.2f} GB of weights",
    )
    yield (
        "options",
        f"KV cache {result['kv_cache_dtype']}, lm_head {result['lm_head_quant']}, CUDA graphs "
        f"{'yes' if result['cuda_graph'] else 'no'}, chunks of {result['chunk_length']}",
    )
    for row in result["rows"]:
        yield (
            f"at {row['context']} tokens",
            f"{row['step_ms']:.3f} ms a step (median, ± {row['step_spread_ms'] / 2:.3f}), "
            f"{1e3 / row['step_ms']:.1f} tokens/s, {row['ratio']:.2f} x the floor of "
            f"{row['floor_ms']:.3f} ms; prompt {row['prefill_tokens_per_s']:.0f} tokens/s",
        )
    yield from _draft_lines(result.get("speculation"))


def _draft_lines(speculation: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
    if speculation is None:
        yield "draft", "none"
        return
    given = ", ".join(f"{name} {value}" for name, value in speculation["options"].items())
    yield "draft", f"depth {speculation['depth']}, {rounding(speculation)}, {given}"
    for row in speculation["rows"]:
        yield (
            f"drafted at {row['context']}",
            f"{row['cycle_ms']:.3f} ms a speculative step ({row['cycle_ratio']:.2f} x plain), "
            f"accept length {row['mean_accept_length']:.2f}, {row['tokens_per_s']:.1f} tokens/s",
        )
    for row in speculation["chosen"]:
        yield (
            f"chosen at {row['context']}",
            f"accept length {row['mean_accept_length']:.2f} of the steps that drafted, "
            f"{row['tokens_per_s']:.1f} tokens/s",
        )
