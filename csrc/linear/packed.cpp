// Linear method "packed": quantised weights of checkpoints, in any layout of the table.
//
// A checkpoint's tensors are streamed unchanged into the buffer that will hold the weight blocks.
// Once all tensors are loaded, the device repacks them.
#include "linear/packed_matrix.h"
#include "linear/packed_tensors.h"

namespace cpmcu {
namespace {

class PackedLinear : public LinearMethod {
 public:
  explicit PackedLinear(const LinearConfig& config)
      : name_(config.stacked_name()),
        dtype_(config.dtype),
        tensors_(make_packed_tensors(config)),
        matrix_(tensors_->weight()) {}

  void plan(MemoryPlan& plan, const StepLimits& limits) override {
    matrix_.plan(plan, name_, dtype_, limits, tensors_->num_bytes());
    load_id_ = plan.add_scratch("packed.load", tensors_->num_bytes(), kLoad, kLoad);
  }

  void bind(const Arena& arena) override {
    matrix_.bind(arena);
    load_ = arena.array<char>(load_id_);
  }

  void list_tensors(WeightTable& table) override {
    tensors_->list(table, static_cast<char*>(matrix_.weight().blocks), "");
  }

  // All layers share the scratch; the stream orders their copies.
  void finish_loading(const Context& ctx) override {
    copy_on_device(ctx.device, load_, matrix_.weight().blocks, tensors_->num_bytes(), ctx.stream);
    tensors_->pack(ctx, matrix_.weight(), load_);
    matrix_.prepare(ctx);
  }

  void forward(const Context& ctx, Phase phase, const Tensor& y, const Tensor& x, float alpha,
               float beta) const override {
    matrix_.forward(ctx, phase, y, x, alpha, beta);
  }

  void forward_gated(const Context& ctx, Phase phase, const Tensor& out, const Tensor& gate_up,
                     const Tensor& x) const override {
    matrix_.forward_gated(ctx, phase, out, gate_up, x);
  }

  std::optional<FusedForm> fused_form() const override { return matrix_.fused_form(); }
  int64_t weight_bytes() const override { return matrix_.weight().num_bytes(); }

 private:
  std::string name_;
  DType dtype_;
  std::unique_ptr<PackedTensors> tensors_;
  PackedMatrix matrix_;
  MemoryPlan::Id load_id_ = 0;
  char* load_ = nullptr;
};

REGISTER_LINEAR("packed", PackedLinear);

}  // namespace
}  // namespace cpmcu
