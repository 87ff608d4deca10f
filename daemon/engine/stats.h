// Counts what each session and each membership does, in the engine's page (proto/statistics.h).
#pragma once

#include "page.h"
#include "proto/statistics.h"

#include <cstdint>

namespace epd::engine {

class Member;
class SessionPort;

// An owner's row. It is given back when the owner is destroyed. Owners for whom the table has no row share
// the last one.
class Statistics {
 public:
  Statistics() = default;  // counts nowhere
  static Statistics of_session(Page& page, std::uint64_t session_id);
  static Statistics of_member(Page& page, std::uint64_t session_id, std::uint64_t group_id,
                              std::uint32_t rank);
  Statistics(Statistics&& other) noexcept;
  Statistics& operator=(Statistics&& other) noexcept;
  ~Statistics() { release(); }

  void taken(abi::Op op);
  void refused(StatusCode status);
  void moved(abi::Op op, std::uint64_t bytes);
  // `status` of an operation that was answered.
  void ended(StatusCode status);
  // The time of an operation from its beginning to its end.
  void ran(std::uint32_t us);

 private:
  template <std::size_t Rows>
  void claim(Page& page, abi::StatisticsTable<Rows>& table);
  void release();

  abi::StatisticsRow* row_ = nullptr;
  bool shared_ = false;
};

// The same for a membership and its session at once. The engine calls only these.
void count_taken(Member& member, abi::Op op);
// Rows that a dispatch has delivered to the rank. For a combine: those of the routing that it used. With
// padding (layout packed), as in num_recv_rows.
void count_rows(Page& page, Member& member, abi::Op op, std::uint32_t flags, std::uint64_t rows);
void count_ran(Member& member, std::uint32_t us);
void count_ended(Member& member, StatusCode status);

}  // namespace epd::engine
