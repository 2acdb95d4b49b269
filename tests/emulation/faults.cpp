// Tests of the emulation itself: the storage types, the results of shuffles and barriers, and each
// mistake that it must find. `faults NAME` makes the mistake NAME and must not reach its end.

#include "harness.h"

#include "kernels/reduce.cuh"
#include "kernels/vec.cuh"

using namespace emulation;
using namespace tp_ext;

namespace emulation::faults {

void missing_barrier(bool present) {
  const auto reversed = [&] {
    Tensor<int> y(64);
    launch(1, 64, [&] {
      static int shown[64];
      shown[threadIdx.x] = 7 * static_cast<int>(threadIdx.x);
      if (present) __syncthreads();
      y[threadIdx.x] = shown[63 - threadIdx.x];
    });
    return results(y);
  };
  const auto [y] = run_in_every_order("a missing barrier", reversed);
  for (int i = 0; i < 64; ++i)
    if (y[i] != 7 * (63 - i)) wrong("what the other thread has shown");
}

void shuffles() {
  current_case = "shuffles";
  launch(2, dim3(16, 4), [&] {
    const int lane = (threadIdx.y * 16 + threadIdx.x) % 32;
    if (__shfl_xor_sync(~0u, lane, 5) != (lane ^ 5)) wrong("xor");
    if (__shfl_sync(~0u, lane * 1.5, 31) != 46.5) wrong("broadcast");
    if (__shfl_down_sync(~0u, lane, 3) != (lane + 3 < 32 ? lane + 3 : lane)) wrong("down");
    if (__shfl_up_sync(~0u, lane, 3) != (lane < 3 ? lane : lane - 3)) wrong("up");
    if (__shfl_xor_sync(~0u, lane, 1, 8) != (lane ^ 1)) wrong("xor of eight");
    const unsigned half = lane < 16 ? 0xffffu : 0xffff0000u;  // a separate shuffle for each half
    if (__shfl_xor_sync(half, lane, 8) != (lane ^ 8)) wrong("half a warp");
    __syncwarp();
  });
  launch(1, 64, [&] {
    static float scratch[33];
    if (block_reduce(1.f, Sum(), 0.f, scratch) != 64) wrong("a sum over the block");
  });
}

void types() {
  current_case = "types";
  for (int bits = 0; bits < 0x10000; ++bits) {
    BFloat16 b;
    Half h;
    b.bits = h.bits = static_cast<uint16_t>(bits);
    const float fb = static_cast<float>(b), fh = static_cast<float>(h);
    if (!std::isnan(fb) && BFloat16(fb).bits != bits) wrong("bfloat16 there and back");
    if (!std::isnan(fh) && Half(fh).bits != bits) wrong("half there and back");
    if (std::isnan(fb) != ((bits & 0x7fff) > 0x7f80) ||
        std::isnan(fh) != ((bits & 0x7fff) > 0x7c00))
      wrong("NaN");
  }
  for (int bits = 0; bits < 0x7bff; ++bits) {  // half way between neighbours: to the even one
    Half low, high;
    low.bits = bits, high.bits = bits + 1;
    const float middle = (static_cast<float>(low) + static_cast<float>(high)) / 2;
    if (Half(middle).bits != bits + (bits & 1)) wrong("a tie of halfs");
    if (Half(std::nextafterf(middle, 1e9f)).bits != bits + 1) wrong("above a tie of halfs");
  }
  if (BFloat16(1.00390625f).bits != 0x3f80 || BFloat16(1.01171875f).bits != 0x3f82) wrong("a tie");
}

void mistake(const std::string& name) {
  const auto x = values<float>(6, 0);
  const auto shifted = values<float>(8, 1);
  const Tensor<float> y(6, 1);
  volatile float sink = 0;
  const auto on_block = [](auto body) { launch(1, 64, body); };
  current_case = name;
  if (name == "missing_barrier") missing_barrier(false);
  if (name == "divergent_barrier")
    on_block([] {
      if (threadIdx.x < 32) {
        __syncthreads();
      } else {
        __syncthreads();
      }
    });
  if (name == "lost_thread")
    on_block([] {
      if (threadIdx.x != 5) __syncthreads();
    });
  if (name == "lost_lane")
    on_block([] {
      if (threadIdx.x != 5) __shfl_xor_sync(~0u, 1, 1);
    });
  if (name == "stranger_lane") launch(1, 16, [] { __shfl_xor_sync(~0u, 1, 1); });
  if (name == "read_past_end") launch(1, 1, [&] { sink = load<4>(x.data(), 4).v[3]; });
  if (name == "write_past_end") launch(1, 1, [&] { y[6] = 1; });
  if (name == "write_in_front") {
    launch(1, 1, [&] { y.data()[-1] = 1; });
    y.check_head();
  }
  if (name == "odd_vector") launch(1, 1, [&] { sink = load<4>(shifted.data(), 0).v[0]; });
  if (name == "int_overflow")
    launch(1, 64, [&] { sink = static_cast<int>(threadIdx.x) * 0x7fffffff; });
  if (name == "early_read")  // of two copies, while the later one is on its way
    launch(
        1, 1,
        [&] {
          Vec<float, 4>* const to = reinterpret_cast<Vec<float, 4>*>(dynamic_shared());
          for (int i = 0; i < 2; ++i)
            copy_async(to + i, reinterpret_cast<const Vec<float, 4>*>(x.data()), true),
                end_copies();
          wait_for_copies<1>();
          if (to[0].v[3] != x[3] || to[1].v[3] != x[3]) wrong("a copy that is on its way");
        },
        2 * sizeof(Vec<float, 4>));
  if (name == "tall_grid") launch(dim3(1, 65536), 1, [] {});
  if (name == "empty_grid") launch(0, 1, [] {});
  if (name == "large_block") launch(1, dim3(32, 33), [] {});
}

int program(int argc, char** argv) {
  if (argc > 1) {
    mistake(argv[1]);
    return done();
  }
  missing_barrier(true);
  for (const Order o : {Order::kAscending, Order::kDescending, Order::kShuffled})
    order = o, shuffles();
  types();
  return done();
}

}  // namespace emulation::faults
