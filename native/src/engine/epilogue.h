// The epilogue of a task: element-wise steps, then storing floats, bits or both. Its parameters are laid out for the kernels.
#pragma once

#include <vector>

#include "aligned.h"
#include "task.h"

namespace unflip {

// The outputs of a task: floats (value >= 0), a code (code >= 0), or both.
struct Emits {
  int value = -1;
  int code = -1;
  const Quantizer* quantizer = nullptr;
  int unit = -1;  // the value that multiplies the quantizer's thresholds, or -1
};

class Epilogue {
 public:
  Epilogue(const Shape& shape, const std::vector<Step>& steps, const Emits& emits, const std::vector<ValueInfo>& values);
  Epilogue(const Epilogue&) = delete;
  Epilogue& operator=(const Epilogue&) = delete;

  const EpilogueParams& params() const { return params_; }
  const Shape& shape() const { return shape_; }
  int stride() const { return params_.stride; }
  int pixels() const { return shape_.height * shape_.width; }
  bool stores_floats() const { return emits_.value >= 0; }
  bool has_work() const { return params_.step_count || params_.thresholds; }

  EpilogueTarget target(const RunContext& context) const;

  // Writes the zeros around the code, all of them or those next to the pixels first .. last - 1. Threads that clear what is next to
  // their own pixels keep it in their caches.
  void clear_border(const RunContext& context) const { clear_border(context, 0, pixels()); }
  void clear_border(const RunContext& context, int first, int last) const;

 private:
  const float* keep(const std::vector<float>& vector, float padding);
  void add_step(const Step& step, const std::vector<ValueInfo>& values);
  void add_quantizer(const Quantizer& quantizer);
  void add_even_steps(const Quantizer& quantizer);

  Shape shape_;
  Emits emits_;
  EpilogueParams params_;
  std::vector<EpilogueStep> steps_;
  std::vector<AlignedVector<float>> floats_;
  std::vector<std::vector<int>> groups_;
  std::vector<int> even_first_;
  std::vector<uint8_t> strict_;
};

}  // namespace unflip
