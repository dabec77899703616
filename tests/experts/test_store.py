"""Records: what is written is read back, bit for bit; what was altered is refused by name."""
from __future__ import annotations

import json
import os
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_prefetch.errors import ArtefactError, DeadlineError, UnsupportedModelError
from moe_prefetch.experts.store import MANIFEST, DiskStore, LocalStore, RecordLayout, read_manifest
from moe_prefetch.kernels.expert_mlp.record import PAGE
from moe_prefetch.runtime import ALIGN, REAL, Runtime
from tests.experts.records import Source


def read_back(store, source):
    buffer = REAL.allocate(store.layout.nbytes)
    for layer in range(source.num_layers):
        for expert in range(source.num_experts):
            buffer.fill_(0xFF)
            store.read_into(layer, expert, buffer)
            for name, want in source.tensors(layer, expert).items():
                got = store.layout.views(buffer)[name]
                assert torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8)), (layer, expert, name)


@given(shape=st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 70), st.integers(1, 70)),
       dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_round_trip_of_odd_sizes(tmp_path_factory, shape, dtype):
    source = Source(*shape, dtype=dtype)
    folder = tmp_path_factory.mktemp("records")
    store = DiskStore.obtain(folder, source, REAL)
    assert store.layout.nbytes % PAGE == 0 and all(p.offset % ALIGN == 0 for p in store.layout.parts)
    read_back(store, source)
    store.close()
    again = DiskStore.obtain(folder, source, REAL)
    assert again.path == store.path
    read_back(again, source)
    again.close()


def test_special_values_keep_their_bits(tmp_path):
    source = Source(1, 1, 64, 32)
    source.gate_up[0].view(torch.int32).copy_(torch.arange(64 * 64, dtype=torch.int32).reshape(1, 64, 64) * 1048573)
    source.down[0].fill_(float("nan"))
    store = DiskStore.obtain(tmp_path, source, REAL)
    read_back(store, source)
    store.close()


def test_parts_do_not_overlap_and_cover_their_bytes():
    layout = RecordLayout.of({"gate_up": torch.zeros(7, 5), "down": torch.zeros(5, 3, dtype=torch.bfloat16), "x": torch.zeros(0)})
    ends = 0
    for p in layout.parts:
        assert p.offset >= ends
        ends = p.offset + p.nbytes
    assert layout.nbytes >= ends


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.bool])
def test_a_dtype_that_can_not_be_stored(dtype):
    with pytest.raises(UnsupportedModelError, match="dtype"):
        RecordLayout.of({"gate_up": torch.zeros(2, 2, dtype=dtype)})


def test_experts_of_several_shapes_are_refused(tmp_path):
    source = Source()
    source.down[1] = torch.zeros(5, 8, 7)
    with pytest.raises(UnsupportedModelError, match="layer 1, expert 0"):
        DiskStore.obtain(tmp_path / "r", source, REAL)
    assert not (tmp_path / "r").exists()


def test_local_views_are_always_aligned_and_contiguous():
    for width in (3, 16):
        source = Source(hidden=2 * width, width=width)
        source.down = [d.transpose(1, 2).contiguous().transpose(1, 2) for d in source.down]
        store = LocalStore(source, REAL)
        for layer in range(2):
            for expert in range(5):
                for name, t in store.views(layer, expert).items():
                    assert t.data_ptr() % ALIGN == 0 and t.is_contiguous()
                    assert torch.equal(t, source.tensors(layer, expert)[name])


# altered ------------------------------------------------------------------------------------------------------------------
@pytest.fixture
def made(tmp_path):
    source = Source(1, 3)
    DiskStore.obtain(tmp_path, source, REAL).close()
    return tmp_path, source, next(tmp_path.glob("records-*.bin"))


def refused(folder, source, match):
    with pytest.raises(ArtefactError, match=match) as e:
        DiskStore.obtain(folder, source, REAL)
    assert e.value.where and e.value.do and "delete the folder" not in e.value.do, "there may be more in it"
    return e.value


def test_an_altered_byte_anywhere_is_named(made):
    folder, source, path = made
    data = path.read_bytes()
    for at in [0, 1, 63, 64, 4095, 4096, 8191, len(data) - 1]:
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        assert f"layer 0, expert {at // 4096}" in refused(folder, source, "altered").where
    path.write_bytes(data)
    DiskStore.obtain(folder, source, REAL).close()


@pytest.mark.parametrize("cut", [0, 1, 4095, 4096, 12287])
def test_a_short_file(made, cut):
    folder, source, path = made
    os.truncate(path, cut)
    refused(folder, source, f"has {cut} bytes")


def test_a_long_file(made):
    folder, source, path = made
    with open(path, "ab") as f:
        f.write(b"x")
    refused(folder, source, "has 12289 bytes")


def test_a_missing_file(made):
    folder, source, path = made
    path.unlink()
    refused(folder, source, "can't be read")


def test_a_file_cut_short_while_open(made):
    folder, source, path = made
    store = DiskStore.obtain(folder, source, REAL)
    os.truncate(path, 5000)
    buffer = REAL.allocate(store.layout.nbytes)
    store.read_into(0, 0, buffer)
    for expert in (1, 2):
        with pytest.raises(ArtefactError, match=r"early.*keep the file"):
            store.read_into(0, expert, buffer)
    store.close()
    with pytest.raises(ArtefactError, match="closed"):
        store.read_into(0, 0, buffer)


