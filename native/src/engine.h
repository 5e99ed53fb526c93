// Runs a Graph: memory planned once, weights packed once, nothing allocated while running.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "graph.h"

namespace unflip {

class ThreadPool;
struct Kernels;

// Instruction sets whose kernels this build has and this CPU can run, best first; "portable" is always there.
std::vector<std::string> instruction_sets();

// What one run needs besides the model: buffers of fixed size. One run at a time may use it.
class Workspace {
 public:
  virtual ~Workspace() = default;
};

class Engine {
 public:
  // isa: a name from instruction_sets(), or empty for the first of them. Throws std::runtime_error.
  static std::unique_ptr<Engine> create(Graph graph, const std::string& isa, int threads);
  // For benchmarks: with these kernels, which have to live as long.
  static std::unique_ptr<Engine> create(Graph graph, const Kernels& kernels, int threads);
  virtual ~Engine() = default;

  virtual std::unique_ptr<Workspace> workspace() const = 0;

  // input: batch x C x H x W floats; outputs: for each of the graph's, room for as many samples of its shape. Never throws.
  // pool may be null: then this thread alone works. seconds: null, or one double an op to which the time spent in it is added.
  virtual void run(const float* input, float* const* outputs, int batch, Workspace& workspace, ThreadPool* pool,
                   double* seconds) const = 0;

  virtual const Graph& graph() const = 0;  // its large vectors (weights) may have been given up
  virtual const std::string& isa() const = 0;
  virtual size_t workspace_bytes() const = 0;
};

}  // namespace unflip
