"""gpt-oss: attention with sinks and biases, windows in every other layer, experts with biases.

Gate and up alternate in the rows of the experts' gate_up_proj, and in its bias. Files in MXFP4 have
their blocks and scales; files of 16 bits have the experts' matrices transposed, as x W.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cpmcu.models.common import BuildOptions, SpecFields, read_spec, with_windows
from cpmcu.models.experts import expert_names, read_experts
from cpmcu.models.names import Piece
from cpmcu.models.reader import ConfigReader
from cpmcu.models.registry import register_model
from cpmcu.models.rope import rope_parameters

# transformers' defaults of keys that a config.json may leave out.
DEFAULTS = {"head_dim": 64, "num_key_value_heads": 8, "num_experts_per_tok": 4}
DEFAULT_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_STACK = re.compile(r"^(?P<experts>.*\.mlp\.experts\.)(?P<part>gate_up_proj|down_proj)$")


def gpt_oss_names(name: str, fields: SpecFields) -> Sequence[Piece]:
    """Renames mlp.router to mlp.gate, and divides a stack of experts into its matrices.

    A stack of 16 bits is [E, K, N]. The engine reads each expert's matrix transposed, as [N, K].
    """
    name = name.replace(".mlp.router.", ".mlp.gate.")
    stack = _STACK.match(name)
    if stack is None or not fields.layers:
        return expert_names(name, fields)
    params = dict(fields.layers[0])["moe"]
    num_experts, width = params["num_experts"], params["intermediate_size"]
    rows = 2 * width if stack["part"] == "gate_up_proj" else fields.hidden_size
    return [
        Piece(
            f"{stack['experts']}{expert}.{stack['part']}.weight",
            expert * rows,
            rows,
            leading=(num_experts, rows),
            transposed=True,
        )
        for expert in range(num_experts)
    ]


@register_model("GptOssForCausalLM", names=gpt_oss_names)
def build_gpt_oss(config: Mapping[str, Any], options: BuildOptions) -> SpecFields:
    """Raises ValueError for a config that the engine cannot run."""
    config = {"rope_theta": 150000.0, "sliding_window": 128, **DEFAULTS, **config}
    reader = ConfigReader(config)
    if not rope_parameters(config):
        config["rope_parameters"] = DEFAULT_ROPE
    biased = reader.flag("attention_bias", default=True)
    width = reader.positive_int("intermediate_size")
    experts = read_experts(
        ConfigReader({**config, "moe_intermediate_size": width, "norm_topk_prob": True})
    )
    moe = experts | {
        "activation": "clamped_swiglu",
        "swiglu_alpha": reader.positive_float("swiglu_alpha", default=1.702),
        "swiglu_limit": reader.positive_float("swiglu_limit", default=7.0),
        "alternating_gate_up": True,
        "expert_bias": True,
        "router_bias": True,
    }
    fields = read_spec(config, options, qkv_bias=biased)
    attention = {"sinks": True, "o_bias": biased}
    layers = ((("attention", attention), ("moe", moe)),) * fields.num_hidden_layers
    if config.get("layer_types") is None:
        kinds = ("sliding_attention", "full_attention")
        config["layer_types"] = [kinds[i % 2] for i in range(fields.num_hidden_layers)]
    return with_windows(replace(fields, layers=layers), config, options)
