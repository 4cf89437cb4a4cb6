"""Code shared by all model families: reading and checking the keys of config.json.

`SpecFields` is C.ModelSpec as plain Python data, so configs can be read and tested without the
extension. The loader adds dtype and linear methods, which config.json alone does not determine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from cpmcu.models.limits import CUDA_HEAD_DIMS, MODEL_LIMITS
from cpmcu.models.reader import ConfigReader
from cpmcu.models.rope import rope_from_config
from cpmcu.sparse_options import SparseOptions

DEFAULT_WINDOW = 4096  # transformers' default for Mistral and Qwen


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """Inputs of a specification besides config.json."""

    device: str = "cpu"  # "cpu" | "cuda"
    max_model_len: int = 0  # maximum number of tokens of a sequence; 0: the model's own limit
    has_lm_head: bool = True  # does the checkpoint hold lm_head.weight?
    minicpm4_yarn: bool = False  # use the published 128K LongRoPE factors of MiniCPM4
    sparse: SparseOptions | None = None  # None: all attention is dense, as in a draft


@dataclass(frozen=True, slots=True)
class SpecFields:
    """The fields of C.ModelSpec that follow from config.json; sizes in elements."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int  # maximum number of tokens of a sequence
    rope_inv_freq: tuple[float, ...]  # [rotary width / 2] radians per position
    rope_attention_scaling: float = 1.0
    qkv_bias: bool = False
    qk_norm: bool = False
    zero_centred_norms: bool = False  # RMSNorm multiplies by 1 + weight
    # The norm before the head multiplies by its weight, even if zero_centred_norms.
    plain_final_norm: bool = False
    normed_embedding: bool = False  # the embedding output goes through an RMSNorm without weights
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0  # logits become cap * tanh(logits / cap); 0: no cap
    tie_word_embeddings: bool = False
    # Blocks of each layer: (kind, overrides of the fields above). Empty: attention and mlp in each.
    layers: tuple[tuple[tuple[str, Mapping[str, Any]], ...], ...] = ()
    # Not a field of C.ModelSpec: layers in which k_proj also serves as v_proj, for the name map.
    layers_without_v: tuple[int, ...] = ()

    def to_kwargs(self) -> dict[str, Any]:
        """Keyword arguments for C.ModelSpec, with tuples converted to lists."""
        fields = asdict(self)
        del fields["layers_without_v"]
        fields["rope_inv_freq"] = list(self.rope_inv_freq)
        fields["layers"] = [
            [(kind, dict(params)) for kind, params in layer] for layer in self.layers
        ]
        return fields


