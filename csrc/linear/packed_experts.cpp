// Quantised experts of checkpoints, in any layout of the table: "packed".
//
// The buffer has a part for each expert. A part holds the expert's tensors while they are loaded,
// then its weight blocks. The device repacks one expert after another.
#include <algorithm>

#include "linear/experts.h"
#include "linear/packed_tensors.h"

namespace cpmcu {
namespace {

LinearConfig unfused(LinearConfig expert) {
  expert.options.stacked = false;  // it is for other modules; experts are never stacked
  return expert;
}

class PackedExperts : public ExpertLinear {
 public:
  explicit PackedExperts(const ExpertsConfig& config)
      : config_(config),
        tensors_(make_packed_tensors(unfused(config.expert))),
        weight_(tensors_->weight()) {
    const int64_t bytes = std::max(weight_.num_bytes(), tensors_->num_bytes());
    stride_ =
        (bytes + MemoryPlan::kAlignment - 1) / MemoryPlan::kAlignment * MemoryPlan::kAlignment;
  }

  void plan(MemoryPlan& plan) override {
    id_ = plan.add(config_.prefix + config_.expert.stacked_name(), "weights",
                   config_.num_experts * stride_);
    load_id_ = plan.add_scratch("packed.load", tensors_->num_bytes(), kLoad, kLoad);
  }

  void bind(const Arena& arena) override {
    weight_.blocks = arena.array<char>(id_);
    load_ = arena.array<char>(load_id_);
  }

  void list_tensors(WeightTable& table) override {
    for (int i = 0; i < config_.num_experts; ++i) {
      tensors_->list(table, static_cast<char*>(of(i).blocks), config_.prefix_of(i));
    }
  }

  // All experts share the scratch; the stream orders their copies.
  void finish_loading(const Context& ctx) override {
    for (int i = 0; i < config_.num_experts; ++i) {
      copy_on_device(ctx.device, load_, of(i).blocks, tensors_->num_bytes(), ctx.stream);
      tensors_->pack(ctx, of(i), load_);
    }
  }

  int64_t expert_bytes() const override { return weight_.num_bytes(); }
  void forward(const Context& ctx, const ExpertRows& rows) const override {
    packed_expert_gemm(ctx, {.rows = rows, .w = weight_, .stride = stride_});
  }
  void forward_sorted(const Context& ctx, const SortedRows& rows) const override {
    packed_sorted_gemm(ctx, {.rows = rows, .w = weight_, .stride = stride_});
  }

 private:
  PackedWeight of(int index) const {
    PackedWeight weight = weight_;
    weight.blocks = static_cast<char*>(weight_.blocks) + index * stride_;
    return weight;
  }

  ExpertsConfig config_;
  std::unique_ptr<PackedTensors> tensors_;
  PackedWeight weight_;  // of expert 0
  int64_t stride_ = 0;
  MemoryPlan::Id id_ = 0, load_id_ = 0;
  char* load_ = nullptr;
};

REGISTER_EXPERTS("packed", PackedExperts);

}  // namespace
}  // namespace cpmcu
