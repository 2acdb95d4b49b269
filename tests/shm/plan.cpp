#include "plan.h"

#include <algorithm>
#include <deque>
#include <tuple>

namespace tp_ext::shm::test {
namespace {

using namespace std::chrono_literals;

constexpr auto kLimit = 60s;
constexpr int kMessageKind = 10;

struct Buffers {  // buffers of one operation: they live until it has finished
  Bytes in, out, expected;
  std::vector<int64_t> in_sizes, out_sizes;
};
using BuffersPtr = std::shared_ptr<Buffers>;

struct Ran {  // outlives the thread that follows the plan, if that fails
  std::atomic<int64_t> finished{0}, notified{0};
};

template <typename Pointer>
std::vector<Pointer> divided(char* base, const std::vector<int64_t>& sizes, int64_t size = 1) {
  std::vector<Pointer> blocks;
  for (const int64_t n : sizes) {
    blocks.push_back(base);
    base += n * size;
  }
  return blocks;
}

int64_t total(const std::vector<int64_t>& sizes) {
  int64_t sum = 0;
  for (const int64_t n : sizes) sum += n;
  return sum;
}

class Follower {
 public:
  Follower(const Plan& plan, const std::vector<std::shared_ptr<Engine>>& engines, int rank)
      : plan_(plan),
        engines_(engines),
        rank_(rank),
        drawn_(plan.seed),
        own_(plan.seed * 64 + static_cast<uint64_t>(rank) + 1) {}

  void run() {
    for (number_ = 0; number_ < plan_.operations; ++number_) {
      operation();
      for (size_t i = 0; i < late_.size();) {
        if (late_[i].due <= number_)
          post_late(i);
        else
          ++i;
      }
      const auto most = static_cast<size_t>(own_.one_in(4) ? 0 : 8);
      while (pending_.size() > most) wait_for_one();
      rest();
    }
    while (!late_.empty()) post_late(0);
    while (!pending_.empty()) wait_for_one();
    for (const auto& [engine, task] : sends_) engine->wait(task);
    for (const auto& engine : engines_) {  // completes calls without a waiting thread
      const auto last = task_of(std::make_unique<Barrier>(engine->member()), kLimit);
      engine->start(last, false);
      engine->wait(last);
    }
    const auto deadline = Clock::now() + kLimit;
    while (ran_->finished < begun_ || ran_->notified < asked_) {
      EXPECT(Clock::now() < deadline, "rank %d: %ld of %ld finished, %ld of %ld notified", rank_,
             ran_->finished.load(), begun_, ran_->notified.load(), asked_);
      std::this_thread::sleep_for(100us);
    }
    EXPECT(ran_->finished == begun_ && ran_->notified == asked_, "rank %d: something ran twice",
           rank_);
  }

 private:
  struct Late {
    int64_t due;
    Engine* engine;
    int from;
    int tag;
    uint64_t key;
    int64_t bytes;
    bool any;
  };