def read_spec(
    config: Mapping[str, Any],
    options: BuildOptions,
    *,
    qkv_bias: bool = False,
    qk_norm: bool = False,
    embed_scale: float = 1.0,
    residual_scale: float = 1.0,
    logit_scale: float = 1.0,
) -> SpecFields:
    """Reads the keys of a Llama-like config.

    The keyword arguments are the features of the family. Raises ValueError in one sentence (key,
    found, expected) for the first key that is missing or out of range.
    """
    reader = ConfigReader(config)
    hidden_size = _size(reader, "hidden_size")
    intermediate_size = _size(reader, "intermediate_size")
    num_heads = _size(reader, "num_attention_heads")
    num_kv_heads = reader.positive_int("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise reader.fail("num_key_value_heads", f"a divisor of num_attention_heads={num_heads}")
    head_dim = _head_dim(reader, hidden_size, num_heads, options.device)
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise reader.fail("hidden_act", "'silu', the only activation that the engine has")
    eps = reader.positive_float("rms_norm_eps")
    if eps >= 1:
        raise reader.fail("rms_norm_eps", "a number between 0 and 1")
    max_positions = _size(reader, "max_position_embeddings")
    rope = rope_from_config(config, head_dim, options.max_model_len or max_positions)
    return SpecFields(
        vocab_size=_size(reader, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=_size(reader, "num_hidden_layers"),
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=eps,
        max_position_embeddings=max_positions,
        rope_inv_freq=tuple(rope.inv_freq.tolist()),
        rope_attention_scaling=rope.attention_scaling,
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        embed_scale=embed_scale,
        residual_scale=residual_scale,
        logit_scale=logit_scale,
        tie_word_embeddings=_tied(reader, options),
    )


def with_windows(
    fields: SpecFields, config: Mapping[str, Any], options: BuildOptions, first_layer: int = 0
) -> SpecFields:
    """The fields with the sliding windows of config.json.

    A token attends to the last `sliding_window` tokens, itself included. `layer_types` selects the
    layers; without it, layers from `first_layer` on have the window. A null window means no
    window. A window that covers the engine's whole context is dropped. Raises ValueError for other
    layer types.
    """
    config = {"sliding_window": DEFAULT_WINDOW, **config}
    reader = ConfigReader(config)
    has_window = _window_layers(reader, fields.num_hidden_layers, first_layer)
    if not any(has_window) or config["sliding_window"] is None:
        return fields
    window = reader.positive_int("sliding_window")
    if window >= (options.max_model_len or fields.max_position_embeddings):
        return fields
    return with_attention(fields, [{"window": window} if has else {} for has in has_window])


def with_attention(fields: SpecFields, params: Sequence[Mapping[str, Any]]) -> SpecFields:
    """The fields with these parameters added to the attention of each layer."""
    blocks = fields.layers or ((("attention", {}), ("mlp", {})),) * fields.num_hidden_layers
    layers: tuple[tuple[tuple[str, Mapping[str, Any]], ...], ...] = tuple(
        tuple((kind, {**own, **new} if kind == "attention" else own) for kind, own in layer)
        for layer, new in zip(blocks, params, strict=True)
    )
    return replace(fields, layers=layers)


def _window_layers(reader: ConfigReader, num_layers: int, first_layer: int) -> list[bool]:
    kinds = reader.config.get("layer_types")
    if kinds is None:
        return [layer >= first_layer for layer in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise reader.fail("layer_types", f"a list of {num_layers} layer types")
    known = ("full_attention", "sliding_attention")
    if others := sorted({str(kind) for kind in kinds} - set(known)):
        raise ValueError(
            f"config.json: layer_types has {', '.join(others)}, expected only {' or '.join(known)}"
        )
    return [kind == "sliding_attention" for kind in kinds]


def layer_kinds(reader: ConfigReader, num_layers: int, full_interval: int) -> list[str]:
    """`layer_types`; without it, each `full_interval`-th layer has full attention, others a window.

    Raises ValueError for other layer types.
    """
    if reader.config.get("layer_types") is None:
        kinds = ("sliding_attention", "full_attention")
        return [kinds[(layer + 1) % full_interval == 0] for layer in range(num_layers)]
    windows = _window_layers(reader, num_layers, 0)
    return ["sliding_attention" if window else "full_attention" for window in windows]


def first_window_layer(config: Mapping[str, Any]) -> int:
    """Qwen's first layer with a window, for configs without `layer_types`."""
    first = config.get("max_window_layers", 28)
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise ConfigReader(config).fail("max_window_layers", "a number of layers")
    return first


def _size(reader: ConfigReader, key: str) -> int:
    """An integer within the engine's limits (MODEL_LIMITS)."""
    _, most, multiple = MODEL_LIMITS[key]
    value = reader.positive_int(key, most=most)
    if value % multiple:
        raise reader.fail(key, f"a multiple of {multiple}")
    return value


def _head_dim(reader: ConfigReader, hidden_size: int, num_heads: int, device: str) -> int:
    if reader.config.get("head_dim") is None and hidden_size % num_heads:
        raise reader.fail("num_attention_heads", f"a divisor of hidden_size={hidden_size}")
    head_dim = reader.positive_int("head_dim", default=hidden_size // num_heads)
    if device == "cuda" and head_dim not in CUDA_HEAD_DIMS:
        allowed = ", ".join(map(str, CUDA_HEAD_DIMS))
        raise ValueError(
            f"config.json: head_dim (hidden_size / num_attention_heads if it is not given) is "
            f"{head_dim}, expected one of {allowed} on CUDA"
        )
    _, most, multiple = MODEL_LIMITS["head_dim"]
    if head_dim % multiple or head_dim > most:
        raise ValueError(
            f"config.json: head_dim (hidden_size / num_attention_heads if it is not given) is "
            f"{head_dim}, expected a multiple of {multiple} up to {most}"
        )
    return head_dim


def _tied(reader: ConfigReader, options: BuildOptions) -> bool:
    # Without the key, a checkpoint without lm_head.weight shares the embedding table.
    return reader.flag("tie_word_embeddings", default=not options.has_lm_head)
