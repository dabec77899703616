"""Traces: what is read is what was recorded; an interruption costs one shard; damage is named; foreign formats."""
from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from moe_prefetch.errors import ArtefactError, BudgetError, ProbeMismatchError, SessionError, ShapeError
from moe_prefetch.probes.batches import Memory
from moe_prefetch.probes.collect import Collector, Step, recent_past
from moe_prefetch.probes.fit import fit
from moe_prefetch.probes.probe import normalise, select
from moe_prefetch.probes.targets import FitConfig
from moe_prefetch.probes.traces import Trace, TraceWriter, read_ids, read_megatron
from moe_prefetch.runtime import Runtime
from moe_prefetch.seam import open_model
from tests.probes.synthetic import D, E, L, gates, step
from tests.probes.test_fit import Dying, Stop
from tests.tiny import tiny

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"


def same(a: Step, b: Step) -> bool:
    pairs = ((a.taps.residual_LTD.bfloat16(), b.taps.residual_LTD), (a.taps.moe_input_LTD.bfloat16(), b.taps.moe_input_LTD),
             (a.taps.logits_LTE, b.taps.logits_LTE), (a.ids_TLK, b.ids_TLK), (a.start_T, b.start_T))
    return all(torch.equal(x, y) for x, y in pairs)


def cut(whole: Step, size: int, i: int) -> Step:
    a, b = size * i, size * (i + 1)
    return Step(whole.taps.slice(a, b), whole.ids_TLK[a:b], whole.start_T[a:b])


def write(folder: Path, steps: list[Step], **kw: object) -> TraceWriter:
    writer = TraceWriter(folder, gates(), **{"shard_tokens": 100, **kw})
    for s in steps:
        writer.add(s)
    writer.flush()
    return writer


def test_round_trip(tmp_path: Path) -> None:
    steps = [step(gates(), 60, i) for i in range(5)]
    write(tmp_path, steps)
    trace = Trace(tmp_path, gates())
    assert len(trace) == 3 and trace.tokens == 300
    whole = trace.all()
    assert all(same(s, cut(whole, 60, i)) for i, s in enumerate(steps))
    assert trace.routing().start_T.sum() == 5
    with pytest.raises(ProbeMismatchError):
        Trace(tmp_path, gates(seed=1))
    with pytest.raises(ProbeMismatchError):
        TraceWriter(tmp_path, gates(seed=1))


def test_cap_is_kept(tmp_path: Path) -> None:
    one = TraceWriter(tmp_path / "a", gates(), shard_tokens=100)
    one.add(step(gates(), 100, 0))
    size = sum(f.stat().st_size for f in (tmp_path / "a").glob("shard-*"))
    writer = write(tmp_path / "b", [step(gates(), 100, i) for i in range(6)], cap_bytes=int(2.5 * size))
    assert writer.full and writer.position == 2
    assert sum(f.stat().st_size for f in (tmp_path / "b").glob("shard-*")) <= 2.5 * size
    with pytest.raises(BudgetError, match="less than one shard"):
        TraceWriter(tmp_path / "c", gates(), cap_bytes=1000)


def test_killed_at_any_moment_it_loses_at_most_a_shard(tmp_path: Path) -> None:
    steps = [step(gates(), 50, i) for i in range(8)]
    died = 0
    for at in range(1, 20):
        folder = tmp_path / str(at)
        added = 0
        try:
            writer = TraceWriter(folder, gates(), shard_tokens=100, runtime=Dying(at))
            for s in steps:
                writer.add(s)
                added += 1
            writer.flush()
        except Stop:
            died += 1
        again = TraceWriter(folder, gates(), shard_tokens=100)
        # Two steps make a shard; the one at hand when it died may be lost with the step before it.
        assert added - again.position < 2, f"killed at disk call {at}"
        for s in steps[again.position :]:
            again.add(s)
        again.flush()
        whole = Trace(folder).all()
        assert whole.start_T.shape[0] == 400
        assert all(same(s, cut(whole, 50, i)) for i, s in enumerate(steps))
        assert {p.name for p in folder.iterdir()} == {"trace.json", *(f"shard-{i:05d}.safetensors" for i in range(4))}
    assert died > 10, "it never died: the test tests nothing"


