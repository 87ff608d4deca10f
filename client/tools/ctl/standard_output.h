// Standard output that remembers why it took not all: a stream forgets the errno.
#pragma once

#include <array>
#include <ostream>
#include <streambuf>

namespace epd::ctl {

class DescriptorBuffer : public std::streambuf {
 public:
  explicit DescriptorBuffer(int fd);
  // Of the first write that failed; 0 if none has.
  int error() const { return error_; }

 protected:
  int_type overflow(int_type c) override;
  int sync() override;

 private:
  bool write_out();

  int fd_;
  int error_ = 0;
  std::array<char, 8192> bytes_{};
};

// Standard error waits for what is to come before it.
class StandardOutput {
 public:
  StandardOutput();
  ~StandardOutput();
  StandardOutput(const StandardOutput&) = delete;
  StandardOutput& operator=(const StandardOutput&) = delete;

  std::ostream& stream() { return stream_; }
  // Writes what is left. 0, or the errno of the first write that failed.
  int finish();

 private:
  DescriptorBuffer buffer_;
  std::ostream stream_;
  std::ostream* tied_before_;
};

}  // namespace epd::ctl
