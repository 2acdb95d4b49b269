#include "shm/segment.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <utility>

#include "shm/calls.h"

namespace tp_ext::shm {
namespace {

constexpr char kPrefix[] = "tp_shm.";

[[noreturn]] void fail(const std::string& what, const std::string& name, int error) {
  throw Failure("shared memory " + name + ": " + what + ": " + std::strerror(error));
}

// Names are tp_shm.<pid>.<128 random bits>
std::string new_name() {
  unsigned char random[16];
  if (getrandom(random, sizeof random, 0) != sizeof random)
    throw Failure("shared memory: the system gives no random bytes");
  std::string name = std::string("/") + kPrefix + std::to_string(getpid()) + ".";
  for (const unsigned char byte : random) {
    constexpr char kDigits[] = "0123456789abcdef";
    name += {kDigits[byte >> 4], kDigits[byte & 15]};
  }
  return name;
}

// What jobs of this user left that were killed before all their ranks had opened it
void sweep() {
  DIR* folder = opendir("/dev/shm");
  if (folder == nullptr) return;
  while (const dirent* entry = readdir(folder)) {
    if (std::strncmp(entry->d_name, kPrefix, sizeof kPrefix - 1) != 0) continue;
    const long pid = std::strtol(entry->d_name + sizeof kPrefix - 1, nullptr, 10);
    if (pid <= 0 || kill(static_cast<pid_t>(pid), 0) == 0 || errno != ESRCH) continue;
    struct stat status;
    const std::string path = std::string("/") + entry->d_name;
    const int file = shm_open(path.c_str(), O_RDWR | O_CLOEXEC, 0);
    if (file < 0) continue;
    // Its maker may live in another process namespace: then somebody's mark is on it
    struct flock lock = {};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    if (fstat(file, &status) == 0 && status.st_uid == geteuid() &&
        fcntl(file, F_GETLK, &lock) == 0 && lock.l_type == F_UNLCK)
      shm_unlink(path.c_str());
    ::close(file);
  }
  closedir(folder);
}

void* map(int file, int64_t bytes, const std::string& name) {
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (base == MAP_FAILED) fail("cannot map " + std::to_string(bytes) + " bytes", name, errno);
  return base;
}

}  // namespace

Segment Segment::create(int64_t bytes, int64_t reserved) {
  sweep();
  const std::string name = new_name();
  const int file = shm_open(name.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
  if (file < 0) fail("cannot create", name, errno);
  try {
    if (fchmod(file, 0600) != 0 || ftruncate(file, bytes) != 0)
      fail("cannot give it " + std::to_string(bytes) + " bytes", name, errno);
    Segment segment(name, file, map(file, bytes, name), bytes);
    segment.reserve(0, reserved);
    return segment;
  } catch (...) {
    shm_unlink(name.c_str());
    throw;
  }
}

Segment Segment::open(const std::string& name, int64_t bytes) {
  if (name.rfind(std::string("/") + kPrefix, 0) != 0 || name.find('/', 1) != std::string::npos)
    throw Failure("shared memory " + name + ": no name of ours");
  const int file = shm_open(name.c_str(), O_RDWR | O_CLOEXEC, 0);
  if (file < 0) fail("cannot open", name, errno);
  struct stat status;
  const bool ours = fstat(file, &status) == 0 && status.st_uid == geteuid() &&
                    (status.st_mode & 0777) == 0600 && status.st_size == bytes;
  if (!ours) {
    ::close(file);
    throw Failure("shared memory " + name + ": is not this user's alone, or not of " +
                  std::to_string(bytes) + " bytes");
  }
  return Segment(name, file, map(file, bytes, name), bytes);
}

Segment::Segment(Segment&& other) noexcept
    : name_(std::move(other.name_)),
      file_(std::exchange(other.file_, -1)),
      base_(std::exchange(other.base_, nullptr)),
      bytes_(other.bytes_) {}

Segment::~Segment() {
  if (base_ != nullptr) munmap(base_, bytes_);
  if (file_ >= 0) ::close(file_);
}

// Without this a full /dev/shm would be a SIGBUS at some later write
void Segment::reserve(int64_t offset, int64_t bytes) const {
  const int error = posix_fallocate(file_, offset, bytes);
  if (error != 0)
    fail("no room for " + std::to_string(bytes) + " bytes (is /dev/shm full or small?)", name_,
         error);
}

void Segment::unlink() { shm_unlink(name_.c_str()); }

// Locks belong to the process: a forked child does not keep its parent's
void Segment::mark_alive(int rank) const {
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  if (fcntl(file_, F_SETLK, &lock) != 0) fail("cannot lock", name_, errno);
}

bool Segment::alive(int rank) const {
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  return fcntl(file_, F_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

std::string host_identity() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  struct stat status = {};
  stat("/dev/shm", &status);
  char name[256] = "";
  gethostname(name, sizeof name - 1);
  return boot + ":" + std::to_string(status.st_dev) + ":" + name;
}

}  // namespace tp_ext::shm
