#include "planner/machine.h"

#include <algorithm>
#include <cmath>

namespace tp_ext::planner {
namespace {

// Of the units that the last wave of tiles leaves idle, libraries recover about a half by cutting
// tiles along k (Osama et al., Stream-K, arXiv:2301.03598)
constexpr double kIdleOfLastWave = 0.5;

double filled(double m, double n, double tile_m, double tile_n, double units) {
  const double waves = std::ceil(m / tile_m) * std::ceil(n / tile_n) / units;
  const double idle = waves < 1 ? 1 - waves : kIdleOfLastWave * (std::ceil(waves) - waves);
  return std::min(1.0, m * n / ((waves + idle) * units * tile_m * tile_n));
}

}  // namespace

double Curve::at(double m, double n, double k) const {
  if (!table.empty()) {
    // Shepard's interpolation: near rows count most, and a row of this shape alone
    double sum = 0, weights = 0;
    for (const auto& row : table) {
      const double dm = std::log(row[0] / m), dn = std::log(row[1] / n), dk = std::log(row[2] / k);
      const double squared = dm * dm + dn * dn + dk * dk;
      if (squared < 1e-12) return row[3];
      const double weight = 1 / (squared * squared);
      sum += weight * row[3];
      weights += weight;
    }
    return sum / weights;
  }
  // Libraries choose among tiles; the quarter is the choice for small results
  const double part =
      std::max(filled(m, n, tile_m, tile_n, units),
               filled(m, n, std::max(1.0, tile_m / 2), std::max(1.0, tile_n / 2), units));
  return share * part * k / (k + half_k);
}

double wire_bytes(Collective kind, int64_t size, double payload) {
  const double others = double(size - 1) / double(size);
  switch (kind) {
    case Collective::AllReduce:
      return 2 * others * payload;
    case Collective::Broadcast:
      return size > 1 ? payload : 0;
    case Collective::Send:
    case Collective::Recv:
      return payload;
    default:
      return others * payload;
  }
}

double Machine::gemm(double m, double n, double k, bool in_blocks, double moved) const {
  if (m <= 0 || n <= 0 || k <= 0) return 0;
  const Curve& curve = in_blocks ? blocks : other;
  const double speed = (in_blocks ? peak_blocks : peak_other) * curve.at(m, n, k);
  return std::max(2 * m * n * k / speed, moved / memory_bandwidth);
}

double Machine::message(int64_t stride, double payload) const {
  for (const Level& level : levels)
    if (stride < level.devices || &level == &levels.back())
      return level.latency + payload / level.bandwidth;
  return 0;
}

// Alpha-beta by level. A level joins groups of `inside` members that the levels within it have
// joined: each such group sends over the links of all its members, so that a ring over whole nodes
// is as fast as the links of a node together (arXiv:1909.09756 and NCCL's rings); the levels work
// at the same time, in slices, and so the slowest one counts.
double Machine::collective(Collective kind, Group group, double payload) const {
  if (group.size <= 1 || payload <= 0) return 0;
  if (kind == Collective::Send || kind == Collective::Recv) return message(group.stride, payload);
  double ring_latency = 0, tree_latency = 0, transfer = 0;
  double inside = 1;
  for (const Level& level : levels) {
    const bool last = &level == &levels.back();
    const double holds =
        last ? double(group.size)
             : std::clamp(double(level.devices) / double(group.stride), 1.0, double(group.size));
    if (holds <= inside) continue;
    const double joined = holds / inside;
    ring_latency += (std::ceil(joined) - 1) * level.latency;
    tree_latency += std::ceil(std::log2(joined)) * level.latency;
    const double leaves = kind == Collective::AllToAll
                              ? (holds - inside) / double(group.size)  // nothing is passed on
                              : (joined - 1) / joined / inside;
    transfer = std::max(transfer, payload * leaves / level.bandwidth);
    inside = holds;
  }
  switch (kind) {
    case Collective::AllReduce: {
      const double others = double(group.size - 1) / double(group.size);
      return std::min(2 * (ring_latency + transfer), 2 * (tree_latency + transfer / others));
    }
    case Collective::Broadcast:
      return tree_latency + transfer * double(group.size) / double(group.size - 1);
    default:
      return ring_latency + transfer;
  }
}

}  // namespace tp_ext::planner
