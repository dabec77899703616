"""The one configuration object: frozen, versioned, unknown keys refused with the nearest valid name.

Read from YAML, from a dict, or from the `"moe_prefetch"` section of a DeepSpeed JSON. `load()` raises one ConfigError that lists
every problem. `Config.model_json_schema()` is the JSON schema. Only keys that do something exist.
"""
from __future__ import annotations

import copy
import difflib
import json
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from .errors import ConfigError

MAX_CONFIG_BYTES = 1 << 18
KV_FORMATS = ("fp16", "fp8", "fp4-72", "fp4-quality", "nvfp4", "mxfp4")
if TYPE_CHECKING:
    KVName = str
else:  # one of them, or K's and V's
    KVName = Literal[(*KV_FORMATS, *(f"{k}+{v}" for k in KV_FORMATS for v in KV_FORMATS if k != v))]
# Those that have outlier channels: a codebook, and a budget in bits.
WITH_OUTLIERS = ("fp4-72", "fp4-quality")
PlanName = Literal["auto", "lru", "recent", "stale", "probe"]

_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tb": 10**12, "tib": 2**40}


def parse_bytes(text: str) -> int:
    """'512MiB', '2 GB', '1024B' -> bytes. Raises ValueError."""
    m = re.fullmatch(r"\s*([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([a-zA-Z]*)\s*", text)
    if not m or m[2].lower() not in _UNITS:
        raise ValueError(f"{text!r} is not a size; write for example 512MiB or 2GB")
    return int(Fraction(m[1]) * _UNITS[m[2].lower()])


class _Checked(type(BaseModel)):  # type: ignore[misc]
    """A section made in Python raises ConfigError as one from a file does; pydantic's own error names no key of ours and no way out."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except ValidationError as e:
            lines = tuple(line for error in e.errors(include_url=False, include_context=False) for line in _explain(dict(error), cls))
            raise ConfigError("; ".join(lines), problems=lines, where=cls.__name__, do="mend what is named") from e


class _Section(BaseModel, metaclass=_Checked):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, strict=False, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_bool(cls, value: Any) -> Any:
        """No key is a switch, and true would pass for 1."""
        if isinstance(value, bool):
            raise ValueError("must be something else than true or false")
        return value

    @field_validator("*")
    @classmethod
    def _no_nul(cls, value: Any) -> Any:
        if isinstance(value, Path) and "\0" in str(value):
            raise ValueError("a path can't contain a NUL")
        return value

    @field_validator("path", "calibration", "out", mode="before", check_fields=False)
    @classmethod
    def _named(cls, value: Any) -> Any:
        """`~` is the user's home, as in a shell; nothing, or blanks, names no file."""
        if not isinstance(value, str | Path):
            return value
        if not str(value).strip():
            raise ValueError("is empty; name a folder or a file, or leave the key out")
        try:
            return Path(value).expanduser()
        except RuntimeError as e:
            raise ValueError(f"{value}: {e}") from e


class DriveConfig(_Section):
    """A model of the drive on top of the real reads, for machines whose page cache makes reads unreal. null: real reads only."""

    bandwidth: float = Field(3e9, gt=0, description="bytes per second of the whole drive")
    latency: float = Field(80e-6, ge=0, le=10, description="seconds from request to first byte")


