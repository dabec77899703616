"""The kernels over expert records against their law, and the law against transformers."""

from __future__ import annotations

import inspect
import re

import pytest
import torch
from torch.nn.functional import linear

pytest.importorskip("triton")

from moe_prefetch.errors import ShapeError
from moe_prefetch.kernels.expert_mlp import fused, fused_elements, grouped
from moe_prefetch.kernels.expert_mlp.naive import E2M1, gated, moe_records, weights_of
from moe_prefetch.kernels.expert_mlp.op import _expert_mlp, expert_mlp, with_shared
from moe_prefetch.kernels.expert_mlp.record import Form, RecordLayout, plain_bytes, tiled_bytes, tiled_codes

from . import ptx_words
from .expert_cases import DEVICE, FORMS, dtype_of, hidden, records, routing, table

# Rounding of hidden states between the products, and of the result: a few units of half the type's last place.
BOUND = {torch.bfloat16: 6e-3, torch.float16: 8e-4}


def run(form, x, ids, weights, recs, limit=0.0, alpha=1.702):
    return fused.launch(x, ids, weights, table(recs), form, limit, alpha)


def law(form, x, ids, weights, recs, limit=0.0, alpha=1.702):
    return moe_records(x, ids, weights, recs, form, limit, alpha, torch.float64)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    got, want = got.detach(), want.detach()
    return float((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30))


# the law --------------------------------------------------------------------------------------------------------------------
def test_the_law_is_transformers_gpt_oss():
    from tests.experts.layouts import E, module_of

    module = module_of("gpt_oss")
    g = torch.Generator().manual_seed(0)
    for p in module.parameters():
        p.data = torch.randn(p.shape, generator=g) / p.shape[-1] ** 0.5 * 3
    from moe_prefetch.experts.homes import LocalHome, MemoryStore
    from moe_prefetch.experts.sources import ModuleSource
    from moe_prefetch.runtime import REAL

    x = torch.randn(9, 64, generator=g) * 3
    weights, ids = torch.randn(9, E, generator=g).softmax(-1).topk(2)
    want = module(x, ids, weights)
    store = MemoryStore(ModuleSource([module]), LocalHome("cpu", REAL), REAL)
    recs = [store.buffer(0, e) for e in range(E)]
    got = moe_records(x, ids, weights, recs, store.form, module.limit, module.alpha)
    assert error(got, want) < 1e-5


@pytest.mark.parametrize("kind", ["mixtral", "deepseek", "qwen3"])
def test_the_law_is_transformers_swiglu(kind):
    from moe_prefetch.experts.homes import LocalHome, MemoryStore
    from moe_prefetch.experts.sources import ModuleSource
    from moe_prefetch.runtime import REAL
    from tests.experts.layouts import E, module_of

    module = module_of(kind)
    g = torch.Generator().manual_seed(0)
    for p in module.parameters():
        p.data = torch.randn(p.shape, generator=g) / p.shape[-1] ** 0.5
    x = torch.randn(9, 64, generator=g)
    weights, ids = torch.randn(9, E, generator=g).softmax(-1).topk(2)
    want = module(x, ids, weights)
    store = MemoryStore(ModuleSource([module]), LocalHome("cpu", REAL), REAL)
    assert error(moe_records(x, ids, weights, [store.buffer(0, e) for e in range(E)], store.form), want) < 1e-5


def test_mxfp4_stands_for_what_transformers_reads_in_it():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    g = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (1, 192, 5, 16), dtype=torch.uint8, generator=g)
    scales = torch.randint(100, 129, (1, 192, 5), dtype=torch.uint8, generator=g)
    want = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)[0].T
    down, down_scales = torch.zeros(160, 3, 16, dtype=torch.uint8), torch.zeros(160, 3, dtype=torch.uint8)
    parts = {"gate_up": blocks[0], "down": down, "gate_up_scale": scales[0], "down_scale": down_scales}
    layout = RecordLayout.of(parts)
    record = torch.zeros(layout.nbytes, dtype=torch.uint8)
    layout.pack(parts, record)
    assert layout.form() == Form("mxfp4", 160, 96)
    assert torch.equal(weights_of(record, layout.form())["gate_up"], want)


