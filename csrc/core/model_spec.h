// A model as plain data, built in Python (cpmcu/models) from a checkpoint's config. Field names are
// Hugging Face's, so one search finds them in both languages.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "core/params.h"

namespace cpmcu {

// One block of a layer: a registered kind, and parameters that override the model's numbers.
struct BlockSpec {
  std::string kind;
  Params params{};
};
using LayerSpec = std::vector<BlockSpec>;

// How a checkpoint stores its quantised matrices. Read by linear methods that are not dense.
struct LinearOptions {
  std::string layout{};  // how weights are packed: a name in the table of layouts
  // The format of the tensors in the files, such as "gptq"; empty: the layout's only one.
  std::string format{};
  int group_size = 0;  // inputs (k) that share a scale; -1: a whole row; 0: the layout decides
  bool zero_points = false;
  DType scale_dtype = DType::kF16;
  bool stacked = false;  // the files hold parts such as q, k and v as one tensor
};

struct ModelSpec {
  int vocab_size = 0;
  int hidden_size = 0;
  int intermediate_size = 0;
  int num_hidden_layers = 0;
  int num_attention_heads = 0;
  int num_key_value_heads = 0;
  int head_dim = 0;
  float rms_norm_eps = 1e-6f;
  int max_position_embeddings = 0;
  // [rotary width / 2] radians per position; at most head_dim / 2 numbers.
  std::vector<float> rope_inv_freq;
  float rope_attention_scaling = 1;  // factor of cos and sin
  bool qkv_bias = false;
  bool qk_norm = false;             // each head of q and k has an RMSNorm
  bool zero_centred_norms = false;  // norms multiply by 1 + weight
  // The norm before the head multiplies by its weight, even if zero_centred_norms.
  bool plain_final_norm = false;
  bool normed_embedding = false;  // the embedding output goes through an RMSNorm without weights
  float embed_scale = 1;          // factor of the embedding output
  float residual_scale = 1;       // factor of each block's output, before the residual add
  float logit_scale = 1;          // factor of the head's input
  float logit_softcap = 0;        // logits become cap * tanh(logits / cap); 0: none
  bool tie_word_embeddings = false;
  DType dtype = DType::kBF16;
  // Keys and values are stored as e4m3, with a scale for each token and KV head.
  bool fp8_kv_cache = false;
  // The blocks of each layer; empty: {"attention", "mlp"} in every layer.
  std::vector<LayerSpec> layers;
  std::string linear_method = "dense";
  // Module name -> its method, instead of linear_method.
  std::map<std::string, std::string> linear_overrides;
  LinearOptions linear_options;
  // Module name -> its options, instead of linear_options.
  std::map<std::string, LinearOptions> module_options;
  // GPUs that share the model; above 1: this spec is one GPU's part (model/model_part.h).
  int num_ranks = 1;

  float norm_offset() const { return zero_centred_norms ? 1.0f : 0.0f; }
  const std::string& linear_method_of(const std::string& module) const {
    auto it = linear_overrides.find(module);
    return it == linear_overrides.end() ? linear_method : it->second;
  }
  const LinearOptions& linear_options_of(const std::string& module) const {
    auto it = module_options.find(module);
    return it == module_options.end() ? linear_options : it->second;
  }
  // Whether an override names a method that is not dense.
  bool quantises(const std::string& module) const {
    auto it = linear_overrides.find(module);
    return it != linear_overrides.end() && it->second != "dense";
  }
  LayerSpec layer(int index) const {
    return layers.empty() ? LayerSpec{{"attention"}, {"mlp"}} : layers[static_cast<size_t>(index)];
  }
  // Throws if the engine cannot run this model.
  void check_validity(bool cuda) const;
};

}  // namespace cpmcu
