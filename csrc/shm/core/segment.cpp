#include "shm/core/segment.h"

#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
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

#include "shm/core/collective.h"

namespace tp_ext::shm {
namespace {

constexpr char kPrefix[] = "tp_shm.";

[[noreturn]] void fail(const std::string& what, const std::string& name, int error) {
  throw Failure("shared memory " + name + ": " + what + ": " + std::strerror(error));
}

// The pid namespace of this process; "" if the system does not report it
std::string pid_namespace() {
  char link[PATH_MAX];
  const ssize_t length = readlink("/proc/self/ns/pid", link, sizeof link);
  const std::string text(link, length > 0 ? static_cast<size_t>(length) : 0);  // pid:[4026531836]
  const size_t begin = text.find_first_of("0123456789"), end = text.find(']');
  return begin < end && end != std::string::npos ? text.substr(begin, end - begin) : "";
}

// Names are tp_shm.<pid namespace>.<pid>.<128 random bits>
std::string name_start() { return kPrefix + pid_namespace() + "."; }

std::string new_name() {
  return "/" + name_start() + std::to_string(getpid()) + "." + random_number();
}

bool may_be_ours(const std::string& name) {
  const std::string start = std::string("/") + kPrefix;
  return name.rfind(start, 0) == 0 && name.size() <= NAME_MAX &&
         name.find_first_not_of("0123456789abcdef.", start.size()) == std::string::npos;
}

// Removes the segments of this user's jobs that were killed before all their ranks had opened them.
// Only names: opening and closing a file would drop all locks that this process has on it.
void sweep() {
  const std::string start = name_start();
  DIR* folder = start == std::string(kPrefix) + "." ? nullptr : opendir("/dev/shm");
  if (folder == nullptr) return;
  while (const dirent* entry = readdir(folder)) {
    if (std::strncmp(entry->d_name, start.c_str(), start.size()) != 0) continue;
    const long pid = std::strtol(entry->d_name + start.size(), nullptr, 10);
    if (pid <= 0 || kill(static_cast<pid_t>(pid), 0) == 0 || errno != ESRCH) continue;
    struct stat status;
    if (fstatat(dirfd(folder), entry->d_name, &status, AT_SYMLINK_NOFOLLOW) == 0 &&
        status.st_uid == geteuid())
      unlinkat(dirfd(folder), entry->d_name, 0);
  }
  closedir(folder);
}

// Closes the descriptor unless it was released
class File {
 public:
  explicit File(int file) : file_(file) {}
  ~File() {
    if (file_ >= 0) ::close(file_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int get() const { return file_; }
  int take() { return std::exchange(file_, -1); }

 private:
  int file_;
};

struct flock mark_of(int rank) {
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  return lock;
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
  File file(shm_open(name.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600));
  if (file.get() < 0) fail("cannot create", name, errno);
  Segment segment(name, file.take(), nullptr, bytes, true);
  if (fchmod(segment.file_, 0600) != 0 || ftruncate(segment.file_, bytes) != 0)
    fail("cannot give it " + std::to_string(bytes) + " bytes", name, errno);
  segment.base_ = map(segment.file_, bytes, name);
  segment.reserve(0, reserved);
  return segment;
}

Segment Segment::open(const std::string& name, int64_t bytes) {
  if (!may_be_ours(name)) throw Failure("shared memory " + name + ": no name of ours");
  File file(shm_open(name.c_str(), O_RDWR | O_CLOEXEC, 0));
  if (file.get() < 0) fail("cannot open", name, errno);
  struct stat status;
  const bool ours = fstat(file.get(), &status) == 0 && S_ISREG(status.st_mode) &&
                    status.st_uid == geteuid() && (status.st_mode & 07777) == 0600 &&
                    status.st_size == bytes;
  if (!ours)
    throw Failure("shared memory " + name + ": is not this user's alone, or not of " +
                  std::to_string(bytes) + " bytes");
  void* base = map(file.get(), bytes, name);
  return Segment(name, file.take(), base, bytes, false);
}

Segment::Segment(Segment&& other) noexcept
    : name_(std::move(other.name_)),
      file_(std::exchange(other.file_, -1)),
      base_(std::exchange(other.base_, nullptr)),
      bytes_(other.bytes_),
      named_(std::exchange(other.named_, false)) {}

Segment::~Segment() {
  if (named_) unlink();
  if (base_ != nullptr) munmap(base_, bytes_);
  if (file_ >= 0) ::close(file_);
}

// Without this a full /dev/shm would be a SIGBUS at some later write
void Segment::reserve(int64_t offset, int64_t bytes) const {
  int error = EINTR;  // retries after a signal
  while (error == EINTR) error = posix_fallocate(file_, offset, bytes);
  if (error != 0)
    fail("no room for " + std::to_string(bytes) + " bytes (is /dev/shm full or small?)", name_,
         error);
}

void Segment::unlink() {
  shm_unlink(name_.c_str());
  named_ = false;
}

// The lock belongs to the process, not to the open file: a forked child that lives on does not keep
// it
void Segment::mark_alive(int rank) const {
  struct flock lock = mark_of(rank);
  if (fcntl(file_, F_SETLK, &lock) != 0) fail("cannot lock", name_, errno);
}

// Queried through the open file description, which sees locks of this process too: ranks may be its
// threads
bool Segment::alive(int rank) const {
  struct flock lock = mark_of(rank);
  return fcntl(file_, F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

std::string random_number() {
  unsigned char random[16];
  if (getrandom(random, sizeof random, 0) != sizeof random)
    throw Failure("shared memory: the system gives no random bytes");
  std::string digits;
  for (const unsigned char byte : random) {
    constexpr char kDigits[] = "0123456789abcdef";
    digits += {kDigits[byte >> 4], kDigits[byte & 15]};
  }
  return digits;
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
