"""Logits from `transformers` in float32: the reference of the model families."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.reference.tiny_checkpoints import fuse_experts

Array = npt.NDArray[Any]


def hf_logits(config: Mapping[str, Any], weights: Mapping[str, Array], ids: Sequence[int]) -> Array:
    """Returns logits [T, V] in float32, for a config.json and weights of any family but MiniCPM."""
    return hf_states(config, weights, ids)[0]


def hf_states(
    config: Mapping[str, Any], weights: Mapping[str, Array], ids: Sequence[int]
) -> tuple[Array, Array]:
    """Returns (logits [T, V], hidden states after the final norm [T, H]), float32."""
    import torch

    model = hf_model(config, weights)
    with torch.no_grad():
        outputs = model(torch.tensor([list(ids)]), output_hidden_states=True, use_cache=False)
    return outputs.logits[0].numpy(), outputs.hidden_states[-1][0].numpy()


def hf_model(config: Mapping[str, Any], weights: Mapping[str, Array]) -> Any:
    """The model of transformers, float32."""
    import torch
    import transformers

    keys = {k: v for k, v in config.items() if k not in ("torch_dtype", "model_type")}
    keys = {"pad_token_id": None, **keys}  # the defaults are outside of a tiny vocabulary
    if config["model_type"] == "muse_glimmer":
        text = {**keys, "model_type": "muse_glimmer_text", "architectures": None}
        vision = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32}
        keys = {"text_config": text, "vision_config": vision | {"num_attention_heads": 2}}
    hf_config = transformers.AutoConfig.for_model(
        config["model_type"], **keys, attn_implementation="eager"
    )
    # NOTE: with several threads, torch's first call in a process sometimes has an error of 6e-5.
    torch.set_num_threads(1)
    weights = fuse_experts(config, weights)
    has_vision = config["model_type"] in ("qwen3_5", "muse_glimmer")
    auto = transformers.AutoModelForImageTextToText if has_vision else None
    auto = auto or transformers.AutoModelForCausalLM
    model = auto.from_config(hf_config).float().eval()
    state = {
        name: torch.from_numpy(np.array(array))
        for name, array in weights.items()
        if not name.startswith(("mtp.", "model.visual."))
    }
    if config.get("tie_word_embeddings"):
        prefix = "model.language_model." if has_vision else "model."
        state["lm_head.weight"] = state[f"{prefix}embed_tokens.weight"]
    # The tower of a model with vision keeps its own random weights, which text does not use.
    missing, unexpected = model.load_state_dict(state, strict=False)
    towers = ("model.visual.", "model.vision")
    assert not unexpected and all(name.startswith(towers) for name in missing), missing
    return model


def fold_minicpm(
    config: Mapping[str, Any], weights: Mapping[str, Array]
) -> tuple[dict[str, Any], dict[str, Array]]:
    """Returns (config, weights) of a Llama equal to a MiniCPM, whose scales go into weights."""
    residual = config["scale_depth"] / np.sqrt(config["num_hidden_layers"])
    logit = config["dim_model_base"] / config["hidden_size"]
    folded = {name: np.array(array, np.float64) for name, array in weights.items()}
    head = folded.get("lm_head.weight", folded["model.embed_tokens.weight"])
    folded["lm_head.weight"] = (
        head * logit
    )  # before the table is scaled, because a tied head is not scaled
    folded["model.embed_tokens.weight"] = folded["model.embed_tokens.weight"] * config["scale_emb"]
    for name in folded:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            folded[name] = folded[name] * residual
    own = ("scale_emb", "scale_depth", "dim_model_base")
    llama = {key: value for key, value in config.items() if key not in own}
    llama |= {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "tie_word_embeddings": False,
    }
    return llama, {name: array.astype(np.float32) for name, array in folded.items()}
