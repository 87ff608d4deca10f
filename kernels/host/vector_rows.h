// Copies and sums of rows, for every vector path. A path includes this file in its own unnamed namespace,
// when it has defined
//   EPD_PATH, EPD_PATH_INLINE           the attributes of its functions
//   Ints, Floats                        its vectors; a vector of bf16 has even and odd columns
//   load, put, even_floats, odd_floats, broadcast, multiply_add, round_sum, round_result
//   kSumVectors<grouped>                vectors of an output row that are summed together
// No include guard: each path has functions of its own, compiled for its own target.

bool is_line_aligned(const void* p) {
  return reinterpret_cast<std::uintptr_t>(p) % 64 == 0;
}

bool can_stream(std::span<void* const> destinations, Stores stores) {
  return stores == Stores::kStreaming && std::all_of(destinations.begin(), destinations.end(),
                                                     [](const void* p) { return is_line_aligned(p); });
}

// ---- copies

template <Stores kStores>
EPD_PATH_INLINE void put(void* place, __m128i value) {
  if constexpr (kStores == Stores::kStreaming) {
    _mm_stream_si128(static_cast<__m128i*>(place), value);
  } else {
    _mm_storeu_si128(static_cast<__m128i*>(place), value);
  }
}

template <Stores kStores>
EPD_PATH void copy_to_all(const char* source, std::size_t bytes, std::span<void* const> destinations) {
  constexpr std::size_t kTogether = 128;
  constexpr std::size_t kVectors = kTogether / sizeof(Ints);
  std::size_t i = 0;
  for (; i + kTogether <= bytes; i += kTogether) {
    Ints values[kVectors];
    for (std::size_t v = 0; v < kVectors; ++v) values[v] = load(source + i + v * sizeof(Ints));
    for (void* destination : destinations) {
      char* place = static_cast<char*>(destination) + i;
      for (std::size_t v = 0; v < kVectors; ++v) put<kStores>(place + v * sizeof(Ints), values[v]);
    }
  }
  for (; i + 16 <= bytes; i += 16) {
    const __m128i value = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i));
    for (void* destination : destinations) put<kStores>(static_cast<char*>(destination) + i, value);
  }
  for (void* destination : destinations)
    std::memcpy(static_cast<char*>(destination) + i, source + i, bytes - i);
}

// Copies a row that begins or ends within a cache line. Whole lines of the row bypass the caches.
EPD_PATH void stream_inner_lines(const char* source, std::size_t bytes, char* destination) {
  const std::size_t head = std::min<std::size_t>(bytes, -reinterpret_cast<std::uintptr_t>(destination) % 64);
  const std::size_t inner_end = head + (bytes - head) / 64 * 64;
  std::memcpy(destination, source, head);
  for (std::size_t i = head; i < inner_end; i += sizeof(Ints))
    put<Stores::kStreaming>(destination + i, load(source + i));
  std::memcpy(destination + inner_end, source + inner_end, bytes - inner_end);
}

void copy_row(const void* source, std::size_t bytes, std::span<void* const> destinations, Stores stores) {
  const auto* from = static_cast<const char*>(source);
  if (can_stream(destinations, stores)) {
    copy_to_all<Stores::kStreaming>(from, bytes, destinations);
  } else if (stores == Stores::kStreaming) {
    for (void* destination : destinations) stream_inner_lines(from, bytes, static_cast<char*>(destination));
  } else {
    for (void* destination : destinations) std::memcpy(destination, from, bytes);
  }
}

// ---- casts

// The path's own.
template <Stores kStores>
EPD_PATH void cast_to_all(const CastRow& row, std::span<void* const> destinations);

void cast_row(const CastRow& row, std::span<void* const> destinations, Stores stores) {
  if (can_stream(destinations, stores)) {
    cast_to_all<Stores::kStreaming>(row, destinations);
  } else {
    cast_to_all<Stores::kCached>(row, destinations);
  }
}

// ---- sums

template <bool kWeighted>
EPD_PATH_INLINE Floats accumulate(Floats sum, Floats value, Floats weight) {
  if constexpr (kWeighted) return multiply_add(weight, value, sum);
  return sum + value;
}

// Sums of columns, as many as kVectors vectors of bf16 have.
template <std::size_t kVectors>
struct Columns {
  Floats even[kVectors];
  Floats odd[kVectors];
};
constexpr std::size_t kColumns = sizeof(Ints) / sizeof(std::uint16_t);  // of a vector

template <bool kWeighted, bool kPrefetch, std::size_t kVectors>
EPD_PATH_INLINE void add_row(Columns<kVectors>& sums, const WeightedRow& source, std::size_t start) {
  const Floats weight = broadcast(source.weight);
  for (std::size_t v = 0; v < kVectors; ++v) {
    const std::uint16_t* columns = source.row + start + v * kColumns;
    if (kPrefetch && v * sizeof(Ints) % 64 == 0)
      _mm_prefetch(reinterpret_cast<const char*>(columns) + kSumAhead, _MM_HINT_T0);
    const Ints y = load(columns);
    sums.even[v] = accumulate<kWeighted>(sums.even[v], even_floats(y), weight);
    sums.odd[v] = accumulate<kWeighted>(sums.odd[v], odd_floats(y), weight);
  }
}