def test_what_is_not_the_traces_stays(tmp_path: Path) -> None:
    """Shards of somebody else's in the folder: those that could be a trace's own are refused, the others are no business of ours."""
    others = [tmp_path / name for name in ("shard-00001-of-00004.safetensors", "shard-eval.safetensors", ".shard-mine.tmp")]
    for path in others:
        path.write_text("mine")
    write(tmp_path, [step(gates(), 100, 0)])
    (tmp_path / "shard-00007.safetensors").write_text("mine")
    write(tmp_path, [step(gates(), 100, 1)])
    assert len(Trace(tmp_path)) == 2 and all(p.read_text() == "mine" for p in (*others, tmp_path / "shard-00007.safetensors"))
    (tmp_path / "trace.json").rename(tmp_path / "lost")
    before = {p: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(ArtefactError, match=r"shard-00000\.safetensors would be replaced"):
        TraceWriter(tmp_path, gates(), shard_tokens=100)
    (tmp_path / "trace.json").write_text('{"format": "mine"}')
    before[tmp_path / "trace.json"] = b'{"format": "mine"}'
    with pytest.raises(ArtefactError, match=r"trace\.json would be replaced.*name another folder"):
        TraceWriter(tmp_path, gates(), shard_tokens=100)
    assert before == {p: p.read_bytes() for p in tmp_path.iterdir()}


def test_a_folder_where_nothing_was_stored_yet_takes_another_model(tmp_path: Path) -> None:
    TraceWriter(tmp_path, gates())
    TraceWriter(tmp_path, gates(seed=1), shard_tokens=100).add(step(gates(seed=1), 100, 0))
    assert len(Trace(tmp_path, gates(seed=1))) == 1


@pytest.mark.parametrize("spoil", ["truncate", "flip", "missing", "swap", "link", "outside", "tokens", "version", "text", "twice"])
def test_damage_is_named_and_refused(tmp_path: Path, spoil: str) -> None:
    folder = tmp_path / "t"
    write(folder, [step(gates(), 100, i) for i in range(2)])
    shard, manifest = folder / "shard-00001.safetensors", folder / "trace.json"
    data, m = bytearray(shard.read_bytes()), json.loads(manifest.read_text())
    named = "shard-00001"
    if spoil == "truncate":
        shard.write_bytes(data[:-10])
    elif spoil == "flip":
        data[len(data) // 2] ^= 4
        shard.write_bytes(data)
    elif spoil == "missing":
        shard.unlink()
    elif spoil == "swap":
        shard.write_bytes((folder / "shard-00000.safetensors").read_bytes())
    elif spoil == "link":
        shard.rename(tmp_path / "x")
        shard.symlink_to(tmp_path / "x")
    elif spoil == "outside":
        m["shards"][1]["file"] = named = "../x"
    elif spoil == "tokens":
        m["shards"][1]["tokens"] = 99
    elif spoil == "version":
        m["version"], named = 7, "trace.json"
    elif spoil == "twice":
        m["shards"].append(m["shards"][1])
    else:
        m["shards"][1]["bytes"], named = "many", "trace.json"
    if spoil in ("outside", "tokens", "version", "text", "twice"):
        manifest.write_text(json.dumps(m))
    with pytest.raises(ArtefactError) as e:
        Trace(folder).all()
    assert named in str(e.value)
    if spoil in ("truncate", "flip", "swap"):
        with pytest.raises(ArtefactError, match=named):
            fit(gates(), Trace(folder), {"a": step(gates(), 50, 9).taps}, tmp_path / "out", FitConfig(rank=8, linear=4, steps=5, batch=50))


def test_of_two_writers_in_a_folder_one_goes_on_and_nothing_is_lost(tmp_path: Path) -> None:
    a, b = (TraceWriter(tmp_path, gates(), shard_tokens=100) for _ in range(2))
    steps = [step(gates(), 100, i) for i in range(3)]
    a.add(steps[0])
    with pytest.raises(ArtefactError, match="another process"):
        b.add(steps[1])
    late = TraceWriter(tmp_path, gates(), shard_tokens=100)
    a.add(steps[2])
    with pytest.raises(ArtefactError, match="another process"):
        late.add(steps[1])
    whole = Trace(tmp_path).all()
    assert whole.start_T.shape[0] == 200 and all(same(s, cut(whole, 100, i)) for i, s in enumerate((steps[0], steps[2])))
    assert not list(tmp_path.glob(".*"))


def test_a_writer_that_opens_while_another_stores_waits(tmp_path: Path) -> None:
    """Or it would take the shard that no manifest names yet for a rest."""
    first = TraceWriter(tmp_path, gates(), shard_tokens=100)
    opened: list[TraceWriter] = []

    class Slow(Runtime):
        def replace(self, src: Path, dst: Path) -> None:
            super().replace(src, dst)
            if not opened:
                thread = threading.Thread(target=lambda: opened.append(TraceWriter(tmp_path, gates(), shard_tokens=100)))
                thread.start()
                thread.join(0.3)
                opened.append(first)
                assert len(opened) == 1, "it opened in the middle"

    first.runtime = Slow()
    first.add(step(gates(), 100, 0))
    assert Trace(tmp_path).all().start_T.shape[0] == 100


# recording a model --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe"])
def test_collector_sees_what_the_model_computed(family: str) -> None:
    model = tiny(family).eval()
    host, got = open_model(model), []
    ids = torch.randint(2, 90, (2, 9))
    inner = {}
    for layer, block in enumerate(host.blocks):
        block.post_attention_layernorm.register_forward_pre_hook(lambda m, args, layer=layer: inner.__setitem__(layer, args[0][:, :9]))
    with host.observe(Collector(host.num_layers, got.append)), torch.no_grad():
        out = model(ids, output_hidden_states=True)
        stream = {k: v.reshape(-1, v.shape[-1]) for k, v in inner.items()}
        model(ids[:, :1])
    s = got[0]
    assert s.start_T.tolist() == ([True] + [False] * 8) * 2 and not got[1].start_T.any()
    for layer in range(host.num_layers):
        assert torch.equal(s.taps.residual_LTD[layer], out.hidden_states[layer].reshape(-1, s.taps.residual_LTD.shape[-1]))
        # The MoE input, through the layer's own norm and gate, is the router's output: bit for bit.
        gate, mlp = host.gates[layer], host.blocks[layer].mlp
        x = normalise(stream[layer], gate)
        logits = torch.nn.functional.linear(x, gate.weight_ED)
        assert torch.equal(logits, s.taps.logits_LTE[layer])
        assert torch.equal(select(logits, gate).sort(1).values, s.ids_TLK[:, layer].sort(1).values)
        assert gate.shared == (family == "qwen2_moe")
        with torch.no_grad():
            shared = torch.sigmoid(mlp.shared_expert_gate(x)) * mlp.shared_expert(x) if gate.shared else torch.zeros(())
        torch.testing.assert_close(s.taps.moe_input_LTD[layer], stream[layer] + shared, rtol=1e-5, atol=1e-5)


def test_the_recent_past_is_what_decoding_would_carry() -> None:
    unit, start = torch.randn(2, 40, 5), torch.zeros(40, dtype=torch.bool)
    start[[0, 7, 8, 30]] = True
    got, past = recent_past(unit, start), torch.zeros(2, 5)
    for t in range(40):
        past = torch.zeros(2, 5) if start[t] else past
        torch.testing.assert_close(got[:, t], past, atol=2e-3, rtol=0)
        past = (past + unit[:, t]) / 2
    assert not got[:, start].any() and got[:, ~start].any()
    assert recent_past(unit[:, :1], start[:1]).shape == (2, 1, 5) and recent_past(unit[:, :0], start[:0]).shape == (2, 0, 5)


def test_collector_refuses_a_pass_with_holes_and_ignores_one_that_never_began() -> None:
    got: list[Step] = []
    c = Collector(2, got.append)
    c.step_begin(1, 3)
    c.step_end()
    assert not got
    c.step_begin(1, 3)
    c.moe_input(0, torch.zeros(3, 4))
    with pytest.raises(SessionError, match="tap"):
        c.step_end()


# foreign formats ----------------------------------------------------------------------------------------------------------
def megatron(folder: Path, steps: list[Step], specs: list, *, hidden: bool = True) -> None:
    """A trace as Megatron-core 0.19.2's RouterTracer lays it out: records per (step, layer), bf16 side files, 0-based layer numbers with
    dense layers between, one MTP record that must be left out."""
    folder.mkdir(exist_ok=True)
    lines, sides = [], {"hidden_states": bytearray(), "logits": bytearray()}
    for n, s in enumerate(steps):
        for layer, spec in enumerate(specs):
            tokens = s.ids_TLK.shape[0]
            record = {"step": n + 40, "stage": "pre_dispatch", "block": "decoder", "layer": 2 * layer + 1, "rank": 0, "num_tokens": tokens,
                      "topk": 2, "top_indices": s.ids_TLK[:, layer].tolist()}
            if hidden:
                x = s.taps.moe_input_LTD[layer]
                normed = spec.norm_D * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))
                for kind, head, value in (("hidden_states", "hs", normed), ("logits", "logit", s.taps.logits_LTE[layer])):
                    raw = value.bfloat16().view(torch.int16).numpy().tobytes()
                    record |= {f"{head}_offset": len(sides[kind]), f"{head}_bytes": len(raw), f"{head}_shape": list(value.shape)}
                    sides[kind] += raw
            lines.append(json.dumps(record))
        lines.append(json.dumps({**record, "block": "mtp", "mtp_idx": 0, "layer": 0}))
    (folder / "router_trace_rank0.jsonl").write_text("\n".join(lines) + "\n")
    for kind, data in sides.items():
        if hidden:
            (folder / f"{kind}_rank0.bin").write_bytes(bytes(data))


