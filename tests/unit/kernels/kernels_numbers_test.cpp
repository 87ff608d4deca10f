// The conversions against definitions that are written differently.
#include "kernels/numbers.h"

#include "host/fma.h"
#include "host/row_kernels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace epd::kernels {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

double magnitude_of_code(int code) {
  const int exponent = code >> 3;
  const int mantissa = code & 7;
  return exponent == 0 ? mantissa / 512.0 : (1.0 + mantissa / 8.0) * std::pow(2.0, exponent - 7);
}

// Every finite code is looked at.
std::uint8_t search_e4m3(float value) {
  if (std::isnan(value)) return 0x7f;
  const double magnitude = std::min(std::fabs(static_cast<double>(value)), 1e9);
  int best = 0;
  for (int code = 1; code < 127; ++code) {
    const double distance = std::fabs(magnitude_of_code(code) - magnitude);
    const double least = std::fabs(magnitude_of_code(best) - magnitude);
    if (distance < least || (distance == least && code % 2 == 0)) best = code;
  }
  return static_cast<std::uint8_t>(best | (std::signbit(value) ? 0x80 : 0));
}

struct Block {
  std::array<std::uint8_t, kScaleBlock> q;
  float scale;
};

// The least power of two that is no less than amax / 448, found from below.
float search_pow2_scale(float amax) {
  for (int e = -127; e < 128; ++e) {
    if (std::ldexp(448.0, e) >= static_cast<double>(amax)) return static_cast<float>(std::ldexp(1.0, e));
  }
  return kInf;
}

Block search_block(const std::uint16_t* x, bool pow2) {
  float amax = 0;
  for (std::uint32_t i = 0; i < kScaleBlock; ++i) {
    const float magnitude = std::fabs(bf16_to_float(x[i]));
    if (!std::isnan(magnitude)) amax = std::max(amax, magnitude);
  }
  if (amax < 1e-30f) amax = 1e-30f;
  Block block{};
  block.scale = pow2 ? search_pow2_scale(amax) : amax / 448.0f;
  const float inverse = pow2 ? 1.0f / block.scale : 448.0f / amax;
  for (std::uint32_t i = 0; i < kScaleBlock; ++i) block.q[i] = search_e4m3(bf16_to_float(x[i]) * inverse);
  return block;
}

TEST(Bf16, RoundsToNearestEven) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float value = bf16_to_float(static_cast<std::uint16_t>(bits));
    const std::uint16_t back = float_to_bf16(value);
    if (std::isnan(value)) {
      EXPECT_EQ(back, 0x7fc0) << bits;
      continue;
    }
    EXPECT_EQ(back, bits);
    if (std::isinf(value)) continue;
    // Between this value and the next away from zero: just below the middle, the middle, just above.
    const std::uint32_t low = bits << 16;
    const auto next = static_cast<std::uint16_t>(bits + 1);
    EXPECT_EQ(float_to_bf16(std::bit_cast<float>(low + 0x7fffu)), bits);
    EXPECT_EQ(float_to_bf16(std::bit_cast<float>(low + 0x8000u)), bits % 2 == 0 ? bits : next) << bits;
    EXPECT_EQ(float_to_bf16(std::bit_cast<float>(low + 0x8001u)), next);
  }
}

TEST(Bf16, EveryNanGivesTheSameNan) {
  for (const std::uint32_t bits :
       {0x7f800001u, 0xff800001u, 0x7fc00000u, 0xffc00000u, 0x7fffffffu, 0xffffffffu}) {
    EXPECT_EQ(float_to_bf16(std::bit_cast<float>(bits)), 0x7fc0) << std::hex << bits;
  }
}

TEST(E4m3, AllCodesRoundTrip) {
  for (int code = 0; code < 256; ++code) {
    const float value = e4m3_to_float(static_cast<std::uint8_t>(code));
    if ((code & 0x7f) == 0x7f) {
      EXPECT_TRUE(std::isnan(value)) << code;
      EXPECT_EQ(float_to_e4m3(value), 0x7f);
      continue;
    }
    EXPECT_EQ(std::fabs(value), magnitude_of_code(code & 0x7f)) << code;
    EXPECT_EQ(std::signbit(value), code >= 0x80) << code;
    EXPECT_EQ(float_to_e4m3(value), code);
  }
}

