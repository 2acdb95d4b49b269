"""A process that has trained elastically ends with 0, however its program ends."""

import os
import subprocess
import sys

import pytest
import torch.distributed as dist

PROGRAM = """
import sys
import torch
import torch.distributed as dist
import tp_ext

number, port, ends = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
dist.init_process_group("gloo", store=dist.PrefixStore(f"job {number}", store.clone()), rank=0, world_size=1)
model = tp_ext.ColumnParallelLinear(8, 16, group=dist.group.WORLD)
optimizer = torch.optim.AdamW(model.parameters())
options = {"group": dist.group.WORLD, "store": store, "replica": str(number), "min_replicas": 4}
elastic = tp_ext.parallel.ElasticData(model, optimizer, **options)
for _ in range(2):
    with elastic.begin():
        model(torch.randn(4, 8)).sum().backward()
        elastic.average(4)
        optimizer.step()
        optimizer.zero_grad()
        elastic.commit()
if "close" in ends:
    elastic.close()
if "destroy" in ends:
    dist.destroy_process_group()
print("done")
"""


@pytest.mark.timeout(200)
def test_it_ends_with_0():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = os.environ | {"RES_OPTIONS": "timeout:1 attempts:1"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(number), str(store.port), ends],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number, ends in enumerate(["close and destroy", "close", "destroy", "neither"])
    ]
    outputs = [process.communicate(timeout=150)[0] for process in started]
    assert [process.returncode for process in started] == [0] * 4, outputs
    assert all("done" in output for output in outputs)
