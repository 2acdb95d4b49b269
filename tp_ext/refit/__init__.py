"""Weights in memory from one layout to another."""

from tp_ext.refit.lost import RankLost
from tp_ext.refit.refit_plan import Moved, RefitPlan, plan

__all__ = ["Moved", "RankLost", "RefitPlan", "plan"]
