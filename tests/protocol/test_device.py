"""The protocol in the kernels that run: clean under delays, and each planted violation is found (`device_faults.py`)."""
from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from .device_faults import BOUNDED, DELAYS, FAULTS, NO_REHOME
from .device_scene import Scene, kernels
from .planted import SMALL, text_of


@pytest.mark.parametrize("name", FAULTS)
def test_its_texts_are_in_the_kernels(name: str) -> None:
    fault = FAULTS[name]
    changes = (SMALL, *BOUNDED, *fault.delays, *fault.fault)
    for kernel in ("plan", "move", "settle"):
        assert text_of(kernel, changes).count("\n") > 50
    assert all(text_of(c[0], (SMALL, *BOUNDED, *fault.delays)) != text_of(c[0], changes) for c in fault.fault)


def test_a_kernel_that_changed_is_an_error() -> None:
    text_of("move", (SMALL, *DELAYS))
    with pytest.raises(ValueError, match="0 times in move"):
        text_of("move", (("move", "no such text", ""),))


def test_steps_of_the_kernels_one_after_the_other() -> None:
    """Under the interpreter, or on a GPU: clean as they are, and not without re-homing."""
    torch.manual_seed(0)
    with kernels():
        scene = Scene(layers=3)
        assert scene.run(5) == [0] * 5
        assert scene.device_experts.counts().total.hit > 0
    with kernels((NO_REHOME,)):
        assert Scene(layers=3).run(8)[0] > 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAULTS)
def test_found(name: str) -> None:
    """Delays alone are harmless; with the violation the count that it is named for is not zero."""
    fault = FAULTS[name]
    assert not any(fault.found(False))
    assert fault.found(True)[fault.finding] > 0


@pytest.mark.gpu
@pytest.mark.parametrize("home", ["local", "host"])
def test_fifty_thousand_steps_with_delays(home: str) -> None:
    """10^5 in all, drawn anew each time."""
    with kernels(DELAYS):
        scene = Scene(home=home, maybe_ns=4000)
        assert scene.run(50_000) == [0] * 5
    said = scene.device_experts.counts().total
    assert min(said.hit, said.late, said.miss, said.cancelled, said.wasted) > 0
    assert said.demanded == int(scene.asked)
    assert torch.cuda.is_available()
