#include "standard_output.h"

#include <unistd.h>
#include <cerrno>
#include <iostream>

namespace epd::ctl {

DescriptorBuffer::DescriptorBuffer(int fd) : fd_(fd) {
  setp(bytes_.data(), bytes_.data() + bytes_.size());
}

DescriptorBuffer::int_type DescriptorBuffer::overflow(int_type c) {
  if (!write_out()) return traits_type::eof();
  if (!traits_type::eq_int_type(c, traits_type::eof())) sputc(traits_type::to_char_type(c));
  return traits_type::not_eof(c);
}

int DescriptorBuffer::sync() {
  return write_out() ? 0 : -1;
}

// Output after a failure is dropped.
bool DescriptorBuffer::write_out() {
  const char* next = pbase();
  while (error_ == 0 && next != pptr()) {
    const ssize_t written = ::write(fd_, next, static_cast<std::size_t>(pptr() - next));
    if (written >= 0) {
      next += written;
    } else if (errno != EINTR) {
      error_ = errno;
    }
  }
  setp(bytes_.data(), bytes_.data() + bytes_.size());
  return error_ == 0;
}

StandardOutput::StandardOutput()
    : buffer_(STDOUT_FILENO), stream_(&buffer_), tied_before_(std::cerr.tie(&stream_)) {}

StandardOutput::~StandardOutput() {
  std::cerr.tie(tied_before_);
}

int StandardOutput::finish() {
  stream_.flush();
  return buffer_.error();
}

}  // namespace epd::ctl
