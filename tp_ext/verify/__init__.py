"""Proof by running: a model written with tensor-parallel layers computes and learns the same on every number of ranks.

``tp_ext.verify(make_model, example)`` in a program or a test, ``python -m tp_ext.verify module:make_model`` on the
command line; docs/guide/verify.md.
"""

import inspect
import sys
from types import ModuleType

from tp_ext.verify.report import Finding, Report
from tp_ext.verify.verification import verify

__all__ = ["Finding", "Report", "verify"]
__signature__ = inspect.signature(verify)  # of this module, which is called as its function


class _Callable(ModuleType):
    """The type of this module."""

    __call__ = staticmethod(verify)


sys.modules[__name__].__class__ = _Callable
