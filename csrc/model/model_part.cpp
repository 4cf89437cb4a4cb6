#include "model/model_part.h"

#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <string_view>

#include "core/exchange.h"
#include "layers/sublayer.h"
#include "model/transformer.h"
#include "state/state_cache.h"

namespace cpmcu {
namespace {

// Blocks that can be divided.
constexpr std::array<std::string_view, 8> kKinds{"attention", "sparse_attention", "mlp",
                                                 "moe",       "mlp_and_experts",  "gated_delta_net",
                                                 "mamba2",    "short_conv"};

// Blocks that each rank has as a whole. They write no parts, so nothing is summed.
constexpr std::array<std::string_view, 2> kWholeKinds{"per_layer_embedding", "per_layer_input"};

// Maximum number of inputs (k) that share a scale in the layout "float_groups".
constexpr int kFloatGroup = 32;

class Divider {
 public:
  Divider(const ModelSpec& whole, int num_ranks) : whole_(whole), num_ranks_(num_ranks) {}

  int divide(const std::string& where, const char* name, int size) const {
    CHECK(size % num_ranks_ == 0,
          "tensor_parallel_size is {}, but {}{} is {}, expected a multiple of it", num_ranks_,
          where, name, size);
    return size / num_ranks_;
  }

  int divide_kv_heads(const std::string& where, int heads) const {
    CHECK(heads % num_ranks_ == 0 || num_ranks_ % heads == 0,
          "tensor_parallel_size is {}, but {}num_key_value_heads is {}, expected a multiple or a "
          "divisor of it",
          num_ranks_, where, heads);
    return std::max(1, heads / num_ranks_);
  }

  // Whether blocks of kPackedK rows and kPackedK inputs share a scale.
  bool has_blocks(const std::string& module) const {
    const LinearOptions& options = whole_.linear_options_of(module);
    return whole_.linear_method_of(module) != "dense" && options.layout == "fp8" &&
           (options.format == "inverse" || options.format == "block");
  }

  // Inputs of a linear layer that share a scale. 8: all of a row.
  int unit_of(const std::string& module) const {
    const LinearOptions& options = whole_.linear_options_of(module);
    if (options.layout == "float_groups") return kFloatGroup;
    if (options.group_size != 0) return options.group_size > 0 ? options.group_size : 8;
    return options.layout == "fp8" && !has_blocks(module) ? 8 : kPackedK;
  }

  // Checks that the rank's inputs of a linear layer are whole groups of weights with one scale.
  void check_inputs(const std::string& module, int64_t inputs) const {
    if (whole_.linear_method_of(module) == "dense") return;
    const int unit = unit_of(module);
    CHECK(inputs % unit == 0,
          "tensor_parallel_size is {}, but {} has {} inputs for each GPU, expected a multiple of "
          "{}, whose weights share a scale",
          num_ranks_, module, inputs, unit);
  }

  // Checks that the rank's rows of each part are whole blocks with one scale, and that each part is
  // a tensor of its own. One tensor of several parts would be cut across their borders.
  void check_rows(const std::string& module, int64_t rows) const {
    CHECK(!has_blocks(module) || rows % kPackedK == 0 || rows * num_ranks_ <= kPackedK,
          "tensor_parallel_size is {}, but a part of {} has {} rows for each GPU, expected a "
          "multiple of {}, whose weights share a scale",
          num_ranks_, module, rows, kPackedK);
    CHECK(!whole_.linear_options_of(module).stacked || whole_.linear_method_of(module) == "dense",
          "tensor_parallel_size is {}, but {} is one quantised tensor in the files, expected its "
          "parts; convert the model with `python -m cpmcu.convert`",
          num_ranks_, module);
  }

  BlockSpec block(const BlockSpec& block, int layer) const {
    const std::string name = "model.layers." + std::to_string(layer) + ".";
    if (std::ranges::find(kWholeKinds, block.kind) != kWholeKinds.end()) return block;
    CHECK(std::ranges::find(kKinds, block.kind) != kKinds.end(),
          "tensor_parallel_size is {}, but layer {} has a block of kind {}, which runs on one GPU; "
          "expected tensor_parallel_size 1",
          num_ranks_, layer, block.kind);
    if (block.kind == "moe") return moe(block, name + "mlp.");
    if (block.kind == "mlp_and_experts") return mlp_and_experts(block, name);
    if (block.kind == "gated_delta_net") return gated_delta_net(block, name + "linear_attn.");
    if (block.kind == "short_conv") return short_conv(block, name + "conv.");
    if (block.kind == "mamba2") return mamba2(block, name + "mamba.");
    return block.kind == "mlp" ? mlp(block, name) : attention(block, name);
  }