  // All draws here are the same on all ranks
  void operation() {
    engine_ = engines_[static_cast<size_t>(drawn_.below(int64_t(engines_.size())))].get();
    const uint64_t key = drawn_.next();
    const auto type = static_cast<uint32_t>(drawn_.below(3));
    const int64_t size = kTypes[type].size;
    const int root = static_cast<int>(drawn_.below(plan_.ranks));
    const int64_t count = length() / size;
    const Elements elements{count, size, kTypes[type].combine, type, 0};
    auto b = std::make_shared<Buffers>();
    const Member member = engine_->member();
    const Kind kind = static_cast<Kind>(1 + drawn_.below(kMessageKind));
    switch (kind) {
      case Kind::kAllReduce: {
        b->in = data(key, rank_, type, count);
        b->expected = combined(key, plan_.ranks, type, count);
        const bool in_place = own_.one_in(2);
        b->out.resize(b->in.size());
        if (in_place) b->out = b->in;
        const void* in = in_place ? b->out.data() : b->in.data();
        if (elements.bytes() <= std::min(AllReduce::kMaxBytes, member.slot_bytes()))
          return start(std::make_unique<AllReduce>(member, in, b->out.data(), elements), b);
        return start(std::make_unique<ChunkedAllReduce>(member, in, b->out.data(), elements), b);
      }
      case Kind::kAllGather:
      case Kind::kGather: {
        const bool all = kind == Kind::kAllGather;
        for (int r = 0; r < plan_.ranks; ++r) b->out_sizes.push_back(all ? length() : count * size);
        b->in = data(key, rank_, 0, b->out_sizes[size_t(rank_)]);
        std::vector<void*> out;
        if (all || rank_ == root) {
          for (int r = 0; r < plan_.ranks; ++r) {
            const Bytes theirs = data(key, r, 0, b->out_sizes[size_t(r)]);
            b->expected.insert(b->expected.end(), theirs.begin(), theirs.end());
          }
          b->out.resize(b->expected.size());
          out = divided<void*>(b->out.data(), b->out_sizes);
        }
        return start(std::make_unique<AllGather>(member, b->in.data(), out, b->out_sizes, 0,
                                                 all ? -1 : root),
                     b);
      }
      case Kind::kReduceScatter: {
        for (int r = 0; r < plan_.ranks; ++r) b->in_sizes.push_back(length() / size);
        const int64_t all = total(b->in_sizes);
        b->in = data(key, rank_, type, all);
        const Bytes sums = combined(key, plan_.ranks, type, all);
        const int64_t before = total({b->in_sizes.begin(), b->in_sizes.begin() + rank_}) * size;
        const int64_t mine = b->in_sizes[size_t(rank_)] * size;
        b->expected.assign(sums.begin() + before, sums.begin() + before + mine);
        b->out.resize(b->expected.size());
        Elements like = elements;
        like.count = all;
        auto in = divided<const void*>(b->in.data(), b->in_sizes, size);
        return start(std::make_unique<ReduceScatter>(member, std::move(in), b->out.data(),
                                                     b->in_sizes, like),
                     b);
      }
      case Kind::kAllToAll: {
        for (int from = 0; from < plan_.ranks; ++from)
          for (int to = 0; to < plan_.ranks; ++to) {
            const int64_t bytes = length();
            const Bytes block = data(key + uint64_t(to), from, 0, bytes);
            if (from == rank_) {
              b->in_sizes.push_back(bytes);
              b->in.insert(b->in.end(), block.begin(), block.end());
            }
            if (to == rank_) {
              b->out_sizes.push_back(bytes);
              b->expected.insert(b->expected.end(), block.begin(), block.end());
            }
          }
        b->out.resize(b->expected.size());
        auto in = blocks_at(divided<void*>(b->in.data(), b->in_sizes), b->in_sizes);
        auto out = blocks_at(divided<void*>(b->out.data(), b->out_sizes), b->out_sizes);
        return start(std::make_unique<AllToAll>(member, std::move(in), std::move(out), 0), b);
      }
      case Kind::kBroadcast: {
        b->expected = data(key, root, 0, count * size);
        b->out.resize(b->expected.size());
        if (rank_ == root) b->out = b->expected;
        return start(std::make_unique<Broadcast>(member, b->out.data(), count * size, type, root),
                     b);
      }
      case Kind::kReduce: {
        b->in = data(key, rank_, type, count);
        b->out.resize(b->in.size());
        b->expected = b->out;
        if (rank_ == root) b->expected = combined(key, plan_.ranks, type, count);
        return start(std::make_unique<Reduce>(member, b->in.data(), b->out.data(), elements, root),
                     b);
      }
      case Kind::kScatter: {
        const int64_t bytes = count * size;
        b->in_sizes.assign(size_t(plan_.ranks), bytes);
        if (rank_ == root) b->in = data(key, root, 0, bytes * plan_.ranks);
        const Bytes all = data(key, root, 0, bytes * plan_.ranks);
        b->expected.assign(all.begin() + rank_ * bytes, all.begin() + (rank_ + 1) * bytes);
        b->out.resize(b->expected.size());
        auto in = rank_ == root ? divided<const void*>(b->in.data(), b->in_sizes)
                                : std::vector<const void*>();
        return start(
            std::make_unique<Scatter>(member, std::move(in), b->out.data(), bytes, type, root), b);
      }
      case Kind::kBarrier:
        return start(std::make_unique<Barrier>(member), b);
      default:
        return message(key, root, b);
    }
  }

