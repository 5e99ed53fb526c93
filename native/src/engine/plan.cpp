#include "plan.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "../fail.h"
#include "../sizes.h"
#include "binary_conv.h"
#include "float_conv.h"
#include "window.h"

namespace unflip {
namespace {

constexpr int64_t kAlignment = 64;
constexpr int64_t kSlack = 64;  // vectors may read slightly beyond the end of a value

// All values that an op reads.
std::vector<int> reads_of(const Op& op, const std::vector<Step>& steps) {
  std::vector<int> reads = op.inputs;
  for (const Step& s : steps)
    if (s.kind == StepKind::Add || s.kind == StepKind::Mul) reads.push_back(s.value);
  return reads;
}

std::vector<bool> returned_values(const Graph& graph) {
  std::vector<bool> returned(graph.ops.size() + 1, false);
  for (const Output& output : graph.outputs) returned[output.value] = true;
  return returned;
}

// Values that an output depends on.
std::vector<bool> needed_values(const Graph& graph) {
  std::vector<bool> needed = returned_values(graph);
  for (int v = static_cast<int>(graph.ops.size()); v > 0; v--)
    if (needed[v])
      for (int r : reads_of(graph.ops[v - 1], graph.ops[v - 1].steps)) needed[r] = true;
  return needed;
}

class Planner {
 public:
  Planner(const Graph& graph, const Kernels& kernels)
      : graph_(graph), kernels_(kernels), returned_(returned_values(graph)), needed_(needed_values(graph)),
        users_(graph.ops.size() + 1), done_(graph.ops.size(), false) {
    plan_.values.resize(graph.ops.size() + 1);
    for (int i = 0; i < count(); i++)
      if (needed_[i + 1])
        for (int v : reads_of(graph.ops[i], graph.ops[i].steps)) users_[v].push_back(i);
  }

  Plan plan() {
    choose_ops();
    describe_values();
    place_values();
    return std::move(plan_);
  }

 private:
  int count() const { return static_cast<int>(graph_.ops.size()); }

  void choose_ops() {
    for (int i = 0; i < count(); i++) {
      if (!needed_[i + 1] || done_[i]) continue;
      PlannedOp planned;
      planned.op = i;
      planned.steps = graph_.ops[i].steps;
      planned.emits.value = i + 1;
      if (graph_.ops[i].kind == OpKind::Quantize) {
        emit_code(planned, i);
        planned.emits.value = -1;
      } else {
        fuse(planned);
      }
      plan_.ops.push_back(std::move(planned));
    }
  }

  void emit_code(PlannedOp& planned, int quantize) {
    const Op& op = graph_.ops[quantize];
    if (!op.quantizer.steps()) fail("op '" + op.name + "' has no thresholds");
    planned.emits.code = quantize + 1;
    planned.emits.quantizer = &op.quantizer;
    planned.emits.unit = op.inputs.size() > 1 ? op.inputs[1] : -1;
    done_[quantize] = true;
  }

  void fuse(PlannedOp& planned) {
    const OpKind kind = graph_.ops[planned.op].kind;
    if (kind == OpKind::Conv || kind == OpKind::Map)
      while (fuse_map(planned)) {
      }
    if (kind == OpKind::Conv && !graph_.is_code(graph_.ops[planned.op].inputs[0])) fuse_pool(planned);
    if (kind == OpKind::Conv || kind == OpKind::Map || kind == OpKind::MaxPool || kind == OpKind::AvgPool) fuse_quantize(planned);
  }

  // A map that is the only reader of the op's value and needs nothing computed later.
  bool fuse_map(PlannedOp& planned) {
    const int value = planned.emits.value;
    if (returned_[value] || users_[value].size() != 1) return false;
    const int user = users_[value][0];
    const Op& op = graph_.ops[user];
    if (op.kind != OpKind::Map || op.inputs[0] != value) return false;
    for (int r : reads_of(op, op.steps))
      if (r != value && r > planned.op) return false;
    planned.steps.insert(planned.steps.end(), op.steps.begin(), op.steps.end());
    planned.emits.value = user + 1;
    done_[user] = true;
    return true;
  }

