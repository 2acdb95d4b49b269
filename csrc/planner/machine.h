// The machine: how fast a kernel runs on a device, and a collective over levels of links.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace tp_ext::planner {

// The share of the peak that GEMMs of one dtype reach
struct Curve {
  double share = 0.7, tile_m = 128, tile_n = 256, units = 1, half_k = 128;
  std::vector<std::array<double, 4>> table;  // m, n, k, share

  double at(double m, double n, double k) const;
};

struct Level {
  double latency, bandwidth;
  int64_t devices;  // that share the level
};

// Multiprocessors that the kernels of a collective occupy: 16 of an A100's 108
constexpr double kOccupied = 0.15;

// Ranks at a distance of stride from one another
struct Group {
  int64_t size = 1, stride = 1;
};

enum class Collective : uint8_t {
  AllReduce,
  AllGather,
  ReduceScatter,
  AllToAll,
  Broadcast,
  Send,
  Recv
};

// As count_collectives defines them: docs/reference/communication.md
double wire_bytes(Collective kind, int64_t size, double payload);

struct Machine {
  double peak_blocks = 1, peak_other = 1;  // FLOP/s of the blocks' dtype, and of attention and head
  Curve blocks, other;
  double attention = 0.5;  // share of peak_other
  double memory_bandwidth = 1, memory = 0, launch = 0;
  double optimizer_bandwidth = 1;  // bytes/s of the optimizer
  // Whether kernels, collectives and the host run at the same time; on a CPU its cores do all
  bool asynchronous = true;
  double gather = 1;  // share of the links' bandwidth that ZeRO's collectives reach
  int64_t count = 1;
  std::vector<Level> levels;

  // What a collective adds to a computation during which it runs
  double shown(double time, double computed) const {
    const double occupied = asynchronous ? kOccupied : 1;
    return std::max(0.0, time - computed) + occupied * std::min(time, computed);
  }
  // What the host adds to a kernel: a short one ends before the next is launched
  double host(double time) const { return asynchronous ? std::max(0.0, launch - time) : launch; }
  // Of a copy, read and write: on a CPU a tenth of a step, on a GPU less than a hundredth
  double copy(double bytes) const { return asynchronous ? 0 : 2 * bytes / memory_bandwidth; }
  // What Python adds, by the number of kernels for which the host works as long; on a GPU it runs
  // ahead
  double python(double kernels) const { return asynchronous ? 0 : kernels * launch; }
  // By FLOPs, or by the bytes that it moves if these take longer
  double gemm(double m, double n, double k, bool in_blocks, double moved) const;
  double collective(Collective kind, Group group, double payload) const;
  // Of a message to the rank at this distance
  double message(int64_t stride, double payload) const;
};

}  // namespace tp_ext::planner
