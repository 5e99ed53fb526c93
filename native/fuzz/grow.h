// Grows networks that the loader accepts, op by op: fields are made to fit the values before, and tensors the fields.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "file.h"
#include "graph.h"
#include "limits.h"
#include "random.h"

namespace fuzz {

// Loads a file if no instruction set needs more than the limits.
unflip::Graph load(const Bytes& file, const unflip::Limits& limits, bool check_hash);

class Grower {
 public:
  // The network has no ops yet. tensors: those that ops may name.
  Grower(const Json& input, std::map<std::string, Tensor> tensors, const unflip::Limits& limits, Random& random);

  // Adds an op whose inputs are numbers of this network. Returns the number of its value, or -1 if it cannot be made to fit or
  // needs too much.
  int add(Json op);
  // A random op that reads some of the values.
  int add_random();

  const unflip::Graph& graph() const { return graph_; }
  // The network with random outputs and labels.
  Bytes finished();

 private:
  Json random_op(const std::string& kind, int x);
  Json random_conv(int x);
  Json random_quantize(int x);
  Json random_steps(int most);
  void add_pool_fields(Json& op);

  bool fit(Json& op);
  bool fit_conv(Json& op, const unflip::Shape& in);
  bool fit_weights(Json& op, int64_t filters, int64_t depth, bool of_code);
  void fit_bytes(Json& op);
  bool fit_quantize(Json& op, const unflip::Shape& in);
  void fit_steps(Json& op, const unflip::Shape& shape);
  bool fit_step(Json& step, const unflip::Shape& shape);
  bool fit_concat(Json& op);
  void fit_slice(Json& op, const unflip::Shape& in);
  void fit_groups(Json& op, const unflip::Shape& in);
  void fit_factor(Json& op, const unflip::Shape& in);
  bool reload();

  // The number of the field, or of item `index` of a list; made whole and not too small.
  static int64_t whole(Json& op, const std::string& key, size_t index = 0, int least = 1);
  static std::vector<int64_t> weight_shape(const Json& conv);
  std::string new_tensor(bool is_float, std::vector<int64_t> shape);
  // Makes the tensor that the field names have this shape, by repeating or cutting its content.
  void reshape(Json& op, const std::string& key, bool is_float, std::vector<int64_t> shape);
  Tensor* tensor(Json& op, const std::string& key);
  int float_value();
  bool is_one(int value) const { return graph_.shape(value) == unflip::Shape{1, 1, 1} && graph_.is_float(value); }
  std::vector<int> values_like(const unflip::Shape& shape) const;

  Draft draft_;
  std::map<std::string, Tensor> tensors_;  // to choose from
  std::set<std::string> taken_;            // names of the op that is being made
  unflip::Limits limits_;
  Random& random_;
  unflip::Graph graph_;
};

}  // namespace fuzz
