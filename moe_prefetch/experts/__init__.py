"""The expert wing: planner decides, slots hold, mover moves, compute computes, ledger counts."""
