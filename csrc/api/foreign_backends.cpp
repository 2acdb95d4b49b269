// Declares as much of the classes as a call of their constructors needs. An object is made and
// destroyed by functions of torch's library; it gets more memory than it has members.

#include "api/foreign_backends.h"

namespace c10d {

class ProcessGroupGloo : public Backend {
 public:
  struct Options : Backend::Options {
    static c10::intrusive_ptr<Options> create_default(std::chrono::milliseconds timeout);
  };
  ProcessGroupGloo(const c10::intrusive_ptr<Store>& store, int rank, int size,
                   c10::intrusive_ptr<Options> options);
  ~ProcessGroupGloo() override;

 private:
  [[maybe_unused]] char members_[4096];
};

#ifdef TP_EXT_WITH_CUDA
class ProcessGroupNCCL : public Backend {
 public:
  struct Options : Backend::Options {
    explicit Options(bool is_high_priority_stream = false);
    [[maybe_unused]] char members[2048];
  };
  ProcessGroupNCCL(c10::intrusive_ptr<Store> store, int rank, int size,
                   c10::intrusive_ptr<Options> options);
  ~ProcessGroupNCCL() override;

 private:
  [[maybe_unused]] char members_[16384];
};
#endif

}  // namespace c10d

namespace tp_ext {

c10::intrusive_ptr<c10d::Backend> make_gloo(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                            int size, std::chrono::milliseconds timeout) {
  auto options = c10d::ProcessGroupGloo::Options::create_default(timeout);
  return c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, size, std::move(options));
}

#ifdef TP_EXT_WITH_CUDA
c10::intrusive_ptr<c10d::Backend> make_nccl(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                            int size, std::chrono::milliseconds timeout) {
  auto options = c10::make_intrusive<c10d::ProcessGroupNCCL::Options>(false);
  const_cast<std::chrono::milliseconds&>(options->timeout) = timeout;
  return c10::make_intrusive<c10d::ProcessGroupNCCL>(store, rank, size, std::move(options));
}
#endif

}  // namespace tp_ext
