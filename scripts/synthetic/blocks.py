"""Block drafters: the config.json and the tensors of DFlash, JetSpec, DFlash2 and DSpark heads.

The shapes are those of the published heads:

| kind | published head | parameters |
|---|---|---|
| dspark | deepseek-ai/dspark_qwen3_8b_block7 | 2.37 G, of which 1.24 G are copies of two tables |
| dflash | z-lab/Qwen3-8B-DFlash-b16 | 1.05 G |
| jetspec | JetSpec/jetspec-qwen3-8b | 1.05 G |
| dflash2 | z-lab/Qwen3.8-27B-DFlash2 | 1.92 G |

The copies of the target's tables are left out, since the engine reads the target's own. The number
of layers of the JetSpec head follows from its size: five layers that read five hidden states have
1.05 G parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from scripts.synthetic.layouts import attention_tensors, mlp_tensors
from scripts.synthetic.sources import Array, Source, encode
from scripts.synthetic.tensors import Config, Fill, TensorSpec, matrix, norm, normal

LAYERS = 5  # layers of a draft, and target layers whose hidden states it reads
MASK_IDS = {151936: 151669, 248320: 248070}  # vocab_size -> mask token of Qwen3 and Qwen3.5 to 3.8
MIXING = 0.02  # size of the random weights of the convolutions over rows of a block


@dataclass(frozen=True, slots=True)
class Kind:
    """The keys of one kind of head that do not depend on its target."""

    architecture: str
    keys: Config  # at the top level
    nested: Config | None = None  # in dflash_config, with the keys of the target; None: no object
    first_layer: int = 1  # the first target layer whose output is read
    layer_type: str | None = None  # type of all layers; None: layer_types is absent


KINDS = {
    "dspark": Kind(
        "Qwen3DSparkModel",
        {
            "block_size": 7,
            "markov_rank": 256,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        },
    ),
    "dflash": Kind(
        "DFlashDraftModel",
        {"block_size": 16},
        nested={},
        layer_type="full_attention",
    ),
    "jetspec": Kind(
        "DFlashDraftModel",
        {"block_size": 16},
        nested={"causal_head": True},
        layer_type="full_attention",
    ),
    "dflash2": Kind(
        "DFlash2DraftModel",
        {"block_size": 8, "is_causal": False, "sliding_window": 2048},
        nested={
            "conv_kernel_size": 2,
            "conv_group_size": 16,
            "selector_rank": 256,
            "selector_top_k": 16,
        },
        first_layer=5,
        layer_type="sliding_attention",
    ),
}


def block_config(kind: str, target: Config, num_layers: int = LAYERS) -> Config:
    """The config.json of a head of a kind in KINDS for a target with this configuration."""
    of_kind, vocab = KINDS[kind], target["vocab_size"]
    rope = target.get("rope_parameters") or target
    of_target = {
        "mask_token_id": MASK_IDS.get(vocab, vocab - 1),
        "target_layer_ids": layers_read(target["num_hidden_layers"], of_kind.first_layer),
    }
    config = {
        "architectures": [of_kind.architecture],
        "model_type": "qwen3",
        "attention_bias": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": target["hidden_size"],
        "intermediate_size": target.get("intermediate_size", 3 * target["hidden_size"]),
        "max_position_embeddings": target["max_position_embeddings"],
        "num_attention_heads": 32,
        "num_hidden_layers": num_layers,
        "num_key_value_heads": 8,
        "num_target_layers": target["num_hidden_layers"],
        "rms_norm_eps": 1e-6,
        "rope_theta": rope["rope_theta"],
        "tie_word_embeddings": False,
        "vocab_size": vocab,
    }
    config |= of_kind.keys
    if of_kind.layer_type is not None:
        config["layer_types"] = [of_kind.layer_type] * num_layers
    if of_kind.nested is None:
        return config | of_target
    return config | {"dflash_config": of_target | of_kind.nested}


def layers_read(num_layers: int, first: int) -> list[int]:
    """The target layers whose outputs are read: from `first` to the last but two, evenly spaced.

    A target of few layers has fewer.
    """
    last = max(num_layers - 3, 0)
    spaced = np.linspace(min(first, last), last, LAYERS)
    return sorted({round(float(layer)) for layer in spaced})


def stated(config: Config, key: str) -> object:
    """A key of the config or of its nested object."""
    return config.get("dflash_config", {}).get(key, config.get(key))


def size(config: Config, key: str) -> int:
    """A key that is an integer. Raises SystemExit if it is not a positive one."""
    value = stated(config, key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SystemExit(f"{key} is {value!r}, but must be a positive integer")
    return value


def num_inputs(config: Config) -> int:
    """The columns of fc: the hidden states that the draft reads, one after another."""
    layers = stated(config, "target_layer_ids")
    if not isinstance(layers, list) or not layers:
        raise SystemExit(f"target_layer_ids is {layers!r}, but must be a list of layers")
    return len(layers) * int(config["hidden_size"])


def block_tensors(config: Config) -> Iterator[TensorSpec]:
    """The tensors of a block drafter, in forward order."""
    hidden = config["hidden_size"]
    yield matrix("fc.weight", hidden, num_inputs(config))
    yield norm("hidden_norm.weight", hidden)
    for index in range(config["num_hidden_layers"]):
        prefix = f"layers.{index}."
        yield norm(f"{prefix}input_layernorm.weight", hidden)
        if stated(config, "conv_kernel_size"):
            yield from conv_tensors(config, f"{prefix}attention_conv.")
        yield from attention_tensors(config, f"{prefix}self_attn.", hidden, 0.5)
        yield norm(f"{prefix}post_attention_layernorm.weight", hidden)
        if stated(config, "conv_kernel_size"):
            yield from conv_tensors(config, f"{prefix}mlp_conv.")
        yield from mlp_tensors(config, f"{prefix}mlp.", 0.5)
    yield norm("norm.weight", hidden)
    if stated(config, "selector_rank"):
        yield from selector_tensors(config)
    if stated(config, "markov_rank"):
        yield from markov_tensors(config)


def conv_tensors(config: Config, prefix: str) -> Iterator[TensorSpec]:
    """A convolution over the rows of a block, with small weights of the rows before."""
    hidden, width = config["hidden_size"], size(config, "conv_kernel_size")
    shape = (2, width, hidden)
    yield TensorSpec(f"{prefix}base_kernel", shape, identity_kernel(width, hidden))
    groups = hidden // size(config, "conv_group_size")
    yield matrix(f"{prefix}kernel_projection.weight", 2 * width * groups, hidden, MIXING)


def identity_kernel(width: int, hidden: int) -> Fill:
    """A fill of [2, width, H]: near 1 for the row itself, near 0 for the rows before it."""

    def fill(source: Source, seed: int, count: int, dtype: str) -> Iterator[Array]:
        made = np.random.default_rng(seed).standard_normal((2, width, hidden), dtype=np.float32)
        made *= np.float32(MIXING)
        made[:, 0] += 1
        yield encode(made.ravel(), dtype)

    return fill


def selector_tensors(config: Config) -> Iterator[TensorSpec]:
    """The selector of DFlash2. The scores of pairs have a standard deviation of about 1."""
    vocab, rank = config["vocab_size"], size(config, "selector_rank")
    prefix = "candidate_selector."
    yield TensorSpec(f"{prefix}predecessor_codebook", (vocab, rank), normal(1.0))
    yield TensorSpec(f"{prefix}successor_codebook", (vocab, rank), normal(1 / math.sqrt(rank)))
    yield matrix(f"{prefix}hidden_projection.weight", rank, config["hidden_size"])


def markov_tensors(config: Config) -> Iterator[TensorSpec]:
    """The Markov head and the confidence head of DSpark."""
    vocab, rank = config["vocab_size"], size(config, "markov_rank")
    yield TensorSpec("markov_head.markov_w1.weight", (vocab, rank), normal(1.0))
    yield TensorSpec("markov_head.markov_w2.weight", (vocab, rank), normal(1 / math.sqrt(rank)))
    if config.get("enable_confidence_head"):
        width = config["hidden_size"]
        width += rank if config.get("confidence_head_with_markov") else 0
        yield matrix("confidence_head.proj.weight", 1, width)
        yield TensorSpec("confidence_head.proj.bias", (1,), normal(0.1))