class ExpertsConfig(_Section):
    """Where experts live and how they come."""

    home: Literal["local", "host", "disk"] = Field(
        "local", description="local: all in this device's memory; host: in the CPU's memory, read by the GPU; disk: records in a file")
    resident: int | str = Field("100%", description="slots per layer (16), share of the experts (50%), or bytes over all layers (2GiB)")
    plan: PlanName = Field("auto", description="who says what to fetch: auto is probe where probe.path is given, else the stale gate")
    path: Path | None = Field(None, description="folder of the record file; default: a temporary one, removed at detach")
    threads: int = Field(4, ge=1, le=64, description="mover threads")
    drive: DriveConfig | None = Field(None, description="model a slower drive on top of the real reads")
    deadline: float = Field(30.0, gt=0, le=3600, description="seconds after which a read that has not come is an error")

    @field_validator("resident", mode="before")
    @classmethod
    def _slots(cls, value: Any) -> Any:
        if isinstance(value, bool | float):
            raise ValueError("write a number of slots, a share such as 50%, or a size such as 2GiB")
        return int(value) if isinstance(value, str) and re.fullmatch(r"\s*[0-9]+\s*", value) else value

    @field_validator("resident")
    @classmethod
    def _resident(cls, value: int | str) -> int | str:
        if isinstance(value, str) and value.strip().endswith("%"):
            share = value.strip()[:-1].strip()
            if not re.fullmatch(r"[0-9]+(\.[0-9]*)?|\.[0-9]+", share):
                raise ValueError(f"{value!r} is not a share; write for example 50%")
            if not 0 < float(share) <= 100:
                raise ValueError(f"{value} is no share between 0% (exclusive) and 100%")
        elif isinstance(value, str):
            if parse_bytes(value) < 1:
                raise ValueError(f"{value} holds no expert; write for example 2GiB")
        elif value < 1:
            raise ValueError(f"{value} slots hold nothing; give each layer at least 1")
        return value


class ProbeConfig(_Section):
    """The routing probe."""

    path: Path | None = Field(None, description="folder written by save_pretrained; null: the target's own gate, unfitted (stale gate)")


class KVConfig(_Section):
    """How the KV cache is stored. See docs/kv.md for what each format costs and keeps."""

    format: KVName = Field("fp16", description="one of the formats, or two as K+V: fp8+fp4-72 keeps keys in fp8, values in fp4-72")
    window: int | None = Field(None, ge=0, le=1 << 16, description="most recent tokens kept in FP16; null: 64, fp4-quality 1024")
    sinks: int = Field(4, ge=0, le=1024, description="first tokens kept in FP16")
    settle: int = Field(32, ge=1, le=128, description="tokens that leave the window together: up to settle - 1 more are in FP16")
    outliers: Literal["importance", "sigma", "topn", "none"] = "importance"
    calibration: Path | None = Field(None, description="outlier channels made once for the model; null: chosen from the prompt")
    layers: dict[Annotated[int, Field(ge=0)], KVName] = Field(default_factory=dict, description="format of single decoder layers, 0-based")
    attention: Literal["auto", "pages", "tensors"] = Field(
        "auto", description="whether transformers' attention reads pages or decoded tensors; auto: pages on a GPU, tensors elsewhere")

    @field_validator("layers", mode="before")
    @classmethod
    def _unique(cls, value: Any) -> Any:
        if isinstance(value, dict):
            numbers = [int(k) if isinstance(k, int) or (isinstance(k, str) and re.fullmatch(r"\s*-?\d{1,9}\s*", k)) else k for k in value]
            if len(set(numbers)) != len(numbers) or any(isinstance(k, bool) for k in value):
                raise ValueError("a layer is named twice, or true or false")
        return value


class FitSection(_Section):
    """A probe learnt beside a training run, by the framework integrations. See docs/probes.md for what the sizes mean."""

    out: Path = Field(..., description="folder that gets the probe")
    rank: int = Field(64, ge=1, le=4096, description="units of a probe")
    linear: int = Field(32, ge=0, le=4096, description="units of them without the non-linearity")
    after: int = Field(0, ge=0, description="training passes to let go by first: routers that still find their way can't be forecast")
    steps: int = Field(2000, ge=1, description="length of the schedule, in fitting steps")
    batch: int = Field(4096, ge=1, description="tokens of a fitting step, at least; smaller passes are pooled")
    lr: float = Field(1e-3, gt=0, le=1, description="peak learning rate")
    moment_tokens: int = Field(8192, ge=1, description="tokens seen before the first step: they give the ridge start")
    held_out_tokens: int = Field(2048, ge=1, description="tokens kept back to judge the probe")

    @model_validator(mode="after")
    def _fits(self) -> FitSection:
        if self.linear > self.rank:
            raise ValueError(f"linear is {self.linear}, more than the {self.rank} units of rank; lower linear or raise rank")
        return self


