"""Pipeline files: resolved, digested, and wrong ones refused with the nearest right name."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollstream.errors import SettingsError
from rollstream.processors.base import Stage
from rollstream.processors.pipeline import STAGES, Pipeline, load_pipeline
from tests.unit.processors.simulation import DEFAULT

VALUES: dict[str, Any] = yaml.safe_load(DEFAULT.read_text())


def load(tmp_path: Path, values: object) -> Pipeline:
    """Write a pipeline file and load it."""
    file = tmp_path / "pipeline.yaml"
    file.write_text(yaml.safe_dump(values))
    return load_pipeline(file)


def changed(path: str, value: object) -> dict[str, Any]:
    """The default file's values with one of them changed."""
    values = copy.deepcopy(VALUES)
    at: Any = values
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    for part in parents:
        at = at[part]
    at[last] = value
    return values


def test_default_pipeline_makes_the_stages_in_order() -> None:
    """The file that ships loads and gives six stages, each new for a partition."""
    pipeline = load_pipeline(DEFAULT)

    stages: list[Stage] = pipeline.build_stages(0)

    assert STAGES == tuple(stage.name for stage in stages)
    assert [("rollouts", True), ("groups", True), ("scores", True), ("rewards", True), ("credits", True),
            ("samples", True)] == [(stage.output, stage.reads_own_output) for stage in stages]  # fmt: skip
    assert not {id(stage) for stage in stages} & {id(stage) for stage in pipeline.build_stages(1)}


def test_digest_is_over_resolved_values(tmp_path: Path) -> None:
    """Leaving a default out, or writing it down, is the same pipeline."""
    short = {name: VALUES[name] for name in ("name", "reward")}
    short["score"] = {"scorers": [{"name": "outcome", "kind": "environment_outcome"}]}

    assert load_pipeline(DEFAULT).digest == load(tmp_path, short).digest


@pytest.mark.parametrize(
    ("path", "value", "stage"),
    [
        ("join.deadline_s", 5, "join"),
        ("group.min_size", 3, "group"),
        ("score.scorers.0.config.field", "other", "score"),
        ("reward.clip", None, "reward"),
        ("credit.config.ddof", 0, "credit"),
        ("build.layout", "split", "build"),
    ],
)
def test_digests_tell_which_stage_changed(tmp_path: Path, path: str, value: object, stage: str) -> None:
    """A changed knob changes its own stage's digest and the whole one's, and no other stage's."""
    before, after = load_pipeline(DEFAULT), load(tmp_path, changed(path, value))

    different = [n for n in STAGES if before.stage_ref(n).config_digest != after.stage_ref(n).config_digest]

    assert [stage] == different
    assert before.digest != after.digest


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (changed("grop", {}), "grop: unknown key, nearest is 'group'"),
        (changed("join.dead_line_s", 1), "join.dead_line_s: unknown key, nearest is 'deadline_s'"),
        (changed("score.scorers.0.timeout", 1), "scorers.0.timeout: unknown key, nearest is 'timeout_s'"),
        (changed("score.scorers.0.config.feild", 1), "config.feild: unknown key, nearest is 'field'"),
        (changed("score.scorers.0.kind", "environment_outcom"), "unknown scorer 'environment_outcom', nearest is"),
        (changed("score.scorers.0.kind", "no.module:f"), "import scorer 'no.module:f'"),
        (changed("score.scorers.0.version", 2), "is at version 1 here, got 2"),
        (changed("reward.components", {"outcom": 1.0}), "unknown scorer 'outcom', nearest is 'outcome'"),
        (changed("reward.clip", [1, -1]), "clip must be"),
        (changed("credit.method", "gpro"), "unknown method 'gpro', nearest is 'grpo'"),
        (changed("credit.config.epsilon", 1), "credit.config.epsilon: unknown key"),
        (changed("credit.config.ddof", 2), "credit.config.ddof: .*got 2"),
        (changed("credit.version", 2), "'grpo' is at version 1 here, got 2"),
        (changed("build.aggregation", "mean"), "build.aggregation: .*got 'mean'"),
        (changed("build.aggregation", "rollout_sum_constant"), "constant must be set"),
        (changed("build.constant", 8), "constant must be set"),
        (changed("join.deadline_s", 0), "join.deadline_s: .*got 0"),
        (changed("join.version", 2), "join.version: .*got 2"),
        (changed("score.scorers", []), "score.scorers: "),
        (changed("score.scorers", VALUES["score"]["scorers"] * 2), "scorer names must be unique"),
        ([1], "expected a mapping"),
        ({1: 2}, "keys must be words"),
    ],
)
def test_wrong_files_are_refused_with_place_and_value(tmp_path: Path, values: object, message: str) -> None:
    """Whatever is wrong in a file is found at load, and the message says where and what."""
    with pytest.raises(SettingsError, match=message):
        load(tmp_path, values)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    """The message names the file."""
    with pytest.raises(SettingsError, match="nowhere"):
        load_pipeline(tmp_path / "nowhere.yaml")


def test_unknown_stage_is_refused() -> None:
    """The nearest stage is named."""
    with pytest.raises(SettingsError, match="nearest is 'join'"):
        load_pipeline(DEFAULT).stage_ref("joni")