  // A pool that is the only reader of a float convolution, whose value then need not be stored.
  void fuse_pool(PlannedOp& planned) {
    const int value = planned.emits.value;
    if (returned_[value] || users_[value].size() != 1) return;
    const Op &conv = graph_.ops[planned.op], &op = graph_.ops[users_[value][0]];
    if (op.kind != OpKind::MaxPool && op.kind != OpKind::AvgPool) return;
    if (!pools_rows(conv, planned.steps, op) || (conv.conv.int8 && conv.conv.groups > 1)) return;
    planned.pool = users_[value][0];
    planned.emits.value = planned.pool + 1;
    done_[planned.pool] = true;
  }

  void fuse_quantize(PlannedOp& planned) {
    const int value = planned.emits.value;
    std::vector<int>& users = users_[value];
    for (size_t u = 0; u < users.size(); u++) {
      const Op& op = graph_.ops[users[u]];
      if (op.kind != OpKind::Quantize || op.inputs[0] != value) continue;
      if (op.inputs.size() > 1 && op.inputs[1] > planned.op) continue;
      emit_code(planned, users[u]);
      users.erase(users.begin() + u);
      if (users.empty() && !returned_[value]) planned.emits.value = -1;
      return;
    }
  }

  void describe_values() {
    for (int v = 0; v <= count(); v++) {
      ValueInfo& info = plan_.values[v];
      info.shape = graph_.shape(v);
      info.code = !graph_.is_float(v);
      info.stride = v == 0 ? info.shape.channels : padded(info.shape.channels);
      if (info.code) info.layout = layout_of(v);
    }
  }

  // With a border for the convolutions that need one in memory.
  CodeLayout layout_of(int value) const {
    const Quantizer& quantizer = graph_.ops[value - 1].quantizer;
    const Shape& shape = graph_.shape(value);
    const bool bytes = graph_.is_bytes(value);
    CodeLayout l;
    int64_t bottom = 0, right = 0;
    for (int user : users_[value]) {
      const Op& op = graph_.ops[user];
      if (op.kind != OpKind::Conv || (!bytes && !looks_up(op, quantizer, shape, kernels_))) continue;
      const Window window(op.conv, shape, op.shape);
      l.top = std::max(l.top, window.top);
      l.left = std::max(l.left, window.left);
      bottom = std::max(bottom, window.rows() - window.top - shape.height);
      right = std::max(right, window.columns() - window.left - shape.width);
    }
    l.planes = bytes ? 1 : quantizer.planes();
    l.pixel_bytes = bytes ? shape.channels : (shape.channels + 7) / 8;
    l.rows = static_cast<int>(l.top + shape.height + bottom);
    l.columns = static_cast<int>(l.left + shape.width + right);
    l.row_bytes = int64_t{l.columns} * l.pixel_bytes;
    l.plane_bytes = l.rows * l.row_bytes;
    return l;
  }

  // At most 2^57: a code of 2^20 channels and 8 planes, 2^18 rows and columns with their border.
  int64_t bytes_of(int value) const {
    const ValueInfo& info = plan_.values[value];
    int64_t bytes = info.code ? info.layout.planes * info.layout.plane_bytes
                              : int64_t{info.shape.height} * info.shape.width * info.stride * 4;
    return round_up(bytes + kSlack, kAlignment);
  }