def test_megatron_trace_can_be_fitted(tmp_path: Path) -> None:
    specs = gates()
    steps = [step(specs, 300, i) for i in range(6)]
    megatron(tmp_path / "m", steps, specs)
    got = list(read_megatron(tmp_path / "m", specs, E))
    assert len(got) == 6
    for a, b in zip(steps, got):
        assert torch.equal(a.ids_TLK, b.ids_TLK)
        # Up to a factor per token and bf16: the direction is the stream's.
        cos = torch.cosine_similarity(a.taps.moe_input_LTD, b.taps.moe_input_LTD, dim=-1)
        assert cos.min() > 0.9999 and bool(b.taps.residual_LTD.isnan().all())
    held = {"a": got[-1].taps}
    probe = fit(specs, Memory(got[:-1]), held, tmp_path / "p", FitConfig(rank=16, linear=12, steps=30, batch=128, horizons=(1, 2)))
    assert probe.residuals[0] is None and probe.residuals[1] is not None


def test_megatron_ids_alone_and_damage(tmp_path: Path) -> None:
    specs = gates()
    steps = [step(specs, 20, i) for i in range(2)]
    megatron(tmp_path / "ids", steps, specs, hidden=False)
    got = list(read_megatron(tmp_path / "ids", None, E))
    assert torch.equal(got[1].ids_TLK, steps[1].ids_TLK) and got[0].taps.moe_input_LTD.shape[-1] == 0
    with pytest.raises(ArtefactError, match="expert ids"):
        list(read_megatron(tmp_path / "ids", None, 3))
    megatron(tmp_path / "m", steps, specs)
    side = tmp_path / "m" / "logits_rank0.bin"
    side.write_bytes(side.read_bytes()[:-2])
    with pytest.raises(ArtefactError, match="logits_rank0"):
        list(read_megatron(tmp_path / "m", specs, E))
    path = tmp_path / "m" / "router_trace_rank0.jsonl"
    path.write_text(path.read_text()[:-40])
    with pytest.raises(ArtefactError, match="line 10"):
        list(read_megatron(tmp_path / "m", specs, E))


