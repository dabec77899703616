"""DeepSpeed: one section in its JSON, one import.

    from moe_prefetch.integrations import deepspeed as mpd

    engine = mpd.init_inference(model, "ds_config.json")     # inference: experts, probe, kv
    engine.moe_prefetch.detach()

    engine, *_ = mpd.initialize(model=model, config="ds_config.json", ...)   # training: fit
    engine.moe_prefetch.finish()

Both check everything that can be checked before the model is touched, then call DeepSpeed's function of the same name with its half of
the configuration, and leave ours on `engine.moe_prefetch`. Nothing is patched. Made for DeepSpeed 0.19; see docs/deepspeed.md.
"""
from __future__ import annotations

import difflib
import importlib.metadata
import importlib.util
import inspect
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.inference.config import DeepSpeedInferenceConfig
from deepspeed.inference.engine import InferenceEngine
from deepspeed.module_inject.auto_ep_config import PRESET_MODELS
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.moe.layer import MoE
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS
from deepspeed.runtime.engine import DeepSpeedEngine
from pydantic import ValidationError
from torch import nn
from transformers import PreTrainedModel

from moe_prefetch.checkpoint import check_writable
from moe_prefetch.config import Config
from moe_prefetch.deepspeed_file import SECTION, contradictions, split
from moe_prefetch.errors import ArtefactError, ConfigError, ProbeMismatchError, SessionError, UnsupportedModelError
from moe_prefetch.experts.mover import bounce_buffers
from moe_prefetch.experts.slots import slots_per_layer
from moe_prefetch.experts.store import RecordLayout
from moe_prefetch.integrations.deepspeed_experts import MoEPrefetchPolicy
from moe_prefetch.integrations.deepspeed_models import AutoEPModel, MoEModel, OwnExperts, autoep_works, check_family
from moe_prefetch.integrations.deepspeed_training import ProbeFit
from moe_prefetch.integrations.transformers import FITTED, TransformersModel
from moe_prefetch.probes.probe import GateSpec, RoutingProbe, check_folder, gate_hash, read_folder
from moe_prefetch.seam import open_model, register_host
from moe_prefetch.session import Session, attach

__all__ = ["MoEPrefetchPolicy", "ProbeFit", "attach_engine", "init_inference", "initialize"]

Source = Mapping[str, Any] | str | Path | None
# What a launcher sets, and DeepSpeed's training side needs.
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
HostModel = TransformersModel | AutoEPModel | MoEModel


def open_module(module: nn.Module) -> HostModel:
    """The model inside an engine. Raises UnsupportedModelError: no MoE layers, or a family that is not supported, by name; SessionError
    while a fit runs beside it."""
    if module in FITTED:
        raise SessionError("a fit runs beside this model", where=type(module).__name__, do="engine.moe_prefetch.finish(), or stop(), first")
    kinds = {type(m) for m in module.modules()}
    if AutoEPMoELayer in kinds:
        return AutoEPModel(module)
    if MoE in kinds:
        return MoEModel(module)
    if isinstance(module, PreTrainedModel):
        host: TransformersModel = open_model(module)  # type: ignore[assignment]
        check_family(host.family, type(module).__name__)
        return host if host.tensors(0, 0)["down"].device.type == "cpu" else OwnExperts(module)
    raise UnsupportedModelError(f"{type(module).__name__} has no MoE layers that we know", where="DeepSpeed",
                                expected="a transformers MoE model, or deepspeed.moe.layer.MoE itself (no subclass)",
                                do="dense models need no expert prefetch")


class _Host:
    name = "deepspeed"

    def open(self, model: Any) -> HostModel:
        if not isinstance(model, InferenceEngine | DeepSpeedEngine):
            raise UnsupportedModelError(f"{type(model).__name__} is no engine", where="attach", expected="a DeepSpeed engine",
                                        do="pass what deepspeed.init_inference or deepspeed.initialize returned")
        return open_module(model.module)


