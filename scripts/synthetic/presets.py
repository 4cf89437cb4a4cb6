"""Configurations of real and of tiny models, one row each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from scripts.synthetic.hybrid import hybrid_tensors
from scripts.synthetic.layouts import (
    decoder_tensors,
    eagle3_tensors,
    eagle_tensors,
    module_tensors,
)
from scripts.synthetic.tensors import Config, TensorSpec


@dataclass(frozen=True, slots=True)
class Preset:
    """One row: the configuration of a checkpoint and the function that lists its tensors."""

    config: Config
    generation: Config
    tensors: Callable[[Config], Iterable[TensorSpec]] = decoder_tensors
    files: dict[str, bytes] = field(default_factory=dict)  # further files, written unchanged
    draft: bool = False  # has token_counts.npy, but no tokenizer and no generation_config.json
    quantised: bool = False  # `tensors` lists quantised projections itself
    with_vision: bool = False  # written as the language model of a model with vision


# LongRoPE factors published with MiniCPM4, head_dim 128 and 64; long and short are equal.
LONGROPE_128 = [
    *(0.9977997200264581, 1.014658295992452, 1.0349680404997148, 1.059429246056193),
    *(1.0888815016813513, 1.1243301355211495, 1.166977103606075, 1.2182568066927284),
    *(1.2798772354275727, 1.3538666751582975, 1.4426259039919596, 1.5489853358570191),
    *(1.6762658237220625, 1.8283407612492941, 2.0096956085876183, 2.225478927469756),
    *(2.481536379650452, 2.784415934557119, 3.1413289096347365, 3.560047844772632),
    *(4.048719380066383, 4.752651957515948, 5.590913044973868, 6.584005926629993),
    *(7.7532214876576155, 9.119754865903639, 10.704443927019176, 12.524994176518703),
    *(14.59739595363613, 16.93214476166354, 19.53823297353041, 22.417131025031697),
    *(25.568260840911098, 28.991144156566317, 32.68408069090375, 36.65174474170465),
    *(40.90396065611201, 45.4664008671033, 50.37147343433591, 55.6804490772103),
    *(61.470816952306556, 67.8622707390618, 75.00516023410414, 83.11898235973767),
    *(92.50044360202462, 103.57086856690864, 116.9492274587385, 118.16074567836519),
    *(119.18497548708795, 120.04810876261652, 120.77352815196981, 121.38182790207875),
    *(121.89094985353891, 122.31638758099915, 122.6714244963338, 122.9673822552567),
    *(123.21386397019609, 123.41898278254268, 123.58957065488238, 123.73136519024158),
    *(123.84917421274221, 123.94701903496814, 124.02825801299717, 124.09569231686116),
]
LONGROPE_64 = [
    *(1.0004360675811768, 1.0668443441390991, 1.1631425619125366, 1.3025742769241333),
    *(1.5040205717086792, 1.7941505908966064, 2.2101221084594727, 2.802666664123535),
    *(3.6389970779418945, 4.804192543029785, 6.39855432510376, 8.527148246765137),
    *(11.277542114257812, 14.684998512268066, 18.69317054748535, 23.13019371032715),
    *(27.72362518310547, 32.1606559753418, 36.168827056884766, 39.57627868652344),
    *(42.32667541503906, 44.45526885986328, 46.04962921142578, 47.21482849121094),
    *(48.05115509033203, 48.64370346069336, 49.05967712402344, 49.34980392456055),
    *(49.551246643066406, 49.69068145751953, 49.78697967529297, 49.85338592529297),
]


def longrope(factors: list[float], original: int) -> Config:
    return {
        "rope_type": "longrope",
        "long_factor": factors,
        "short_factor": factors,
        "original_max_position_embeddings": original,
    }


def minicpm(**keys: Any) -> Config:
    return {
        "architectures": ["MiniCPMForCausalLM"],
        "model_type": "minicpm",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": [2, 73440],
        "pad_token_id": 2,
        "hidden_act": "silu",
        "initializer_range": 0.1,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "scale_emb": 12,
        "scale_depth": 1.4,
        "dim_model_base": 256,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": 73448,
        **keys,
    }


def llama(**keys: Any) -> Config:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "use_cache": True,
        **keys,
    }


def ministral(**keys: Any) -> Config:
    return llama(
        architectures=["Ministral3ForCausalLM"],
        model_type="ministral3",
        bos_token_id=1,
        eos_token_id=2,
        head_dim=128,
        max_position_embeddings=262144,
        num_attention_heads=32,
        num_key_value_heads=8,
        rope_parameters={
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 16.0,
            "llama_4_scaling_beta": 0.1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 16384,
            "rope_theta": 1000000.0,
            "rope_type": "yarn",
        },
        vocab_size=131072,
        **keys,
    )


def qwen(version: int, **keys: Any) -> Config:
    config = {
        "architectures": [f"Qwen{version}ForCausalLM"],
        "model_type": f"qwen{version}",
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_window_layers": keys["num_hidden_layers"],
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
    }
    if version == 3:
        config |= {"attention_bias": False, "sliding_window": None}
    return config | keys


def hybrid(**keys: Any) -> Config:
    """Qwen3.5: three gated delta nets to one attention."""
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "attention_bias": False,
        "attn_output_gate": True,
        "eos_token_id": 248044,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "tie_word_embeddings": False,
        "vocab_size": 248320,
        **keys,
    }


def hybrid_moe(**keys: Any) -> Config:
    """Qwen3.5 with experts in every layer and in its MTP head, and no other MLPs."""
    experts = {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "num_experts_per_tok": 8,
        "num_key_value_heads": 2,
    }
    return hybrid(**experts | keys)


def qwen_moe(**keys: Any) -> Config:
    experts = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }
    return qwen(3, **experts, **keys)


def generation(bos: int, eos: list[int], pad: int | None = None, **keys: Any) -> Config:
    config: Config = {"bos_token_id": bos, "eos_token_id": eos}
    if pad is not None:
        config["pad_token_id"] = pad
    return config | keys


TINY = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": [2, 4],
    "pad_token_id": 0,
}
TINY_GENERATION = generation(1, [2, 4], pad=0)
TINY_HYBRID = {
    **TINY,
    "num_hidden_layers": 4,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
QWEN35_GENERATION: Config = {
    "eos_token_id": [248046, 248044],
    "pad_token_id": 248044,
    "do_sample": True,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
}

LLAMA_8B = {
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "vocab_size": 128256,
}
MINICPM4_8B = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "intermediate_size": 16384,
    "rope_scaling": longrope(LONGROPE_128, 32768),
}

QWEN3 = {
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "num_attention_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "vocab_size": 151936,
}
QWEN3_GENERATION = generation(
    151643, [151645, 151643], pad=151643, do_sample=True, temperature=0.6, top_k=20, top_p=0.95
)

PRESETS: dict[str, Preset] = {
    "minicpm4-8b": Preset(
        minicpm(**MINICPM4_8B, num_hidden_layers=32),
        generation(1, [2, 73440], pad=2, do_sample=True, temperature=0.8, top_p=0.8),
    ),
    "minicpm4-0.5b": Preset(
        minicpm(
            hidden_size=1024,
            num_hidden_layers=24,
            num_attention_heads=16,
            num_key_value_heads=2,
            intermediate_size=4096,
            rms_norm_eps=1e-5,
            rope_scaling=longrope(LONGROPE_64, 32768),
            tie_word_embeddings=True,
        ),
        generation(1, [2, 73440], pad=2, do_sample=True, temperature=0.8, top_p=0.8),
    ),
    "llama3.1-8b": Preset(
        llama(**LLAMA_8B, num_hidden_layers=32),
        generation(128000, [128001, 128008, 128009], do_sample=True, temperature=0.6, top_p=0.9),
    ),
    "ministral-8b": Preset(
        ministral(hidden_size=4096, num_hidden_layers=34, intermediate_size=14336),
        generation(1, [2], do_sample=True, temperature=0.15),
    ),
    "ministral-14b": Preset(
        ministral(hidden_size=5120, num_hidden_layers=40, intermediate_size=16384),
        generation(1, [2], do_sample=True, temperature=0.15),
    ),
    "qwen3-8b": Preset(
        qwen(
            3,
            **QWEN3,
            hidden_size=4096,
            num_hidden_layers=36,
            num_key_value_heads=8,
            intermediate_size=12288,
        ),
        QWEN3_GENERATION,
    ),
    "qwen3-30b-a3b": Preset(
        qwen_moe(
            **QWEN3,
            hidden_size=2048,
            num_hidden_layers=48,
            num_key_value_heads=4,
            intermediate_size=6144,
            moe_intermediate_size=768,
            num_experts=128,
            num_experts_per_tok=8,
        ),
        QWEN3_GENERATION,
    ),
    "qwen2.5-7b": Preset(
        qwen(
            2,
            bos_token_id=151643,
            eos_token_id=151645,
            hidden_size=3584,
            num_hidden_layers=28,
            num_attention_heads=28,
            num_key_value_heads=4,
            intermediate_size=18944,
            max_position_embeddings=32768,
            sliding_window=131072,
            vocab_size=152064,
        ),
        generation(
            151643,
            [151645, 151643],
            pad=151643,
            do_sample=True,
            repetition_penalty=1.05,
            temperature=0.7,
            top_k=20,
            top_p=0.8,
        ),
    ),
    "qwen3.5-4b": Preset(
        hybrid(
            hidden_size=2560,
            num_hidden_layers=32,
            intermediate_size=9216,
            num_attention_heads=16,
            linear_num_value_heads=32,
            tie_word_embeddings=True,
        ),
        QWEN35_GENERATION,
        hybrid_tensors,
    ),
    "qwen3.5-9b": Preset(
        hybrid(
            hidden_size=4096,
            num_hidden_layers=32,
            intermediate_size=12288,
            num_attention_heads=16,
            linear_num_value_heads=32,
        ),
        QWEN35_GENERATION,
        hybrid_tensors,
    ),
    "qwen3.5-27b": Preset(
        hybrid(
            hidden_size=5120,
            num_hidden_layers=64,
            intermediate_size=17408,
            num_attention_heads=24,
            linear_num_value_heads=48,
        ),
        QWEN35_GENERATION,
        hybrid_tensors,
    ),
    "qwen3.5-35b-a3b": Preset(
        hybrid_moe(
            hidden_size=2048,
            num_hidden_layers=40,
            num_attention_heads=16,
            linear_num_value_heads=32,
            moe_intermediate_size=512,
            shared_expert_intermediate_size=512,
            num_experts=256,
        ),
        QWEN35_GENERATION,
        hybrid_tensors,
    ),
    "tiny-llama": Preset(
        llama(
            **TINY,
            head_dim=64,
            rope_scaling={
                "factor": 8.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 256,
                "rope_type": "llama3",
            },
            rope_theta=10000.0,
        ),
        TINY_GENERATION,
    ),
    "tiny-qwen2": Preset(qwen(2, **TINY), TINY_GENERATION),
    # head_dim is larger than H / Hq; embeddings are tied.
    "tiny-qwen3": Preset(qwen(3, **TINY, head_dim=128, tie_word_embeddings=True), TINY_GENERATION),
    "tiny-qwen3-moe": Preset(
        qwen_moe(
            **TINY, head_dim=64, moe_intermediate_size=128, num_experts=16, num_experts_per_tok=4
        ),
        TINY_GENERATION,
    ),
    "tiny-minicpm": Preset(minicpm(**TINY, dim_model_base=64), TINY_GENERATION),
    "tiny-qwen3.5": Preset(hybrid(**TINY_HYBRID), TINY_GENERATION, hybrid_tensors),
    "tiny-qwen3.5-moe": Preset(
        hybrid_moe(
            **{key: value for key, value in TINY_HYBRID.items() if key != "intermediate_size"},
            moe_intermediate_size=128,
            shared_expert_intermediate_size=128,
            num_experts=16,
            num_experts_per_tok=4,
        ),
        TINY_GENERATION,
        hybrid_tensors,
    ),
    "tiny-qwen3.5-vl": Preset(
        hybrid(**TINY_HYBRID, tie_word_embeddings=True),
        TINY_GENERATION,
        hybrid_tensors,
        with_vision=True,
    ),
    # Each layer has an MLP, while published models have experts.
    "tiny-qwen3-next": Preset(
        hybrid(
            **TINY_HYBRID,
            architectures=["Qwen3NextForCausalLM"],
            model_type="qwen3_next",
            mlp_only_layers=[0, 1, 2, 3],
        ),
        TINY_GENERATION,
        hybrid_tensors,
    ),
    "minicpm4-8b-eagle": Preset(
        minicpm(**MINICPM4_8B, num_hidden_layers=1), {}, eagle_tensors, draft=True
    ),
    "llama3.1-8b-eagle": Preset(
        llama(**LLAMA_8B, num_hidden_layers=1), {}, eagle_tensors, draft=True
    ),
    "llama3.1-8b-mtp3": Preset(
        llama(**LLAMA_8B, num_hidden_layers=32, num_nextn_predict_layers=3),
        {},
        module_tensors,
        draft=True,
    ),
    "llama3.1-8b-eagle3": Preset(
        llama(
            **LLAMA_8B,
            architectures=["LlamaForCausalLMEagle3"],
            num_hidden_layers=1,
            draft_vocab_size=32000,
        ),
        {},
        eagle3_tensors,
        draft=True,
    ),
    "tiny-minicpm-eagle": Preset(
        minicpm(**TINY | {"num_hidden_layers": 1}, dim_model_base=64), {}, eagle_tensors, draft=True
    ),
}
