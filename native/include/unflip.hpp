// unflip for C++17: the C API (unflip.h) with exceptions, vectors, and models that free themselves.
//
//   unflip::Model model("digits.unflip");
//   std::vector<float> scores = model.run(pixels);  // one sample, or several one after the other
//
// A Model can be moved, but not copied. Any number of threads may call one model at the same time.
#pragma once

#include <cstddef>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "unflip.h"

namespace unflip {

struct Error : std::runtime_error {  // what() is unflip_error()
  using std::runtime_error::runtime_error;
};

struct Shape {  // of one sample
  int channels = 0, height = 0, width = 0;
  size_t size() const { return size_t(channels) * size_t(height) * size_t(width); }
};

struct Output {
  std::string name;
  Shape shape;
  int dims = 0;  // 1 if it is a vector of channels, else 3
};

struct Preprocess {  // an image with values 0 .. 255 becomes input by (pixel / 255 - mean) / deviation, per channel
  std::vector<double> mean, deviation;
};

class Model {
 public:
  explicit Model(const std::string& path, int threads = 1, unflip_limits limits = {})
      : Model(unflip_load(path.c_str(), threads, &limits)) {}
  static Model from_memory(const void* data, size_t size, int threads = 1, unflip_limits limits = {}) {
    return Model(unflip_load_memory(data, size, threads, &limits));
  }

  Shape input_shape() const {
    int sizes[3];
    check(unflip_input_shape(get(), sizes) == 0);
    return {sizes[0], sizes[1], sizes[2]};
  }
  std::vector<Output> outputs() const {
    std::vector<Output> all;
    for (int sizes[3], i = 0; i < unflip_outputs(get()); ++i) {
      check(unflip_shape_of_output(get(), i, sizes) == 0);
      all.push_back({unflip_output_name(get(), i), {sizes[0], sizes[1], sizes[2]}, unflip_output_dims(get(), i)});
    }
    return all;
  }
  std::vector<std::string> labels() const {  // empty if the file has none
    std::vector<std::string> all;
    for (int i = 0; i < unflip_labels(get()); ++i) all.emplace_back(unflip_label(get(), i));
    return all;
  }
  Preprocess preprocess() const {  // mean 0 and deviation 1 if the file has none
    std::vector<double> mean(size_t(input_shape().channels)), deviation(mean.size());
    check(unflip_preprocess(get(), mean.data(), deviation.data()) == 0);
    return {std::move(mean), std::move(deviation)};
  }

  // For networks with one output. The input has a whole number of samples, and so has the result.
  std::vector<float> run(const std::vector<float>& input) const {
    if (unflip_outputs(get()) > 1) throw Error("this network has several outputs: call run_outputs");
    return std::move(run_outputs(input)[0]);
  }
  std::vector<std::vector<float>> run_outputs(const std::vector<float>& input) const {
    const size_t sample = input_shape().size(), batch = input.size() / sample;
    if (batch < 1 || batch > size_t((std::numeric_limits<int>::max)()) || batch * sample != input.size())
      throw Error(std::to_string(input.size()) + " numbers are not a batch: a sample has " + std::to_string(sample));
    std::vector<std::vector<float>> results;
    std::vector<float*> places;
    for (const Output& output : outputs()) results.emplace_back(batch * output.shape.size());
    for (std::vector<float>& result : results) places.push_back(result.data());
    check(unflip_run_outputs(get(), input.data(), int(batch), places.data()) == 0);
    return results;
  }

  unflip_model* get() const { return model_.get(); }  // for the other functions of unflip.h; still belongs to this object

 private:
  explicit Model(unflip_model* model) : model_(model, &unflip_free) { check(model != nullptr); }
  static void check(bool succeeded) {
    if (!succeeded) throw Error(unflip_error());
  }

  std::unique_ptr<unflip_model, void (*)(unflip_model*)> model_;
};

}  // namespace unflip
