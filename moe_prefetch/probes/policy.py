"""Which plan runs under the name that was asked for."""
from __future__ import annotations

import difflib

from ..config import Config
from ..errors import ConfigError
from ..experts.planner import POLICIES, Policy
from .forecast import Forecaster


def policy_of(config: Config, plan: str | None, forecaster: Forecaster | None) -> Policy:
    """The policy that will run under the name asked for. Raises ConfigError where another one would have to stand in for it."""
    name = config.experts.plan if plan is None else plan
    if name not in ("auto", *POLICIES):
        near = difflib.get_close_matches(str(name), POLICIES, n=1)
        raise ConfigError(f"there is no plan {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""), where="plan",
                          expected=", ".join(("auto", *POLICIES)), do="name one of them")
    if config.experts.home == "local" and (plan not in (None, "auto") or forecaster is not None):
        raise ConfigError("a plan or forecaster was given, but experts.home is local: nothing moves", where="attach",
                          do="set experts.home: disk, or drop them")
    if forecaster is None and (name == "oracle" or (name == "probe" and config.probe.path is None)):
        raise ConfigError(f"plan {name} was asked for without its source", where="plan",
                          expected="a forecaster that knows the future" if name == "oracle" else "probe.path, a fitted probe",
                          do="give it, or use plan: stale (the unfitted gate)")
    if config.experts.home == "host" and name == "lru":
        raise ConfigError("plan lru was asked for, but experts.home: host reads on demand in place", where="plan",
                          expected="recent, stale, probe", do="name one of them")
    if name == "auto":
        name = "probe" if config.probe.path is not None else "stale"
    return POLICIES[name]