def test_fp8_blocks_of_gate_and_up_are_counted_apart():
    """80 rows in blocks of 32: the third block of gate has 16 rows, and up begins a block of its own."""
    form = FORMS["fp8"]
    (record,) = records(form, 1, device="cpu")
    v = form.layout().views(record)
    plain = plain_bytes(v["gate_up"], 96).view(torch.float8_e4m3fn)
    w = weights_of(record, form, torch.float64)["gate_up"]
    for row in (0, 31, 32, 79, 80, 111, 112, 159):
        block = row // 32 if row < 80 else 3 + (row - 80) // 32
        for column in (0, 31, 32, 95):
            assert float(w[row, column]) == float(plain[row, column].float()) * float(v["gate_up_scale"][block, column // 32])


def test_a_token_alone_and_among_others_is_the_same_by_law():
    form = FORMS["bf16"]
    recs, x = records(form, 5, device="cpu"), hidden(form, 9).cpu()
    ids, weights = (t.cpu() for t in routing(9, 3, 5))
    together = moe_records(x, ids, weights, recs, form)
    for t in range(9):
        one = slice(t, t + 1)
        assert torch.equal(moe_records(x[one], ids[one], weights[one], recs, form), together[one])


def test_clamping_is_what_gpt_oss_says():
    gate_up = torch.tensor([-9.0, -1.0, 0.0, 8.0, float("nan"), 1.0, -8.0, 8.0, 0.5, -0.5, 1.0, float("nan")])
    got = gated(gate_up, 7.0, 1.702)
    for i, (g, u) in enumerate(zip(gate_up[:6].tolist(), gate_up[6:].tolist())):
        g, u = min(g, 7.0), min(max(u, -7.0), 7.0)
        want = g * torch.sigmoid(torch.tensor(1.702 * g)) * (u + 1)
        assert torch.allclose(got[i], want, equal_nan=True)


# the kernels ----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "tokens"), [(n, 1) for n in FORMS] + [("bf16", 63), ("mxfp4", 63), ("fp8", 63), ("fp16", 17)])
def test_same_as_the_law(name, tokens):
    form = FORMS[name]
    recs, x = records(form, 5), hidden(form, tokens)
    ids, weights = routing(tokens, 3, 5)
    for limit in (0.0, 1.5):
        assert error(run(form, x, ids, weights, recs, limit), law(form, x, ids, weights, recs, limit)) < BOUND[x.dtype]


def test_more_tokens_than_plan_looks_at_together_and_wide_tiles():
    form = Form("bfloat16", 40, 24)
    recs, x = records(form, 2), hidden(form, 300)
    ids, weights = routing(300, 1, 2)
    assert fused.width(form, 300, 1, 2) == 128
    assert error(run(form, x, ids, weights, recs), law(form, x, ids, weights, recs)) < BOUND[x.dtype]


def test_items_that_are_at_most_half_full_have_half_the_columns(monkeypatch):
    """Experts with 64, 65, 128 + 64 and 128 + 65 pairs: the last items lie on either side of half of 128."""
    form, counts = Form("bfloat16", 40, 24), (64, 65, 192, 193)
    recs, x = records(form, 4), hidden(form, sum(counts))
    ids = torch.repeat_interleave(torch.arange(4), torch.tensor(counts))[:, None]
    ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))].to(DEVICE)
    weights = torch.ones(len(ids), 1, device=DEVICE)
    tile = fused.tuning(form, "down", len(ids), 1, 4)
    assert tile.pairs == 128 and tile.halves and not fused.tuning(form, "down", 2000, 1, 4).halves
    got = run(form, x, ids, weights, recs)
    assert error(got, law(form, x, ids, weights, recs)) < BOUND[x.dtype]
    tuning = fused.tuning
    monkeypatch.setattr(fused, "tuning", lambda *args: tuning(*args)._replace(halves=False))
    assert torch.equal(got, run(form, x, ids, weights, recs))


