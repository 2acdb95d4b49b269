// Random operations with threads as ranks, so that a race detector sees all of the protocol:
// threads RANKS OPERATIONS SEED. Slots of a few lines: everything is chunked, wraps around and is
// reused.

#include "plan.h"

namespace tp_ext::shm::test::threads {

int program(char** args) {
  const int ranks = std::atoi(args[1]);
  const Plan plan{ranks, std::atoll(args[2]), std::strtoull(args[3], nullptr, 10), 3000};
  Random random(plan.seed);
  std::vector<std::unique_ptr<Memory>> groups;
  for (int64_t n = 1 + random.below(2); n > 0; --n) {
    const int64_t slot = kLine * (ranks + random.below(12)),
                  ring = kMessageHead + random.below(300);
    groups.push_back(std::make_unique<Memory>(Geometry{ranks, slot, ring}));
  }
  on_threads(ranks, [&](int rank) {
    std::vector<std::shared_ptr<Engine>> engines;
    for (const auto& group : groups) engines.push_back(group->engine(rank));
    follow(plan, engines, rank);
  });
  std::printf("%lld operations on %d ranks in %zu groups\n", std::atoll(args[2]), ranks,
              groups.size());
  return 0;
}

}  // namespace tp_ext::shm::test::threads