register_host("deepspeed", _Host())


# inference ----------------------------------------------------------------------------------------------------------------
def init_inference(model: nn.Module, config: Source = None, **kwargs: Any) -> InferenceEngine:
    """`deepspeed.init_inference` with a `moe_prefetch` section in its configuration; the session is on `engine.moe_prefetch`.

    config   a path of a JSON file, or a dict; keyword arguments are merged into it, as DeepSpeed does

    Raises, all before the model is touched: ConfigError (any key of either half, or halves that contradict each other; `.problems` lists
    every one), BudgetError, UnsupportedModelError, SessionError, ProbeMismatchError, ArtefactError.
    """
    ours, stock = split(config, kwargs)
    stock, named = _without_policies(stock)
    _refuse(contradictions(stock, ours), config)
    _check_folders(ours)
    settings = _inference_settings(stock)
    if not isinstance(model, nn.Module) or isinstance(model, InferenceEngine | DeepSpeedEngine):
        raise UnsupportedModelError(f"{type(model).__name__} is no plain model", where="init_inference", expected="a torch module",
                                    do="pass the model itself; for an engine that exists use moe_prefetch.attach(engine, section)")
    host = open_module(model)
    _check_policies(model, named, settings.injection_policy or {})
    _check_launch(settings, host)
    if isinstance(host, MoEModel) and not deepspeed.comm.is_initialized():
        raise ConfigError("DeepSpeed's own MoE layers need its process groups, also in one process", where="init_inference",
                          expected="deepspeed.init_distributed() before", do="call it, or start with `deepspeed`")
    _check_model(host, ours, settings.dtype, "cpu" if settings.keep_module_on_host else get_accelerator().device_name())
    engine = deepspeed.init_inference(model, stock)
    engine.moe_prefetch = attach(engine, ours)
    return engine


def _without_policies(stock: dict[str, Any]) -> tuple[dict[str, Any], list[type[nn.Module]]]:
    """Old style: `injection_policy={Block: MoEPrefetchPolicy}`. (DeepSpeed's half without such entries, the blocks they name.)"""
    named: list[type[nn.Module]] = []
    for key in ("injection_policy", "injection_dict"):
        policies = stock.get(key)
        if not isinstance(policies, Mapping):
            continue
        rest = {}
        for block, policy in policies.items():
            if policy is MoEPrefetchPolicy or isinstance(policy, MoEPrefetchPolicy):
                if block not in MoEPrefetchPolicy._orig_layer_class:
                    known = ", ".join(c.__name__ for c in MoEPrefetchPolicy._orig_layer_class)
                    raise ConfigError(f"{getattr(block, '__name__', block)} is no MoE block that we serve", where=key, expected=known,
                                      do="name the class of the model's MoE blocks")
                named.append(block)
            elif inspect.isclass(policy) or not isinstance(policy, str | tuple | list):
                raise ConfigError(f"the policy of {getattr(block, '__name__', block)} is {policy!r}", where=key,
                                  expected="MoEPrefetchPolicy, or names of layers: DeepSpeed 0.19 takes no policy classes of its own",
                                  do='write for example {MixtralDecoderLayer: ("self_attn.o_proj",)}')
            else:
                rest[block] = policy
        stock = {k: v for k, v in stock.items() if k != key} | ({key: rest} if rest else {})
    return stock, named


def _check_policies(model: nn.Module, named: list[type[nn.Module]], policies: Mapping[Any, Any]) -> None:
    """What DeepSpeed asserts once it has converted the model, and that there is what is named: it passes over a class that is not."""
    kinds = {type(m) for m in model.modules() if m is not model}
    for block in (*named, *policies):
        if block not in kinds:
            raise ConfigError(f"the model has no {getattr(block, '__name__', block)}", where="injection_policy",
                              do="name the class of the model's MoE blocks, or of its decoder layers")
    paths = [path for path, _ in model.named_modules()]
    for name in (n for names in policies.values() for n in ((names,) if isinstance(names, str) else names)):
        if not isinstance(name, str) or not any(path.endswith(name) for path in paths):
            raise ConfigError(f"no layer's path ends in {name!r}", where="injection_policy", expected='for example "self_attn.o_proj"',
                              do="correct the name")


