// Classifies images with a packed network, in C++: raw pixels in, the best class of each image out.
//
//     g++ -std=c++17 classify.cpp $(pkg-config --cflags --libs unflip) -o classify
//     ./classify model.unflip < pixels
//
// The pixels are bytes: images one after the other, each as C x H x W. native/examples/CMakeLists.txt builds it with CMake.
#include <algorithm>
#include <iostream>
#include <iterator>
#include <vector>

#include <unflip.hpp>

namespace {

// Pixels 0 .. 255 as the network's input.
std::vector<float> normalized(const std::vector<char>& pixels, const unflip::Model& model) {
  const unflip::Shape shape = model.input_shape();
  const unflip::Preprocess preprocess = model.preprocess();
  const size_t plane = shape.size() / size_t(shape.channels);
  std::vector<float> values;
  for (size_t i = 0; i < pixels.size(); ++i) {
    const size_t channel = i / plane % size_t(shape.channels);
    const double value = static_cast<unsigned char>(pixels[i]) / 255.0;
    values.push_back(float((value - preprocess.mean[channel]) / preprocess.deviation[channel]));
  }
  return values;
}

std::string printable(const std::string& text) {  // a terminal must not interpret text from a file
  std::string shown(unflip_printable(text.c_str(), nullptr, 0), ' ');
  unflip_printable(text.c_str(), shown.data(), shown.size() + 1);
  return shown;
}

}  // namespace

int main(int count, char** arguments) try {
  if (count != 2) throw unflip::Error("usage: classify MODEL.unflip < PIXELS");
  const unflip::Model model(arguments[1]);
  const std::vector<std::string> labels = model.labels();
  const std::vector<char> pixels{std::istreambuf_iterator<char>(std::cin), {}};
  const std::vector<float> scores = model.run(normalized(pixels, model));
  const auto classes = static_cast<std::ptrdiff_t>(model.outputs().at(0).shape.size());
  for (auto at = scores.begin(); at != scores.end(); at += classes) {
    const size_t best = size_t(std::max_element(at, at + classes) - at);
    std::cout << at[std::ptrdiff_t(best)] << "  " << (best < labels.size() ? printable(labels[best]) : std::to_string(best))
              << "\n";
  }
  return 0;
} catch (const std::exception& error) {
  std::cerr << "classify: " << error.what() << "\n";
  return 1;
}