TEST(E4m3, AllBf16TimesScalesAgainstSearch) {
  for (const float scale : {1.0f, 0.125f, 1.0f / 3, 448.0f, 0.0123456f, 1e-20f, 1e30f}) {
    for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
      const float value = bf16_to_float(static_cast<std::uint16_t>(bits)) * scale;
      ASSERT_EQ(float_to_e4m3(value), search_e4m3(value)) << value << " bits " << bits << " scale " << scale;
    }
  }
}

TEST(E4m3, TiesAndTheirNeighbours) {
  for (int code = 0; code < 126; ++code) {
    const auto middle = static_cast<float>((magnitude_of_code(code) + magnitude_of_code(code + 1)) / 2);
    for (const float value : {middle, std::nextafter(middle, 0.0f), std::nextafter(middle, kInf)}) {
      EXPECT_EQ(float_to_e4m3(value), search_e4m3(value)) << value;
      EXPECT_EQ(float_to_e4m3(-value), search_e4m3(-value)) << -value;
    }
    EXPECT_EQ(float_to_e4m3(middle) % 2, 0) << middle;
  }
}

TEST(E4m3, SaturatesAndKeepsTheSignOfZero) {
  for (const float value : {448.0f, 463.9f, 464.0f, 465.0f, 480.0f, 1e30f, kInf}) {
    EXPECT_EQ(float_to_e4m3(value), 0x7e) << value;
    EXPECT_EQ(float_to_e4m3(-value), 0xfe) << value;
  }
  EXPECT_EQ(float_to_e4m3(0.0f), 0x00);
  EXPECT_EQ(float_to_e4m3(-0.0f), 0x80);
  EXPECT_EQ(float_to_e4m3(-1e-40f), 0x80);
  EXPECT_EQ(float_to_e4m3(-kNan), 0x7f);
}

void expect_fma(float a, float b, float c) {
  const float expected = std::fma(a, b, c);
  const float actual = host::fma_by_double(a, b, c);
  if (std::isnan(expected)) {
    ASSERT_TRUE(std::isnan(actual)) << a << " * " << b << " + " << c;
    return;
  }
  ASSERT_EQ(std::bit_cast<std::uint32_t>(actual), std::bit_cast<std::uint32_t>(expected))
      << std::hexfloat << a << " * " << b << " + " << c;
}

float random_float(std::mt19937& random, int least_exponent, int greatest_exponent) {
  const auto mantissa = static_cast<float>(1 + static_cast<double>(random()) / 4294967296.0);
  const auto range = static_cast<std::uint32_t>(greatest_exponent - least_exponent + 1);
  const float value = std::ldexp(mantissa, least_exponent + static_cast<int>(random() % range));
  return random() % 2 == 0 ? value : -value;
}

TEST(FmaByDouble, RandomBits) {
  std::mt19937 random(11);
  for (int i = 0; i < 500000; ++i) {
    const auto bits = [&] { return std::bit_cast<float>(static_cast<std::uint32_t>(random())); };
    ASSERT_NO_FATAL_FAILURE(expect_fma(bits(), bits(), bits()));
  }
}

