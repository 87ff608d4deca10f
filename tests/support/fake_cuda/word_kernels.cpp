#include "fake_cuda/word_kernels.h"

#include "fake_cuda/played_thread.h"
#include "fake_cuda/word_step.h"
#include "stream_copies.h"

#include <algorithm>
#include <vector>

namespace epd::fake_cuda {
namespace {

using stream_kernels::FewStep;
using stream_kernels::Launch;
using stream_kernels::StagedStep;

// A block of one thread.
class PlayedBlock {
 public:
  PlayedBlock(std::uint32_t index, std::uint32_t count, std::uint32_t blocks_of_rows)
      : index_(index), count_(count), ends_(blocks_of_rows) {
    shared_.sums = &sum_;
    shared_.ends = ends_.data();
  }
  std::uint32_t index() const { return index_; }
  std::uint32_t count() const { return count_; }
  std::uint32_t thread() const { return 0; }
  std::uint32_t threads() const { return 1; }
  void sync() const {}
  stream_kernels::SharedWords& shared() const { return shared_; }

 private:
  const std::uint32_t index_;
  const std::uint32_t count_;
  std::uint32_t sum_ = 0;
  std::vector<std::uint32_t> ends_;
  mutable stream_kernels::SharedWords shared_{};
};

void run(const FewStep& step) {
  stream_kernels::run(step, PlayedBlock(0, 1, 0));
}

void run(const StagedStep& step, std::uint32_t blocks, bool backwards) {
  if (step.staging == nullptr) return stream_kernels::run(static_cast<const stream_kernels::Step&>(step));
  for (std::uint32_t i = 0; i < blocks; ++i) {
    const PlayedBlock block(backwards ? blocks - 1 - i : i, blocks, step.copies.blocks);
    stream_kernels::run(step, block);
  }
}

}  // namespace

bool is_word_kernel(const std::string& kernel) {
  return std::find(std::begin(stream_kernels::kKernelNames), std::end(stream_kernels::kKernelNames),
                   kernel) != std::end(stream_kernels::kKernelNames);
}

Stream::Work word_kernel(const std::string& kernel, unsigned blocks, unsigned threads, unsigned shared_bytes,
                         void** parameters, bool backwards) {
  const auto is = [&](const Launch& how) {
    return blocks == how.blocks && threads == how.threads && shared_bytes >= how.shared_bytes;
  };
  if (copying_of(kernel.c_str()) == stream_kernels::Copying::kFew) {
    const FewStep step = *static_cast<const FewStep*>(parameters[0]);
    if (!is(stream_kernels::launch_of(step))) return nullptr;
    return [kernel, step](Stream& stream) { return play(stream, kernel, [&] { run(step); }); };
  }
  const StagedStep step = step_of(kernel.c_str(), parameters);
  if (!is(stream_kernels::launch_of(step))) return nullptr;
  return [kernel, step, blocks, backwards](Stream& stream) {
    return play(stream, kernel, [&] { run(step, blocks, backwards); });
  };
}

}  // namespace epd::fake_cuda
