"""Configurations of model families, and the sizes that several presets share."""

from __future__ import annotations

from typing import Any

from scripts.synthetic.tensors import Config

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
TINY_NEMOTRON = TINY | {
    "num_hidden_layers": 4,
    "head_dim": 64,
    "mamba_num_heads": 8,
    "mamba_head_dim": 32,
    "n_groups": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_shared_expert_intermediate_size": 128,
}
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
LLAMA_70B = {
    **LLAMA_8B,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "intermediate_size": 28672,
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
QWEN3_8B = qwen(
    3,
    **QWEN3,
    hidden_size=4096,
    num_hidden_layers=36,
    num_key_value_heads=8,
    intermediate_size=12288,
)
QWEN35_27B = hybrid(
    hidden_size=5120,
    num_hidden_layers=64,
    intermediate_size=17408,
    num_attention_heads=24,
    linear_num_value_heads=48,
)
QWEN3_GENERATION = generation(
    151643, [151645, 151643], pad=151643, do_sample=True, temperature=0.6, top_k=20, top_p=0.95
)


def gpt_oss(**keys: Any) -> Config:
    """gpt-oss: a window of 128 in every other layer, experts in MXFP4."""
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "bos_token_id": 199998,
        "eos_token_id": 200002,
        "pad_token_id": 199999,
        "head_dim": 64,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_theta": 150000.0,
            "rope_type": "yarn",
            "truncate": False,
        },
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "vocab_size": 201088,
        **keys,
    }


def gemma4(**keys: Any) -> Config:
    """Dense Gemma 4: every sixth layer has full attention, with wider heads and without v_proj."""
    return {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "attention_bias": False,
        "attention_k_eq_v": True,
        "bos_token_id": 2,
        "eos_token_id": [1, 106],
        "pad_token_id": 0,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 0,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "full_attention": {
                "partial_rotary_factor": 0.25,
                "rope_theta": 1000000.0,
                "rope_type": "proportional",
            },
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "sliding_window": 1024,
        "tie_word_embeddings": True,
        "vocab_size": 262144,
        **keys,
    }


def nemotron_h(**keys: Any) -> Config:
    """Nemotron-H with experts."""
    return {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "chunk_size": 128,
        "conv_kernel": 4,
        "head_dim": 128,
        "layer_norm_epsilon": 1e-5,
        "mamba_head_dim": 64,
        "mamba_hidden_act": "silu",
        "mamba_proj_bias": False,
        "max_position_embeddings": 262144,
        "mlp_bias": False,
        "mlp_hidden_act": "relu2",
        "n_group": 1,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "ssm_state_size": 128,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "vocab_size": 131072,
        **keys,
    }
