"""The record of a run on fake tensors: operators, with rules for the dims that their tensors share."""