  void message(uint64_t key, int from, const BuffersPtr& b) {
    const int to = static_cast<int>(drawn_.below(plan_.ranks));
    const int64_t bytes = length();
    const bool late = drawn_.one_in(3), any = drawn_.one_in(4);
    const int64_t due = number_ + (late ? 1 + drawn_.below(12) : 0);
    // Any sender is valid: the tag identifies it
    const auto tag = static_cast<int>(any ? 1000 + number_ : drawn_.below(3));
    if (rank_ == from) {
      b->in = data(key, 0, 0, bytes);
      TaskPtr task = task_of(Message{to, tag, b->in.data(), bytes, 0}, false, kLimit);
      finish(task, b);
      engine_->start(task, true);
      sends_.emplace_back(engine_, task);  // the receive may come much later
    }
    if (rank_ == to) {
      late_.push_back({due, engine_, from, tag, key, bytes, any});
      if (due == number_) post_late(late_.size() - 1);
    }
  }

  // In order where only the order identifies the message
  void post_late(size_t index) {
    const Late wanted = late_[index];
    for (size_t i = 0; i < late_.size();) {
      const Late late = late_[i];
      const bool same =
          late.engine == wanted.engine && late.from == wanted.from && late.tag == wanted.tag;
      if (!same && late.key != wanted.key) {
        ++i;
        continue;
      }
      late_.erase(late_.begin() + static_cast<long>(i));
      post(late);
      if (late.key == wanted.key) return;
    }
  }

  void post(const Late& late) {
    auto b = std::make_shared<Buffers>();
    b->expected = data(late.key, 0, 0, late.bytes);
    b->out.resize(b->expected.size());
    TaskPtr task = task_of(
        Message{late.any ? -1 : late.from, late.tag, b->out.data(), late.bytes, 0}, true, kLimit);
    finish(task, b);
    late.engine->start(task, true);
    pending_.emplace_back(late.engine, task);
  }

  void start(std::unique_ptr<Collective> call, const BuffersPtr& b) {
    TaskPtr task = task_of(std::move(call), kLimit);
    finish(task, b);
    // With one group, any waiting thread advances everything; with several, none would advance the
    // others
    const bool now = own_.one_in(2), background = engines_.size() > 1 || own_.one_in(2);
    engine_->start(task, !now && background);
    if (own_.one_in(8)) {
      ++asked_;
      engine_->on_done(task, [ran = ran_] { ++ran->notified; });
    }
    if (now)
      engine_->wait(task);
    else if (!background || !own_.one_in(4))  // otherwise never awaited
      pending_.emplace_back(engine_, task);
  }

  void finish(const TaskPtr& task, const BuffersPtr& b) {
    ++begun_;
    task->finish = [ran = ran_, b, rank = rank_, number = number_] {
      if (b->out != b->expected) {
        const auto at = std::mismatch(b->out.begin(), b->out.end(), b->expected.begin());
        EXPECT(false, "rank %d, operation %ld: wrong at byte %ld of %zu", rank, number,
               at.first - b->out.begin(), b->out.size());
      }
      ++ran->finished;
    };
  }

  void wait_for_one() {
    const auto index = own_.below(int64_t(pending_.size()));
    const auto [engine, task] = pending_[size_t(index)];
    pending_.erase(pending_.begin() + index);
    if (own_.one_in(4)) {
      for (int turn = 0; turn < 1000 && !engine->poll(task); ++turn) std::this_thread::yield();
    } else if (own_.one_in(64)) {
      std::thread([engine = engine, task = task] {
        try {
          engine->wait(task);
        } catch (const Failure&) {  // raised again below
        }
      }).join();
    }
    engine->wait(task);
  }

  int64_t length() {  // mostly short, around the ends of slots and lines
    const int64_t most = drawn_.one_in(8) ? plan_.longest : 130;
    return drawn_.one_in(16) ? 0 : drawn_.below(most);
  }

  void rest() {
    if (own_.one_in(64)) std::this_thread::sleep_for(std::chrono::microseconds(own_.below(200)));
    if (own_.one_in(8)) std::this_thread::yield();
  }

  const Plan plan_;
  const std::vector<std::shared_ptr<Engine>>& engines_;
  const int rank_;
  Random drawn_, own_;  // drawn_: the same on all ranks; own_: not

  int64_t number_ = 0;
  Engine* engine_ = nullptr;
  std::deque<std::pair<Engine*, TaskPtr>> pending_, sends_;
  std::vector<Late> late_;
  int64_t begun_ = 0, asked_ = 0;
  std::shared_ptr<Ran> ran_ = std::make_shared<Ran>();
};

}  // namespace

void follow(const Plan& plan, const std::vector<std::shared_ptr<Engine>>& engines, int rank) {
  Follower(plan, engines, rank).run();
}

}  // namespace tp_ext::shm::test
