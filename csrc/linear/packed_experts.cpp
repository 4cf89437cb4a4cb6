// Quantised experts of checkpoints, in any layout of the table: "packed".
//
// The buffer has a part for each expert. A part holds the expert's tensors while they are loaded,
// then its weight blocks. The device repacks one expert after another.
#include "linear/packed_experts.h"

#include <utility>

#include "linear/packed_tensors.h"

namespace cpmcu {
namespace {

LinearConfig unfused(LinearConfig expert) {
  expert.options.stacked = false;  // the flag is for other modules: experts are never stacked
  return expert;
}

class PackedExperts : public PackedExpertLinear {
 public:
  explicit PackedExperts(const ExpertsConfig& config)
      : PackedExperts(config, make_packed_tensors(unfused(config.expert))) {}

  void plan(MemoryPlan& plan) override {
    plan_blocks(plan);
    load_id_ = plan.add_scratch("packed.load", tensors_->num_bytes(), kLoad, kLoad);
  }

  void bind(const Arena& arena) override {
    bind_blocks(arena);
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

 private:
  PackedExperts(const ExpertsConfig& config, std::unique_ptr<PackedTensors> tensors)
      : PackedExpertLinear(config, tensors->weight(), tensors->num_bytes()),
        tensors_(std::move(tensors)) {}

  std::unique_ptr<PackedTensors> tensors_;
  MemoryPlan::Id load_id_ = 0;
  char* load_ = nullptr;
};

REGISTER_EXPERTS("packed", PackedExperts);

}  // namespace
}  // namespace cpmcu
