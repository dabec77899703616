"""Megatron-core 0.16.1, the last version for Python 3.11; `checks.py` has the tests."""
from tests.integrations.megatron.checks import Checks


class TestMegatron016(Checks):
    version = "0.16.1"
    nightly = ("learns_ep2", "learns_ep4", "learns_tp2", "learns_pp2", "serve_tp2ep2", "matrix_tp2ep2_allgather", "matrix_ep4_allgather")
