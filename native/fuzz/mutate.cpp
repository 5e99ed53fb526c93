#include "mutate.h"

#include <cstring>
#include <functional>
#include <iterator>

#include "graph.h"
#include "grow.h"

namespace fuzz {
namespace {

// --- text and bytes

const char* const kNumbers[] = {"0",     "1",    "2",          "3",          "4",          "5",
                                "7",     "8",    "9",          "16",         "63",         "64",
                                "65",    "100",  "255",        "256",        "65535",      "65536",
                                "65537", "-1",   "2147483647", "2147483648", "4294967296", "9223372036854775807",
                                "1e38",  "1e39", "1e400",      "-0.0",       "0.5",        "1e-45",
                                "null",  "true", "[]",         "{}"};

bool in_number(char c) { return (c >= '0' && c <= '9') || c == '-' || c == '.'; }

// Replaces a number by another.
void change_number(std::string& text, Random& random) {
  std::vector<size_t> starts;
  for (size_t i = 1; i < text.size(); ++i)
    if (in_number(text[i]) && (text[i - 1] == ':' || text[i - 1] == '[' || text[i - 1] == ',')) starts.push_back(i);
  if (starts.empty()) return;
  const size_t start = random.of(starts);
  size_t end = start;
  while (end < text.size() && in_number(text[end])) ++end;
  text.replace(start, end - start, kNumbers[random.below(std::size(kNumbers))]);
}

// Moves, deletes or duplicates the text between two commas.
void move_piece(std::string& text, Random& random) {
  std::vector<size_t> commas;
  for (size_t i = 0; i < text.size(); ++i)
    if (text[i] == ',') commas.push_back(i);
  if (commas.size() < 3) return;
  const size_t a = random.below(commas.size() - 1), b = random.below(commas.size() - 1);
  const std::string piece = text.substr(commas[a], commas[a + 1] - commas[a]);
  if (random.below(3) == 0) {
    text.erase(commas[a], piece.size());
  } else if (random.below(2) == 0) {
    text.insert(commas[b], piece);
  } else {
    text.replace(commas[b], commas[b + 1] - commas[b], piece);
  }
}

void change_word(std::string& text, Random& random) {
  static const std::vector<std::string> words = [] {
    std::vector<std::string> all = {"affine", "prelu",    "clamp", "add", "mul",    "planes", "levels",
                                    "sample", "channels", "gelu",  "elu", "true",   "false",  "t0",
                                    "t1",     "t2",       "F32",   "U8",  "output", "tuple",  "dict"};
    all.insert(all.end(), std::begin(unflip::kOpNames), std::end(unflip::kOpNames));
    return all;
  }();
  const std::string from = random.of(words);
  std::vector<size_t> places;
  for (size_t at = text.find(from); at != std::string::npos; at = text.find(from, at + 1)) places.push_back(at);
  if (!places.empty()) text.replace(random.of(places), from.size(), random.of(words));
}

void change_bytes(uint8_t* bytes, size_t size, Random& random) {
  if (size == 0) return;
  uint8_t& byte = bytes[random.below(size)];
  byte =
      random.chance(50) ? static_cast<uint8_t>(byte ^ (1u << random.below(8))) : random.pick<uint8_t>({0, 1, 0x7F, 0x80, 0xFF});
}

void change_frame(Frame& frame, Random& random) {
  switch (random.below(8)) {
    case 0:
    case 1:
    case 2: return change_number(frame.header, random);
    case 3: return move_piece(frame.header, random);
    case 4: return change_word(frame.header, random);
    case 5: return change_bytes(reinterpret_cast<uint8_t*>(frame.header.data()), frame.header.size(), random);
    case 6: return change_bytes(frame.data.data(), frame.data.size(), random);
    default: return frame.data.resize(random.below(4) == 0 ? random.below(frame.data.size() + 1) : frame.data.size());
  }
}

// --- the network

void for_numbers(Json& value, const std::function<void(Json&)>& call) {
  if (value.type == Json::Type::Number) call(value);
  for (Json& item : value.items) for_numbers(item, call);
}

// Another size for a size, another number for a number.
void change_one_number(Json& value, Random& random) {
  std::vector<Json*> found;
  for_numbers(value, [&](Json& number) { found.push_back(&number); });
  if (found.empty()) return;
  Json& changed = *random.of(found);
  const bool is_whole = changed.number == std::floor(changed.number) && changed.number >= 0;
  if (!is_whole || random.chance(10)) {
    changed.number = static_cast<double>(random.value());
  } else if (random.chance(30)) {
    changed.number = std::max(0.0, changed.number + random.pick({-1.0, 1.0}));
  } else {
    changed.number = random.chance(10) ? 0 : random.size(random.chance(90) ? 65'536 : 1'048'576);
  }
}

void change_tensor(Draft& draft, Random& random) {
  if (draft.tensors.empty()) return;
  Tensor& tensor = std::next(draft.tensors.begin(), static_cast<std::ptrdiff_t>(random.below(draft.tensors.size())))->second;
  if (!tensor.is_float || tensor.bytes.size() < sizeof(float))
    return change_bytes(tensor.bytes.data(), tensor.bytes.size(), random);
  const size_t count = tensor.bytes.size() / sizeof(float);
  const float value = random.value();
  const size_t first = random.below(count), last = random.chance(70) ? first + 1 : count;
  for (size_t i = first; i < last; ++i) std::memcpy(&tensor.bytes[i * sizeof value], &value, sizeof value);
}

// More or fewer bases or thresholds: the op's other fields are then made to fit.
void change_rows(Json& op, Draft& draft, Random& random) {
  for (const char* key : {"scales", "thresholds"}) {
    const Json* name = op.find(key);
    const auto found = name == nullptr ? draft.tensors.end() : draft.tensors.find(name->string);
    if (found == draft.tensors.end() || found->second.shape.size() != 2) continue;
    Tensor& tensor = found->second;
    const int64_t columns = std::max<int64_t>(1, tensor.shape[1]), rows = random.size(key[0] == 's' ? 64 : 255);
    const Bytes old = tensor.bytes;
    if (old.empty() || columns > 4096) continue;
    tensor.shape[0] = rows;
    tensor.bytes.resize(static_cast<size_t>(rows * columns) * sizeof(float));
    for (size_t i = 0; i < tensor.bytes.size(); ++i) tensor.bytes[i] = old[i % old.size()];
  }
}

struct Edit {
  enum { None, Remove, Before, Twice } kind = None;
  size_t op = 0;
};

Edit change_draft(Draft& draft, Random& random) {
  Json* ops = find(draft.graph, "ops");
  Edit edit;
  edit.op = random.below(ops->items.size() + 1);
  const bool exists = edit.op < ops->items.size();
  switch (random.below(9)) {
    case 0: edit.kind = Edit::Remove; break;
    case 1: edit.kind = Edit::Before; break;
    case 2: edit.kind = Edit::Twice; break;
    case 3: change_tensor(draft, random); break;
    case 4:
      if (exists) change_rows(ops->items[edit.op], draft, random);
      break;
    case 5:
      if (Json* input = find(draft.graph, "input")) change_one_number(*input, random);
      break;
    default:
      if (exists) change_one_number(ops->items[edit.op], random);
  }
  return edit;
}

// The number in the new network of an op's inputs and operands.
void renumber(Json& op, const std::vector<int>& numbers) {
  auto renamed = [&](Json& value) {
    if (value.type == Json::Type::Number && value.number >= 0 && value.number < static_cast<double>(numbers.size()))
      value.number = numbers[static_cast<size_t>(value.number)];
  };
  if (Json* inputs = find(op, "inputs"))
    for (Json& item : inputs->items) renamed(item);
  if (Json* steps = find(op, "steps"))
    for (Json& step : steps->items)
      if (Json* value = find(step, "value")) renamed(*value);
}

int first_input(const Json& op, const unflip::Graph& graph) {
  const Json* inputs = op.find("inputs");
  if (inputs == nullptr || inputs->items.empty()) return 0;
  return static_cast<int>(std::clamp(inputs->items[0].number, 0.0, static_cast<double>(graph.ops.size())));
}

// Grows the edited network again. Where an op no longer fits, its readers read its input.
Bytes regrown(Draft draft, const unflip::Limits& limits, Random& random) {
  Json* ops = find(draft.graph, "ops");
  const Json* input = draft.graph.find("input");
  if (ops == nullptr || ops->type != Json::Type::Array || input == nullptr) return written(draft);
  const Edit edit = change_draft(draft, random);
  Grower grower(*input, draft.tensors, limits, random);
  std::vector<int> numbers = {0};
  for (size_t i = 0; i < ops->items.size() && i < 40; ++i) {
    Json op = ops->items[i];
    renumber(op, numbers);
    if (edit.op == i && edit.kind == Edit::Before) grower.add_random();
    if (edit.op == i && edit.kind == Edit::Twice) grower.add(op);
    const int made = edit.op == i && edit.kind == Edit::Remove ? -1 : grower.add(op);
    numbers.push_back(made >= 0 ? made : first_input(op, grower.graph()));
  }
  if (random.chance(30)) grower.add_random();
  return grower.finished();
}

Bytes grown(const unflip::Limits& limits, Random& random) {
  Json input;
  const int limit = random.chance(90) ? 300 : 1'048'576, side = random.chance(90) ? 40 : 65'536;
  set(input, "shape", list({double(random.size(limit)), double(random.size(side)), double(random.size(side))}));
  set(input, "preprocess", Json());
  Grower grower(input, {}, limits, random);
  for (int left = random.in(1, 7); left > 0; --left) grower.add_random();
  return grower.finished();
}

}  // namespace

Bytes mutated(const Bytes& file, const unflip::Limits& limits, Random& random) {
  if (random.chance(20)) return grown(limits, random);
  auto frame = split(file.data(), file.size());
  if (!frame) return file;
  if (random.chance(50))
    if (const auto draft = read_draft(*frame)) return regrown(*draft, limits, random);
  for (size_t left = 1 + random.below(3); left > 0; --left) change_frame(*frame, random);
  return joined(*frame);
}

}  // namespace fuzz