  // `name`: the prefix of the layer's modules.
  BlockSpec attention(BlockSpec block, const std::string& name) const {
    const std::string attn = name + "self_attn.";
    const int all_heads = block.params.integer("num_attention_heads", whole_.num_attention_heads);
    const int all_kv_heads =
        block.params.integer("num_key_value_heads", whole_.num_key_value_heads);
    const int heads = divide(attn, "num_attention_heads", all_heads);
    const int kv_heads = divide_kv_heads(attn, all_kv_heads);
    if (block.params.flag("joint_qk_norm", false)) {
      block.params.set("num_q_proj_heads", int64_t{all_heads});
      block.params.set("num_k_proj_heads", int64_t{all_kv_heads});
    }
    block.params.set("num_attention_heads", int64_t{heads});
    block.params.set("num_key_value_heads", int64_t{kv_heads});
    const int head_dim = block.params.integer("head_dim", whole_.head_dim);
    check_rows(attn + "qkv_proj", int64_t{heads} * head_dim);
    check_rows(attn + "qkv_proj", int64_t{kv_heads} * head_dim);
    check_inputs(attn + "o_proj", int64_t{heads} * head_dim);
    return block;
  }

 private:
  BlockSpec mlp_and_experts(const BlockSpec& block, const std::string& name) const {
    return mlp(moe(block, name + "mlp."), name, "mlp_intermediate_size");
  }

  BlockSpec mlp(BlockSpec block, const std::string& name,
                const char* field = "intermediate_size") const {
    const int width = divide(name + "mlp.", "intermediate_size",
                             block.params.integer(field, whole_.intermediate_size));
    block.params.set(field, int64_t{width});
    check_rows(name + "mlp.gate_up_proj", width);
    check_inputs(name + "mlp.down_proj", width);
    return block;
  }

  // Divides the columns of each expert, so any choice of experts is equal work for all ranks.
  BlockSpec moe(BlockSpec block, const std::string& mlp) const {
    CHECK(
        !block.params.flag("expert_bias", false) || block.params.flag("alternating_gate_up", false),
        "tensor_parallel_size is {}, but the biases of gate and up in {} do not alternate, which "
        "runs on one GPU; expected tensor_parallel_size 1",
        num_ranks_, mlp);
    const auto divide_width = [&](const char* field, int width, const std::string& prefix) {
      const int part = divide(mlp, field, width);
      block.params.set(field, int64_t{part});
      check_rows(prefix + "gate_up_proj", part);
      check_inputs(prefix + "down_proj", part);
    };
    divide_width("intermediate_size",
                 block.params.integer("intermediate_size", whole_.intermediate_size),
                 mlp + "experts.0.");
    const int shared = block.params.integer("shared_intermediate_size", 0);
    if (shared > 0) divide_width("shared_intermediate_size", shared, mlp + "shared_expert.");
    return block;
  }

  // Divides key heads with their value heads.
  BlockSpec gated_delta_net(BlockSpec block, const std::string& module) const {
    const auto divide_heads = [&](const char* field, const char* key) {
      const int heads = divide(module, key, block.params.integer(field, 0));
      block.params.set(field, int64_t{heads});
      return int64_t{heads};
    };
    const int64_t key_heads = divide_heads("num_key_heads", "linear_num_key_heads");
    const int64_t value_heads = divide_heads("num_value_heads", "linear_num_value_heads");
    const int64_t keys = key_heads * block.params.integer("key_head_dim", 0);
    const int64_t values = value_heads * block.params.integer("value_head_dim", 0);
    if (block.params.flag("fused_projections", false)) {
      check_rows(module + "in_proj_qkvz", 2 * (keys + values));
      check_rows(module + "in_proj_ba", 2 * value_heads);
    } else {
      for (const int64_t rows : {keys, values}) check_rows(module + "in_proj_qkvz", rows);
      check_rows(module + "in_proj_ba", value_heads);
    }
    check_inputs(module + "out_proj", values);
    return block;
  }

  BlockSpec short_conv(BlockSpec block, const std::string& module) const {
    const int channels = divide("", "hidden_size", whole_.hidden_size);
    block.params.set("channels", int64_t{channels});
    check_rows(module + "in_proj", channels);
    check_inputs(module + "out_proj", channels);
    return block;
  }

  // Divides groups with their heads. The norm is over each group by itself. If ranks had to share a
  // group, each rank has the whole block.
  BlockSpec mamba2(BlockSpec block, const std::string& module) const {
    const int num_heads = block.params.integer("num_heads", 0);
    const int num_groups = block.params.integer("num_groups", 0);
    if (num_groups % num_ranks_ != 0) {
      block.params.set("is_whole", true);
      return block;
    }
    CHECK(num_heads % (8 * num_ranks_) == 0,
          "tensor_parallel_size is {}, but {}num_heads is {}, expected a multiple of {}",
          num_ranks_, module, num_heads, 8 * num_ranks_);
    const int heads = num_heads / num_ranks_, groups = num_groups / num_ranks_;
    block.params.set("num_heads", int64_t{heads});
    block.params.set("num_groups", int64_t{groups});
    const int64_t inner = int64_t{heads} * block.params.integer("head_dim", 0);
    const int64_t of_groups = int64_t{groups} * block.params.integer("state_size", 0);
    for (const int64_t rows : {inner, of_groups, int64_t{heads}}) {
      check_rows(module + "in_proj", rows);
    }
    check_inputs(module + "out_proj", inner);
    return block;
  }