class Config(_Section):
    """Everything that `attach` needs, or (with `fit`) a training run. Whatever is left out has a default that never loses."""

    version: Literal[1] = 1
    experts: ExpertsConfig = ExpertsConfig()
    probe: ProbeConfig = ProbeConfig()
    kv: KVConfig = KVConfig()
    fit: FitSection | None = Field(None, description="learn a probe beside training; inference takes no such section")

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        """What keys say together. A setting that would do nothing is a fault: it was written to do something."""
        experts, faults = self.experts, []
        if experts.home == "local":
            for key in type(experts).model_fields:
                if getattr(experts, key) != type(experts).model_fields[key].default:
                    faults.append(f"experts.{key} is set, but experts.home: local moves nothing; set home: disk or drop {key}")
            if self.probe.path is not None:
                faults.append("probe.path is set, but experts.home: local moves nothing; set home: disk or drop it")
        if experts.home == "host":
            for key in ("path", "threads", "drive", "deadline"):
                if getattr(experts, key) != type(experts).model_fields[key].default:
                    faults.append(f"experts.{key} is set, but experts.home: host has no file and no threads; set home: disk or drop {key}")
            if experts.plan == "lru":
                faults.append("experts.plan is lru, but experts.home: host reads on demand in place; use plan: recent, stale or probe")
        if experts.plan in ("lru", "recent", "stale") and self.probe.path is not None:
            faults.append(f"probe.path is set, but experts.plan: {experts.plan} asks no probe; use plan: probe (or auto), or drop it")
        if experts.plan == "probe" and self.probe.path is None:
            faults.append("experts.plan is probe, but probe.path is empty; name a fitted probe, or use plan: stale (the unfitted gate)")
        if self.fit is not None and (self.experts, self.probe, self.kv) != (ExpertsConfig(), ProbeConfig(), KVConfig()):
            faults.append("fit belongs to training, but experts, probe or kv set up inference; keep one of the two")
        names = {self.kv.format, *self.kv.layers.values()}
        keys, either = {name.split("+")[0] for name in names}, {half for name in names for half in name.split("+")}
        if names == {"fp16"}:
            for key in ("window", "sinks", "settle", "outliers", "calibration", "attention"):
                if getattr(self.kv, key) != KVConfig.model_fields[key].default:
                    faults.append(f"kv.{key} is set, but kv.format: fp16 keeps everything as it is; set another format or drop {key}")
        else:
            for key, coded in (("outliers", keys), ("calibration", either)):
                if not coded & set(WITH_OUTLIERS) and getattr(self.kv, key) != KVConfig.model_fields[key].default:
                    faults.append(f"kv.{key} is set, but kv.format: {self.kv.format} has no outlier channels; "
                                  f"use {' or '.join(WITH_OUTLIERS)}, or drop {key}")
        if faults:
            raise ValueError("\n".join(faults))
        return self


