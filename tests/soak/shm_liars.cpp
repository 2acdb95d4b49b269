// Ranks whose shared memory is overwritten at random while they work: shm_liars CORRUPTIONS SEED.
// Every call must end, within its timeout, in an error or in the right result; run under
// sanitizers, so that no access out of bounds goes unseen. The shared memory lies between
// inaccessible pages.
//
// A peer is trusted for the following, so results are not compared once these have been
// overwritten: the payload (slots, rings, and in these the sizes of an all_to_all and the heads of
// messages), and its claims that a step was posted or finished, or bytes written or read.

#include <algorithm>

#include "harness.h"

using namespace std::chrono_literals;

namespace tp_ext::shm::test::shm_liars {

constexpr auto kLimit = 25ms;  // for each call
constexpr auto kHang = 30s;    // for all of a round
constexpr int kGroups = 6;     // concurrent: most of the time is spent waiting for the limit
constexpr int kOperations = 24;

// Like Memory, with protected pages before and after it
class GuardedMemory {
 public:
  explicit GuardedMemory(const Geometry& geometry) : geometry_(geometry) {
    bytes_ = (geometry.bytes() + kPage - 1) / kPage * kPage;
    all_ = static_cast<char*>(
        mmap(nullptr, size_t(bytes_ + 2 * kPage), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    EXPECT(all_ != MAP_FAILED, "mmap");
    EXPECT(mprotect(all_ + kPage, size_t(bytes_), PROT_READ | PROT_WRITE) == 0, "mprotect");
  }
  ~GuardedMemory() { munmap(all_, size_t(bytes_ + 2 * kPage)); }
  GuardedMemory(const GuardedMemory&) = delete;
  GuardedMemory& operator=(const GuardedMemory&) = delete;

  // The end of the memory is the end of its last page, the beginning the beginning of a line
  char* base() const { return all_ + kPage + (bytes_ - geometry_.bytes()) / kLine * kLine; }
  Shared shared() const { return Shared(base(), geometry_); }

 private:
  static constexpr int64_t kPage = 4096;
  Geometry geometry_;
  int64_t bytes_;
  char* all_;
};

// The field that the liar overwrites
enum class Field {
  kHeader,     // identity, who gave up and why, who has left
  kSignature,  // what a rank calls
  kPosted,
  kFinished,
  kRing,
  kPayload,
  kFields,
};
constexpr const char* kNames[] = {"header", "signature", "posted", "finished", "ring", "payload"};
bool trusted(Field field) { return field >= Field::kPosted; }

struct Counts {
  std::atomic<int64_t> rounds{0}, errors{0}, right{0}, unchecked{0}, timeouts{0};
  std::atomic<int64_t> fields[size_t(Field::kFields)] = {};
};

// A word similar to the one it replaces, or arbitrary
uint64_t lie(Random& random, uint64_t now) {
  switch (random.below(10)) {
    case 0:
      return random.next();
    case 1:
      return 0;
    case 2:
      return ~uint64_t(0);
    case 3:
      return now + 1 + uint64_t(random.below(8));
    case 4:
      return now - 1 - uint64_t(random.below(8));
    case 5:
      return uint64_t(1) << random.below(64);
    case 6:
      return (uint64_t(1) << 63) - uint64_t(random.below(16));
    case 7:
      return uint64_t(random.below(4096));
    default:
      return now ^ uint64_t(1) << random.below(64);
  }
}

void overwrite(char* at, Random& random) {
  auto* word = reinterpret_cast<std::atomic<uint64_t>*>(at);
  word->store(lie(random, word->load()));
}

void corrupt(const Shared& shared, Field field, Random& random) {
  const int ranks = shared.ranks(), rank = int(random.below(ranks)),
            other = int(random.below(ranks));
  const int lane = int(random.below(kLanes));
  const auto step = uint64_t(random.below(kSlots));
  Line& line = shared.line(lane, rank, step);
  switch (field) {
    case Field::kHeader:
      overwrite(reinterpret_cast<char*>(&shared.header()) +
                    8 * random.below(random.one_in(2) ? 6 : int64_t(sizeof(Header)) / 8),
                random);
      break;
    case Field::kSignature:
      overwrite(reinterpret_cast<char*>(&line.signature) +
                    8 * random.below(int64_t(sizeof(Signature)) / 8),
                random);
      break;
    case Field::kPosted:
      overwrite(reinterpret_cast<char*>(&line.posted), random);
      break;
    case Field::kFinished:
      overwrite(reinterpret_cast<char*>(&shared.finished(lane, rank)), random);
      break;
    case Field::kRing: {
      Ring& ring = shared.ring(rank, other);
      overwrite(reinterpret_cast<char*>(random.one_in(2) ? &ring.written : &ring.read), random);
      break;
    }
    default: {  // the beginning of a slot or ring more often, where sizes and heads are
      const int64_t bytes = random.one_in(2) ? 32 : shared.geometry().ring_bytes;
      char* at = random.one_in(2) ? shared.slot(lane, rank, step) : shared.ring_bytes(rank, other);
      overwrite(at + random.below(bytes / 8) * 8, random);
    }
  }
}

// One rank's work: the same calls on all, each compared if `comparable` still holds at its end
class Worker {
 public:
  Worker(const Shared& shared, int rank, uint64_t seed, const std::atomic<bool>& comparable)
      : engine_(std::make_shared<Engine>(shared, rank, "lied to", nullptr)),
        ranks_(shared.ranks()),
        rank_(rank),
        drawn_(seed),
        own_(seed + 1 + uint64_t(rank)),
        comparable_(comparable) {}

  void run() {
    for (int i = 0; i < kOperations; ++i) operation(drawn_.next());
    while (!pending_.empty()) wait();
  }

 private:
  struct Pending {
    TaskPtr task;
    std::shared_ptr<Bytes> in, out;
    Bytes expected;
  };

  void operation(uint64_t key) {
    const int root = int(drawn_.below(ranks_)), p = ranks_;
    const int64_t n = 8 * drawn_.below(drawn_.one_in(4) ? 200 : 10);  // bytes of each rank
    const Member member = engine_->member();
    const Elements elements{n / 8, 8, kTypes[1].combine, 1, 0};
    const Bytes own = data(key, rank_, 0, n);
    Bytes all;
    for (int rank = 0; rank < p; ++rank) {
      const Bytes theirs = data(key, rank, 0, n);
      all.insert(all.end(), theirs.begin(), theirs.end());
    }
    const auto in = std::make_shared<Bytes>(own), out = std::make_shared<Bytes>(size_t(n));
    const auto parts = [&](Bytes& bytes) {
      std::vector<void*> at;
      for (int rank = 0; rank < p; ++rank) at.push_back(bytes.data() + rank * n);
      return at;
    };
    const std::vector<int64_t> sizes(size_t(p), n);
    std::unique_ptr<Collective> call;
    Bytes expected;
    switch (drawn_.below(10)) {
      case 0:
      case 1:
        expected = combined(key, p, 1, n / 8);
        if (n <= member.slot_bytes())
          call = std::make_unique<AllReduce>(member, in->data(), out->data(), elements);
        else
          call = std::make_unique<ChunkedAllReduce>(member, in->data(), out->data(), elements);
        break;
      case 2:
        expected = all;
        out->resize(all.size());
        call = std::make_unique<AllGather>(member, in->data(), parts(*out), sizes, 0);
        break;
      case 3:
        expected = data(key, root, 0, n);
        *out = rank_ == root ? own : *out;
        call = std::make_unique<Broadcast>(member, out->data(), n, 0, root);
        break;
      case 4: {
        *in = all;
        expected = data(key, rank_, 0, n);
        const auto at = parts(*in);
        call =
            std::make_unique<Scatter>(member,
                                      rank_ == root ? std::vector<const void*>(at.begin(), at.end())
                                                    : std::vector<const void*>(),
                                      out->data(), n, 0, root);
        break;
      }
      case 5: {  // rank r sends everybody what it has
        in->clear();
        for (int rank = 0; rank < p; ++rank) in->insert(in->end(), own.begin(), own.end());
        expected = all;
        out->resize(all.size());
        call = std::make_unique<AllToAll>(member, blocks_at(parts(*in), sizes),
                                          blocks_at(parts(*out), sizes), 0);
        break;
      }
      case 6:
        expected = *out;
        if (rank_ == root) expected = combined(key, p, 1, n / 8);
        call = std::make_unique<Reduce>(member, in->data(), out->data(), elements, root);
        break;
      case 7:
        call = std::make_unique<Barrier>(member);
        out->clear();
        break;
      case 8: {
        *in = data(key, rank_, 1, n / 8 * p);
        const Bytes sums = combined(key, p, 1, n / 8 * p);
        expected.assign(sums.begin() + rank_ * n, sums.begin() + (rank_ + 1) * n);
        const auto at = parts(*in);
        Elements like = elements;
        like.count *= p;
        call = std::make_unique<ReduceScatter>(
            member, std::vector<const void*>(at.begin(), at.end()), out->data(),
            std::vector<int64_t>(size_t(p), n / 8), like);
        break;
      }
      default:
        return message(key, root, n);
    }
    issue(task_of(std::move(call), kLimit), in, out, std::move(expected));
  }

  void message(uint64_t key, int from, int64_t n) {
    const int to = int(drawn_.below(ranks_)), tag = int(drawn_.below(2));
    const auto bytes = std::make_shared<Bytes>(size_t(n));
    if (rank_ == from) {
      *bytes = data(key, 0, 0, n);
      issue(task_of(Message{to, tag, bytes->data(), n, 0}, false, kLimit), bytes, bytes, *bytes);
    }
    if (rank_ == to) {
      const auto out = std::make_shared<Bytes>(size_t(n));
      issue(task_of(Message{from, tag, out->data(), n, 0}, true, kLimit), out, out,
            data(key, 0, 0, n));
    }
  }

  void issue(TaskPtr task, std::shared_ptr<Bytes> in, std::shared_ptr<Bytes> out, Bytes expected) {
    pending_.push_back({task, std::move(in), std::move(out), std::move(expected)});
    // Failed tasks are dropped while their buffers might still be written, if there were a bug
    task->finish = [in = pending_.back().in, out = pending_.back().out] {};
    engine_->start(task, own_.one_in(2));
    if (own_.one_in(4)) engine_->on_done(task, [] {});
    while (pending_.size() > 3) wait();
  }

  void wait() {
    const Pending first = std::move(pending_.front());
    pending_.erase(pending_.begin());
    engine_->wait(first.task);
    if (comparable_)
      EXPECT(*first.out == first.expected || !comparable_, "rank %d: %s has a wrong result", rank_,
             first.task->what());
  }

  std::shared_ptr<Engine> engine_;
  const int ranks_, rank_;
  Random drawn_, own_;  // drawn_: the same on all ranks; own_: not
  const std::atomic<bool>& comparable_;
  std::vector<Pending> pending_;
};

int64_t round(uint64_t seed, Counts& counts) {
  Random random(seed);
  const int ranks = 2 + int(random.below(2));
  const Geometry geometry{ranks, kLine * (ranks + random.below(3)), 64 + 8 * random.below(20)};
  const GuardedMemory memory(geometry);
  std::atomic<bool> comparable{true};
  std::atomic<int> working{ranks};
  int64_t lies = 0;
  const uint64_t work = random.next();
  const auto begun = Clock::now();
  on_threads(ranks + 1, [&](int rank) {
    if (rank == ranks) {
      const int64_t most = 1 + random.below(40);
      for (; lies < most && working > 0; ++lies) {
        const auto field = static_cast<Field>(random.below(int64_t(Field::kFields)));
        if (trusted(field)) comparable = false;  // before the write
        corrupt(memory.shared(), field, random);
        ++counts.fields[size_t(field)];
        if (random.one_in(3))
          std::this_thread::sleep_for(std::chrono::microseconds(random.below(300)));
      }
      return;
    }
    try {
      Worker(memory.shared(), rank, work, comparable).run();
      ++(comparable ? counts.right : counts.unchecked);
    } catch (const TimedOut&) {
      ++counts.timeouts;
    } catch (const Failure&) {
      ++counts.errors;
    }
    --working;
  });
  EXPECT(Clock::now() - begun < kHang, "seed %lu took too long", seed);
  ++counts.rounds;
  return lies;
}

// Names as received over the store: only a valid one may be opened
int64_t names(Random& random) {
  Segment segment = Segment::create(8192, 4096);
  int64_t lies = 0;
  for (; lies < 64; ++lies) {
    std::string name = segment.name();
    for (int64_t n = 1 + random.below(3); n > 0; --n) {
      const auto at = size_t(random.below(int64_t(name.size())));
      switch (random.below(5)) {
        case 0:
          name[at] = char(random.next());
          break;
        case 1:
          name.resize(at);
          break;
        case 2:
          name.insert(at, 1, char(random.next()));
          break;
        case 3:
          name.insert(at, "/../");
          break;
        default:
          name += std::string(size_t(random.below(300)), 'a');
      }
      if (name.empty()) break;
    }
    try {
      Segment::open(name, random.one_in(2) ? 8192 : int64_t(random.next() >> 1));
      EXPECT(name == segment.name(), "opened %s", name.c_str());
    } catch (const Failure&) {
    }
  }
  segment.unlink();
  return lies;
}

int program(char** args) {
  const int64_t corruptions = std::atoll(args[1]);
  const uint64_t seed = std::strtoull(args[2], nullptr, 10);
  static Counts counts;
  std::atomic<int64_t> done{0}, of_names{0};
  std::atomic<uint64_t> next{0};
  on_threads(kGroups, [&](int) {
    while (done < corruptions) {
      const uint64_t number = next++;
      if (number % 64 == 0) {
        Random random(seed ^ mix(number));
        of_names += names(random);
        continue;
      }
      done += round(mix(seed) + number, counts);
      if (number % 8192 == 1) {
        std::printf("  %ld corruptions in %ld rounds\n", done.load(), counts.rounds.load());
        std::fflush(stdout);
      }
    }
  });
  std::printf(
      "%ld corruptions in %ld rounds, %ld names; ranks: %ld errors, %ld timeouts, %ld right, "
      "%ld not compared;",
      done.load(), counts.rounds.load(), of_names.load(), counts.errors.load(),
      counts.timeouts.load(), counts.right.load(), counts.unchecked.load());
  for (size_t i = 0; i < size_t(Field::kFields); ++i)
    std::printf(" %s %ld", kNames[i], counts.fields[i].load());
  std::printf("\n");
  return 0;
}

}  // namespace tp_ext::shm::test::shm_liars
