"""How much memory operators take at once."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class Peak(TorchDispatchMode):
    """The most bytes at once of storages that operators made while it was active."""

    def __init__(self):
        super().__init__()
        self.most = 0
        self.live = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        known = {a.untyped_storage()._cdata for a in args if isinstance(a, torch.Tensor)}  # views are not new
        self.live = {key: entry for key, entry in self.live.items() if not entry[0].expired()}
        for tensor in result if isinstance(result, list | tuple) else [result]:
            if (
                not isinstance(tensor, torch.Tensor) or tensor.untyped_storage().device.type == "meta"
            ):  # a fake one, too
                continue
            if (storage := tensor.untyped_storage())._cdata not in known:
                self.live.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.most = max(self.most, sum(size for _, size in self.live.values()))
        return result
