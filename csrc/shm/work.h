// The caller's handle of a call or message in progress.

#pragma once

#include <memory>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "shm/core/engine.h"

namespace tp_ext::shm {

class ShmWork : public c10d::Work {
 public:
  ShmWork(std::shared_ptr<Engine> engine, TaskPtr task, std::vector<at::Tensor> results, int rank,
          c10d::OpType type);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  std::vector<at::Tensor> result() override;
  int sourceRank() const override;
  void synchronize() override;
  // The group's deadline applies unless the caller's is earlier
  bool wait(std::chrono::milliseconds timeout) override;
  // Complete once the data is there, even if no thread waits
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  const std::shared_ptr<Engine> engine_;
  const TaskPtr task_;
  const std::vector<at::Tensor> results_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace tp_ext::shm
