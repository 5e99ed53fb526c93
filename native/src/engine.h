// Runs a Graph. Memory is planned and weights are packed once; a run allocates nothing.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "graph.h"
#include "limits.h"

namespace unflip {

class ThreadPool;
struct Kernels;

// The instruction sets that this build contains and this CPU supports, best first. "portable" is always among them.
std::vector<std::string> instruction_sets();

// How the buffers of a run are laid out. Shared: in one block, where later values take the place of earlier ones. Separate: each
// value and each scratch is an allocation of exactly its size, filled with NaN. Tests compare both, and sanitizers see a value that
// runs into the next one.
enum class Layout { Shared, Separate };

// The buffers of one run. Only one run at a time may use a workspace.
class Workspace {
 public:
  virtual ~Workspace() = default;
};

class Engine {
 public:
  // Bounds on memory and work, for a graph with or without tensors. Allocates little. The graph and the file are not included.
  static Needs needs(const Graph& graph, const std::string& isa, int threads);

  // isa: a name from instruction_sets(), or empty for the best one. Throws std::runtime_error.
  static std::unique_ptr<Engine> create(Graph graph, const std::string& isa, int threads);
  // For benchmarks: uses these kernels, which must outlive the engine.
  static std::unique_ptr<Engine> create(Graph graph, const Kernels& kernels, int threads);
  virtual ~Engine() = default;

  virtual std::unique_ptr<Workspace> workspace(Layout layout = Layout::Shared) const = 0;

  // input: batch x C x H x W floats. outputs: for each output of the graph, space for batch samples. Never throws.
  // pool: null to use only this thread. seconds: null, or one double per op, to which the time spent in the op is added.
  virtual void run(const float* input, float* const* outputs, int batch, Workspace& workspace, ThreadPool* pool,
                   double* seconds) const = 0;

  // The same for pixels 0 .. 255 instead of normalized floats, if takes_pixels().
  virtual void run_pixels(const uint8_t* input, float* const* outputs, int batch, Workspace& workspace, ThreadPool* pool,
                          double* seconds) const = 0;
  virtual bool takes_pixels() const = 0;

  virtual const Graph& graph() const = 0;  // its large vectors (weights) may have been freed
  virtual const std::string& isa() const = 0;
  virtual size_t workspace_bytes() const = 0;
};

}  // namespace unflip