def _refuse(problems: list[str], config: Source) -> None:
    if problems:
        raise ConfigError(f"{len(problems)} problem{'s' * (len(problems) > 1)} in the configuration: " + "; ".join(problems),
                          problems=tuple(problems), where=str(config) if isinstance(config, str | Path) else "config",
                          do="mend the keys named; `moe-prefetch validate FILE` checks a file")


def _check_folders(ours: Config) -> None:
    """Whether the folders that will be written can be; nothing is made. Every rank asks, so that none waits for one that was refused."""
    for key, folder in (("experts.path", ours.experts.path), ("fit.out", ours.fit.out if ours.fit is not None else None)):
        if folder is None:
            continue
        try:
            check_writable(folder)
        except ArtefactError as e:
            raise ConfigError(f"{key}: {e.what} ({folder})", where=f"{SECTION}.{key}", expected="a new folder, or one that can be written",
                              do="name another folder") from e
    if ours.fit is not None:
        check_folder(ours.fit.out)


def _inference_settings(stock: dict[str, Any]) -> DeepSpeedInferenceConfig:
    try:
        settings = DeepSpeedInferenceConfig(**stock)
    except ValidationError as e:
        lines = [f"{'.'.join(map(str, x['loc']))}: {x['msg']}" for x in e.errors(include_url=False, include_context=False)]
        raise ConfigError("DeepSpeed refuses its half: " + "; ".join(lines), problems=tuple(lines), where="config",
                          do="mend the keys named") from e
    except (TypeError, ValueError, AttributeError, AssertionError) as e:
        raise ConfigError(f"DeepSpeed refuses its half: {e}", problems=(str(e),), where="config", do="mend the value named") from e
    if settings.dtype not in get_accelerator().supported_dtypes():
        known = ", ".join(str(d).removeprefix("torch.") for d in get_accelerator().supported_dtypes())
        raise ConfigError(f"dtype: {settings.dtype} can't be computed on {get_accelerator().device_name()}", where="dtype", expected=known,
                          do="name one of these; DeepSpeed's default is fp16")
    return settings


def _world() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def _check_launch(settings: DeepSpeedInferenceConfig, host: HostModel) -> None:
    size, spread = settings.tensor_parallel.tp_size, settings.moe.ep_size
    world = _world()
    most = world if isinstance(host, MoEModel) else 1
    if not 1 <= spread <= most:
        raise ConfigError(f"ep_size is {spread}", where="moe.ep_size",
                          expected=f"1 to {world}, the processes" if most > 1 else "1: every rank holds all experts",
                          do="correct it; AutoEP spreads a model's experts under deepspeed.initialize")
    if size < 1 or size > world:
        raise ConfigError(f"tp_size is {size}, and processes are {world}", where="tensor_parallel.tp_size", expected=f"1 to {world}",
                          do="start as many: deepspeed --num_gpus N script.py")
    if size > 1 and get_accelerator().device_name() == "cpu" and "LOCAL_SIZE" not in os.environ:
        raise ConfigError("LOCAL_SIZE is not set: DeepSpeed's shared-memory collectives would crash", where="environment",
                          expected="LOCAL_SIZE = processes on this machine", do="start with `deepspeed`, or set it")