@pytest.mark.parametrize("name", ["bf16_bias", "fp8_bf16_scales", "mxfp4"])
def test_whole_numbers_are_exact(name):
    """Sums of small whole numbers are exact in every order, so all differences are mistakes: a wrong row, scale, pair or weight."""
    form = FORMS[name]
    recs = records(form, 4, whole=True)
    x = torch.zeros(40, form.hidden, dtype=torch.bfloat16, device=DEVICE)
    # One element a token, in every column in turn: the result is a column of the first matrix, through the second.
    x[torch.arange(40), torch.arange(40) * 7 % form.hidden] = 1
    ids = (torch.arange(40, device=DEVICE)[:, None] + torch.tensor([[0, 2]], device=DEVICE)) % 4
    weights = torch.tensor([[1.0, 2.0]], device=DEVICE).expand(40, 2).contiguous()
    got = run(form, x, ids, weights, recs, limit=1000.0, alpha=1000.0)
    # alpha = 1000 makes the sigmoid a step, so that h is whole too: max(gate, 0) * (up + 1).
    want = torch.zeros_like(got, dtype=torch.float64)
    for t in range(40):
        for e, weight in zip(ids[t].tolist(), weights[t].tolist()):
            w = weights_of(recs[e], form, torch.float64)
            gate, up = (w["gate_up"] @ x[t].double() + w.get("gate_up_bias", torch.zeros(1, dtype=torch.float64, device=DEVICE))).chunk(2)
            mid = (gate.clamp(min=0) * (up + 1)).to(torch.bfloat16).double()
            want[t] += weight * (w["down"] @ mid + w.get("down_bias", 0))
    assert torch.equal(got, want.to(torch.bfloat16))


def test_masked_repeated_and_strange_ids():
    form = FORMS["bf16"]
    recs, x = records(form, 4), hidden(form, 6)
    ids = torch.tensor([[-1, -1, -1], [2, 2, 2], [4, 3, -7], [1, 0, 1], [1 << 40, 3, 0], [0, 1, 2]], device=DEVICE)
    weights = torch.rand(6, 3, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    got = run(form, x, ids, weights, recs)
    assert not got[0].any(), "a token without experts gets zeros"
    merged = torch.tensor([[2], [3]], device=DEVICE)
    alone = torch.stack([weights[1].sum(), weights[2, 1]])[:, None]
    assert error(got[1:3], law(form, x[1:3], merged, alone, recs)) < BOUND[x.dtype]
    assert error(got, law(form, x, ids, weights, recs)) < BOUND[x.dtype]


def test_experts_are_added_in_ascending_order_wherever_a_token_names_them():
    """Outputs 2^30, -2^30 and 1 (the biases of empty matrices): only in this order is their sum 1, and only in FP32 from zero."""
    form = FORMS["bf16_bias"]
    recs = records(form, 3)
    for record, bias in zip(recs, (2.0**30, -(2.0**30), 1.0)):
        v = form.layout().views(record)
        v["down"].zero_()
        v["down_bias"].fill_(bias)
    x = hidden(form, 6)
    ids = torch.tensor([[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]], device=DEVICE)
    ones = torch.ones(6, 3, device=DEVICE)
    for got in (run(form, x, ids, ones, recs), moe_records(x, ids, ones, recs, form)):
        assert bool((got == 1).all())


@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(1, 4, 4), (7, 3, 5), (8, 8, 3), (6, 1, 9)])
def test_few_pairs_need_no_plan(monkeypatch, tokens, top_k, experts):
    form = FORMS["bf16"]
    recs, x = records(form, experts), hidden(form, tokens)
    ids, weights = routing(tokens, top_k, experts)
    assert fused.direct(tokens)
    got = run(form, x, ids, weights, recs)
    monkeypatch.setattr(fused, "SMALL", 0)
    assert not fused.direct(tokens)
    assert torch.equal(got, run(form, x, ids, weights, recs))


def test_an_expert_that_all_tokens_choose_and_experts_without_any():
    form = FORMS["mxfp4_whole"]
    recs, x = records(form, 20), hidden(form, 50)
    ids, weights = torch.full((50, 1), 13, device=DEVICE), torch.ones(50, 1, device=DEVICE)
    assert error(run(form, x, ids, weights, recs), law(form, x, ids, weights, recs)) < BOUND[x.dtype]


