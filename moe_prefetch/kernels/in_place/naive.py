"""The law: for each program the exclusive or of the 32-bit words that it reads, and the words as they were."""
from __future__ import annotations

import numpy as np
import torch

BLOCK = 4096  # words that a program reads at a time, in turns with the others


def read(memory: torch.Tensor, programs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(exclusive ors int32 [programs], a copy) of a uint8 tensor whose size is a multiple of 4."""
    words = memory.contiguous().view(torch.int32)
    whole = torch.nn.functional.pad(words, (0, -len(words) % (programs * BLOCK)))
    turns = whole.view(-1, programs, BLOCK).transpose(0, 1).flatten(1).cpu().numpy()
    return torch.from_numpy(np.bitwise_xor.reduce(turns, axis=1)).to(memory.device), memory.clone()
