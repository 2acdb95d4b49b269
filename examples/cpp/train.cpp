// Trains a small GPT on the bytes of a file, on the ranks of the job:
//
//   torchrun --no-python --nproc-per-node 2 build/train --data README.md --steps 20

#include <torch/optim/adamw.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>

#include "gpt.h"

namespace {

constexpr int64_t kBatch = 4, kSeq = 32;

at::Tensor bytes_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const auto size = static_cast<int64_t>(text.size());
  TORCH_CHECK_VALUE(file && size > kSeq + 1, "--data: '", path, "' must be a file of more than ",
                    kSeq + 1, " bytes");
  return torch::from_blob(const_cast<char*>(text.data()), {size}, at::kByte).to(at::kLong);
}

// kBatch windows of kSeq + 1 bytes, one after the other
at::Tensor batch_of(const at::Tensor& data, int64_t step) {
  std::vector<at::Tensor> windows;
  for (int64_t i = 0; i < kBatch; ++i)
    windows.push_back(
        data.narrow(0, (step * kBatch + i) * kSeq % (data.size(0) - kSeq - 1), kSeq + 1));
  return at::stack(windows);
}

int train(const std::string& path, int64_t steps, const std::string& backend) {
  const bool in_job = std::getenv("WORLD_SIZE") != nullptr;
  const tp_ext::Group group = in_job ? tp_ext::init_group({.backend = backend}) : tp_ext::Group();
  const at::Tensor data = bytes_of(path);
  tp_ext::manual_seed(1);
  GPT model(GPTConfig(), group);
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-3));
  for (int64_t step = 0; step < steps; ++step) {
    const at::Tensor window = batch_of(data, step);
    const at::Tensor loss =
        model->loss(window.narrow(1, 0, kSeq).contiguous(), window.narrow(1, 1, kSeq).contiguous());
    optimizer.zero_grad();
    loss.backward();
    tp_ext::clip_grad_norm_(*model, 1.0);
    optimizer.step();
    if (group.rank() == 0)
      std::printf("step %ld loss %.17g\n", static_cast<long>(step), loss.item<double>());
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  std::string data, backend = "tp_shm";
  int64_t steps = 20;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    if (name == "--data") data = argv[i + 1];
    if (name == "--steps") steps = std::atol(argv[i + 1]);
    if (name == "--backend") backend = argv[i + 1];
  }
  if (data.empty()) {
    std::cerr << "usage: train --data FILE [--steps N] [--backend tp_shm|gloo]\n";
    return 2;
  }
  try {
    return train(data, steps, backend);
  } catch (const c10::Error& error) {
    std::cerr << "train: " << error.what_without_backtrace() << "\n";
  } catch (const std::exception& error) {
    std::cerr << "train: " << error.what() << "\n";
  }
  return 1;
}