// The double sum falls on or beside the middle of two floats, and what is lost decides: a product that is a
// half of c's last place, a little more or less; c normal, subnormal, or about to overflow.
TEST(FmaByDouble, TiesAndWhatLiesBehindThem) {
  std::mt19937 random(12);
  std::uint32_t rounded_twice_differs = 0;
  for (int i = 0; i < 500000; ++i) {
    const int exponent =
        i % 3 == 0 ? -149 + static_cast<int>(random() % 30) : static_cast<int>(random() % 254) - 126;
    const float c = random_float(random, exponent, exponent);
    const int last_place = std::max(exponent, -126) - 24;  // half of c's
    // (1 + d)(1 - d) = 1 - d^2 is a little less than one, (1 + d)(1 - d + d^2) = 1 + d^3 a little more.
    const bool more = random() % 2 == 0;
    const float d = std::ldexp(1.0f, -static_cast<int>(more ? 10 + random() % 2 : 15 + random() % 9));
    const bool exact = random() % 4 == 0;
    const float a = std::ldexp(exact ? 1.0f : 1 + d, -40);
    const float b = std::ldexp(exact ? 1.0f : more ? 1 - d + d * d : 1 - d, std::max(last_place + 40, -126));
    ASSERT_NO_FATAL_FAILURE(expect_fma(a, random() % 2 == 0 ? b : -b, c));
    const auto twice =
        static_cast<float>(static_cast<double>(a) * static_cast<double>(b) + static_cast<double>(c));
    if (twice != std::fma(a, b, c)) ++rounded_twice_differs;
    // A tiny product beside a sum of any size.
    ASSERT_NO_FATAL_FAILURE(expect_fma(random_float(random, -149, -60), random_float(random, -133, 20), c));
  }
  EXPECT_GT(rounded_twice_differs, 1000u) << "these values would not show a double rounding";
}

TEST(FmaByDouble, Specials) {
  const std::vector<float> values = {0.0f, -0.0f,  1.0f,    -1.0f,   kInf,     -kInf,
                                     kNan, 1e-45f, -1e-45f, 3.4e38f, -3.4e38f, 1.1754944e-38f};
  for (const float a : values) {
    for (const float b : values) {
      for (const float c : values) ASSERT_NO_FATAL_FAILURE(expect_fma(a, b, c));
    }
  }
}

class CastRow : public testing::TestWithParam<const host::RowKernels*> {
 protected:
  // Also through several destinations, one of them misaligned, with both kinds of stores.
  void expect_block(const std::uint16_t* x, const char* what) {
    ASSERT_NO_FATAL_FAILURE(expect_block(x, what, false));
    ASSERT_NO_FATAL_FAILURE(expect_block(x, what, true));
  }

  void expect_block(const std::uint16_t* x, const char* what, bool pow2) {
    const Block expected = search_block(x, pow2);
    for (const host::Stores stores : {host::Stores::kCached, host::Stores::kStreaming}) {
      for (const std::size_t shift : {std::size_t{0}, std::size_t{3}}) {
        alignas(64) std::array<std::uint8_t, 768> out;
        out.fill(0xa5);
        const std::array<void*, 2> destinations = {out.data() + 64, out.data() + 512 + shift};
        float scale = -1;
        GetParam()->cast_row({x, kScaleBlock, &scale, pow2}, destinations, stores);
        GetParam()->store_fence();
        ASSERT_EQ(std::bit_cast<std::uint32_t>(scale), std::bit_cast<std::uint32_t>(expected.scale)) << what;
        for (std::uint32_t i = 0; i < kScaleBlock; ++i) {
          ASSERT_EQ(out[64 + i], expected.q[i])
              << what << ": element " << i << " bits " << x[i] << " scale " << scale;
          ASSERT_EQ(out[512 + shift + i], expected.q[i])
              << what << ": element " << i << ", second destination";
        }
        for (std::size_t i = 0; i < out.size(); ++i) {
          if (i - 64 < kScaleBlock || i - 512 - shift < kScaleBlock) continue;
          ASSERT_EQ(out[i], 0xa5) << what << ": stored outside, byte " << i;
        }
      }
    }
  }
};

// Every finite bf16 pattern no larger than amax, next to several amax: products of all roundings.
TEST_P(CastRow, AllPatternsUnderSeveralScales) {
  for (const float amax : {1.0f, 448.0f, 3.1415f, 1e-3f, 7.7e4f, 1e38f, 3e-30f, 1e-30f, 1e-36f}) {
    const std::uint16_t largest = float_to_bf16(amax);
    std::array<std::uint16_t, kScaleBlock> x{};
    std::uint32_t filled = 1;
    x[0] = largest;
    for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
      if ((bits & 0x7fffu) > largest) continue;
      x[filled++] = static_cast<std::uint16_t>(bits);
      if (filled < kScaleBlock) continue;
      // The place of the largest moves too.
      std::swap(x[0], x[bits % kScaleBlock]);
      ASSERT_NO_FATAL_FAILURE(expect_block(x.data(), "patterns", bits % 3 == 0));
      x[0] = largest;
      filled = 1;
    }
  }
}