def _sections(model: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """Keys of `model` whose value is a section of its own."""
    found = {}
    for name, field in model.model_fields.items():
        for t in (field.annotation, *get_args(field.annotation)):
            if isinstance(t, type) and issubclass(t, BaseModel):
                found[name] = t
    return found


def _explain(error: dict[str, Any], whole: type[BaseModel] | None = None) -> list[str]:
    """One line a fault for one pydantic error of `whole` (None: Config): key, fault, nearest valid key."""
    loc = error["loc"]
    if not loc:
        return error["msg"].removeprefix("Value error, ").splitlines()
    if loc[-1] == "[key]":
        return [f"{'.'.join(map(str, loc[:-2]))}: {_short(error['input'])} is no layer number"]
    key = ".".join(_short(p, str) for p in loc if not (isinstance(p, str) and p in ("int", "str")))
    if error["type"] == "model_type":
        return [f"{key}: must be a section with keys of its own (given: {_short(error['input'])})"]
    if error["type"] != "extra_forbidden":
        # A union reports once per member; the value that was given says more than the member's name.
        given = "" if isinstance(error.get("input"), dict | BaseModel) else _short(error.get("input"))
        said = error["msg"].removeprefix("Value error, ").replace("Input should", "must").replace("a valid dictionary", "a mapping")
        valid = re.findall(r"'([^']*)'", said) if error["type"] == "literal_error" else []
        near = difflib.get_close_matches(_short(error.get("input"), str), valid, n=1)
        # thirty pairs of KV formats say less than how they are made
        said = re.sub(r", '[^',]*\+.*", ", or two of them as K+V, such as 'fp8+fp4-72'", said)
        return [f"{key}: {said}" + (f" (given: {given})" if given else "") + (f"; did you mean {near[0]!r}?" if near else "")]
    model: type[BaseModel] = whole or Config
    for part in loc[:-1]:
        model = _sections(model).get(str(part), model)
    valid = sorted(model.model_fields)
    near = difflib.get_close_matches(_short(loc[-1], str), valid, n=1)
    return [f"{key}: unknown key; " + (f"did you mean {near[0]!r}?" if near else f"valid keys are {', '.join(valid)}")]


def _short(value: Any, text: Callable[[Any], str] = repr) -> str:
    try:
        said = text(value)
    except ValueError:  # an integer of more digits than Python prints
        return "a number too long to print"
    return said if len(said) <= 100 else said[:97] + "..."


def _validated(value: dict[Any, Any]) -> tuple[Config, tuple[str, ...]]:
    """(the config, every problem). Keys that are wrong are set aside and the rest is looked at again, since what keys say together
    is checked only once each is right by itself; with problems the config is what was left."""
    problems: dict[str, None] = {}
    doubtful: set[str] = set()  # what was set aside, and what may have been meant: no rule over these can be judged
    value = copy.deepcopy(value)
    while True:
        try:
            return Config.model_validate(value), tuple(problems)
        except ValidationError as e:
            errors = e.errors(include_url=False, include_context=False)
        lines = [line for error in errors for line in _explain(dict(error))]
        if not any(error["loc"] for error in errors):
            problems |= dict.fromkeys(line for line in lines if not doubtful & set(re.findall(r"\w+", line)))
            parts = {name: _sections(Config)[name].model_validate(value[name]) for name in _sections(Config)
                     if value.get(name) is not None}
            return Config.model_construct(**parts), tuple(problems)
        problems |= dict.fromkeys(lines)
        wrong = []
        for error in errors:
            doubtful |= set(re.findall(r"did you mean '(\w+)'", " ".join(_explain(dict(error)))))
            place, owner, key = value, {}, None
            for part in error["loc"]:
                if not isinstance(place, dict) or part not in place:
                    break
                place, owner, key = place[part], place, part
            wrong.append((owner, key))
        for owner, key in wrong:
            doubtful.add(str(key))
            owner.pop(key, None)
        value = {key: v for key, v in value.items() if isinstance(key, str)}


class _Loader(yaml.SafeLoader):
    """Safe loader without aliases (their expansion can fill the memory) and without duplicate keys (the first would be lost)."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.constructor.ConstructorError(None, None, "aliases are not allowed", self.peek_event().start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key!r}", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) != len(dict(pairs)):
        raise ValueError(f"duplicate key among {[k for k, _ in pairs]}")
    return dict(pairs)


def parse_file(path: Path) -> dict[str, Any]:
    """The keys of a YAML or JSON file. Raises ConfigError."""
    try:
        with open(path, "rb") as f:
            data = f.read(MAX_CONFIG_BYTES + 1)
    except (OSError, ValueError) as e:
        raise ConfigError(f"the configuration can't be read: {getattr(e, 'strerror', None) or e}", where=str(path),
                          do="check the path") from e
    if len(data) > MAX_CONFIG_BYTES:
        raise ConfigError(f"larger than {MAX_CONFIG_BYTES} bytes", where=str(path), expected="a small YAML or JSON file",
                          do="check the path")
    try:
        text = data.decode("utf-8")
        value = json.loads(text, object_pairs_hook=_unique_keys) if path.suffix == ".json" else yaml.load(text, _Loader)  # noqa: S506
    except Exception as e:  # hostile text makes the YAML constructors fall over in many ways (KeyError, AttributeError, ...)
        raise ConfigError(f"not valid {'JSON' if path.suffix == '.json' else 'YAML'}: {' '.join(str(e).split())}", where=str(path),
                          do="mend the syntax") from e
    value = {} if value is None else value
    if not isinstance(value, dict):
        raise ConfigError(f"the top level is a {type(value).__name__}", where=str(path), expected="keys such as experts, probe, kv",
                          do="see docs/config.md")
    return value


def read_file(path: Path) -> dict[str, Any]:
    """Our keys of a YAML file, or of a JSON file (a DeepSpeed config gives its `moe_prefetch` section). Raises ConfigError."""
    value = parse_file(path)
    if path.suffix == ".json" and value and not {"moe_prefetch", *Config.model_fields} & set(value):
        raise ConfigError("there is no moe_prefetch section", where=str(path), expected='"moe_prefetch": {...} among its top-level keys',
                          do="add the section; without it DeepSpeed runs without us")
    if path.suffix == ".json" and "moe_prefetch" in value:
        value = value["moe_prefetch"]
        if not isinstance(value, dict):
            raise ConfigError("the moe_prefetch section is not an object", where=str(path), expected="keys such as experts, probe, kv",
                              do="see docs/config.md")
    return value


def examine(path: Path) -> tuple[Config | None, list[str]]:
    """(what a file says as far as it is sound, every problem of the text); None when it can't be parsed. Raises nothing for a bad file."""
    try:
        config, problems = _validated(read_file(path))
    except ConfigError as e:
        return None, [str(e)]
    return _relative_to(config, path.parent), list(problems)


def load(source: Config | dict[str, Any] | str | Path | None, *, base: Path | None = None) -> Config:
    """A Config from a file path, a dict (its relative paths are taken from `base`, where given), a Config or None (defaults).

    Raises ConfigError with every problem in `.problems`."""
    if isinstance(source, Config):
        return source
    if not isinstance(source, dict | str | Path | None):
        raise ConfigError(f"a configuration can't be a {type(source).__name__}", expected="a path, a dict, a Config or None",
                          do="pass one of these")
    where = str(source) if isinstance(source, str | Path) else ""
    config, problems = _validated({} if source is None else source if isinstance(source, dict) else read_file(Path(source)))
    if problems:
        raise ConfigError(f"{len(problems)} problem{'s' * (len(problems) > 1)} in the configuration: " + "; ".join(problems),
                          problems=problems, where=where, do="mend the keys named; `moe-prefetch validate FILE` checks again")
    folder = Path(where).parent if where else base
    return config if folder is None else _relative_to(config, folder)


def _relative_to(config: Config, folder: Path) -> Config:
    """Paths in a file are relative to its folder, so that a config folder can be moved."""
    base = folder.resolve()
    update: dict[str, Any] = {}
    for section, key in (("experts", "path"), ("probe", "path"), ("kv", "calibration"), ("fit", "out")):
        part = getattr(config, section)
        if (p := getattr(part, key, None)) is not None and not p.is_absolute():
            update[section] = part.model_copy(update={key: base / p})
    return config.model_copy(update=update)