def test_plain_ids(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).random((30, L, E)).argsort(-1)[..., :2].astype(np.uint8)
    np.savez(tmp_path / "a.npz", expert_ids=ids, seq_lens=np.array([10, 20], np.int32))
    r = read_ids(tmp_path / "a.npz", E)
    assert torch.equal(r.ids_TLK, torch.from_numpy(ids).long()) and r.start_T.nonzero().flatten().tolist() == [0, 10]
    np.savez(tmp_path / "b.npz", expert_ids=np.array([object()]), seq_lens=np.array([1]))
    with pytest.raises(ArtefactError, match="plain"):
        read_ids(tmp_path / "b.npz", E)
    np.savez(tmp_path / "c.npz", other=ids)
    with pytest.raises(ArtefactError, match="expert_ids"):
        read_ids(tmp_path / "c.npz", E)


@pytest.mark.parametrize(("ids", "lengths"), [
    (np.zeros((0, 2, 2), int), np.zeros(0, int)), (np.full((4, 2, 1), 1.7), np.array([4])), (np.zeros((4, 2, 1), int), np.array([4.0])),
    (np.zeros((4, 2, 2), int), np.array([4])), (np.tile(np.arange(9) % 8, (4, 2, 1)), np.array([4])),
    (np.zeros((4, 2), int), np.array([4])), (np.zeros((4, 2, 1), int), np.array([[4]])),
    (np.zeros((4, 2, 1), int), np.array([0, 4])), (np.zeros((4, 2, 1), int), np.array([3])),
    (np.zeros((4, 2, 1), bool), np.array([4])), (np.full((4, 2, 1), 8), np.array([4])), (np.full((4, 2, 1), -1), np.array([4]))],
    ids=["none", "fractions", "fractional lengths", "twice", "more than experts", "two dimensions", "lengths of two", "no length", "short",
         "truths", "beyond", "below"])
