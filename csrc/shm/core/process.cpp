#include "shm/core/process.h"

#include <pthread.h>

namespace tp_ext::shm {
namespace {

// Written only in a new child, by its one thread
uint64_t generation = 0;

const int registered = pthread_atfork(nullptr, nullptr, [] { ++generation; });

}  // namespace

uint64_t process_generation() {
  static_cast<void>(registered);
  return generation;
}

}  // namespace tp_ext::shm
