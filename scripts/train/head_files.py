"""Files of draft heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from block_head import Block
from drafts import Eagle2, Eagle3, Head
from model import Target, read_state
from mtp_head import Mtp
from safetensors.torch import save_file

from cpmcu.convert.output import new_directory
from cpmcu.loading.index import read_json


def write_head(
    head: Head, destination: Path, card: str, extra: dict[str, Any], counts: np.ndarray | None
) -> None:
    """Writes config.json, model.safetensors (bf16), the card, and token_counts.npy if given.

    The target's embedding, and an output head that the head shares with it, are not stored.
    """
    state = {}
    for name, value in head.state_dict().items():
        value = value.detach().cpu()
        dtype = torch.bfloat16 if value.is_floating_point() else value.dtype
        state[name] = value.to(dtype).contiguous()
    config = dict(sorted({**extra, **head.to_hf()}.items()))
    with new_directory(destination) as directory:
        save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
        (directory / "model.safetensors").chmod(0o644)
        text = json.dumps(config, indent=2) + "\n"
        (directory / "config.json").write_text(text, encoding="utf-8")
        (directory / "README.md").write_text(card, encoding="utf-8")
        if counts is not None:
            np.save(directory / "token_counts.npy", counts.astype(np.int64))


def load_head(directory: Path | str, target: Target) -> Head | None:
    """Loads a head in float32; an EAGLE head may have 4 bits. None: no head is in the directory."""
    directory = Path(directory)
    config = read_json(directory / "config.json")
    state = read_state(directory)
    modules = sum(name.endswith(".eh_proj.weight") for name in state)
    if "fc.weight" not in state and not modules:
        return None
    if config["hidden_size"] != target.hidden_size:
        raise ValueError(f"{directory}: hidden size {config['hidden_size']} is not the target's")
    names = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    shape = {name: config[name] for name in names}
    head: Head
    if "hidden_norm.weight" in state:
        head = _block(config, target, shape)
    elif modules:
        shape = {"intermediate_size": config["intermediate_size"]}
        head = Mtp(target, modules, config.get("chain_mtp_hidden", False), **shape)
    elif "d2t" in state:
        offsets = state["d2t"]
        tokens = (offsets + torch.arange(len(offsets))).tolist()
        head = Eagle3(target.source, tokens, "lm_head.weight" in state, **shape)
        head.aux_layers = tuple(config["eagle_aux_hidden_state_layer_ids"])
    else:
        head = Eagle2(target.source, **shape)
    state = {k: v.float() if v.is_floating_point() else v for k, v in state.items()}
    head.load_state_dict(state)
    return head.to(target.device).eval()


def _block(config: dict[str, Any], target: Target, shape: dict[str, int]) -> Block:
    rank = config.get("markov_rank", 0)
    kind = "dspark" if rank else "dflash"
    nested = config.get("dflash_config", {})
    if nested.get("causal_head"):
        kind = "jetspec"
    tokens = config["block_size"] - (kind != "dspark")
    head = Block(target.source, kind, config["num_hidden_layers"], tokens, rank, **shape)
    layers = config.get("target_layer_ids") or nested["target_layer_ids"]
    head.aux_layers = tuple(layer + 1 for layer in layers)
    return head
