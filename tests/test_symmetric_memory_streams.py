"""The order of several streams that use a group's symmetric memory, with streams and events that only log."""

import shutil
import subprocess

import pytest

from tests.helpers.paths import ROOT

PROGRAM = r"""
#include "comm/symmetric/stream_order.h"

#include <cassert>
#include <string>

std::string log_;

struct Stream {
  char name;
  int device_type() const { return 0; }
  bool operator==(const Stream& other) const { return name == other.name; }
  bool operator!=(const Stream& other) const { return name != other.name; }
};
struct Event {
  explicit Event(int) {}
  void record(const Stream& s) { log_ += std::string(" record ") + s.name; }
  void block(const Stream& s) const { log_ += std::string(" block ") + s.name; }
};
using Order = tp_ext::comm::StreamOrder<Stream, Event>;

bool use(Order& order, char stream, bool capturing = false) {
  const bool allowed = order.begin({stream}, capturing);
  log_ += std::string(" ") + (allowed ? "use " : "refuse ") + stream;
  if (allowed) order.end({stream}, capturing);
  return allowed;
}

void expect(const char* text) {
  assert(log_ == text);
  log_.clear();
}

int main() {
  Order order;
  use(order, 'a'), use(order, 'a');  // one stream waits for no other
  expect(" use a record a use a record a");
  use(order, 'b'), use(order, 'b'), use(order, 'a');
  expect(" block b use b record b use b record b block a use a record a");
  use(order, 'c', true), use(order, 'c', true);  // no event crosses into a capture
  expect(" use c use c");
  assert(!use(order, 'd', true));  // another stream of the capture, or of another one
  expect(" refuse d");
  use(order, 'b');  // nor out of it; what was used before it still is waited for
  expect(" block b use b record b");
  use(order, 'd', true);  // the next capture
  expect(" use d");
}
"""


def test_uses_on_several_streams(tmp_path):
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    (tmp_path / "order.cpp").write_text(PROGRAM)
    command = ["g++", "-std=c++17", f"-I{ROOT / 'csrc'}", tmp_path / "order.cpp", "-o", tmp_path / "order"]
    subprocess.run(command, check=True)
    subprocess.run([tmp_path / "order"], check=True)
