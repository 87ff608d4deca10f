// Runs a harness without libFuzzer: over the files named, then over a bounded number of seeded
// mutations of them. Usage: NAME_replay [--runs N] [--seed S] FILE...

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

using Bytes = std::vector<std::uint8_t>;

Bytes mutate(Bytes bytes, std::mt19937_64& random) {
  static constexpr std::uint8_t kInteresting[] = {0x00, 0x01, 0x7f, 0x80, 0xff};
  for (std::uint64_t n = 1 + random() % 6; n > 0; --n) {
    if (bytes.empty() || random() % 8 == 0) {
      bytes.push_back(static_cast<std::uint8_t>(random()));
    } else if (random() % 16 == 0) {
      bytes.resize(random() % bytes.size());
    } else {
      const std::uint8_t value =
          random() % 2 == 0 ? kInteresting[random() % 5] : static_cast<std::uint8_t>(random());
      bytes[random() % bytes.size()] = value;
    }
  }
  return bytes;
}

}  // namespace

int main(int argc, char** argv) {
  std::uint64_t runs = 0;
  std::uint64_t seed = std::random_device{}();
  std::vector<Bytes> corpus;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--runs") == 0 && i + 1 < argc) {
      runs = std::strtoull(argv[++i], nullptr, 10);
    } else if (std::strcmp(argv[i], "--seed") == 0 && i + 1 < argc) {
      seed = std::strtoull(argv[++i], nullptr, 10);
    } else {
      std::ifstream file(argv[i], std::ios::binary);
      if (!file) {
        std::fprintf(stderr, "can't read %s\n", argv[i]);
        return 2;
      }
      corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    }
  }
  std::printf("corpus %zu, mutations %llu, --seed %llu\n", corpus.size(),
              static_cast<unsigned long long>(runs), static_cast<unsigned long long>(seed));
  std::fflush(stdout);
  for (const Bytes& input : corpus) LLVMFuzzerTestOneInput(input.data(), input.size());
  std::mt19937_64 random(seed);
  for (std::uint64_t i = 0; i < runs; ++i) {
    const Bytes input = mutate(corpus.empty() ? Bytes{} : corpus[random() % corpus.size()], random);
    LLVMFuzzerTestOneInput(input.data(), input.size());
  }
  return 0;
}
