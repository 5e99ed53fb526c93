#include "safetensors.h"

#include <algorithm>
#include <limits>
#include <string_view>

#include "fail.h"
#include "json.h"
#include "sha256.h"

namespace unflip {
namespace {

constexpr uint64_t kMaxFile = uint64_t{1} << 31;
constexpr uint64_t kMaxHeader = 100'000'000;  // safetensors' own limit
constexpr size_t kMaxName = 4096;
constexpr size_t kHashDigits = 64;
constexpr int64_t kTensorBytes = 512;  // of its entries in tables, without its name

// What the user can do. src/unflip/packing/file.py has the same messages for the same files.
const std::string kMake = "; make a packed network with 'unflip pack'";
const std::string kAgain = "; copy it again, or pack the network again with 'unflip pack'";

std::string in_bytes(uint64_t count) { return std::to_string(count) + (count == 1 ? " byte" : " bytes"); }

// Other kinds of files that are likely to be given by mistake.
[[noreturn]] void not_ours(const uint8_t* data, size_t size) {
  if (size >= 4 && data[0] == 'P' && data[1] == 'K') fail("not a packed network but a zip file (torch.save writes one)" + kMake);
  if (size >= 2 && data[0] == 0x80 && data[1] >= 2 && data[1] <= 5) fail("not a packed network but a pickle" + kMake);
  fail("not a packed network (no safetensors header)" + kMake);
}

uint64_t header_length(const uint8_t* data, size_t size) {
  if (size == 0) fail("the file is empty" + kAgain);
  if (size > kMaxFile) fail("larger than 2^31 bytes");
  if (size < 8) not_ours(data, size);
  uint64_t length = 0;
  for (int i = 7; i >= 0; --i) length = length << 8 | data[i];
  if (length > size - 8 && length <= kMaxHeader && size > 8 && data[8] == '{')
    fail("the file is cut off within its header" + kAgain);
  if (length > size - 8 || length < 2 || data[8] != '{') not_ours(data, size);
  if (length > kMaxHeader) fail("its header has " + std::to_string(length) + " bytes; at most 100,000,000 are allowed");
  return length;
}

const Json& member(const Json& object, const char* key, Json::Type type, const std::string& where) {
  const Json* found = object.find(key);
  if (found == nullptr) fail(where + ": '" + key + "' is missing");
  if (found->type != type) fail(where + ": '" + key + "' must be " + type_name(type) + ", not " + type_name(found->type));
  return *found;
}

uint64_t whole(const Json& value, uint64_t most, const std::string& where) {
  const double number = value.number;
  if (value.type != Json::Type::Number || !value.whole || !(number >= 0) || number > static_cast<double>(most))
    fail(where + " must be whole numbers 0 .. " + std::to_string(most));
  return static_cast<uint64_t>(number);
}

Tensor read_tensor(const Json& entry, const std::string& where, uint64_t room, uint64_t& begin) {
  if (entry.type != Json::Type::Object) fail(where + " must be an object");
  for (const std::string& key : entry.keys)
    if (key != "dtype" && key != "shape" && key != "data_offsets") fail(where + ": unknown field '" + key.substr(0, 100) + "'");
  Tensor tensor;
  const std::string& dtype = member(entry, "dtype", Json::Type::String, where).string;
  if (dtype != "F32" && dtype != "U8") fail(where + ": dtype must be F32 or U8, not '" + dtype.substr(0, 100) + "'");
  tensor.dtype = dtype == "F32" ? Dtype::F32 : Dtype::U8;
  uint64_t bytes = tensor.dtype == Dtype::F32 ? 4 : 1;
  const Json& shape = member(entry, "shape", Json::Type::Array, where);
  if (shape.items.empty() || shape.items.size() > 4) fail(where + ": shape must have 1 to 4 dimensions");
  for (const Json& item : shape.items) {
    const uint64_t length = whole(item, kMaxFile, where + ": the sizes in its shape");
    if (length == 0) fail(where + ": a size of 0 in its shape");
    if (length > kMaxFile / bytes) fail(where + ": more than 2^31 bytes");
    bytes *= length;
    tensor.shape.push_back(static_cast<int64_t>(length));
  }
  const Json& offsets = member(entry, "data_offsets", Json::Type::Array, where);
  if (offsets.items.size() != 2) fail(where + ": data_offsets must be [begin, end]");
  begin = whole(offsets.items[0], kMaxFile, where + ": data_offsets");
  const uint64_t end = whole(offsets.items[1], kMaxFile, where + ": data_offsets");
  if (begin > end || end > room) fail(where + ": data_offsets lie outside the file, which may be cut off");
  if (end - begin != bytes)
    fail(where + ": data_offsets span " + std::to_string(end - begin) + " bytes, its shape needs " + std::to_string(bytes));
  tensor.bytes = static_cast<size_t>(bytes);
  return tensor;
}

// Tensors must fill the rest of the file without gaps or overlaps. Overlapping tensors could claim more data than the file has.
void check_layout(std::vector<std::pair<uint64_t, uint64_t>> spans, uint64_t room) {
  std::sort(spans.begin(), spans.end());
  uint64_t at = 0;
  for (const auto& [begin, end] : spans) {
    if (begin != at) fail("its tensors overlap or leave a gap at byte " + std::to_string(std::min(begin, at)) + " of the data");
    at = end;
  }
  if (at != room) fail("the file has " + std::to_string(room) + " bytes of tensors, its table says " + std::to_string(at));
}

// What happened to a file whose hash is wrong, as far as its length shows.
std::string damage(const Json& header, uint64_t room) {
  uint64_t end = 0;
  for (const Json& entry : header.items) {
    const Json* offsets = entry.type == Json::Type::Object ? entry.find("data_offsets") : nullptr;
    if (offsets == nullptr || offsets->type != Json::Type::Array || offsets->items.size() != 2) continue;
    end = std::max(end, whole(offsets->items[1], kMaxFile, "data_offsets"));
  }
  if (room < end) return "the file is cut off by " + in_bytes(end - room);
  if (room > end) return "the file has " + in_bytes(room - end) + " too many at its end";
  return "its SHA-256 is wrong: the file was changed";
}

void check_hash_digits(const uint8_t* data, size_t size, const Json& header, uint64_t room, const Json& digits) {
  const std::string& found = digits.string;
  const bool hex =
      std::all_of(found.begin(), found.end(), [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
  // The digits must be in the file without escapes, because they are searched as text.
  if (!hex || found.size() != kHashDigits || digits.end - digits.begin != kHashDigits + 2)
    fail("its sha256 must be 64 lowercase hex digits");
  const size_t at = 8 + digits.begin + 1;
  const std::string zeros(kHashDigits, '0');
  Sha256 hash;
  hash.add(data, at);
  hash.add(reinterpret_cast<const uint8_t*>(zeros.data()), zeros.size());
  hash.add(data + at + kHashDigits, size - at - kHashDigits);
  if (hash.hex() != found) fail(damage(header, room) + kAgain);
}

const Json& checked_metadata(const Json& header) {
  if (header.type != Json::Type::Object) fail("not a packed network: its header is not an object");
  const Json* metadata = header.find("__metadata__");
  const Json* format = metadata != nullptr && metadata->type == Json::Type::Object ? metadata->find("format") : nullptr;
  if (format == nullptr || format->type != Json::Type::String || format->string != "unflip")
    fail("a safetensors file, but not a packed network" + kMake);
  const std::string& version = member(*metadata, "version", Json::Type::String, "metadata").string;
  if (version != "1")
    fail("its format version is '" + version.substr(0, 20) +
         "', but this unflip reads version '1'; install an unflip that reads it, or pack the network again");
  for (const std::string& key : metadata->keys)
    if (key != "format" && key != "version" && key != "graph" && key != "sha256")
      fail("metadata: unknown field '" + key.substr(0, 100) + "'");
  member(*metadata, "sha256", Json::Type::String, "metadata");
  member(*metadata, "graph", Json::Type::String, "metadata");
  return *metadata;
}

}  // namespace

Container read_container(const uint8_t* data, size_t size, const Limits& limits, bool check_hash) {
  const uint64_t length = header_length(data, size);
  const uint64_t room = size - 8 - length;
  const std::string_view text(reinterpret_cast<const char*>(data) + 8, static_cast<size_t>(length));
  const Size memory = Size(static_cast<int64_t>(size)) + json_memory(text);
  check_memory(memory, limits);
  const Json header = parse_json(text, "not a packed network, or a damaged one: its header is ", kAgain);
  const Json& metadata = checked_metadata(header);
  if (check_hash) check_hash_digits(data, size, header, room, *metadata.find("sha256"));

  Container container;
  container.memory = memory + kTensorBytes * Size(static_cast<int64_t>(header.keys.size()));
  check_memory(container.memory, limits);
  container.graph = metadata.find("graph")->string;
  std::vector<std::pair<uint64_t, uint64_t>> spans;
  for (size_t i = 0; i < header.keys.size(); ++i) {
    const std::string& name = header.keys[i];
    if (name == "__metadata__") continue;
    if (name.size() > kMaxName) fail("a tensor's name is longer than 4,096 bytes");
    uint64_t begin = 0;
    Tensor tensor = read_tensor(header.items[i], "tensor '" + name.substr(0, 100) + "'", room, begin);
    tensor.data = data + 8 + length + begin;
    spans.emplace_back(begin, begin + tensor.bytes);
    container.tensors.emplace(name, std::move(tensor));
  }
  check_layout(std::move(spans), room);
  return container;
}

}  // namespace unflip
