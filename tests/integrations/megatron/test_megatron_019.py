"""Megatron-core 0.19.2; `checks.py` has the tests."""
from tests.integrations.megatron.checks import Checks


class TestMegatron019(Checks):
    version = "0.19.2"
    nightly = ("learns_one", "learns_tp2ep2", "learns_pp2ep2", "smolmoe_logits", "smolmoe_taps", "saves_the_whole_model",
               "matrix_tp2ep2_alltoall", "matrix_ep4_alltoall")
