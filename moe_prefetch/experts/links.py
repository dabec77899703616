"""Measures the links between a GPU and the homes of experts, for `distributed.topology`."""
from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ..distributed.topology import SIZES
from ..kernels.in_place.op import in_place
from ..runtime import Runtime
from .homes import Home

PROGRAMS = {"read": 512, "move": 64}


class HomeProbe:
    """Links from each home to `device`: `read`, `move` and `copy`. Of a home that ranks share, the next rank's memory.

    Allocates the largest size measured in every home; `close` gives it back. With a CPU for a device, and the runtime's clock, the same
    runs without a GPU.
    """

    def __init__(self, homes: Sequence[Home], device: torch.device | str, runtime: Runtime) -> None:
        self._device, self._runtime = torch.device(device), runtime
        self._blocks = {home.name: home.allocate(SIZES[-1]) for home in homes}
        self._far = {}
        for home in homes:
            block, other = self._blocks[home.name], (home.rank + 1) % len(self._blocks[home.name].bases)
            view = block.views[other] if block.views else block.mine
            # Read before it is measured: pages that nobody has touched may not be there.
            view.copy_(torch.arange(SIZES[-1] // 8, dtype=torch.int64).view(torch.uint8)) if other == home.rank else None
            self._far[home.name] = (view, torch.tensor([block.bases[other]], dtype=torch.int64, device=self._device))
        self._target = runtime.allocate_on(SIZES[-1], self._device)
        self._found = {way: torch.zeros(n, dtype=torch.int32, device=self._device) for way, n in PROGRAMS.items()}

    def machine(self) -> Mapping[str, str]:
        """Devices by name and order, driver, torch."""
        said = {"device": str(self._device), "homes": ", ".join(self._blocks), "torch": torch.__version__, "driver": "none"}
        if self._device.type == "cuda":
            # Not every torch says which driver there is.
            driver = getattr(torch._C, "_cuda_getDriverVersion", lambda: "unknown")()
            said |= {"driver": str(driver), "cuda": str(torch.version.cuda),
                     "gpus": ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))}
        return said

    def ways(self) -> Sequence[tuple[str, str]]:
        return [(place, way) for place in self._blocks for way in ("read", "move", "copy")]

    def seconds(self, place: str, way: str, nbytes: int) -> float:
        view, where = self._far[place]
        cuda = self._device.type == "cuda"
        if cuda:
            torch.cuda.synchronize(self._device)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record(torch.cuda.current_stream(self._device))
        began = self._runtime.now()
        if way == "copy":
            self._target[:nbytes].copy_(view[:nbytes], non_blocking=True)
        else:
            in_place(where, nbytes, self._found[way], out=self._target if way == "move" else None, memory=() if cuda else (view,))
        if not cuda:
            return self._runtime.now() - began
        end.record(torch.cuda.current_stream(self._device))
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def close(self) -> None:
        """The memory to the system."""
        for block in self._blocks.values():
            block.release()
        self._blocks, self._far = {}, {}
