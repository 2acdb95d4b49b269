// Continues a text by an exported model for each number of tokens that it reads, and prints the seconds:
//
//   exported FOLDER PROMPT, with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT

#include <ATen/ops/arange.h>
#include <tp_ext/tp_ext.h>

#include <chrono>
#include <cstdlib>
#include <iostream>

int main(int, char** argv) {
  const tp_ext::Group group = tp_ext::init_group();
  tp_ext::ExportedModel model(argv[1], group);
  const at::Tensor prompt = at::arange(1, 1 + std::atol(argv[2]), at::kLong).unsqueeze(0);
  for (int64_t count = 0; std::cin >> count;) {
    group.barrier();
    const auto start = std::chrono::steady_clock::now();
    model.generate(prompt, {.max_new_tokens = count});
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    std::cout << seconds.count() << std::endl;
  }
  return 0;
}
