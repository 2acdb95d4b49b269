"""Sharded models as files that run without their Python code: of each rank a package of AOTInductor and its weights."""

from tp_ext.export.load import ExportedModel, load_exported
from tp_ext.export.write import export_model

__all__ = ["ExportedModel", "export_model", "load_exported"]
