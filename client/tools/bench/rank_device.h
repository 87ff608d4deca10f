// Where a rank's regions lie, and what is done with them outside the timed parts.
#pragma once

#include <cstddef>
#include <vector>

namespace epd::bench {

class RankDevice {
 public:
  virtual ~RankDevice() = default;
  // Between regions and memory of this process. Complete when settle() has returned.
  virtual void put(void* region, const void* from, std::size_t bytes) = 0;
  virtual void get(void* to, const void* region, std::size_t bytes) = 0;
  virtual void fill(void* region, int byte, std::size_t bytes) = 0;
  // Writes through twice the size of the cache that inputs and outputs could be in.
  virtual void flush_cache() = 0;
  virtual void settle() = 0;
};

// A host device: regions are memory of this process, the cache is the core's own.
class HostRank : public RankDevice {
 public:
  explicit HostRank(bool flushes);
  void put(void* region, const void* from, std::size_t bytes) override;
  void get(void* to, const void* region, std::size_t bytes) override;
  void fill(void* region, int byte, std::size_t bytes) override;
  void flush_cache() override;
  void settle() override {}

 private:
  std::vector<char> evict_;
};

}  // namespace epd::bench
