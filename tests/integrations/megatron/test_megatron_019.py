"""Megatron-core 0.19.2; `checks.py` has the tests."""
from tests.integrations.megatron.checks import Checks


class TestMegatron019(Checks):
    version = "0.19.2"
