"""The process-group backend ``tp_shm``: collectives on CPU tensors of ranks on one host, over shared memory.

Importing ``tp_ext`` registers it: ``init_process_group("cpu:tp_shm")`` or ``new_group(backend="tp_shm")``.
"""

# [Note: small collectives on one host go through our own shared memory]
import datetime
from typing import Any

import torch.distributed as dist

from tp_ext._build import load

BACKEND = "tp_shm"


def _create(options: Any, _: Any) -> Any:
    timeout = options.timeout
    if not isinstance(timeout, datetime.timedelta):  # torch gives seconds or a timedelta
        timeout = datetime.timedelta(seconds=timeout)
    return load().create_shm_backend(
        options.store, options.group_rank, options.group_size, timeout, str(options.group_id)
    )


def register() -> None:
    """Registers the backend with torch, once."""
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])


if dist.is_available():
    register()
