"""Process groups in one shape, whoever made them: Megatron-core's `pg_collection`, DeepSpeed's groups, plain torch.

A `Group` is the ranks along one axis as this process sees it. What ranks must know of each other before any payload moves (hosts, sizes,
layouts, modes) goes through the group's store, where each rank's word stands under its own name: whoever does not come is known by rank.
"""
from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..errors import ConfigError, PeerError
from ..runtime import REAL, Runtime

Scalar = str | int | float | bool | None
PAUSE = 2e-3  # seconds between two looks at the store
DEADLINE = 60.0  # seconds that ranks wait for each other when they attach


class Group:
    """Ranks along one axis. Making one tells nobody; `gather`, `agree` and `hosts` are collective: every rank calls them in one order.

    axis    "ep", "tp", "pp", "dp", "expert_tp", "expert_dp" or a name of the caller's
    ranks   numbers of the ranks in the whole job, in the group's order
    rank    this process's place in `ranks`
    process_group  torch's handle for collectives; None for a group of one that nobody made
    """

    def __init__(self, axis: str, ranks: Sequence[int], rank: int, process_group: Any = None, runtime: Runtime = REAL) -> None:
        if sorted(set(ranks)) != sorted(ranks) or not 0 <= rank < len(ranks):
            raise ConfigError(f"a group of ranks {list(ranks)} with this process at place {rank}", where=axis,
                              expected="distinct ranks, this one among them", do="pass a group that this process belongs to")
        self.axis, self.ranks, self.rank, self.process_group = axis, tuple(ranks), rank, process_group
        self._runtime = runtime
        self._store: Any = None
        self._words = 0
        self._hosts: tuple[str, ...] | None = None

    @classmethod
    def of(cls, process_group: Any = None, axis: str = "ep", runtime: Runtime = REAL) -> Group:
        """A torch process group, or None: the whole job where torch.distributed is set up, otherwise this process alone.

        Raises ConfigError: this process is not a member, or the group is no process group.
        """
        if process_group is None and not (dist.is_available() and dist.is_initialized()):
            return cls(axis, (0,), 0, None, runtime)
        if process_group is None:
            process_group = dist.group.WORLD
        if process_group is dist.GroupMember.NON_GROUP_MEMBER or not isinstance(process_group, dist.ProcessGroup):
            raise ConfigError(f"{process_group!r} is no process group of this process", where=axis, expected="a torch ProcessGroup",
                              do="pass the group that this rank belongs to")
        return cls(axis, dist.get_process_group_ranks(process_group), dist.get_rank(process_group), process_group, runtime)

    def __repr__(self) -> str:
        return f"Group({self.axis}: place {self.rank} of {self.ranks})"

    @property
    def size(self) -> int:
        return len(self.ranks)

    # words before payload ----------------------------------------------------------------------------------------------------
    def gather(self, word: bytes, deadline: float = DEADLINE) -> list[bytes]:
        """Every rank's word, in the group's order. Collective. Raises PeerError: some rank did not come within `deadline` seconds."""
        if self.size == 1:
            return [word]
        if self._store is None:
            store = distributed_c10d._get_process_group_store(self.process_group)
            # Another object over the same group must not read these words: ranks open their groups in one order.
            opened = store.add(f"moe_prefetch/{self.axis}/{self.rank}", 1)
            self._store = dist.PrefixStore(f"moe_prefetch/{self.axis}/{opened}", store)
        end, number = self._runtime.now() + deadline, self._words
        self._words += 1
        names = [f"{number}/{r}" for r in range(self.size)]
        try:
            self._store.set(names[self.rank], word)
            if number > 1:
                # All have said the word before this one, so all have read the one before that.
                self._store.delete_key(f"{number - 2}/{self.rank}")
            # Asked and not waited for: an exception of the store takes up to a second to be made.
            while not self._store.check(names):
                if self._runtime.now() > end:
                    raise self._absent(names, deadline)
                self._runtime.sleep_until(self._runtime.now() + PAUSE)
            return [self._store.get(name) for name in names]
        except RuntimeError as e:
            raise self._absent(names, deadline) from e

    def _absent(self, names: list[str], deadline: float) -> PeerError:
        """Names the ranks whose word is not there; when the store is gone, all others."""
        try:
            silent = tuple(r for r, name in enumerate(names) if not self._store.check([name]))
        except RuntimeError:
            silent = tuple(r for r in range(self.size) if r != self.rank)
        return PeerError(f"no word of theirs within {deadline:g} s", ranks=silent, where=f"group {self.axis}",
                         do="see what became of these ranks; all ranks must attach, and in one order")

    def agree(self, subject: str, facts: Mapping[str, Scalar], deadline: float = DEADLINE, among: Sequence[int] = ()) -> None:
        """Refuse to go on where two ranks differ. Collective. Raises ConfigError on every rank, with each fact that differs; PeerError.

        `among`: only these places must say the same; every rank calls all the same, and each may name its own.
        """
        words = self.gather(json.dumps({"subject": subject, **facts}, sort_keys=True).encode(), deadline)
        every = [json.loads(w) for w in words]
        problems = []
        for key in sorted({k for said in every for k in said}):
            values: dict[str, list[int]] = {}
            for rank, said in ((r, every[r]) for r in among or range(self.size)):
                values.setdefault(json.dumps(said.get(key, "nothing")), []).append(rank)
            if len(values) > 1:
                said = ", ".join(f"{v} on rank{'s' * (len(r) > 1)} {', '.join(map(str, r))}" for v, r in values.items())
                problems.append(f"{key} is {said}")
        if problems:
            raise ConfigError("ranks differ: " + "; ".join(problems), problems=tuple(problems), where=f"{subject}, group {self.axis}",
                              expected="one configuration", do="give every rank the same configuration")

    # hosts -------------------------------------------------------------------------------------------------------------------
    def hosts(self, deadline: float = DEADLINE) -> tuple[str, ...]:
        """For each rank a name of its host; ranks with one name can share memory. Collective at the first call. Raises PeerError."""
        if self._hosts is None:
            self._hosts = tuple(w.decode() for w in self.gather(self._runtime.host().encode(), deadline))
        return self._hosts

    def neighbours(self, deadline: float = DEADLINE) -> tuple[int, ...]:
        """Places of the ranks on this rank's host, itself among them, ascending. Collective at the first call. Raises PeerError."""
        hosts = self.hosts(deadline)
        return tuple(r for r, host in enumerate(hosts) if host == hosts[self.rank])


