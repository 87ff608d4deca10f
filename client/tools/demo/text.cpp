#include "text.h"

#include "kit/random.h"

#include <algorithm>
#include <cctype>
#include <cmath>

namespace epd::demo {
namespace {

constexpr std::size_t kPieceLetters = 5;
constexpr std::uint64_t kCommonSeed = 0xc0ffee;  // a direction that all pieces share

std::uint64_t hash_of(std::string_view text) {
  std::uint64_t hash = 0xcbf29ce484222325ull;  // FNV-1a
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
  return hash;
}

// out[i + shift] += weight * pseudo-random value i of the stream, uniform with variance 1.
void add_stream(std::uint64_t seed, float weight, std::uint32_t shift, std::uint32_t hidden, float* out) {
  const float factor = weight * std::sqrt(3.0f) / 32768.0f;
  const std::uint64_t start = kit::mix64(seed);
  for (std::uint32_t i = 0; i < hidden; i += 4) {
    const std::uint64_t word = kit::mix64(start + i * 0x9e3779b97f4a7c15ull);
    float* at = out + (i + shift) % hidden;
    for (int j = 0; j < 4; ++j) {
      at[j] += factor * (static_cast<float>(word >> (16 * j) & 0xffff) - 32767.5f);
    }
  }
}

// The piece itself, its letter triples, and what all pieces have in common.
void add_piece(const std::string& piece, float weight, std::uint32_t shift, std::uint32_t hidden,
               float* out) {
  add_stream(hash_of(piece), weight, shift, hidden, out);
  const std::string framed = "<" + piece + ">";
  const float share = 0.5f * weight / std::sqrt(static_cast<float>(framed.size() - 2));
  for (std::size_t i = 0; i + 3 <= framed.size(); ++i) {
    add_stream(hash_of(std::string_view(framed).substr(i, 3)), share, shift, hidden, out);
  }
  add_stream(kCommonSeed, 0.6f * weight, shift, hidden, out);
}

void add_position(std::size_t place, std::uint32_t hidden, float* out) {
  constexpr float kWeight = 0.15f;
  for (std::uint32_t i = 0; i + 1 < hidden; i += 2) {
    const double rate = std::pow(10000.0, -static_cast<double>(i) / hidden);
    const auto angle = static_cast<float>(std::fmod(static_cast<double>(place) * rate, 6.283185307179586));
    out[i] += kWeight * std::sin(angle);
    out[i + 1] += kWeight * std::cos(angle);
  }
}

}  // namespace

std::vector<std::string> split_into_pieces(std::string_view text) {
  std::vector<std::string> pieces;
  bool inside = false;  // of a word
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (std::isspace(byte) != 0) {
      inside = false;
    } else if (std::isalpha(byte) != 0 || byte >= 0x80) {
      if (!inside) {
        pieces.emplace_back();
      } else if (pieces.back().size() - (pieces.back()[0] == '#' ? 1 : 0) >= kPieceLetters) {
        pieces.emplace_back("#");
      }
      pieces.back() += static_cast<char>(std::tolower(byte));
      inside = true;
    } else {
      pieces.emplace_back(1, c);
      inside = false;
    }
  }
  return pieces;
}

void embed(const std::vector<std::string>& pieces, std::size_t place, std::uint32_t hidden, float* out) {
  std::fill_n(out, hidden, 0.0f);
  add_piece(pieces[place], 1.0f, 0, hidden, out);
  // Earlier pieces are shifted, so that the order counts: "the node" differs from "node the".
  if (place >= 1) add_piece(pieces[place - 1], 0.45f, 4, hidden, out);
  if (place >= 2) add_piece(pieces[place - 2], 0.2f, 8, hidden, out);
  add_position(place, hidden, out);
  rms_normalize(out, hidden);
}

void rms_normalize(float* values, std::uint32_t hidden) {
  double sum = 0;
  for (std::uint32_t i = 0; i < hidden; ++i) sum += static_cast<double>(values[i]) * values[i];
  const auto factor = static_cast<float>(1.0 / std::sqrt(sum / hidden + 1e-6));
  for (std::uint32_t i = 0; i < hidden; ++i) values[i] *= factor;
}

}  // namespace epd::demo