TEST_P(CastRow, SpecialValues) {
  const std::uint16_t nan = 0x7fc1;
  const std::uint16_t negative_nan = 0xff81;
  const std::uint16_t inf = 0x7f80;
  std::array<std::uint16_t, kScaleBlock> x{};
  expect_block(x.data(), "zeros");
  x.fill(0x8000);
  expect_block(x.data(), "negative zeros");
  x.fill(1);
  expect_block(x.data(), "subnormals");
  x.fill(nan);
  expect_block(x.data(), "all NaN");
  x.fill(0x7f7f);
  expect_block(x.data(), "largest finite");
  for (std::uint32_t place = 0; place < kScaleBlock; ++place) {
    for (std::uint32_t i = 0; i < kScaleBlock; ++i) x[i] = static_cast<std::uint16_t>(0x3f80 + i * 0x8003);
    x[place] = place % 2 == 0 ? nan : negative_nan;
    ASSERT_NO_FATAL_FAILURE(expect_block(x.data(), "one NaN"));
    x[place] = place % 2 == 0 ? inf : inf | 0x8000;
    ASSERT_NO_FATAL_FAILURE(expect_block(x.data(), "one Inf"));
    x[(place + 5) % kScaleBlock] = nan;
    ASSERT_NO_FATAL_FAILURE(expect_block(x.data(), "Inf and NaN"));
  }
}

TEST_P(CastRow, RandomBlocks) {
  for (std::uint32_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(0.0f,
                                           std::exp2(static_cast<float>(static_cast<int>(seed % 200) - 100)));
    std::array<std::uint16_t, kScaleBlock> x{};
    for (auto& value : x)
      value = seed % 3 == 0 ? static_cast<std::uint16_t>(random()) : float_to_bf16(normal(random));
    ASSERT_NO_FATAL_FAILURE(expect_block(x.data(), "random"));
  }
}

TEST(CastBlock, ChoosesSomePath) {
  std::array<std::uint16_t, kScaleBlock> x{};
  for (std::uint32_t i = 0; i < kScaleBlock; ++i) x[i] = static_cast<std::uint16_t>(0x3e00 + 7 * i);
  std::array<std::uint8_t, kScaleBlock> q{};
  const Block expected = search_block(x.data(), false);
  EXPECT_EQ(cast_block_e4m3(x.data(), q.data()), expected.scale);
  EXPECT_EQ(q, expected.q);
  const Block expected_pow2 = search_block(x.data(), true);
  EXPECT_EQ(cast_block_e4m3_pow2(x.data(), q.data()), expected_pow2.scale);
  EXPECT_EQ(q, expected_pow2.q);
}

// Every amax that a block can have: the scale is a power of two, no smaller one would do, and its byte tells
// it.
TEST(CastBlock, PowersOfTwoAreTheLeastThatFit) {
  std::array<std::uint16_t, kScaleBlock> x{};
  std::array<std::uint8_t, kScaleBlock> q{};
  for (std::uint32_t bits = 0; bits <= 0x7f80; ++bits) {
    x[bits % kScaleBlock] = static_cast<std::uint16_t>(bits);
    const float scale = cast_block_e4m3_pow2(x.data(), q.data());
    const float amax = std::max(bf16_to_float(static_cast<std::uint16_t>(bits)), kMinAmax);
    ASSERT_EQ(scale, search_pow2_scale(amax)) << bits;
    const std::uint8_t byte = scale_to_ue8m0(scale);
    ASSERT_EQ(byte, std::isinf(scale) ? 255 : std::ilogb(scale) + 127) << bits;
    x[bits % kScaleBlock] = 0;
  }
}

const auto kPaths =
    testing::ValuesIn(host::available_row_kernels().begin(), host::available_row_kernels().end());
INSTANTIATE_TEST_SUITE_P(Paths, CastRow, kPaths, [](const auto& path) { return path.param->name; });

}  // namespace
}  // namespace epd::kernels
