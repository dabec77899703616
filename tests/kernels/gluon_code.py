"""Compile the Gluon kernels of pages, of MLA and of experts, for one token and for many, for sm_90 and say what their machine code is like.
No GPU is needed.

usage: python tests/kernels/gluon_code.py [NAME ...]

One JSON object a line: name, instructions (encoder: of all; MLA: of the loop over pages; experts: of a step with tiles of full width;
one token: of the longest loop over columns), products (tensor instructions), waits (for those that run on), matrices (read from and stored
to shared memory), lookups (8-byte loads from there), barriers, spills, registers; experts also copies (of the bulk kind, in the whole
kernel) and wide (tensor instructions of 256 columns in a step).
"""

from __future__ import annotations

import json
import re
import sys

from ahead import compile_only
from listing import loops
from machine_code import listing_of


def encoder(kind: str, dim: int) -> str:
    import torch

    from moe_prefetch.kernels.kv_encode import fused, fused_pages
    from moe_prefetch.kernels.kv_encode.naive import empty_pages
    from moe_prefetch.kernels.kv_encode.records import neutral_book, runs_for
    from moe_prefetch.kv.format import format_of, layout_for

    kernels = compile_only()
    fused_pages.programs_on = lambda device: 527
    layout = layout_for(format_of(kind), dim, dim)
    x = torch.zeros(300, 8, dim, dtype=torch.bfloat16)
    runs = torch.tensor(runs_for([0, 1, 2], 0, 300, 0), dtype=torch.int32)
    fused.encode(empty_pages(3, 8, layout), x, x, runs, neutral_book(layout, 8), layout)
    return listing_of(next(k for k in kernels if k.metadata.name == "encode_pages"))


def latent() -> str:
    import torch

    from moe_prefetch.kernels.kv_attend import fused_latent, general_latent
    from moe_prefetch.kernels.kv_encode.records import neutral_book
    from moe_prefetch.kv.format import PageLayout, format_of

    kernels = compile_only()
    fused_latent.programs_on = lambda device: 256
    layout = PageLayout(format_of("fp4-72"), 512, 0, 0, 64)
    i32 = lambda *shape: torch.zeros(*shape, dtype=torch.int32)  # noqa: E731
    half = lambda n, d: torch.zeros(16, 1, n, d, dtype=torch.float16)  # noqa: E731
    general_latent.attend(
        torch.zeros(16, 16, 1, 576, dtype=torch.bfloat16), i32(16), torch.zeros(1, 1, layout.page_bytes, dtype=torch.uint8), i32(16, 256),
        i32(16), i32(16), half(4, 576), half(4, 0), half(65, 576), half(65, 0), i32(16), neutral_book(layout, 1), layout, scale=576**-0.5)
    return listing_of(next(k for k in kernels if k.metadata.name == "attend_latent"))


def experts(which: int) -> str:
    import torch

    from moe_prefetch.kernels.expert_mlp import fused, fused_prefill
    from moe_prefetch.kernels.expert_mlp.record import Form

    kernels = compile_only()
    fused.PREFILL, fused_prefill.serves = True, lambda *a: True
    ids = torch.zeros(1024, 2, dtype=torch.int64)
    fused.launch(torch.zeros(1024, 4096, dtype=torch.bfloat16), ids, torch.zeros(1024, 2), torch.zeros(8, dtype=torch.int64),
                 Form("bfloat16", 4096, 14336), 0.0, 1.0)
    return listing_of([k for k in kernels if k.metadata.name == "product"][which])


def token(which: int) -> str:
    import torch

    from moe_prefetch.kernels.expert_mlp import fused_token
    from moe_prefetch.kernels.expert_mlp.record import Form

    kernels = compile_only()
    fused_token.launch(torch.zeros(1, 2880, dtype=torch.bfloat16), torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, 4),
                       torch.zeros(128, dtype=torch.int64), Form("mxfp4", 2880, 2880, "bfloat16"), 7.0, 1.702)
    return listing_of(kernels[which])


CASES = {
    "encode_d64": lambda: encoder("fp4-72", 64), "encode_d128": lambda: encoder("fp4-quality", 128), "latent": latent,
    "experts_gate_up": lambda: experts(0), "experts_down": lambda: experts(1),
    "token_gate_up": lambda: token(0), "token_down": lambda: token(1),
}


def facts(name: str) -> dict[str, object]:
    code = CASES[name]()
    of = lambda body: sum("HMMA" in t for t in body)  # noqa: E731
    body = re.findall(r"^\s+/\*[0-9a-f]{4,5}\*/\s+(.*?);", code, re.M)
    whole = body
    if name == "latent":
        body = max(loops(code), key=lambda b: (sum("HGMMA" in t for t in b), -len(b)))
    if name.startswith("experts"):
        body = min((b for b in loops(code) if any("HGMMA.64x256x16" in t for t in b)), key=len)
    if name.startswith("token"):
        body = max((b for b in loops(code) if of(b)), key=len)
    count = lambda pattern: sum(bool(re.search(pattern, t)) for t in body)  # noqa: E731
    more = {"copies": sum("UTMALDG" in t for t in whole), "wide": count(r"HGMMA\.64x256x16")} if name.startswith("experts") else {}
    return {
        "name": name,
        "instructions": len(body),
        "products": count("HG?MMA|IMMA"),
        "waits": count(r"WARPGROUP\.DEPBAR"),
        "matrices": count(r"(LD|ST)SM"),
        "lookups": count(r"LDS\.64"),
        "barriers": count(r"BAR\.SYNC"),
        "spills": sum(bool(re.search(r"\b(STL|LDL)\b", t)) for t in (whole if "expert" in name or "token" in name else body)),
        "registers": int(re.search(r"REG:(\d+)", code)[1]),
        **more,
    }


if __name__ == "__main__":
    for name in sys.argv[1:] or CASES:
        print(json.dumps(facts(name)), flush=True)
