"""Tests of the planner: no ranks, no GPU."""