@dataclass(frozen=True, slots=True)
class Grid:
    """Where this process stands along every axis; an axis that nobody split has a group of one.

    ep       ranks that hold the experts of one layer between them
    tp, dp   tensor and data parallelism of the rest of the model; pp pipeline stages
    expert_tp, expert_dp  ranks that split one expert, and that hold the same experts
    """

    ep: Group
    tp: Group
    pp: Group
    dp: Group
    expert_tp: Group
    expert_dp: Group

    @classmethod
    def of(cls, runtime: Runtime = REAL, **process_groups: Any) -> Grid:
        """From torch process groups by axis. Raises ConfigError: an axis that there is not."""
        if unknown := sorted(set(process_groups) - set(cls.__slots__)):
            raise ConfigError(f"there is no axis {', '.join(unknown)}", where="Grid", expected=", ".join(cls.__slots__), do="rename it")
        me = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        given = {axis: process_groups.get(axis) for axis in cls.__slots__}
        return cls(**{axis: Group(axis, (me,), 0, None, runtime) if pg is None else Group.of(pg, axis, runtime)
                      for axis, pg in given.items()})

    @classmethod
    def of_megatron(cls, pg_collection: Any, runtime: Runtime = REAL) -> Grid:
        """From a `ProcessGroupCollection` of Megatron-core 0.16 to 0.19, whose attributes exist as far as somebody set them.

        Raises ConfigError: it has no expert group.
        """
        names = {"ep": "ep", "tp": "tp", "pp": "pp", "dp": "dp", "expert_tp": "expt_tp", "expert_dp": "expt_dp"}
        found = {axis: getattr(pg_collection, name, None) for axis, name in names.items()}
        if found["ep"] is None:
            raise ConfigError("the collection has no expert group", where="pg_collection.ep", expected="a process group",
                              do="ProcessGroupCollection.use_mpu_process_groups(), or set ep")
        return cls.of(runtime, **found)

    @classmethod
    def of_deepspeed(cls, groups: Any, name: str, runtime: Runtime = REAL) -> Grid:
        """From DeepSpeed's module `deepspeed.utils.groups` and the name of an expert group (`ep_size_4`), as an MoE layer carries it.

        Tensor and pipeline groups are those of the `mpu` that DeepSpeed was given. Raises ConfigError: there is no such expert group.
        """
        made = groups._get_expert_parallel_group_dict()
        if name not in made:
            raise ConfigError(f"DeepSpeed has no expert group {name}", where="deepspeed.utils.groups",
                              expected=", ".join(sorted(made)) or "one made at initialize", do="initialize the engine first")
        mpu = groups.mpu
        parts = {"tp": ("get_tensor_model_parallel_group", "get_model_parallel_group"), "pp": ("get_pipeline_model_parallel_group",
                                                                                               "get_pipe_parallel_group")}
        extra = {axis: next((getattr(mpu, n)() for n in getters if hasattr(mpu, n)), None) for axis, getters in parts.items()}
        return cls.of(runtime, ep=made[name], expert_dp=groups._get_expert_data_parallel_group_dict().get(name),
                      dp=groups._get_data_parallel_group(), **extra)
