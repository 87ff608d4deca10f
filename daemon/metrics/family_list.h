// Families of series, as they are put together.
#pragma once

#include "base/utf8.h"

#include <prometheus/metric_family.h>
#include <cstddef>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace epd::metrics {

using Labels = std::vector<std::pair<std::string, std::string>>;

// Families in the order in which they are first used.
class Families {
 public:
  void gauge(const char* name, const char* help, const Labels& labels, double value) {
    metric(name, help, prometheus::MetricType::Gauge, labels).gauge.value = value;
  }
  void counter(const char* name, const char* help, const Labels& labels, double value) {
    metric(name, help, prometheus::MetricType::Counter, labels).counter.value = value;
  }
  prometheus::ClientMetric::Histogram& histogram(const char* name, const char* help, const Labels& labels) {
    return metric(name, help, prometheus::MetricType::Histogram, labels).histogram;
  }
  std::vector<prometheus::MetricFamily> take() && { return std::move(families_); }

 private:
  prometheus::ClientMetric& metric(const char* name, const char* help, prometheus::MetricType type,
                                   const Labels& labels) {
    const auto [found, is_new] = index_.try_emplace(name, families_.size());
    if (is_new) families_.push_back({name, help, type, {}});
    prometheus::ClientMetric& metric = families_[found->second].metric.emplace_back();
    for (const auto& [label, value] : labels) metric.label.push_back({label, clean_text(value)});
    return metric;
  }

  std::vector<prometheus::MetricFamily> families_;
  std::map<std::string_view, std::size_t> index_;
};

inline Labels with(Labels labels, const char* name, const std::string& value) {
  labels.emplace_back(name, value);
  return labels;
}

}  // namespace epd::metrics
