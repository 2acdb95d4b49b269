#include "planner/split.h"

#include <algorithm>
#include <limits>

namespace tp_ext::planner {
namespace {

struct Best {
  double total = 0;
  int64_t begin = -1;  // of the stage that ends here; -1: no split ends here
};

template <typename Add>
std::vector<int64_t> best_ends(const std::vector<double>& until, int64_t stages, double limit,
                               Add add) {
  const int64_t blocks = static_cast<int64_t>(until.size()) - 1;
  std::vector<std::vector<Best>> totals(stages + 1, std::vector<Best>(blocks + 1));
  totals[0][0] = {0, 0};
  for (int64_t stage = 1; stage <= stages; ++stage)
    for (int64_t end = stage; end <= blocks - (stages - stage); ++end)
      for (int64_t begin = 0; begin < end; ++begin) {
        const Best& before = totals[stage - 1][begin];
        const double cost = until[end] - until[begin];
        if (before.begin < 0 || cost > limit) continue;
        const double sum = add(before.total, cost);
        Best& found = totals[stage][end];
        if (found.begin < 0 || sum < found.total) found = {sum, begin};
      }
  std::vector<int64_t> ends{blocks};
  for (int64_t stage = stages; stage > 0; --stage) ends.push_back(totals[stage][ends.back()].begin);
  std::reverse(ends.begin(), ends.end());
  return ends;
}

}  // namespace

std::vector<int64_t> split_blocks(int64_t blocks, int64_t stages) {
  constexpr double kEnd = 1e-3;
  std::vector<double> until{0};
  for (int64_t i = 0; i < blocks; ++i)
    until.push_back(until.back() + (1 + (i == 0 ? kEnd : 0) + (i == blocks - 1 ? kEnd : 0)));
  auto ends = best_ends(until, stages, std::numeric_limits<double>::infinity(),
                        [](double one, double other) { return std::max(one, other); });
  double limit = 0;
  for (int64_t i = 0; i < stages; ++i) limit = std::max(limit, until[ends[i + 1]] - until[ends[i]]);
  ends = best_ends(until, stages, limit * (1 + 1e-9),
                   [](double one, double other) { return one + other * other; });
  std::vector<int64_t> counts;
  for (int64_t i = 0; i < stages; ++i) counts.push_back(ends[i + 1] - ends[i]);
  return counts;
}

}  // namespace tp_ext::planner
