// The Python module: the C API as one class. The user interface is in src/unflip/runtime.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "unflip.h"

namespace nb = nanobind;

namespace {

using Input = nb::ndarray<const float, nb::c_contig, nb::device::cpu>;
using Output = nb::ndarray<float, nb::c_contig, nb::device::cpu>;
using Shape = std::tuple<int, int, int>;

// Messages contain names from files and paths, and a shortened message may end in the middle of a character.
nb::object text(const char* bytes) {
  return nb::steal(PyUnicode_DecodeUTF8(bytes, static_cast<Py_ssize_t>(std::strlen(bytes)), "replace"));
}

[[noreturn]] void raise_value_error(const char* message) {
  PyErr_SetObject(PyExc_ValueError, text(message).ptr());
  throw nb::python_error();
}

class Network {
 public:
  // Limits of 0 are the defaults.
  Network(const nb::bytes& path, int threads, uint64_t max_memory, uint64_t max_work) {
    const char* text = path.c_str();
    const unflip_limits limits = {max_memory, max_work};
    without_gil([&] { return (model_ = unflip_load(text, threads, &limits)) != nullptr; });
  }

  static Network* from_bytes(const nb::bytes& data, int threads, uint64_t max_memory, uint64_t max_work) {
    const void* bytes = data.data();
    const size_t size = data.size();
    const unflip_limits limits = {max_memory, max_work};
    unflip_model* model = nullptr;
    without_gil([&] { return (model = unflip_load_memory(bytes, size, threads, &limits)) != nullptr; });
    return new Network(model);
  }

  ~Network() { unflip_free(model_); }
  Network(const Network&) = delete;
  Network& operator=(const Network&) = delete;

  void run(const Input& input, const nb::args& arrays) {
    const std::vector<Output> outputs = cast(arrays);
    const int batch = checked_batch(input, outputs);
    const std::vector<float*> places = places_of(outputs);
    without_gil([&] { return unflip_run_outputs(model_, input.data(), batch, places.data()) == 0; });
  }

  std::vector<double> profile(const Input& input, const nb::args& arrays) {
    const std::vector<Output> outputs = cast(arrays);
    const int batch = checked_batch(input, outputs);
    const std::vector<float*> places = places_of(outputs);
    std::vector<double> seconds(static_cast<size_t>(unflip_ops(model_)));
    without_gil([&] { return unflip_profile_outputs(model_, input.data(), batch, places.data(), seconds.data()) == 0; });
    return seconds;
  }

  Shape input_shape() const {
    int sizes[3];
    unflip_input_shape(model_, sizes);
    return {sizes[0], sizes[1], sizes[2]};
  }

  // (name, shape) of each output.
  nb::list outputs() const {
    nb::list found;
    for (int i = 0; i < unflip_outputs(model_); ++i)
      found.append(nb::make_tuple(text(unflip_output_name(model_, i)), output_shape(i)));
    return found;
  }

  // For each output 1 if the model returned a vector, or 3 if it returned an image.
  std::vector<int> output_dims() const {
    std::vector<int> dims;
    for (int i = 0; i < unflip_outputs(model_); ++i) dims.push_back(unflip_output_dims(model_, i));
    return dims;
  }

  std::string structure() const { return unflip_structure(model_); }

  nb::list ops() const {
    nb::list names;
    for (int i = 0; i < unflip_ops(model_); ++i) names.append(text(unflip_op_name(model_, i)));
    return names;
  }

  nb::object preprocess() const { return text(unflip_preprocess(model_)); }
  nb::object labels() const { return text(unflip_labels(model_)); }
  std::string isa() const { return unflip_isa(model_); }
  int threads() const { return unflip_threads(model_); }
  uint64_t memory_needed() const { return unflip_memory_needed(model_); }
  uint64_t work_needed() const { return unflip_work_needed(model_); }

 private:
  explicit Network(unflip_model* model) : model_(model) {}

  // Releases the GIL. After a failure, the message is stored for this thread.
  template <typename Action>
  static void without_gil(Action action) {
    bool done;
    {
      nb::gil_scoped_release release;
      done = action();
    }
    if (!done) raise_value_error(unflip_error());
  }

  Shape output_shape(int output) const {
    int sizes[3];
    unflip_shape_of_output(model_, output, sizes);
    return {sizes[0], sizes[1], sizes[2]};
  }

  // Without conversion: an array that must be converted is refused, because results written to a copy would be lost.
  static std::vector<Output> cast(const nb::args& arrays) {
    std::vector<Output> outputs;
    for (nb::handle array : arrays) {
      outputs.emplace_back();
      if (!nb::try_cast(array, outputs.back(), false))
        throw nb::type_error("an output must be a float32 array in C order on the CPU that can be written");
    }
    return outputs;
  }

  static std::vector<float*> places_of(const std::vector<Output>& outputs) {
    std::vector<float*> places;
    for (const Output& output : outputs) places.push_back(output.data());
    return places;
  }

  static size_t elements(const Shape& shape) {
    return static_cast<size_t>(std::get<0>(shape)) * static_cast<size_t>(std::get<1>(shape)) *
           static_cast<size_t>(std::get<2>(shape));
  }

  // Python checks the shapes and reports errors. This check only prevents a bug there from writing out of bounds.
  int checked_batch(const Input& input, const std::vector<Output>& outputs) const {
    const size_t sample = elements(input_shape()), batch = input.size() / sample;
    bool right = batch * sample == input.size() && batch <= std::numeric_limits<int>::max() &&
                 outputs.size() == static_cast<size_t>(unflip_outputs(model_));
    for (size_t i = 0; right && i < outputs.size(); ++i)
      right = batch * elements(output_shape(static_cast<int>(i))) == outputs[i].size();
    if (!right) raise_value_error("input and outputs must have the model's shapes and the same batch");
    return static_cast<int>(batch);
  }

  unflip_model* model_ = nullptr;
};

}  // namespace

NB_MODULE(_native, m) {
  m.def("version", [] { return std::string(unflip_version()); });
  nb::class_<Network>(m, "Network")
      .def(nb::init<const nb::bytes&, int, uint64_t, uint64_t>(), nb::arg("path"), nb::arg("threads"), nb::arg("max_memory") = 0,
           nb::arg("max_work") = 0)
      .def_static("from_bytes", &Network::from_bytes, nb::arg("data"), nb::arg("threads"), nb::arg("max_memory") = 0,
                  nb::arg("max_work") = 0, nb::rv_policy::take_ownership)
      .def("run", &Network::run, nb::arg("input").noconvert(), nb::arg("outputs"))
      .def("profile", &Network::profile, nb::arg("input").noconvert(), nb::arg("outputs"))
      .def_prop_ro("input_shape", &Network::input_shape)
      .def_prop_ro("outputs", &Network::outputs)
      .def_prop_ro("output_dims", &Network::output_dims)
      .def_prop_ro("structure", &Network::structure)
      .def_prop_ro("ops", &Network::ops)
      .def_prop_ro("preprocess", &Network::preprocess)
      .def_prop_ro("labels", &Network::labels)
      .def_prop_ro("isa", &Network::isa)
      .def_prop_ro("threads", &Network::threads)
      .def_prop_ro("memory_needed", &Network::memory_needed)
      .def_prop_ro("work_needed", &Network::work_needed);
}
