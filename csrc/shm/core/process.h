// Distinguishes a forked child from the process that made an object, without a system call.

#pragma once

#include <cstdint>

namespace tp_ext::shm {

// Number of forks between the first process that loaded this code and this one
uint64_t process_generation();

}  // namespace tp_ext::shm
