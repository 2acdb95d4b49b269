// What runs a group's calls and messages: in the thread that waits for them, and, for what nobody
// waits for, in one thread of its own.

#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "shm/calls.h"
#include "shm/messages.h"
#include "shm/segment.h"

namespace tp_ext::shm {

using Clock = std::chrono::steady_clock;

struct TimedOut : Failure {
  using Failure::Failure;
};

// A call, or a message, under way
struct Task {
  std::unique_ptr<Call> call;
  std::shared_ptr<Message> message;
  bool receives = false;
  std::function<void()> finish;  // run once, when the data is there; keeps buffers alive
  std::function<void()> notify;  // run once after that, or after a failure
  Clock::time_point deadline;

  std::atomic<bool> done{false};
  std::exception_ptr error;  // to be read once done

  const char* what() const { return call ? name_of(call->kind()) : receives ? "recv" : "send"; }
};
using TaskPtr = std::shared_ptr<Task>;

class Engine {
 public:
  // `name` of the group is for messages; segment may be none (tests), then nobody is ever dead
  Engine(Shared shared, int rank, std::string name, std::shared_ptr<Segment> segment);
  ~Engine();

  Party party() { return {&shared_, lanes_, rank_}; }
  uint64_t calls() const { return number_; }

  // Queues the task; with `background` its own thread cares for it if nobody waits
  void start(const TaskPtr& task, bool background);
  // Until it is done; raises what went wrong
  void wait(const TaskPtr& task);
  bool poll(const TaskPtr& task);
  void on_done(const TaskPtr& task, std::function<void()> notify);
  void give_up(const std::string& reason);

 private:
  class Patience;
  void advance();  // under the lock; tells nobody
  void tell(std::unique_lock<std::mutex>& lock);
  void fail_all(const std::string& reason, bool timed_out = false);
  void check_peers(const Task& task);
  void end(const TaskPtr& task, std::exception_ptr error);
  void serve();
  std::string prefix() const;

  const Shared shared_;
  const int rank_;
  const std::string name_;
  const std::shared_ptr<Segment> segment_;
  Lane lanes_[kLanes];
  Messages messages_;

  std::mutex mutex_;
  std::deque<TaskPtr> calls_;
  std::list<TaskPtr> transfers_;
  std::vector<std::function<void()>> to_notify_;
  bool begun_ = false;  // the call at the front
  uint64_t number_ = 0;
  std::exception_ptr failure_;

  std::condition_variable work_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace tp_ext::shm
