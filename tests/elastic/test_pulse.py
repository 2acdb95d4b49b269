"""A rank is dead when its signs of life stop, not when the store answers slowly."""

import time

import torch.distributed as dist

from tp_ext.elastic.pulse import Pulse

SILENCE = 1.0


class SlowStore:
    """A store whose answers take as long as ``delay``, in seconds."""

    def __init__(self, store):
        self.store, self.delay = store, 0.0

    def clone(self):
        return self.store

    def set(self, key, value):
        self.store.set(key, value)

    def multi_get(self, keys):
        values = self.store.multi_get(keys)
        time.sleep(self.delay)
        return values


def test_time_in_which_the_store_does_not_answer_does_not_count():
    store = SlowStore(dist.HashStore())
    pulse = Pulse(store, "a", 0, 1, SILENCE)
    store.set("beat/b/0", "1")
    assert pulse.gone(["a", "b"]) == set()
    store.delay = 2 * SILENCE
    assert pulse.gone(["b"]) == set()  # an answer as old as that says nothing
    store.delay, begun = 0.0, time.monotonic()
    while not pulse.gone(["b"]):
        time.sleep(0.02)
        assert time.monotonic() - begun < 30
    assert time.monotonic() - begun > 0.8 * SILENCE
    store.set("beat/b/0", "2")
    assert pulse.gone(["b"]) == set()
    pulse.end()
    assert pulse.gone(["a"]) == {"a"}  # it has left
