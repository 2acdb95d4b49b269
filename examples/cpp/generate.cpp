// Continues a text by an exported model, on the ranks of the job, and prints its ids:
//
//   torchrun --no-python --nproc-per-node 2 build/generate FOLDER --prompt 1,2,3 --max-new-tokens 9

#include <tp_ext/tp_ext.h>

#include <ATen/ops/tensor.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <sstream>
#include <string>
#include <vector>

namespace {

std::vector<int64_t> ids_of(const std::string& text) {
  std::vector<int64_t> ids;
  std::istringstream words(text);
  for (std::string word; std::getline(words, word, ',');) ids.push_back(std::stoll(word));
  return ids;
}

int generate(int argc, char** argv) {
  std::string prompt, backend = "tp_shm";
  tp_ext::GenerateOptions options;
  for (int i = 2; i + 1 < argc; i += 2) {
    const std::string name = argv[i], value = argv[i + 1];
    if (name == "--prompt")
      prompt = value;
    else if (name == "--max-new-tokens")
      options.max_new_tokens = std::stoll(value);
    else if (name == "--temperature")
      options.temperature = std::stod(value);
    else if (name == "--seed")
      options.seed = std::stoll(value);
    else if (name == "--backend")
      backend = value;
    else
      throw std::invalid_argument(name + ": is no option");
  }
  if (argc < 2 || argc % 2 != 0 || prompt.empty()) {
    std::fprintf(stderr,
                 "generate FOLDER --prompt 1,2,3 [--max-new-tokens N] [--temperature T] [--seed S] "
                 "[--backend NAME]\n");
    return 2;
  }
  const bool in_job = std::getenv("WORLD_SIZE") != nullptr;
  const tp_ext::Group group = in_job ? tp_ext::init_group({.backend = backend}) : tp_ext::Group();
  tp_ext::ExportedModel model(argv[1], group);
  const std::vector<int64_t> ids = ids_of(prompt);
  const at::Tensor text = model.generate(at::tensor(ids).unsqueeze(0), options);
  if (group.rank() == 0)
    for (int64_t i = 0; i < text.size(1); ++i)
      std::printf("%ld%c", static_cast<long>(text[0][i].item<int64_t>()),
                  i + 1 < text.size(1) ? ',' : '\n');
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return generate(argc, argv);
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "%s\n", error.what_without_backtrace());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
  }
  return 1;
}