@pytest.mark.parametrize("name", ["bf16", "fp8", "mxfp4"])
def test_bad_tokens_and_bad_experts_touch_no_other(name):
    form = FORMS[name]
    recs, x = records(form, 4), hidden(form, 20)
    ids, weights = routing(20, 2, 4)
    clean = run(form, x, ids, weights, recs)
    x[3, 5], x[7, 0], x[11, 1] = float("nan"), float("inf"), -float("inf")
    got = run(form, x, ids, weights, recs)
    others = [t for t in range(20) if t not in (3, 7, 11)]
    assert torch.equal(got[others], clean[others])
    want = law(form, x, ids, weights, recs)
    assert torch.equal(got.isnan(), want.isnan())
    # An expert whose memory is poison, chosen by nobody.
    recs[2].fill_(0xFF)
    mine = (ids == 2).any(-1)
    got = run(form, x, ids, weights, recs)
    keep = [t for t in others if not bool(mine[t])]
    assert torch.equal(got[keep], clean[keep])


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8_e8m0", "mxfp4"])
def test_special_hidden_states(name):
    form = FORMS[name]
    recs = records(form, 3)
    x = torch.zeros(4, form.hidden, dtype=dtype_of(form), device=DEVICE)
    x[1] = 1e-40 if x.dtype == torch.bfloat16 else 6e-8
    x[2, 0] = (1e18 if form.weights == "mxfp4" else 1e30) if x.dtype == torch.bfloat16 else 6e4
    x[3] = -0.0
    ids, weights = torch.tensor([[0], [1], [2], [0]], device=DEVICE), torch.ones(4, 1, device=DEVICE)
    got, want = run(form, x, ids, weights, recs, 7.0), law(form, x, ids, weights, recs, 7.0)
    # BF16's smallest numbers may be taken for zero by tensor cores: what they add is below any bound.
    scale = want.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    assert float(((got.double() - want).abs() / scale).max()) < 4 * BOUND[x.dtype]