  // The memory of a value is reused after its last reader has run.
  void place_values() {
    plan_.offset.assign(count() + 1, -1);
    plan_.size.assign(count() + 1, 0);
    std::vector<int> last_reader(count() + 1, -1);
    const int steps = static_cast<int>(plan_.ops.size());
    for (int i = 0; i < steps; i++) {
      for (int v : reads_of(graph_.ops[plan_.ops[i].op], plan_.ops[i].steps)) last_reader[v] = i;
      if (plan_.ops[i].emits.unit >= 0) last_reader[plan_.ops[i].emits.unit] = i;
    }
    for (const Output& output : graph_.outputs) last_reader[output.value] = steps;
    std::vector<std::vector<int>> ends(steps + 1);
    for (int v = 0; v <= count(); v++)
      if (last_reader[v] >= 0) ends[last_reader[v]].push_back(v);
    take(0);
    for (int i = 0; i < steps; i++) {
      const PlannedOp& planned = plan_.ops[i];
      const int replaced = replaced_by(planned, i, last_reader);
      if (replaced >= 0)
        plan_.offset[planned.emits.value] = plan_.offset[replaced], plan_.size[planned.emits.value] = plan_.size[replaced];
      else if (planned.emits.value >= 0)
        take(planned.emits.value);
      if (planned.emits.code >= 0) take(planned.emits.code);
      for (int v : ends[i])
        if (plan_.offset[v] >= 0 && v != replaced) give_back(plan_.offset[v], plan_.size[v]);
    }
  }

  // A shortcut that a binary convolution adds and that has no later reader: the sum takes its place, which is in the cache. Other
  // convolutions store sums there before they add the shortcut. -1 if there is none.
  int replaced_by(const PlannedOp& planned, int step, const std::vector<int>& last_reader) const {
    const std::vector<int>& inputs = graph_.ops[planned.op].inputs;
    const int out = planned.emits.value;
    if (out < 0 || graph_.ops[planned.op].kind != OpKind::Conv || !graph_.is_code(inputs[0])) return -1;
    std::set<int> factors = {planned.emits.unit};
    for (const Step& s : planned.steps)
      if (s.kind == StepKind::Mul) factors.insert(s.value);
    for (const Step& s : planned.steps)
      if (s.kind == StepKind::Add && s.value > 0 && last_reader[s.value] == step && !factors.count(s.value) &&
          plan_.values[s.value].stride == plan_.values[out].stride && plan_.size[s.value] == bytes_of(out))
        return s.value;
    return -1;
  }

  // The smallest hole that is large enough (the first of those), or the end.
  void take(int value) {
    const int64_t bytes = plan_.size[value] = bytes_of(value);
    const auto best = by_size_.lower_bound({bytes, 0});
    if (best == by_size_.end()) {
      plan_.offset[value] = plan_.bytes;
      plan_.bytes = (Size(plan_.bytes) + bytes).value();
      if (plan_.bytes == Size::kMost) fail("its values need more than 2^63 bytes of memory");
      return;
    }
    const auto [size, offset] = *best;
    remove_hole(holes_.find(offset));
    if (size > bytes) add_hole(offset + bytes, size - bytes);
    plan_.offset[value] = offset;
  }

  void give_back(int64_t offset, int64_t bytes) {
    auto next = holes_.lower_bound(offset);
    if (next != holes_.end() && next->first == offset + bytes) {
      bytes += next->second;
      next = remove_hole(next);
    }
    if (next != holes_.begin()) {
      auto before = std::prev(next);
      if (before->first + before->second == offset) {
        offset = before->first;
        bytes += before->second;
        remove_hole(before);
      }
    }
    add_hole(offset, bytes);
  }

  using Holes = std::map<int64_t, int64_t>;

  void add_hole(int64_t offset, int64_t bytes) {
    holes_[offset] = bytes;
    by_size_.insert({bytes, offset});
  }

  Holes::iterator remove_hole(Holes::iterator hole) {
    by_size_.erase({hole->second, hole->first});
    return holes_.erase(hole);
  }

  const Graph& graph_;
  const Kernels& kernels_;
  std::vector<bool> returned_;  // values that are outputs: they are stored and keep their memory to the end
  std::vector<bool> needed_;
  std::vector<std::vector<int>> users_;            // ops that read a value
  std::vector<bool> done_;                         // ops that are fused into another
  Holes holes_;                                    // free memory in the arena: offset and size
  std::set<std::pair<int64_t, int64_t>> by_size_;  // the same: size and offset
  Plan plan_;
};

}  // namespace

Plan make_plan(const Graph& graph, const Kernels& kernels) { return Planner(graph, kernels).plan(); }

}  // namespace unflip
