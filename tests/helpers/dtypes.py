"""The default dtype of tensors, for a while."""

import contextlib

import torch


@contextlib.contextmanager
def default_dtype(dtype):
    """Makes ``dtype`` the default, and fp32 again at the end."""
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
