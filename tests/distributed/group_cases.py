"""Cases of groups and shared memory; `test_groups.py` runs them in processes of their own."""
from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from moe_prefetch.distributed.groups import Grid, Group
from moe_prefetch.distributed.symmetric import symmetric_memory
from moe_prefetch.errors import MoEPrefetchError
from moe_prefetch.runtime import Runtime


class Hosts(Runtime):
    """A simulated topology: ranks of the job on hosts of these names."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def host(self) -> str:
        return self.names[dist.get_rank()]


class Full(Runtime):
    """A host whose shared memory is full for one rank."""

    def share(self, nbytes: int) -> Any:
        if dist.get_rank() == 1:
            raise MemoryError("no space left")
        return super().share(nbytes)


def refusal(act: Any) -> dict[str, Any]:
    start = time.perf_counter()
    try:
        act()
    except (MoEPrefetchError, MemoryError) as e:
        return {"kind": type(e).__name__, "said": str(e), "seconds": time.perf_counter() - start, "ranks": getattr(e, "ranks", None)}
    return {"kind": "none"}


def plain(rank: int, world: int) -> Any:
    everyone = Group.of()
    odd = dist.new_group([r for r in range(world) if r != 1])
    mine = None if rank == 1 else Group.of(odd, "odd")
    words = everyone.gather(bytes([rank]) * (rank + 1))
    return {"ranks": everyone.ranks, "rank": everyone.rank, "odd": mine and [mine.ranks, mine.rank], "words": [list(w) for w in words],
            "stranger": refusal(lambda: Group.of(odd)) if rank == 1 else None}


def twice(rank: int, world: int) -> Any:
    """Two objects over one group, used by turns; neither reads the other's words."""
    first, second = Group.of(), Group.of()
    got = []
    for i in range(3):
        got.append(first.gather(f"a{i}".encode()) == [f"a{i}".encode()] * world)
        got.append(second.gather(f"b{i}".encode()) == [f"b{i}".encode()] * world)
    return got


def forgets(rank: int, world: int) -> Any:
    """Words that every rank has read do not pile up in the store."""
    group = Group.of()
    for i in range(5):
        assert group.gather(bytes([i])) == [bytes([i])] * world
    group.gather(b"over")
    return [group._store.check([f"{i}/{rank}"]) for i in range(6)]


def agreement(rank: int, world: int) -> Any:
    group = Group.of()
    group.agree("test", {"capacity": 64, "mode": "gather"})
    differs = refusal(lambda: group.agree("test", {"capacity": 64 if rank != world - 1 else 128, "mode": "gather"}))
    lacks = refusal(lambda: group.agree("test", {"capacity": 64} if rank else {"capacity": 64, "fp8": True}))
    other = refusal(lambda: group.agree("this" if rank else "that", {}))
    group.agree("test", {"capacity": 64})
    return [differs, lacks, other]


def absent(rank: int, world: int) -> Any:
    """Rank 1 does not come; the others say so, and go on among themselves."""
    group = Group.of()
    if rank == 1:
        time.sleep(1.5)
        return None
    return refusal(lambda: group.gather(b"here", 1.0))


def hosts(rank: int, world: int, *names: str) -> Any:
    group = Group.of(runtime=Hosts(*names))
    memory = symmetric_memory(group, "cpu", group._runtime)
    block = memory.allocate(1000)
    for view in block.views:
        view[memory.rank] = rank + 1
    group.gather(b"written")
    return {"hosts": group.hosts(), "neighbours": group.neighbours(), "places": memory.places, "rank": memory.rank,
            "bytes": block.mine[: len(block.views)].tolist(), "aligned": all(b % 128 == 0 for b in block.bases),
            "words": block.words[memory.rank][0] == block.mine[:8].view(torch.int64).item()}


def real_host(rank: int, world: int) -> Any:
    return len(set(Group.of().hosts()))


def memory_refusals(rank: int, world: int) -> Any:
    group = Group.of()
    memory = symmetric_memory(group, "cpu")
    sizes = refusal(lambda: memory.allocate(1000 if rank else 5000))
    full = refusal(lambda: symmetric_memory(group, "cpu", Full()).allocate(1000))
    memory.allocate(0)
    big = memory.allocate(1 << 20)
    zero = not big.mine.any().item()
    return [sizes, full, zero]


def _grid(grid: Grid) -> dict[str, Any]:
    return {axis: [list(getattr(grid, axis).ranks), getattr(grid, axis).rank] for axis in Grid.__slots__}


def megatron(rank: int, world: int, tp: str, ep: str, pp: str, etp: str) -> Any:
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=int(tp), pipeline_model_parallel_size=int(pp),
                                             expert_model_parallel_size=int(ep), expert_tensor_parallel_size=int(etp))
    grid = Grid.of_megatron(ProcessGroupCollection.use_mpu_process_groups())
    theirs = {"tp": parallel_state.get_tensor_model_parallel_group(), "pp": parallel_state.get_pipeline_model_parallel_group(),
              "dp": parallel_state.get_data_parallel_group(), "ep": parallel_state.get_expert_model_parallel_group(),
              "expert_tp": parallel_state.get_expert_tensor_parallel_group(), "expert_dp": parallel_state.get_expert_data_parallel_group()}
    want = {axis: [dist.get_process_group_ranks(pg), dist.get_rank(pg)] for axis, pg in theirs.items()}
    word = grid.ep.gather(str(rank).encode())
    empty = refusal(lambda: Grid.of_megatron(ProcessGroupCollection(tp=theirs["tp"])))
    return {"same": _grid(grid) == want, "grid": _grid(grid), "words": [int(w) for w in word], "empty": empty["kind"]}


def deepspeed(rank: int, world: int, size: str) -> Any:
    import os

    os.environ.update({"DS_ACCELERATOR": "cpu", "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
                       "LOCAL_SIZE": str(world)})
    import deepspeed
    from deepspeed.utils import groups

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()
    groups._create_expert_and_data_parallel(int(size))
    grid = Grid.of_deepspeed(groups, f"ep_size_{size}")
    want = {"ep": list(groups._get_expert_parallel_group_ranks(f"ep_size_{size}")),
            "expert_dp": list(groups._get_expert_data_parallel_group_ranks(f"ep_size_{size}"))}
    word = grid.ep.gather(str(rank).encode())
    return {"same": all(_grid(grid)[axis][0] == ranks for axis, ranks in want.items()), "grid": _grid(grid),
            "words": [int(w) for w in word],
            "empty": refusal(lambda: Grid.of_deepspeed(groups, "ep_size_9"))["kind"]}
