// The engine's service thread, and the handling of failures.

#include <sched.h>

#include <algorithm>
#include <cstring>

#include "shm/core/engine.h"

namespace tp_ext::shm {
namespace {

using namespace std::chrono_literals;

std::string listed(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) text += (i ? ", " : "") + std::to_string(ranks[i]);
  return text;
}

}  // namespace

void Engine::fail_all(const std::string& reason, bool timed_out) {
  if (!failure_) {
    if (!stop_) shm::abort_group(shared_.header(), rank_, reason);
    failure_ = timed_out ? std::make_exception_ptr(TimedOut(prefix() + reason))
                         : std::make_exception_ptr(Failure(prefix() + reason));
  }
  for (const auto& task : calls_) end(task, failure_);
  for (const auto& task : transfers_) end(task, failure_);
  calls_.clear();
  begun_ = false;
  transfers_.clear();
}

void Engine::abort_group(const std::string& reason) {
  if (forked()) return;
  std::unique_lock lock(mutex_);
  fail_all(reason);
  notify_ended(lock);
}

bool Engine::alive(int rank) const { return !segment_ || segment_->alive(rank); }

void Engine::check_aborted() {
  const Header& header = shared_.header();
  const uint32_t who = header.aborted_by.load(std::memory_order_acquire);
  if (who == 0) return;
  if (who > static_cast<uint32_t>(shared_.ranks()))
    return fail_all("the shared memory is damaged: rank " + std::to_string(who - 1) + " gave up");
  std::string reason = reason_of(header);
  if (reason.empty()) {
    if (alive(static_cast<int>(who) - 1)) return;  // it is about to write the reason
    reason = "it died before it could say why";
  }
  fail_all("rank " + std::to_string(who - 1) + " gave up: " + reason);
}

// By value: a task without a waiting thread is held by the queue alone, and may end in here
void Engine::check_peers(const TaskPtr task) {
  check_aborted();
  if (failure_) return;
  // A rank that is gone has posted all it ever will: check what is missing only after that
  const uint64_t left = shared_.header().left.load(std::memory_order_acquire);
  uint64_t gone = left;
  for (int rank = 0; rank < shared_.ranks(); ++rank)
    if (rank != rank_ && !alive(rank)) gone |= uint64_t(1) << rank;
  gone &= ~(uint64_t(1) << rank_);
  advance();
  if (task->done || failure_) return;
  const Collective* call = task->call ? calls_.front()->call.get() : nullptr;
  const std::vector<int> missing = call ? call->missing() : point_to_point_.missing();
  int lost = call ? -1 : point_to_point_.lost(gone, gone & ~left);
  for (const int rank : missing)
    if (call && gone >> rank & 1) lost = rank;
  const std::string doing = call ? name_of(call->kind()) : task->what();
  if (lost >= 0)
    return fail_all(doing + ": rank " + std::to_string(lost) +
                    (left >> lost & 1 ? " has left the group" : " has died"));
  if (Clock::now() >= task->deadline) fail_all(timed_out(*task), true);
}

std::string Engine::timed_out(const Task& task) const {
  const Collective* call = task.call ? calls_.front()->call.get() : nullptr;
  const std::vector<int> missing = call ? call->missing() : point_to_point_.missing();
  return std::string(call ? name_of(call->kind()) : task.what()) + " (call " +
         std::to_string(number_) + ") timed out waiting for " +
         (missing.empty() ? "nobody" : listed(missing));
}

uint64_t Engine::progress() const {
  return ends_ + point_to_point_.progress() + (begun_ ? calls_.front()->call->progress() : 0);
}

void Engine::serve() {
  bool gone = false;
  std::unique_lock lock(mutex_);
  gone_ = &gone;
  uint64_t before = 0;
  int idle = 0;  // iterations without progress
  auto looked = Clock::now(), since = looked;
  while (!stop_) {
    if (calls_.empty() && transfers_.empty()) {
      service_->work.wait_for(lock, 1h);  // wait() would need GLIBCXX_3.4.30, too new for wheels
      idle = 0;
      continue;
    }
    advance();
    if (progress() != before) idle = 0;
    before = progress();
    if (idle > 0 && Clock::now() - looked >= 10ms) {
      looked = Clock::now();
      if (!calls_.empty()) check_peers(calls_.front());
      if (!transfers_.empty()) check_peers(transfers_.front());
    }
    notify_ended(lock);
    if (gone) return;
    if (!lock.owns_lock()) lock.lock();
    if (stop_) break;
    if (idle++ == 0) since = Clock::now();
    if (calls_.empty() && transfers_.empty()) continue;
    // Only this thread can complete a task with a callback, so it spins. Otherwise it leaves the
    // core to a rank that computes, and that will do the rest in wait().
    if (awaited_ > 0 && Clock::now() - since < 50us) {
      lock.unlock();
      sched_yield();
      lock.lock();
    } else {
      service_->work.wait_for(lock, awaited_ > 0 ? 100us : 1000us);
    }
  }
}

}  // namespace tp_ext::shm