def test_ids_that_no_router_chose_are_refused(tmp_path: Path, ids: np.ndarray, lengths: np.ndarray) -> None:
    np.savez(tmp_path / "a.npz", expert_ids=ids, seq_lens=lengths)
    with pytest.raises(ShapeError):
        read_ids(tmp_path / "a.npz", 8)


@pytest.mark.skipif(not DATA.exists(), reason="third-party routing traces are not beside this checkout")
def test_real_ids_are_read_whole() -> None:
    r = read_ids(DATA / "law_topk_ids.npz", 64)
    assert r.ids_TLK.shape == (8327, 26, 6) and int(r.start_T.sum()) == 33


def test_hidden_size_of_the_trace_is_that_of_the_model() -> None:
    assert step(gates(), 3, 0).taps.moe_input_LTD.shape == (L, 3, D)


def test_the_sample_trace_of_the_repository_is_whole() -> None:
    step_ = Trace(Path(__file__).resolve().parents[2] / "examples" / "smolmoe" / "trace-sample").all()
    assert step_.taps.residual_LTD.shape == (30, 12, 576) and step_.ids_TLK.shape == (12, 30, 4)
    # The router's choice is the top-4 of the logits recorded beside it.
    best = step_.taps.logits_LTE.topk(4, -1).indices.transpose(0, 1)
    assert torch.equal(best.sort(-1).values, step_.ids_TLK.sort(-1).values)


def test_a_megatron_trace_of_a_model_with_shared_experts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProbeMismatchError, match="shared expert"):
        next(read_megatron(tmp_path, gates(shared=True), E))