def edited(folder, **change):
    m = json.loads((folder / MANIFEST).read_text())
    for key, value in change.items():
        if value is None:
            m.pop(key)
        else:
            m[key] = value
    (folder / MANIFEST).write_text(json.dumps(m))


@pytest.mark.parametrize("change", [
    {"layers": 2, "digests": ["0" * 64] * 6}, {"experts": 1, "digests": ["0" * 64]}, {"record_bytes": 8192}, {"parts": []},
    {"parts": [{"name": "x"}]},
], ids=str)
def test_a_manifest_of_another_geometry(made, change):
    folder, source, path = made
    edited(folder, **change)
    m = json.loads((folder / MANIFEST).read_text())
    os.truncate(path, m["layers"] * m["experts"] * m["record_bytes"])
    refused(folder, source, "made for another model")


def test_another_models_folder_is_refused_when_the_shapes_differ(made):
    folder, _, path = made
    before = path.read_bytes()
    refused(folder, Source(1, 4), "experts is 3")
    refused(folder, Source(1, 3, hidden=16), "parts is")
    refused(folder, Source(1, 3, dtype=torch.bfloat16), "parts is")
    assert path.read_bytes() == before


def test_other_weights_of_the_same_shape_are_written_again(made, caplog):
    folder, _, path = made
    other = Source(1, 3, seed=1)
    store = DiskStore.obtain(folder, other, REAL)
    assert "other weights" in caplog.text
    read_back(store, other)
    store.close()
    assert not path.exists() and len(list(folder.iterdir())) == 2


def test_one_weight_more_or_less_is_other_weights(made):
    folder, source, path = made
    source.down[0][2, 7, 5] += 1e-6
    DiskStore.obtain(folder, source, REAL).close()
    assert not path.exists()


def test_what_an_interrupted_build_left_is_removed(tmp_path):
    for name in (f".records-{'a' * 16}.bin.{'b' * 12}.tmp", f".manifest.json.{'0' * 12}.tmp", f"records-{'c' * 16}.bin"):
        (tmp_path / name).write_text("half")
    for name in ("records-mine.bin", "notes.txt", ".records-x.tmp"):
        (tmp_path / name).write_text("the user's own")
    DiskStore.obtain(tmp_path, Source(), REAL).close()
    left = sorted(p.name for p in tmp_path.iterdir())
    assert len(left) == 5 and {"records-mine.bin", "notes.txt", ".records-x.tmp", MANIFEST} < set(left)


# making -------------------------------------------------------------------------------------------------------------------
def test_a_full_drive_is_seen_before_a_byte_is_written(tmp_path):
    class Full(Runtime):
        def free_bytes(self, folder):
            return 4096 * 9

        def write(self, fd, data):
            raise AssertionError("written to")

    with pytest.raises(ArtefactError, match="40960 bytes are needed"):
        DiskStore.obtain(tmp_path / "r", Source(), Full())
    assert not (tmp_path / "r").exists()


def test_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "r").write_text("x")
    for path in (tmp_path / "r", tmp_path / "r" / "s"):
        with pytest.raises(ArtefactError, match=r"can't be written.*a file is in the way"):
            DiskStore.obtain(path, Source(), REAL)
    assert (tmp_path / "r").read_text() == "x"


def test_progress_counts_to_the_end_and_may_stop_it(tmp_path):
    seen = []
    DiskStore.obtain(tmp_path / "a", Source(), REAL, lambda done, of: seen.append((done, of))).close()
    assert seen == [(i + 1, 10) for i in range(10)]

    def stop(done, of):
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        DiskStore.obtain(tmp_path / "b", Source(), REAL, stop)
    assert not (tmp_path / "b").exists()


def test_two_builders_take_turns(tmp_path):
    """Threads with weights of their own, one folder: whoever comes last is in the folder, and each reads its own."""
    sources = [Source(seed=s) for s in range(4)]
    stores, errors = {}, []

    def build(i):
        try:
            stores[i] = DiskStore.obtain(tmp_path, sources[i], REAL)
        except BaseException as e:  # noqa: BLE001  # reported by the main thread
            errors.append(e)

    threads = [threading.Thread(target=build, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors
    for i, store in stores.items():
        read_back(store, sources[i])
        store.close()
    assert len(list(tmp_path.iterdir())) == 2
    read_manifest(tmp_path)


def test_a_builder_that_hangs_is_not_waited_for_for_ever(tmp_path):
    class Busy(Runtime):
        shift = 0.0

        def try_lock(self, fd):
            return False

        def now(self):
            self.shift += 100
            return self.shift

        def sleep_until(self, deadline):
            pass

    with pytest.raises(DeadlineError, match="another process"):
        DiskStore.obtain(tmp_path, Source(), Busy())


def test_drives_without_locks_still_work(tmp_path):
    class NoLocks(Runtime):
        def try_lock(self, fd):
            raise OSError(37, "No locks available")

    DiskStore.obtain(tmp_path, Source(), NoLocks()).close()


def test_a_store_without_a_name_reads_on(tmp_path):
    source = Source()
    store = DiskStore.obtain(tmp_path / "r", source, REAL)
    store.unlink()
    assert not (tmp_path / "r").exists()
    read_back(store, source)
    store.close()
    store.close()
