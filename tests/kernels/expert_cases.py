"""Records with random weights in every form, for tests and benchmarks of the kernels over them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moe_prefetch.kernels.expert_mlp.record import LINE, Form, tiled_bytes, tiled_codes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Odd sizes: rows and columns that no tile divides, one token's worth of everything.
FORMS = {
    "bf16": Form("bfloat16", 96, 72),
    "bf16_bias": Form("bfloat16", 200, 40, "bfloat16"),
    "fp16": Form("float16", 100, 63, "float32"),
    "tiny": Form("float16", 1, 1),
    "fp8": Form("fp8", 96, 80, "", "float32", 32),
    "fp8_bf16_scales": Form("fp8", 144, 112, "bfloat16", "bfloat16", 64),
    "fp8_e8m0": Form("fp8", 160, 48, "", "float8_e8m0fnu", 128),
    "mxfp4": Form("mxfp4", 160, 96, "bfloat16"),
    "mxfp4_whole": Form("mxfp4", 128, 256),
}


def dtype_of(form: Form) -> torch.dtype:
    return torch.float16 if form.weights == "float16" else torch.bfloat16


def records(form: Form, experts: int, *, seed: int = 0, whole: bool = False, device: str = DEVICE, guard: int = 0) -> list[torch.Tensor]:
    """Records in one block. `whole`: small whole numbers, whose sums are exact in any order."""
    layout, g = form.layout(), torch.Generator().manual_seed(seed)
    raw = torch.full(((layout.nbytes + guard) * experts + LINE + guard,), 0xA5, dtype=torch.uint8)
    start = -raw.data_ptr() % LINE
    raw = raw.to(device)
    if device != "cpu":
        start = -raw.data_ptr() % LINE
    out = []
    for e in range(experts):
        at = start + guard + e * (layout.nbytes + guard)
        record = raw[at : at + layout.nbytes]
        record.zero_()
        for name, view in layout.views(record).items():
            view.view(torch.uint8).copy_(_part(form, name, view, g, whole).view(torch.uint8))
        out.append(record)
    return out


def _part(form: Form, name: str, view: torch.Tensor, g: torch.Generator, whole: bool) -> torch.Tensor:
    shape, dtype = view.shape, view.dtype
    if name.endswith("_scale"):
        if dtype in (torch.uint8, torch.float8_e8m0fnu):
            low, high = (127, 129) if whole else (118, 124)
            return torch.randint(low, high, shape, generator=g, dtype=torch.uint8).view(dtype)
        return (torch.randint(1, 3, shape, generator=g) if whole else torch.rand(shape, generator=g) * 0.02).to(dtype)
    if dtype == torch.uint8:
        codes = torch.randint(0, 256, shape, generator=g, dtype=torch.uint8)
        if not whole:
            return codes
        # Of whole numbers the codes 0, 2 and 4, with signs: 0, 1, 2.
        tiles, rows, _ = shape
        return tiled_codes(torch.tensor([0, 2, 4, 8, 10, 12], dtype=torch.uint8)[codes.long() % 6].view(rows, tiles * 4, 16) * 17)
    if dtype == torch.float8_e4m3fn:
        # The last tile's further columns are zero, as `pack` leaves them.
        rows, columns = shape[1], form.hidden if name == "gate_up" else form.width
        plain = torch.randint(-2, 3, (rows, columns), generator=g) if whole else torch.randn(rows, columns, generator=g) * 4
        return tiled_bytes(plain.to(dtype).view(torch.uint8))
    if whole:
        return torch.randint(-2, 3, shape, generator=g).to(dtype)
    width = 1.0 if name.endswith("bias") else shape[-1] ** -0.5
    return (torch.randn(shape, generator=g) * width).to(dtype)


def table(records: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([r.data_ptr() for r in records], dtype=torch.int64, device=records[0].device)


def routing(tokens: int, top_k: int, experts: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random ids, with repetitions and masked ones among them, and weights."""
    g = torch.Generator().manual_seed(seed)
    return (torch.randint(-1, experts + 1, (tokens, top_k), generator=g).to(DEVICE), torch.rand(tokens, top_k, generator=g).to(DEVICE))


def hidden(form: Form, tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(tokens, form.hidden, generator=torch.Generator().manual_seed(seed)).to(dtype_of(form)).to(DEVICE)