def _check_model(host: HostModel, ours: Config, dtype: torch.dtype, device: str, autoep: int = 0) -> None:
    """What `attach` will ask of the model once DeepSpeed has converted it, asked now. `autoep`: over how many ranks it will spread the
    experts; 0 without AutoEP."""
    host.check_free()
    host.check_kv(ours.kv)
    if ours.experts.home == "local":
        if isinstance(host, MoEModel):
            host.tensors(0, 0)
        return
    if device != "cpu":
        raise UnsupportedModelError(f"its experts would be on {device}", where="experts.home: disk", expected="weights on the CPU",
                                    do="use home: local, or keep the model on the CPU")
    shapes = {k: torch.empty(t.shape, dtype=dtype, device="meta") for k, t in host.tensors(0, 0).items()}
    slots_per_layer(ours.experts, num_layers=host.num_layers, num_experts=host.num_experts // max(1, autoep),
                    record_bytes=RecordLayout.of(shapes).nbytes, reserve=bounce_buffers(ours.experts.threads))
    if ours.probe.path is not None:
        gates = [replace(g, weight_ED=g.weight_ED.to(dtype), norm_D=g.norm_D.to(dtype)) for g in host.gates]
        _check_probe(ours.probe.path, gates, autoep=autoep > 0)


def _check_probe(path: Path, gates: list[GateSpec], *, autoep: bool) -> None:
    # AutoEP computes a shared expert last, so the taps before the router hold nothing of it.
    try:
        RoutingProbe.from_pretrained(path, [replace(g, shared=g.shared and not autoep) for g in gates])
    except ProbeMismatchError as e:
        if not (autoep and gates[0].shared and read_folder(path)[0].get("gate_hash") == gate_hash(gates)):
            raise
        raise ProbeMismatchError("the probe reads the shared expert's output, which AutoEP computes after the routed ones", where=str(path),
                                 expected="a probe fitted under AutoEP (`fit` in the section)",
                                 do="fit one there, or leave probe out: then the unfitted gate looks ahead") from e


# training and evaluation --------------------------------------------------------------------------------------------------
def initialize(*, model: nn.Module, config: Source = None, args: Any = None, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """`deepspeed.initialize` with a `moe_prefetch` section in its configuration: `fit` learns a probe beside training
    (`engine.moe_prefetch` is a ProbeFit); with `experts`, `probe` or `kv` and no optimizer, as for AutoEP evaluation, it is a session.

    Returns DeepSpeed's (engine, optimizer, dataloader, scheduler). Raises as `init_inference`, before the model is touched.
    """
    source = config if config is not None else kwargs.pop("config_params", None) or getattr(args, "deepspeed_config", None)
    ours, stock = split(source, {})
    problems = contradictions({"train_micro_batch_size_per_gpu": None, **stock}, ours)
    if ours.fit is None and (kwargs.get("optimizer") is not None):
        problems.append("optimizer: experts, probe and kv serve inference; drop the optimizer, or use fit")
    if isinstance(model, PipelineModule):
        problems.append("model: a PipelineModule runs its stages at different times; fit from traces instead (docs/probes.md)")
    problems += _optimizer(stock)
    _refuse(problems, source)
    _check_folders(ours)
    host = open_module(model)
    autoep = stock.get("expert_parallel", {})
    if isinstance(autoep, Mapping) and autoep.get("enabled"):
        _check_autoep(host, autoep)
    if ours.fit is None:
        size = autoep.get("autoep_size", 1) if isinstance(autoep, Mapping) and autoep.get("enabled") else 0
        _check_model(host, ours, _training_dtype(stock, host), get_accelerator().device_name(), size)
    _check_started()
    engine, *rest = deepspeed.initialize(args=None, model=model, config=stock | {SECTION: ours.model_dump(mode="json")}, **kwargs)
    attach_engine(engine, ours)
    return (engine, *rest)


def _optimizer(stock: Mapping[str, Any]) -> list[str]:
    section = stock.get("optimizer")
    name = str(section.get("type") or "").lower() if isinstance(section, Mapping) else ""
    known = [*DEEPSPEED_OPTIMIZERS, "onebitadam", "onebitlamb", "zerooneadam", *map(str.lower, dir(torch.optim))]
    if not name or name in known:
        return []
    near = difflib.get_close_matches(name, known, n=1)
    return [f"optimizer.type: neither DeepSpeed nor torch.optim has {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")]


