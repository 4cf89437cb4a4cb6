"""Configurations of real and of tiny models, one row each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from scripts.synthetic.blocks import block_config, block_tensors
from scripts.synthetic.configs import (
    LLAMA_8B,
    LLAMA_70B,
    LONGROPE_64,
    MINICPM4_8B,
    QWEN3,
    QWEN3_8B,
    QWEN3_GENERATION,
    QWEN35_27B,
    QWEN35_GENERATION,
    TINY,
    TINY_GENERATION,
    TINY_HYBRID,
    TINY_NEMOTRON,
    gemma4,
    generation,
    gpt_oss,
    hybrid,
    hybrid_moe,
    llama,
    longrope,
    minicpm,
    ministral,
    nemotron_h,
    qwen,
    qwen_moe,
)
from scripts.synthetic.hybrid import hybrid_tensors
from scripts.synthetic.layouts import (
    decoder_tensors,
    eagle3_tensors,
    eagle_tensors,
    module_tensors,
)
from scripts.synthetic.mamba import nemotron_tensors
from scripts.synthetic.sliding import MXFP4, gemma4_tensors, gpt_oss_tensors
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
    "llama3.3-70b": Preset(
        llama(**LLAMA_70B, num_hidden_layers=80),
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
    "qwen3-8b": Preset(QWEN3_8B, QWEN3_GENERATION),
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
    "qwen3.5-27b": Preset(QWEN35_27B, QWEN35_GENERATION, hybrid_tensors),
    # The checkpoints of Qwen3.5-27B and Qwen3.8-27B have the same shapes.
    "qwen3.8-27b": Preset(QWEN35_27B, QWEN35_GENERATION, hybrid_tensors),
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
    "qwen3.5-122b-a10b": Preset(
        hybrid_moe(
            hidden_size=3072,
            num_hidden_layers=48,
            num_attention_heads=32,
            linear_num_value_heads=64,
            moe_intermediate_size=1024,
            shared_expert_intermediate_size=1024,
            num_experts=256,
        ),
        QWEN35_GENERATION,
        hybrid_tensors,
    ),
    "gpt-oss-20b": Preset(
        gpt_oss(
            hidden_size=2880,
            num_hidden_layers=24,
            intermediate_size=2880,
            num_local_experts=32,
            quantization_config=MXFP4,
        ),
        generation(199998, [200002, 199999, 200012], pad=199999, do_sample=True),
        gpt_oss_tensors,
        quantised=True,
    ),
    "gemma4-31b": Preset(
        gemma4(
            hidden_size=5376,
            num_hidden_layers=60,
            num_attention_heads=32,
            num_key_value_heads=16,
            num_global_key_value_heads=4,
            intermediate_size=21504,
        ),
        generation(2, [1, 106], pad=0, do_sample=True, temperature=1.0, top_k=64, top_p=0.95),
        gemma4_tensors,
    ),
    "nemotron-3-nano": Preset(
        nemotron_h(
            hidden_size=2688,
            num_hidden_layers=52,
            hybrid_override_pattern="MEMEM*" + "EMEMEM*" * 4 + "EMEMEMEM*" + "EMEMEMEME",
            num_attention_heads=32,
            num_key_value_heads=2,
            intermediate_size=1856,
            mamba_num_heads=64,
            n_groups=8,
            n_routed_experts=128,
            num_experts_per_tok=6,
            moe_intermediate_size=1856,
            moe_shared_expert_intermediate_size=3712,
        ),
        generation(1, [2, 11], pad=0, do_sample=True, temperature=1.0, top_p=1.0),
        nemotron_tensors,
    ),
    "nemotron-3-super": Preset(
        nemotron_h(
            hidden_size=4096,
            num_hidden_layers=88,
            hybrid_override_pattern="MEMEMEM*"
            + "EMEMEMEM*" * 2
            + "EMEMEMEMEM*" * 4
            + "EMEMEMEM*"
            + "EMEMEMEME",
            num_attention_heads=32,
            num_key_value_heads=2,
            intermediate_size=2688,
            mamba_num_heads=128,
            n_groups=8,
            n_routed_experts=512,
            num_experts_per_tok=22,
            moe_intermediate_size=2688,
            moe_latent_size=1024,
            moe_shared_expert_intermediate_size=5376,
            routed_scaling_factor=5.0,
            num_nextn_predict_layers=1,
            mtp_hybrid_override_pattern="*E",
        ),
        generation(1, [2, 11], pad=0, do_sample=True, temperature=1.0, top_p=0.95),
        nemotron_tensors,
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
    "tiny-gpt-oss": Preset(
        gpt_oss(**TINY, head_dim=64, num_local_experts=8, quantization_config=MXFP4),
        TINY_GENERATION,
        gpt_oss_tensors,
        quantised=True,
    ),
    # Five layers with windows and one with full attention.
    "tiny-gemma4": Preset(
        gemma4(
            **TINY | {"num_hidden_layers": 6},
            head_dim=64,
            global_head_dim=128,
            num_global_key_value_heads=1,
            sliding_window=128,
        ),
        TINY_GENERATION,
        gemma4_tensors,
    ),
    "tiny-nemotron": Preset(
        nemotron_h(
            **TINY_NEMOTRON,
            hybrid_override_pattern="ME*-",
            moe_intermediate_size=192,
        ),
        TINY_GENERATION,
        nemotron_tensors,
    ),
    # Experts of a latent width, and an MTP head.
    "tiny-nemotron-super": Preset(
        nemotron_h(
            **TINY_NEMOTRON,
            hybrid_override_pattern="ME*E",
            moe_intermediate_size=256,
            moe_latent_size=128,
            num_nextn_predict_layers=1,
            mtp_hybrid_override_pattern="*E",
        ),
        TINY_GENERATION,
        nemotron_tensors,
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
    "qwen3-8b-dspark": Preset(block_config("dspark", QWEN3_8B), {}, block_tensors, draft=True),
    "qwen3-8b-dflash": Preset(block_config("dflash", QWEN3_8B), {}, block_tensors, draft=True),
    "qwen3-8b-jetspec": Preset(block_config("jetspec", QWEN3_8B), {}, block_tensors, draft=True),
    "qwen3.8-27b-dflash2": Preset(
        block_config("dflash2", QWEN35_27B), {}, block_tensors, draft=True
    ),
    "tiny-minicpm-eagle": Preset(
        minicpm(**TINY | {"num_hidden_layers": 1}, dim_model_base=64), {}, eagle_tensors, draft=True
    ),
}
