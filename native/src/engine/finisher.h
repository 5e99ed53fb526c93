// The end of a task: its steps, where its floats go and how they become bits, with all parameters laid out for the kernels.
#pragma once

#include <vector>

#include "task.h"

namespace unflip {

// What a task makes: floats (value >= 0), a code (code >= 0), or both.
struct Emits {
  int value = -1;
  int code = -1;
  const Quantizer* quantizer = nullptr;
  int unit = -1;  // of the quantizer
};

class Finisher {
 public:
  Finisher(const Shape& shape, const std::vector<Step>& steps, const Emits& emits, const std::vector<ValueInfo>& values);
  Finisher(const Finisher&) = delete;
  Finisher& operator=(const Finisher&) = delete;

  const Finish& finish() const { return finish_; }
  const Shape& shape() const { return shape_; }
  int stride() const { return finish_.stride; }
  int pixels() const { return shape_.height * shape_.width; }
  bool stores_floats() const { return emits_.value >= 0; }
  bool has_work() const { return finish_.step_count || finish_.thresholds; }

  FinishTarget target(const RunContext& context) const;

  // Zeros around the code; before any of its bits is written.
  void clear_border(const RunContext& context) const;

 private:
  const float* keep(const std::vector<float>& vector, float padding);
  void add_step(const Step& step, const std::vector<ValueInfo>& values);
  void add_quantizer(const Quantizer& quantizer);
  void add_even_steps(const Quantizer& quantizer);

  Shape shape_;
  Emits emits_;
  Finish finish_;
  std::vector<FinishStep> steps_;
  std::vector<std::vector<float>> floats_;
  std::vector<std::vector<int>> groups_;
  std::vector<int> even_first_;
  std::vector<uint8_t> strict_;
};

}  // namespace unflip
