// Parts of the loader: JSON and SHA-256 with known results. Whole files are tested from Python (tests/runtime).
#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

#include "allocations.h"
#include "json.h"
#include "limits.h"
#include "printable.h"
#include "safetensors.h"
#include "sha256.h"
#include "sizes.h"

using namespace unflip;

namespace {

int failures = 0;

void expect(bool right, const std::string& what) {
  if (right) return;
  std::printf("wrong: %s\n", what.c_str());
  ++failures;
}

std::string error_of(const std::string& text) {
  try {
    parse_json(text);
    return "";
  } catch (const std::runtime_error& error) {
    return error.what();
  }
}

std::string hash(const std::string& text, size_t piece) {
  Sha256 sha;
  for (size_t at = 0; at < text.size(); at += piece) {
    const std::string part = text.substr(at, piece);
    sha.add(reinterpret_cast<const uint8_t*>(part.data()), part.size());
  }
  return sha.hex();
}

// The examples of FIPS 180-4, in pieces of different sizes, to test every way of filling a block.
void check_sha256() {
  const std::vector<std::pair<std::string, std::string>> known = {
      {"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
      {"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
      {"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
       "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"},
      {"abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmnhijklmnoijklmnopjklmnopqklmnopqrlmnopqrsmnopqrstnopqrstu",
       "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1"},
      {std::string(1'000'000, 'a'), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"},
  };
  for (const auto& [text, digest] : known)
    for (size_t piece : {size_t{1}, size_t{63}, size_t{64}, size_t{65}, text.size() + 1})
      expect(hash(text, piece) == digest, "SHA-256 of " + std::to_string(text.size()) + " bytes");
}

void check_values() {
  const Json json = parse_json(" {\"a\": [1, -2.5e3, true, null, \"x\\n\\u00e4\\ud83d\\ude00\"], \"b\": {}} ");
  const Json& a = *json.find("a");
  expect(a.items.size() == 5 && a.items[0].number == 1 && a.items[1].number == -2500, "numbers");
  expect(a.items[2].boolean && a.items[3].type == Json::Type::Null, "words");
  expect(a.items[4].string == "x\n\xC3\xA4\xF0\x9F\x98\x80", "escapes");
  expect(json.find("b")->type == Json::Type::Object && json.find("c") == nullptr, "members");
  expect(parse_json("\"\xC3\xA4\xF0\x9F\x98\x80\"").string == "\xC3\xA4\xF0\x9F\x98\x80", "UTF-8");
  expect(parse_json("0").number == 0 && parse_json("-0.0").number == 0 && parse_json("1E+2").number == 100, "forms of numbers");
}

void check_refusals() {
  const std::string deep(1000, '[');
  const std::vector<std::string> bad = {"",
                                        " ",
                                        "{",
                                        "[1,]",
                                        "[1 2]",
                                        "{\"a\"}",
                                        "{\"a\":}",
                                        "{a:1}",
                                        "{\"a\":1,}",
                                        "[1]x",
                                        "nul",
                                        "tru",
                                        "True",
                                        "01",
                                        "-",
                                        "1.",
                                        ".5",
                                        "+1",
                                        "1e",
                                        "0x1",
                                        "NaN",
                                        "Infinity",
                                        "-Infinity",
                                        "1e999",
                                        "\"a",
                                        "\"\\x\"",
                                        "\"\\u12\"",
                                        "\"\\u12g4\"",
                                        "\"\\ud800\"",
                                        "\"\\ud800x\"",
                                        "\"\\udc00\"",
                                        "\"\\ud800\\u0041\"",
                                        "\"\n\"",
                                        "\"\xC3\"",
                                        "\"\xC0\x80\"",
                                        "\"\xED\xA0\x80\"",
                                        "\"\xF5\x80\x80\x80\"",
                                        "\"\xE0\x80\x80\"",
                                        "\"\xFF\"",
                                        "'a'",
                                        "/*x*/1",
                                        "\xEF\xBB\xBF{}",
                                        "{\"a\":1,\"a\":2}",
                                        "{\"a\":1,\"\\u0061\":2}",
                                        deep,
                                        std::string("[1\0]", 4),
                                        "[1",
                                        "\"\\",
                                        "\"\\u"};
  for (const std::string& text : bad) expect(!error_of(text).empty(), "accepted: " + text.substr(0, 40));
  expect(error_of("{\"a\":1,\"a\":2}").find("twice") != std::string::npos, "a duplicate key is named");
  expect(error_of("[1, x]").find("byte 4") != std::string::npos, "the place of an error");
  expect(error_of(deep).find("deep") != std::string::npos, "depth");
}

void check_printable() {
  expect(printable("conv 'layer1.0' \xC3\xA9\xE2\x82\xAC") == "conv 'layer1.0' \xC3\xA9\xE2\x82\xAC", "text stays as it is");
  expect(printable("\x1B[31m\r\n\x7F") == "\\x1b[31m\\x0d\\x0a\\x7f", "control characters");
  const std::string invisible = "\xC2\x9B\xE2\x80\xAE\xEF\xBB\xBF\xF3\xA0\x80\x81";
  expect(printable(invisible) == "\\x9b\\u202e\\ufeff\\U000e0001", "invisible characters");
  expect(printable("a\xFF\xC3") == "a\\xff\\xc3", "bytes that are not UTF-8");
}

std::string refusal_of(const Needs& needs, const Limits& limits) {
  try {
    check_limits(needs, limits);
    return "";
  } catch (const std::runtime_error& error) {
    return error.what();
  }
}

void check_sizes() {
  const Size large = Size(Size::kMost / 2);
  expect((large + large + large).value() == Size::kMost, "a sum stops at the largest number");
  expect((large * 3).value() == Size::kMost && (large * 3 / 2).value() == Size::kMost, "a product does too");
  expect((Size(6) * 7 + 1).value() == 43, "other numbers are exact");
  Needs needs;
  needs.load_memory = 1000, needs.run_memory = 234'567, needs.run_work = 5000;
  expect(refusal_of(needs, {}).empty(), "within the limits");
  const std::string memory = refusal_of(needs, {235'566, 5000});
  expect(memory.find("235,567 bytes of memory; the limit is 235,566") != std::string::npos, memory);
  expect(memory.find("max_memory") != std::string::npos, memory);
  const std::string work = refusal_of(needs, {235'567, 4999});
  expect(work.find("5,000 units of work; the limit is 4,999") != std::string::npos, work);
  expect(work.find("max_work") != std::string::npos, work);
}

void check_json_memory() {
  std::string many = "[1";
  for (int i = 0; i < 1000; i++) many += ",[{\"key\":\"\"}]";
  many += "]";
  Json tree;
  const int64_t peak = allocations::peak_of([&] { tree = parse_json(many); });
  expect(peak <= json_memory(many), "the bound on a tree's memory holds");
  expect(peak > 0 && json_memory(many) < 10 * peak, "and is not far off");
}

}  // namespace

int main() {
  check_printable();
  check_sizes();
  check_json_memory();
  check_sha256();
  check_values();
  check_refusals();
  std::printf(failures == 0 ? "all right\n" : "%d wrong\n", failures);
  return failures == 0 ? 0 : 1;
}