template <std::size_t kVectors>
EPD_PATH_INLINE void clear(Columns<kVectors>& sums) {
  for (std::size_t v = 0; v < kVectors; ++v) sums.even[v] = sums.odd[v] = Floats{};
}

template <std::size_t kVectors>
EPD_PATH_INLINE void add_rounded(Columns<kVectors>& sums, const Columns<kVectors>& partial) {
  for (std::size_t v = 0; v < kVectors; ++v) {
    sums.even[v] = sums.even[v] + round_sum(partial.even[v]);
    sums.odd[v] = sums.odd[v] + round_sum(partial.odd[v]);
  }
}

template <bool kWeighted, std::size_t kVectors>
EPD_PATH_INLINE void add_partial_sum(Columns<kVectors>& sums, std::span<const WeightedRow> rows,
                                     std::size_t start) {
  if (!kWeighted && rows.size() == 1) return add_row<false, true>(sums, rows[0], start);  // is bf16 already
  Columns<kVectors> partial;
  clear(partial);
  for (const WeightedRow& source : rows) add_row<kWeighted, true>(partial, source, start);
  add_rounded(sums, partial);
}

// Adds so many summands, from `next` on.
template <bool kWeighted, bool kPartial, std::size_t kVectors>
EPD_PATH_INLINE void add_summands(Columns<kVectors>& sums, Summands& next, std::uint32_t count,
                                  std::size_t start) {
  for (std::uint32_t i = 0; i < count; ++i) {
    if constexpr (kPartial) {
      add_partial_sum<kWeighted>(sums, {next.row, *next.partial_sum}, start);
      next.row += *next.partial_sum++;
    } else {
      add_row<kWeighted, false>(sums, *next.row++, start);
    }
  }
}

template <bool kWeighted, bool kPartial, std::size_t kVectors>
EPD_PATH_INLINE void add_domain(Columns<kVectors>& sums, Summands& next, const SumDomain& domain,
                                std::size_t start) {
  const bool is_bf16 = domain.summands == 1 && (kPartial || !kWeighted);
  if (!domain.rounded || is_bf16)
    return add_summands<kWeighted, kPartial>(sums, next, domain.summands, start);
  Columns<kVectors> partial;
  clear(partial);
  add_summands<kWeighted, kPartial>(partial, next, domain.summands, start);
  add_rounded(sums, partial);
}

template <bool kWeighted, bool kPartial, bool kDomains, std::size_t kVectors>
EPD_PATH_INLINE void sum_block(const RowSum& sum, std::size_t start, Ints (&out)[kVectors]) {
  Columns<kVectors> sums;
  clear(sums);
  if constexpr (kDomains) {
    Summands next{sum.rows.data(), sum.partial_sums.data()};
    for (const SumDomain& domain : sum.domains) add_domain<kWeighted, kPartial>(sums, next, domain, start);
  } else if constexpr (kPartial) {
    const WeightedRow* first = sum.rows.data();
    for (const std::uint32_t count : sum.partial_sums) {
      add_partial_sum<kWeighted>(sums, {first, count}, start);
      first += count;
    }
  } else {
    for (const WeightedRow& source : sum.rows) add_row<kWeighted, false>(sums, source, start);
  }
  for (std::size_t v = 0; v < kVectors; ++v) out[v] = round_result(sums.even[v], sums.odd[v]);
}

template <Stores kStores>
struct Storing {
  template <bool kWeighted, bool kPartial, bool kDomains>
  EPD_PATH static void sum(const RowSum& sum, std::size_t hidden, std::uint16_t* out) {
    constexpr std::size_t kVectors = kSumVectors < kPartial || kDomains > ;
    const std::size_t whole = hidden / (kVectors * kColumns) * (kVectors * kColumns);
    for (std::size_t start = 0; start < whole; start += kVectors * kColumns) {
      Ints sums[kVectors];
      sum_block<kWeighted, kPartial, kDomains>(sum, start, sums);
      for (std::size_t v = 0; v < kVectors; ++v) put<kStores>(out + start + v * kColumns, sums[v]);
    }
    sum_rest(sum, whole, hidden, out);
  }
};

template <typename How>
auto sum_any(const RowSum& sum, std::size_t hidden, std::uint16_t* out) {
  const bool partial = !sum.partial_sums.empty();
  if (!sum.domains.empty()) {
    if (partial && sum.weighted) return How::template sum<true, true, true>(sum, hidden, out);
    if (partial) return How::template sum<false, true, true>(sum, hidden, out);
    if (sum.weighted) return How::template sum<true, false, true>(sum, hidden, out);
    return How::template sum<false, false, true>(sum, hidden, out);
  }
  if (partial && sum.weighted) return How::template sum<true, true, false>(sum, hidden, out);
  if (partial) return How::template sum<false, true, false>(sum, hidden, out);
  if (sum.weighted) return How::template sum<true, false, false>(sum, hidden, out);
  return How::template sum<false, false, false>(sum, hidden, out);
}

void sum_rows(const RowSum& sum, std::size_t hidden, std::uint16_t* out, Stores stores) {
  if (stores == Stores::kStreaming && is_line_aligned(out))
    return sum_any<Storing<Stores::kStreaming>>(sum, hidden, out);
  return sum_any<Storing<Stores::kCached>>(sum, hidden, out);
}

void store_fence() {
  _mm_sfence();
}