def _check_started() -> None:
    missing = [name for name in LAUNCHER if name not in os.environ]
    # It knows these two clouds' own variables, and asks MPI otherwise.
    other = torch.distributed.is_initialized() or {"AZUREML_EXPERIMENT_ID", "SM_TRAINING_ENV"} & os.environ.keys()
    if missing and not other and importlib.util.find_spec("mpi4py") is None:
        raise ConfigError(f"no launcher has set {', '.join(missing)}", where="environment", expected="what a launcher sets",
                          do="start with `deepspeed script.py` or `torchrun --nproc-per-node 1 script.py`, also for one process")


def _training_dtype(stock: Mapping[str, Any], host: HostModel) -> torch.dtype:
    for key, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if isinstance(stock.get(key), Mapping) and stock[key].get("enabled"):
            return dtype
    return host.gates[0].weight_ED.dtype


def _check_autoep(host: HostModel, section: Mapping[str, Any]) -> None:
    version = importlib.metadata.version("transformers")
    if not autoep_works():
        raise UnsupportedModelError(f"AutoEP of DeepSpeed {deepspeed.__version__} does not work with transformers {version}",
                                    where="expert_parallel", expected="transformers 5.17",
                                    do="install that version, or drop expert_parallel")
    if not isinstance(host, TransformersModel):
        raise UnsupportedModelError("AutoEP takes transformers models", where="expert_parallel", expected="Mixtral or Qwen3-MoE",
                                    do="drop expert_parallel; deepspeed.moe layers have ep_size")
    preset = section.get("preset_model")
    if preset is not None and preset not in PRESET_MODELS:
        near = difflib.get_close_matches(str(preset), list(PRESET_MODELS), n=1)
        raise ConfigError(f"AutoEP has no preset {preset!r}" + (f"; did you mean {near[0]!r}?" if near else ""),
                          where="expert_parallel.preset_model", expected=", ".join(PRESET_MODELS), do="name one, or drop the key")
    size = section.get("autoep_size", 1)
    world = _world()
    if not isinstance(size, int) or size < 1 or world % size or host.num_experts % size:
        raise ConfigError(f"expert_parallel.autoep_size is {size!r}", where="expert_parallel.autoep_size",
                          expected=f"a divisor of {world} processes and {host.num_experts} experts", do="correct it")


def attach_engine(engine: Any, section: Config | None = None) -> ProbeFit | Session:
    """For an engine that `deepspeed.initialize` made: start what its configuration's `moe_prefetch` section says.

    Raises ConfigError, UnsupportedModelError, SessionError.
    """
    if getattr(engine, SECTION, None) is not None:
        raise SessionError("this engine has been attached already", where=type(engine).__name__, do="use engine.moe_prefetch")
    if section is None:
        section, stock = split(engine.config if isinstance(engine.config, dict) else {}, {})
        _refuse(contradictions({"train_micro_batch_size_per_gpu": None, **stock}, section), None)
    _check_folders(section)
    if section.fit is not None:
        engine.moe_prefetch = ProbeFit(open_module(engine.module), section.fit, engine.device)
    else:
        engine.moe_prefetch = attach(engine, _own_folder(engine, section))
    return engine.moe_prefetch


def _own_folder(engine: Any, section: Config) -> Config:
    """Ranks of an expert group hold different experts: each keeps its records in a folder of its own."""
    host = open_module(engine.module)
    if section.experts.path is None or not isinstance(host, AutoEPModel | MoEModel) or host._ranks == 1:
        return section
    path = section.experts.path / f"rank-{host._rank}-of-{host._ranks}"
    return section.model_copy(update={"experts": section.experts.model_copy(update={"path": path})})
