"""Planner and simulator of training steps: which layout is fastest, how long its step takes, whether it fits, before a
machine is rented. No process group and no GPU; seconds, bytes, FLOP/s."""

from tp_ext.planner.calibrate import calibrate
from tp_ext.planner.config import from_config
from tp_ext.planner.goodput import Goodput, goodput
from tp_ext.planner.layout import Layout
from tp_ext.planner.machine import Cluster, Device, EfficiencyCurve, Link
from tp_ext.planner.measure import measure
from tp_ext.planner.pipeline import Timeline, simulate_pipeline
from tp_ext.planner.prediction import CollectiveRow, Prediction, StageMemory, predict
from tp_ext.planner.presets import SOURCES, cluster, device
from tp_ext.planner.search import search
from tp_ext.planner.share_times import measure_shares
from tp_ext.planner.trace import trace
from tp_ext.planner.workload import Block, Op, Workload, transformer

__all__ = [
    "SOURCES",
    "Block",
    "Cluster",
    "CollectiveRow",
    "Device",
    "EfficiencyCurve",
    "Goodput",
    "Layout",
    "Link",
    "Op",
    "Prediction",
    "StageMemory",
    "Timeline",
    "Workload",
    "calibrate",
    "cluster",
    "device",
    "from_config",
    "goodput",
    "measure",
    "measure_shares",
    "predict",
    "search",
    "simulate_pipeline",
    "trace",
    "transformer",
]
