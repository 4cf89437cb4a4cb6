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
  std::string layout{};  // of the packed weights: a name in the table of layouts
  // The format of the tensors in the files, such as "gptq"; empty: the layout's only one.
  std::string format{};
  int group_size = 0;  // k that share a scale; -1: a whole row; 0: as the layout says
  bool zero_points = false;
  DType scale_dtype = DType::kF16;
  bool stacked = false;  // parts such as q, k and v are one tensor in the files
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
  std::vector<float> rope_inv_freq;  // [rotary width / 2], at most head_dim / 2
  float rope_attention_scaling = 1;  // multiplies cos and sin
  bool qkv_bias = false;
  bool qk_norm = false;             // RMSNorm of each q and k head
  bool zero_centred_norms = false;  // norms multiply by 1 + weight
  bool plain_final_norm = false;    // except the norm before the head
  bool normed_embedding = false;    // embeddings have an RMSNorm without weights
  float embed_scale = 1;            // embedding output
  float residual_scale = 1;         // each block's output before the residual add
  float logit_scale = 1;            // the head's input
  float logit_softcap = 0;          // logits become cap * tanh(logits / cap); 0: none
  bool tie_word_embeddings = false;
  DType dtype = DType::kBF16;
  bool fp8_kv_cache = false;      // keys and values as e4m3 with a scale for each token and KV head
  std::vector<LayerSpec> layers;  // empty: {"attention", "mlp"} each
  std::string linear_method = "dense";
  std::map<std::string, std::string> linear_overrides;  // module name -> method
  LinearOptions linear_options;
  std::map<std::string, LinearOptions> module_options;  // module name -> options of its own
  int num_ranks = 1;  // above 1: this spec is one GPU's part (model/model_part.h)

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
