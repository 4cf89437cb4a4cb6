// The numbers and switches of an attention block.
#pragma once

#include <cmath>
#include <string>

#include "core/model_spec.h"
#include "core/params.h"
#include "kernels/layer/qkv_layout.h"

namespace cpmcu {

// The sizes of one attention block. A parameter of the block overrides the model's number.
struct AttentionShape {
  int num_heads, num_kv_heads, head_dim, window;
  // Heads of q_proj and k_proj. On a rank of several, joint_qk_norm reads those of all ranks. The
  // heads of this rank come first.
  int num_q_proj_heads, num_k_proj_heads;
  bool qkv_bias, qk_norm, output_gate;
  bool joint_qk_norm;    // one RMSNorm covers all heads of q, another all heads of k
  bool qk_norm_weights;  // false: the RMSNorms of the heads of q and k have no weights
  bool v_norm;           // each v head has an RMSNorm without weights
  bool o_bias, sinks;
  bool gate_proj;  // the output is multiplied by the sigmoid of another projection, gate_proj
  bool head_gate;  // the same with one gate for each head, from the projection g_proj
  int kv_layer;    // the layer whose keys and values this block reads; -1: its own
  float softmax_scale;
  float rope_attention_scaling;
  float query_scale_beta;  // beta of kernels/layer/scale_queries.h; 0: queries are not scaled
  int query_scale_length;  // `length` of kernels/layer/scale_queries.h, in tokens

  AttentionShape(const ModelSpec& spec, const Params& params)
      : num_heads(params.integer("num_attention_heads", spec.num_attention_heads)),
        num_kv_heads(params.integer("num_key_value_heads", spec.num_key_value_heads)),
        head_dim(params.integer("head_dim", spec.head_dim)),
        window(params.integer("window", 0)),
        num_q_proj_heads(params.integer("num_q_proj_heads", num_heads)),
        num_k_proj_heads(params.integer("num_k_proj_heads", num_kv_heads)),
        qkv_bias(params.flag("qkv_bias", spec.qkv_bias)),
        qk_norm(params.flag("qk_norm", spec.qk_norm)),
        output_gate(params.flag("output_gate", false)),
        joint_qk_norm(params.flag("joint_qk_norm", false)),
        qk_norm_weights(params.flag("qk_norm_weights", true)),
        v_norm(params.flag("v_norm", false)),
        o_bias(params.flag("o_bias", false)),
        sinks(params.flag("sinks", false)),
        gate_proj(params.flag("gate_proj", false)),
        head_gate(params.flag("head_gate", false)),
        kv_layer(params.integer("kv_layer", -1)),
        softmax_scale(params.number("softmax_scale", 1 / std::sqrt(static_cast<float>(head_dim)))),
        rope_attention_scaling(
            params.number("rope_attention_scaling", spec.rope_attention_scaling)),
        query_scale_beta(params.number("query_scale_beta", 0)),
        query_scale_length(params.integer("query_scale_length", 1)) {
    params.check_known("an attention block", {"num_attention_heads",
                                              "num_key_value_heads",
                                              "head_dim",
                                              "window",
                                              "num_q_proj_heads",
                                              "num_k_proj_heads",
                                              "qkv_bias",
                                              "qk_norm",
                                              "output_gate",
                                              "rope_inv_freq",
                                              "rope_attention_scaling",
                                              "query_scale_beta",
                                              "query_scale_length",
                                              "joint_qk_norm",
                                              "qk_norm_weights",
                                              "v_norm",
                                              "o_bias",
                                              "sinks",
                                              "gate_proj",
                                              "head_gate",
                                              "softmax_scale",
                                              "kv_layer"});
    CHECK(num_kv_heads >= 1 && num_heads >= num_kv_heads && num_heads % num_kv_heads == 0,
          "an attention block has {} heads and {} key heads, expected a multiple of the key heads",
          num_heads, num_kv_heads);
    CHECK(head_dim >= 8 && head_dim % 8 == 0, "head_dim is {}, expected a positive multiple of 8",
          head_dim);
    CHECK(!(output_gate && qkv_bias),
          "an attention block has an output gate and a bias, expected one of them");
    CHECK(window >= 0, "an attention block has a window of {}, expected at least 0", window);
    CHECK(!(output_gate && (joint_qk_norm || gate_proj || head_gate)) &&
              !(joint_qk_norm && qk_norm) && !(gate_proj && head_gate),
          "an attention block has an output gate in q_proj, or norms of single heads, and also "
          "joint_qk_norm, gate_proj or head_gate, expected one of them");
    CHECK(
        !(qkv_bias && (joint_qk_norm || v_norm)),
        "an attention block has a bias on q, k and v, expected none with joint_qk_norm or v_norm");
    CHECK(!shares_kv() || (!qkv_bias && !output_gate && !joint_qk_norm),
          "an attention block has kv_layer and a bias, an output gate or joint_qk_norm, expected "
          "one of them");
    CHECK(num_q_proj_heads >= num_heads && num_k_proj_heads >= num_kv_heads &&
              (joint_qk_norm || !has_other_heads()),
          "an attention block has {} heads in q_proj and {} in k_proj, expected {} and {}, or more "
          "with joint_qk_norm",
          num_q_proj_heads, num_k_proj_heads, num_heads, num_kv_heads);
    CHECK(softmax_scale > 0, "softmax_scale is {}, expected a number above 0", softmax_scale);
    CHECK(query_scale_length >= 1, "query_scale_length is {}, expected at least 1",
          query_scale_length);
  }

  int64_t q_size() const { return int64_t{num_heads} * head_dim; }
  int64_t kv_size() const { return int64_t{num_kv_heads} * head_dim; }
  // Rows of q_proj: with an output gate, each query head is followed by its gate.
  int64_t q_rows() const { return int64_t{output_gate ? 2 : 1} * num_q_proj_heads * head_dim; }
  int64_t k_rows() const { return int64_t{num_k_proj_heads} * head_dim; }  // rows of k_proj
  bool has_other_heads() const {
    return num_q_proj_heads > num_heads || num_k_proj_heads > num_kv_heads;
  }
  int64_t gate_size() const {
    return head_gate ? num_heads : q_size();
  }  // rows of gate_proj, g_proj
  bool shares_kv() const { return kv_layer >= 0; }
  int64_t qkv_size() const { return q_rows() + (shares_kv() ? 0 : k_rows() + kv_size()); }
  QkvLayout layout() const {
    if (shares_kv()) {
      const auto q = static_cast<int>(q_rows());
      return {.row = q, .q_head = head_dim, .k = q, .v = q};
    }
    if (!output_gate && !has_other_heads()) return {};
    const auto k = static_cast<int>(q_rows()), v = k + static_cast<int>(k_rows());
    return {.row = static_cast<int>(qkv_size()),
            .q_head = (output_gate ? 2 : 1) * head_dim,
            .k = k,
            .v = v};
  }
};

}  // namespace cpmcu