def test_every_mxfp4_byte_and_scale():
    """All 256 bytes under scales from the smallest to the largest, through the kernel: one-hot tokens read columns back."""
    form = Form("mxfp4", 64, 64)
    (record,) = records(form, 1)
    v = form.layout().views(record)
    gate_up, down = torch.full((128, 2, 16), 0x77, dtype=torch.uint8), torch.zeros(64, 2, 16, dtype=torch.uint8)
    gate_up[64:].view(8, 256).copy_(torch.arange(256, dtype=torch.uint8).expand(8, 256))
    v["gate_up_scale"][:, :64] = 128
    # down is the identity over h's 64 elements
    for f in range(64):
        down[f].view(-1)[f // 2] = 2 << (f % 2 * 4)
    v["down_scale"].fill_(127)
    v["gate_up"].copy_(tiled_codes(gate_up))
    v["down"].copy_(tiled_codes(down))
    ids, ones = torch.zeros(64, 1, dtype=torch.int64, device=DEVICE), torch.ones(64, 1)
    # large tokens for the smallest scales: of what is below 2^-60 products with codes may lose bits
    for scales, size in (([0, 1, 2, 3, 7, 16, 30, 45], 2.0**60), ([66, 90, 100, 118, 125, 126, 127, 128], 1.0)):
        x = torch.eye(64, dtype=torch.bfloat16, device=DEVICE) * size
        v["gate_up_scale"][:, 64:] = torch.tensor(scales, dtype=torch.uint8, device=DEVICE).repeat_interleave(8)[None, :, None]
        value = weights_of(record, form, torch.float64)["gate_up"][64:]
        got = run(form, x, ids, ones.to(DEVICE), [record]).double().T
        want = value * 12 * size**2 / (1 + torch.exp(torch.tensor(-12.0 * size, dtype=torch.float64)))
        assert bool(((got - want).abs() <= want.abs() / 128).all())


def test_poisoned_scratch_is_never_read():
    """tests/conftest.py fills what `torch.empty` gives with NaN; ids that leave pairs out make holes in it."""
    form = FORMS["bf16"]
    recs, x = records(form, 5), hidden(form, 33)
    ids = torch.where(torch.arange(33, device=DEVICE)[:, None] % 3 == 0, -1, torch.arange(33, device=DEVICE)[:, None] % 5).expand(33, 2)
    out = run(form, x, ids.contiguous(), torch.ones(33, 2, device=DEVICE), recs)
    assert not out.isnan().any() and not out[::3].any()


def test_guards_around_records_and_scratch_stay_intact():
    form = FORMS["mxfp4"]
    recs = records(form, 4, guard=256)
    x, (ids, weights) = hidden(form, 17), routing(17, 2, 4)
    whole = recs[0]._base
    before = whole.clone()
    run(form, x, ids, weights, recs)
    assert torch.equal(whole, before)


def test_the_table_decides_what_is_read():
    """An entry that leads to a copy, with the home poisoned: the copy's numbers come out; led home again, the home's."""
    from moe_prefetch.experts.homes import LocalHome, MemoryStore
    from moe_prefetch.experts.sources import ModuleSource
    from moe_prefetch.experts.where import Where
    from moe_prefetch.runtime import REAL
    from tests.experts.layouts import E, module_of

    module = module_of("qwen3")
    g = torch.Generator().manual_seed(0)
    for p in module.parameters():
        p.data = (torch.randn(p.shape, generator=g) / 8).to(torch.bfloat16)
    store = MemoryStore(ModuleSource([module]), LocalHome(DEVICE, REAL), REAL)
    where = Where(store, DEVICE)
    x = torch.randn(5, 64, generator=g).to(torch.bfloat16).to(DEVICE)
    ids, weights = (torch.arange(5, device=DEVICE) % E)[:, None], torch.ones(5, 1, device=DEVICE)
    want = fused.launch(x, ids, weights, where.address_LE[0], store.form, 0.0, 1.0)
    slot = LocalHome(DEVICE, REAL).allocate(store.layout.nbytes).mine
    with pytest.raises(ShapeError, match="the copy holds"):
        where.point(0, 1, slot)
    slot.copy_(store.buffer(0, 1))
    where.point(0, 1, slot)
    home = store.buffer(0, 1).clone()
    store.buffer(0, 1).fill_(0xFF)
    assert torch.equal(fused.launch(x, ids, weights, where.address_LE[0], store.form, 0.0, 1.0), want)
    assert error(moe_records(x, ids, weights, where.records(0), store.form), want) < BOUND[x.dtype]
    slot.fill_(0xFF)
    store.buffer(0, 1).copy_(home)
    where.rehome(0, 1)
    assert torch.equal(fused.launch(x, ids, weights, where.address_LE[0], store.form, 0.0, 1.0), want)
    assert where.address_LE[0].tolist() == [store.address(0, e) for e in range(E)]
    for bad in (slot[1:], slot[:100], slot.view(torch.int8)):
        with pytest.raises(ShapeError, match="a copy in"):
            where.point(0, 1, bad)


# grouped --------------------------------------------------------------------------------------------------------------------
def test_grouped_products_are_the_law_too():
    form = Form("bfloat16", 64, 48, "bfloat16")
    recs, x = records(form, 5), hidden(form, 40)
    ids, weights = routing(40, 3, 5)
    assert grouped.serves(form, x.dtype, recs) and not grouped.serves(form, x.dtype, [recs[1], recs[0], *recs[2:]])
    for limit in (0.0, 1.5):
        got = grouped.launch(x, ids, weights, recs, form, limit, 1.702)
        # One rounding more than the kernels: products come out in BF16.
        assert error(got, law(form, x, ids, weights, recs, limit)) < 3 * BOUND[x.dtype]


# the op ---------------------------------------------------------------------------------------------------------------------
def args(form, tokens=3, experts=4):
    recs = records(form, experts)
    ids, weights = routing(tokens, 2, experts)
    return (hidden(form, tokens), ids, weights, table(recs), recs, form.weights, form.width, form.bias, form.scale, form.block, 0.0, 1.0)


@pytest.mark.parametrize("name", ["bf16_bias", "fp8", "mxfp4"])
def test_opcheck(name):
    torch.library.opcheck(_expert_mlp, args(FORMS[name]))


@pytest.mark.parametrize("name", FORMS)
def test_the_op_is_the_law(name):
    form = FORMS[name]
    recs, x = records(form, 4), hidden(form, 5)
    ids, weights = routing(5, 2, 4)
    got = expert_mlp(x, ids.int(), weights.to(torch.bfloat16), table(recs), form, records=recs)
    assert got.dtype == x.dtype
    assert error(got, law(form, x, ids, weights.to(torch.bfloat16), recs, 0.0)) < BOUND[x.dtype]


def test_no_tokens_and_no_experts_a_token():
    form = FORMS["bf16"]
    recs = records(form, 4)
    for tokens, k in ((0, 2), (3, 0)):
        x = hidden(form, tokens)
        ids, weights = torch.zeros(tokens, k, dtype=torch.int64, device=DEVICE), torch.zeros(tokens, k, device=DEVICE)
        # A caller on a GPU has no twin of the table.
        for twin in (recs, ()):
            out = expert_mlp(x, ids, weights, table(recs), form, records=twin)
            assert out.shape == x.shape and not out.any()


def test_shared_experts_are_records_that_every_token_uses():
    """A shared FFN twice as wide as a routed one is two records: their outputs add up."""
    form = FORMS["bf16"]
    recs, x = records(form, 6), hidden(form, 7)
    ids, weights = routing(7, 2, 4)
    share = torch.rand(7, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    all_ids, all_weights = with_shared(torch.where(ids >= 4, -1, ids), weights, 4, 2, share)
    got = run(form, x, all_ids, all_weights, recs)
    a, b = weights_of(recs[4], form, torch.float64), weights_of(recs[5], form, torch.float64)
    halves = [torch.cat([a["gate_up"].chunk(2)[i], b["gate_up"].chunk(2)[i]]) for i in (0, 1)]
    wide_down = torch.cat([a["down"], b["down"]], 1)
    shared = linear(gated(linear(x.double(), torch.cat(halves)), 0.0, 1.0), wide_down)
    want = law(form, x, torch.where(ids >= 4, -1, ids), weights, recs) + share.double()[:, None] * shared
    assert error(got, want) < BOUND[x.dtype]
    assert with_shared(ids, weights, 4, 1)[1][:, -1].eq(1).all()


def test_what_does_not_fit_is_refused_before_any_work():
    form = FORMS["bf16"]
    recs, x = records(form, 4), hidden(form, 3)
    ids, weights, where = torch.zeros(3, 2, dtype=torch.int64, device=DEVICE), torch.ones(3, 2, device=DEVICE), table(recs)
    good = {"hidden_TD": x, "ids_TK": ids, "weights_TK": weights, "where_E": where, "form": form, "records": recs}
    for change in ({"hidden_TD": x[:, :-1]}, {"ids_TK": ids[:2]}, {"ids_TK": ids.float()}, {"ids_TK": ids.bool()}, {"weights_TK": ids},
                   {"where_E": where.int()}, {"where_E": where[None]}, {"records": recs[:3]}, {"records": [r[:64] for r in recs]},
                   {"weights_TK": weights[:, :1]}, {"where_E": torch.stack([where, where], 1)[:, 0]}):
        with pytest.raises(ShapeError) as e:
            expert_mlp(**{**good, **change})
        assert e.value.expected and e.value.do
    with pytest.raises(ShapeError, match="no kernel"):
        expert_mlp(**{**good, "hidden_TD": x.float(), "records": ()})


# inline assembly, which the interpreter does not run ---------------------------------------------------------------------------
def test_the_assembly_that_decodes_mxfp4_is_what_the_interpreter_does():
    """Every code in every place of a word, through a small model of the instructions used."""
    source = inspect.getsource(fused_elements.e2m1.fn)
    bodies = [m[0] or m[1] for m in re.findall(r'inline_asm_elementwise\(\s*(?:"""\{ (.*?)\}"""|"(.*?)")', source, re.S)]
    assert len(bodies) == 4, "the assembly is where this test looks for it"
    g = torch.Generator().manual_seed(0)
    plain = torch.randint(0, 256, (8, 4, 16), dtype=torch.uint8, generator=g)
    words = tiled_codes(plain).view(torch.int32)[0]
    for group, body in enumerate(bodies):
        for row in range(8):
            for i in range(0, 16, 3):
                regs = {"$1": int(words[row, i]) & 0xFFFFFFFF}
                for line in filter(None, (t.strip() for t in body.split(";"))):
                    op, _, rest = line.partition(" ")
                    to, *sources = [s.strip() for s in rest.split(",")]
                    a, *more = [regs[s] if s in regs else int(s, 0) for s in sources]
                    regs[to] = _ptx(op, a, more)
                for lane in (0, 1):
                    code = int(plain[row, group, i]) >> (4 * lane) & 15
                    got = torch.tensor([regs["$0"] >> (16 * lane) & 0xFFFF], dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
                    want = (torch.tensor([E2M1[code]], dtype=torch.float64) * 2.0**-126).to(torch.bfloat16)
                    assert torch.equal(got.view(torch.int16), want.view(torch.int16)), (group, row, i, lane)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_assembly_that_decodes_fp8_gives_every_code_exactly(dtype):
    """All 254 numbers in both halves of a tile and of a word, beside any neighbour."""
    source = inspect.getsource(fused_elements.e4m3.fn)
    bodies = [m[0] or m[1] for m in re.findall(r'inline_asm_elementwise\(\s*(?:"""(\{.*?\})"""|"(\{.*?\})")', source, re.S)]
    assert len(bodies) == 4, "the assembly is where this test looks for it"
    number = torch.tensor([b for b in range(256) if b & 127 != 127], dtype=torch.uint8)
    plain = torch.stack([number.roll(i) for i in range(128)], 1)
    words = tiled_bytes(plain).view(torch.int32)[0]
    for half in (0, 1):
        got = ptx_words.run(bodies[half + 2 * (dtype == torch.float16)], words).view(dtype)
        want = plain[:, 64 * half : 64 * half + 64].view(torch.float8_e4m3fn).to(dtype)
        assert torch.equal(got.view(torch.int16), want.view(torch.int16))


def test_every_fp8_code_in_every_column():
    """Through the kernel: one-hot tokens read columns of `gate_up` back, through a `down` that is the identity."""
    form = Form("fp8", 144, 128, "", "float32", 128)
    (record,) = records(form, 1)
    v = form.layout().views(record)
    number = torch.tensor([b for b in range(256) if b & 127 != 127], dtype=torch.uint8)
    up = number[(torch.arange(128)[:, None] * 2 + torch.arange(144)) % 254]
    gate = torch.full((128, 144), 12.0).to(torch.float8_e4m3fn).view(torch.uint8)
    v["gate_up"].view(torch.uint8).copy_(tiled_bytes(torch.cat([gate, up])))
    v["down"].view(torch.uint8).copy_(tiled_bytes(torch.eye(144, 128).to(torch.float8_e4m3fn).view(torch.uint8)))
    v["gate_up_scale"].fill_(1.0)
    v["down_scale"].fill_(1.0)
    columns = [0, 1, 63, 64, 65, 127, 128, 143]
    x = torch.eye(144)[columns].to(torch.bfloat16).to(DEVICE)
    ids, ones = torch.zeros(len(columns), 1, dtype=torch.int64, device=DEVICE), torch.ones(len(columns), 1, device=DEVICE)
    got = run(form, x, ids, ones, [record]).float().cpu()[:, :128]
    silu = 12 / (1 + torch.exp(torch.tensor(-12.0)))
    want = (up.view(torch.float8_e4m3fn).float()[:, columns].T * silu).to(torch.bfloat16).float()
    assert torch.allclose(got, want, rtol=1 / 128, atol=0.0) and bool((got != 0).eq(want != 0).all())


def test_two_tiles_of_fp8_a_step_change_no_bit(monkeypatch):
    form = Form("fp8", 512, 128, "", "bfloat16", 128)
    recs, x, (ids, weights) = records(form, 3), hidden(form, 2), routing(2, 2, 3)
    want, tuning, steps = run(form, x, ids, weights, recs), fused.tuning, []

    def two(form, which, *rest):
        steps.append(256 if which == "gate_up" else 128)
        return tuning(form, which, *rest)._replace(step=steps[-1])

    monkeypatch.setattr(fused, "tuning", two)
    assert torch.equal(run(form, x, ids, weights, recs), want) and 256 in steps
    assert tuning(Form("fp8", 2048, 768, "", "bfloat16", 128), "gate_up", 1, 8, 128).step == 256, "one token of Qwen3-30B-A3B"
    for other in (Form("fp8", 2176, 768, "", "bfloat16", 128), Form("fp8", 2048, 768, "", "bfloat16", 64)):
        assert tuning(other, "gate_up", 1, 8, 128).step <= 128


def test_fp8_records_meet_fp16_hidden_states():
    form = FORMS["fp8_bf16_scales"]
    recs, x = records(form, 3), hidden(form, 5).to(torch.float16)
    ids, weights = routing(5, 2, 3)
    assert error(run(form, x, ids, weights, recs), law(form, x, ids, weights, recs)) < BOUND[torch.float16]


def _ptx(op: str, a: int, more: list[int]) -> int:
    if op == "shf.r.wrap.b32":
        assert a == more[0], "a rotation"
        return (a >> more[1] | a << (32 - more[1])) & 0xFFFFFFFF
    if op == "shl.b32":
        return a << more[0] & 0xFFFFFFFF
    if op == "and.b32":
        return a & more[0]
    if op == "mul.lo.u32":
        return a * more[0] & 0xFFFFFFFF
    assert op == "mul.rn.bf16x2"
    out = 0
    for lane in (0, 16):
        x, y = (torch.tensor([n >> lane & 0xFFFF], dtype=torch.int32).to(torch.int16).view(torch.bfloat16).double() for n in (a, more[0]))
        out |= int((x * y).to(torch.bfloat16).view(torch.int16)) % 65536 << lane
    return out