  const ModelSpec& whole_;
  const int num_ranks_;
};

// Limits for a model whose tensors are only listed.
constexpr StepLimits kLeast{
    .max_tokens = 1, .max_decode_tokens = 1, .max_tree_size = 1, .max_kv = 1};

// The tensors that `list` lists. `plan_all` plans their memory first, but they do not get it.
WeightTable listed(const std::function<void(MemoryPlan&, ModelState&)>& plan_all,
                   const std::function<void(const Arena&, const ModelState&, WeightTable&)>& list) {
  const DeviceContext ctx(Device{});
  MemoryPlan plan;
  StateCache states;
  ModelState& state = states.add_model("");
  plan_all(plan, state);
  states.plan_slots(plan, 1, 1);
  states.plan_pages(plan, std::vector<int64_t>(static_cast<size_t>(states.num_groups()), 1));
  plan.assign();
  const auto arena = Arena::of_addresses(plan);
  states.bind(ctx, *arena);
  WeightTable table;
  list(*arena, state, table);
  return table;
}

std::string layer_name(const std::string& scope, int layer) {
  return scope + "layers." + std::to_string(layer) + ".";
}

}  // namespace

ModelSpec part_of(const ModelSpec& whole, int num_ranks) {
  if (num_ranks == 1) return whole;
  CHECK(num_ranks >= 1 && num_ranks <= kMaxRanks && (num_ranks & (num_ranks - 1)) == 0,
        "tensor_parallel_size is {}, expected a power of two up to {}", num_ranks, kMaxRanks);
  const Divider divider(whole, num_ranks);
  ModelSpec part = whole;
  part.num_ranks = num_ranks;
  part.layers.clear();
  for (int layer = 0; layer < whole.num_hidden_layers; ++layer) {
    LayerSpec& blocks = part.layers.emplace_back();
    for (const BlockSpec& block : whole.layer(layer)) {
      blocks.push_back(divider.block(block, layer));
    }
  }
  return part;
}

ModelSpec without_other_heads(const ModelSpec& part) {
  ModelSpec divided = part;
  for (LayerSpec& layer : divided.layers) {
    for (BlockSpec& block : layer) {
      if (!block.params.flag("joint_qk_norm", false)) continue;
      block.params.set("num_q_proj_heads", block.params.values().at("num_attention_heads"));
      block.params.set("num_k_proj_heads", block.params.values().at("num_key_value_heads"));
    }
  }
  return divided;
}

WeightTable tensors_of(const ModelSpec& spec) {
  Transformer model(spec);
  return listed([&](MemoryPlan& plan, ModelState& state) { model.plan(plan, state, kLeast, 1, 1); },
                [&](const Arena& arena, const ModelState& state, WeightTable& table) {
                  model.bind(arena, state);
                  model.list_tensors(table);
                });
}

ModelSpec with_part_of_attention(const ModelSpec& whole, int num_ranks, const std::string& scope) {
  const Divider divider(whole, num_ranks);
  ModelSpec part = whole;
  part.layers.clear();
  for (int layer = 0; layer < whole.num_hidden_layers; ++layer) {
    LayerSpec& blocks = part.layers.emplace_back();
    for (const BlockSpec& block : whole.layer(layer)) {
      const bool divides = block.kind == "attention";
      blocks.push_back(divides ? divider.attention(block, layer_name(scope, layer)) : block);
    }
  }
  return part;
}

WeightTable attention_tensors_of(const ModelSpec& spec, const std::string& scope) {
  std::vector<std::unique_ptr<Sublayer>> blocks;
  for (int layer = 0; layer < spec.num_hidden_layers; ++layer) {
    for (const BlockSpec& block : spec.layer(layer)) {
      if (block.kind != "attention") continue;
      Params params;
      for (const auto& [name, value] : block.params.values()) {
        if (name != "kv_layer") params.set(name, value);  // q_proj and o_proj do not depend on it
      }
      blocks.push_back(std::make_unique<Sublayer>(
          layer, block.kind,
          BlockConfig{
              .spec = spec, .params = params, .prefix = layer_name(scope, layer), .scope = ""}));
    }
  }
  return listed(
      [&](MemoryPlan& plan, ModelState& state) {
        for (const auto& block : blocks) block->plan(plan, state, kLeast);
      },
      [&](const Arena& arena, const ModelState& state, WeightTable& table) {
        for (const auto& block : blocks) {
          block->bind(arena, state);
          block->list_tensors(table);
        }
      });
}

}  // namespace cpmcu
