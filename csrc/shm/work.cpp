#include "shm/work.h"

#include <ATen/core/ivalue.h>

namespace tp_ext::shm {

ShmWork::ShmWork(std::shared_ptr<Engine> engine, TaskPtr task, std::vector<at::Tensor> results,
                 int rank, c10d::OpType type)
    : Work(rank, type),
      engine_(std::move(engine)),
      task_(std::move(task)),
      results_(std::move(results)) {}

bool ShmWork::isCompleted() { return engine_->poll(task_); }
bool ShmWork::isSuccess() const { return task_->done && !task_->error; }
std::exception_ptr ShmWork::exception() const { return task_->done ? task_->error : nullptr; }
std::vector<at::Tensor> ShmWork::result() { return results_; }
int ShmWork::sourceRank() const { return task_->message ? task_->message->peer : -1; }
void ShmWork::synchronize() { engine_->wait(task_); }

bool ShmWork::wait(std::chrono::milliseconds timeout) {
  engine_->wait(task_, timeout == kNoTimeout ? Clock::time_point::max() : deadline_in(timeout));
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> ShmWork::getFuture() {
  engine_->refuse_fork();  // where the mutex may be locked for ever
  const std::lock_guard lock(mutex_);
  if (future_) return future_;
  future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
  engine_->on_done(task_, [future = future_, task = task_, results = results_] {
    if (task->error)
      future->setErrorIfNeeded(task->error);
    else
      future->markCompleted(c10::IValue(results));
  });
  return future_;
}

}  // namespace tp_ext::shm
