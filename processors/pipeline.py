"""Load a pipeline file, resolve and check everything in it, digest it, and make its stages.

Nothing is left to be found out while records flow: unknown keys, values, scorers and credit methods, and functions that
cannot be imported, are errors here. Digests are over the resolved configuration: leaving a default out, or writing it
down, gives the same digest.
"""

from __future__ import annotations

import difflib
import typing
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from rollstream.errors import SettingsError
from rollstream.processors.base import Stage
from rollstream.processors.build import BuildStage
from rollstream.processors.config import PipelineConfig, ScorerConfig, Signature
from rollstream.processors.credit import METHODS
from rollstream.processors.credit.stage import CreditStage
from rollstream.processors.group import GroupStage
from rollstream.processors.join import JoinStage
from rollstream.processors.reward import RewardStage
from rollstream.processors.score import ScoreStage
from rollstream.processors.scorers import KINDS, make_scorer
from rollstream.schemas.identity import digest_json
from rollstream.schemas.records import StageRef

STAGES = ("join", "group", "score", "reward", "credit", "build")
"""Stage names, in the order of the data."""

M = TypeVar("M", bound=BaseModel)


class Pipeline:
    """A resolved pipeline: configuration, digests, and the stages for each partition."""

    def __init__(self, config: PipelineConfig) -> None:
        """Args: config: as read; methods and scorers are looked up and their defaults filled in here.

        Raises: SettingsError: an unknown scorer or method, a knob of theirs, or a function that cannot be imported.
        """
        self.config = _resolve(config)
        values = self.config.model_dump(mode="json")
        self.name = config.name
        """Name of the pipeline."""
        self.digest = digest_json(values)
        """Digest of the resolved file."""
        kinds = {
            "join": "barrier",
            "group": "window",
            "score": "scorers",
            "reward": "weighted_sum",
            "credit": self.config.credit.method,
            "build": self.config.build.layout,
        }
        self._refs = {
            name: StageRef(name, kind, values[name]["version"], digest_json(values[name]))
            for name, kind in kinds.items()
        }

    @property
    def max_concurrency(self) -> int:
        """Most scorers running at once in a process."""
        return self.config.score.max_concurrency

    def stage_ref(self, name: str) -> StageRef:
        """What the records of a stage name as their maker.

        Raises: SettingsError: there is no such stage.
        """
        if name not in self._refs:
            raise SettingsError(f"unknown stage {name!r}{_nearest(name, STAGES)}")
        return self._refs[name]

    def signature(self, name: str) -> Signature:
        """What a stage writes into every record it makes."""
        return Signature(self.stage_ref(name), self.name, self.digest)

    def build_stages(self, partition: int) -> list[Stage]:
        """New stages, empty of state, for one partition, in the order join, group, score, reward, credit, build.

        Args: partition: number of the partition; stages do not depend on it.
        """
        del partition
        config, sign = self.config, self.signature
        scorers = [(spec, make_scorer(spec)) for spec in config.score.scorers]
        method = METHODS[config.credit.method]
        return [
            JoinStage(config.join, sign("join")),
            GroupStage(config.group, sign("group")),
            ScoreStage(config.score, config.group, sign("score"), scorers),
            RewardStage(config.reward, sign("reward")),
            CreditStage(method, method.config(**config.credit.config), sign("credit"), self.stage_ref("score")),
            BuildStage(config.build, config.group, sign("build")),
        ]


def load_pipeline(path: Path) -> Pipeline:
    """The pipeline in a YAML file.

    Raises: SettingsError: the file cannot be read, or something in it is unknown or wrong.
    """
    try:
        values = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, yaml.YAMLError) as cause:
        raise SettingsError(f"cannot read pipeline file {str(path)!r}: {cause}") from cause
    if not isinstance(values, dict):
        raise SettingsError(f"cannot read pipeline file {str(path)!r}: expected a mapping, got {values!r}")
    return Pipeline(_validated(PipelineConfig, values, ""))


def _resolve(config: PipelineConfig) -> PipelineConfig:
    scorers = tuple(_resolved_scorer(spec, at) for at, spec in enumerate(config.score.scorers))
    names = [spec.name for spec in scorers]
    for name in config.reward.components:
        if name not in names:
            raise SettingsError(f"pipeline reward.components: unknown scorer {name!r}{_nearest(name, names)}")
    credit = config.credit
    if credit.method not in METHODS:
        raise SettingsError(
            f"pipeline credit.method: unknown method {credit.method!r}{_nearest(credit.method, METHODS)}"
        )
    method = METHODS[credit.method]
    if credit.version != method.version:
        raise SettingsError(
            f"pipeline credit.version: {credit.method!r} is at version {method.version} here, got {credit.version}"
        )
    knobs = _validated(method.config, credit.config, "credit.config")
    return config.model_copy(
        update={
            "score": config.score.model_copy(update={"scorers": scorers}),
            "credit": credit.model_copy(update={"config": knobs.model_dump(mode="json")}),
        }
    )


def _resolved_scorer(spec: ScorerConfig, at: int) -> ScorerConfig:
    where = f"score.scorers.{at}"
    if ":" in spec.kind:
        make_scorer(spec)
        return spec
    if spec.kind not in KINDS:
        raise SettingsError(
            f"pipeline {where}.kind: unknown scorer {spec.kind!r}{_nearest(spec.kind, KINDS)}; your own is named "
            "package.module:function"
        )
    kind = KINDS[spec.kind]
    if spec.version != kind.VERSION:
        raise SettingsError(
            f"pipeline {where}.version: {spec.kind!r} is at version {kind.VERSION} here, got {spec.version}"
        )
    knobs = _validated(kind.Config, spec.config, f"{where}.config")
    return spec.model_copy(update={"config": knobs.model_dump(mode="json")})


def _validated(model: type[M], values: dict[str, Any], where: str) -> M:
    try:
        return model(**values)
    except ValidationError as cause:
        raise SettingsError(_problems(cause, model, where)) from None
    except TypeError as cause:
        raise SettingsError(f"pipeline {where or 'file'}: keys must be words, got {list(values)!r}") from cause


def _problems(cause: ValidationError, model: type[BaseModel], where: str) -> str:
    found = []
    for error in cause.errors():
        at = ".".join([*([where] if where else []), *(str(part) for part in error["loc"])])
        if error["type"] == "extra_forbidden":
            found.append(
                f"pipeline {at}: unknown key{_nearest(str(error['loc'][-1]), _keys(model, error['loc'][:-1]))}"
            )
        else:
            found.append(f"pipeline {at}: {error['msg']}, got {error['input']!r}")
    return "; ".join(found)


def _keys(model: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    """Known keys at a place in the file."""
    for part in path:
        if isinstance(part, str) and part in model.model_fields:
            hint: Any = model.model_fields[part].annotation
            inner = typing.get_args(hint)[:1] or (hint,)
            if isinstance(inner[0], type) and issubclass(inner[0], BaseModel):
                model = inner[0]
    return list(model.model_fields)


def _nearest(name: str, known: typing.Iterable[str]) -> str:
    names = list(known)
    near = difflib.get_close_matches(name, names, 1)
    return f", nearest is {near[0]!r}" if near else f", expected one of {names}"
