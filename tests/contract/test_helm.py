"""The Helm chart: it lints, renders, refuses unknown values, and starts our processes with settings they know."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import helm_python as helm
import kubernetes_validate
import pytest
import yaml

from rollstream.cli import cli
from rollstream.processors.pipeline import load_pipeline
from rollstream.settings import PREFIX, load_settings, setting_names
from tests.contract.checkout import ROOT

CHART = ROOT / "helm" / "rollstream"
EXAMPLES = [None, *sorted((CHART / "examples").glob("*.yaml"))]
OLDEST, NEWEST = "1.35", kubernetes_validate.latest_version()


def _values(example: Path | None) -> dict[str, Any]:
    return {} if example is None else yaml.safe_load(example.read_text("utf-8"))


def render(values: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """The chart's manifests."""
    with helm.Chart.load(CHART) as chart:
        files = chart.render(values or {}, name="demo", namespace="prod")
    texts = [text for name, text in files.items() if not name.endswith(".txt")]
    return [manifest for text in texts for manifest in yaml.safe_load_all(text) if manifest]


def _pods(manifests: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for manifest in manifests:
        if "template" in manifest.get("spec", {}):
            yield manifest["metadata"]["name"], manifest["spec"]["template"]["spec"]


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_chart_lints_without_warning(example: Path | None) -> None:
    """Helm's own linter has nothing to say above a note, with the defaults and with each example."""
    report = helm.lint(CHART, _values(example), strict=True)

    assert report["errors"] == []
    assert [message for message in report["messages"] if message["severity"] > 1] == []


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_rendered_manifests_are_valid_kubernetes(example: Path | None, version: str) -> None:
    """Every manifest follows Kubernetes' own schemas, without unknown fields."""
    for manifest in render(_values(example)):
        kubernetes_validate.validate(manifest, version, strict=True)


def test_default_chart_has_every_process() -> None:
    """Gateway, processors, both sinks and the topics job are there after a plain install."""
    kinds = sorted((m["kind"], m["metadata"]["name"]) for m in render() if "template" in m.get("spec", {}))

    assert kinds == [
        ("Deployment", "demo-rollstream-gateway"),
        ("Deployment", "demo-rollstream-sink-clickhouse"),
        ("Deployment", "demo-rollstream-sink-objects"),
        ("Job", "demo-rollstream-topics"),
        ("StatefulSet", "demo-rollstream-processor"),
    ]


def test_every_process_that_reads_or_writes_records_has_the_claim_store() -> None:
    """One without it could not read what another one wrote; the job that makes topics needs none."""
    pods = dict(_pods(render({"claims": {"url": "s3://large/here", "existingSecret": {"name": "s"}}})))

    found = {
        name: {
            entry["name"]: entry.get("value") for entry in pod["containers"][0]["env"] if "CLAIMS" in entry["name"]
        }
        for name, pod in pods.items()
    }

    assert {"ROLLSTREAM_CLAIMS__STORE": "s3://large/here", "ROLLSTREAM_CLAIMS__S3": None} == found.pop(
        "demo-rollstream-gateway"
    )
    assert {} == found.pop("demo-rollstream-topics")
    assert all("s3://large/here" == env["ROLLSTREAM_CLAIMS__STORE"] for env in found.values())


@pytest.mark.parametrize(
    "values",
    [
        {"gatewy": {}},
        {"gateway": {"replica": 2}},
        {"kafka": {"partitions": 0}},
        {"processor": {"stages": ["joyn"]}},
        {"sinks": {"clickhouse": {"existingSecret": {"name": ""}}}},
        {"image": {"digest": "latest"}},
    ],
    ids=str,
)
def test_chart_refuses_values_it_does_not_know(values: dict[str, Any]) -> None:
    """A misspelt key or an impossible value stops the release."""
    with helm.Chart.load(CHART) as chart, pytest.raises(helm.HelmError):
        chart.validate_schema(values)


def test_every_default_value_is_in_the_values_schema() -> None:
    """The schema describes the whole of values.yaml: each mapping is closed or a free map on purpose."""
    with helm.Chart.load(CHART) as chart:
        schema, values = chart.schema, chart.values
    assert schema is not None

    missing = list(_undescribed(values, schema, ""))

    assert missing == []


def _undescribed(values: dict[str, Any], schema: dict[str, Any], at: str) -> Iterator[str]:
    known = schema.get("properties", {})
    if known and schema.get("additionalProperties") is not False:
        yield f"{at or '.'} is not closed"
    for name, value in values.items():
        if known and name not in known:
            yield f"{at}.{name}"
        elif known and isinstance(value, dict):
            yield from _undescribed(value, known[name], f"{at}.{name}")


def test_two_gateways_need_a_signing_key() -> None:
    """Replicas without a shared secret would refuse each other's keys."""
    with pytest.raises(helm.HelmError, match="sign keys of its own"):
        render({"gateway": {"replicas": 2}})


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_chart_sets_only_known_settings_with_values_that_load(example: Path | None) -> None:
    """A process that the chart starts never stops over an unknown or wrong setting."""
    known = set(setting_names())
    for name, pod in _pods(render(_values(example))):
        for container in pod["containers"]:
            env = {entry["name"]: entry.get("value") for entry in container["env"]}

            assert {key for key in env if key.startswith(PREFIX)} - known == set(), name
            load_settings(environ={key: value for key, value in env.items() if value is not None})


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_containers_run_commands_that_exist(example: Path | None) -> None:
    """The arguments are those of the `rollstream` command line."""
    for _, pod in _pods(render(_values(example))):
        for container in pod["containers"]:
            assert_command(container["args"])


def assert_command(args: list[str]) -> None:
    """Fail unless the words name a command of `rollstream` and arguments it takes."""
    command: click.Command = cli
    words = list(args)
    while isinstance(command, click.Group):
        found = command.commands.get(words.pop(0))
        assert found is not None, args
        command = found
    command.make_context("rollstream", words)


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_every_pod_is_locked_down(example: Path | None) -> None:
    """No pod runs as root, writes its root file system, gains rights, or gets Kubernetes' own variables and tokens.

    Kubernetes' service variables would be named ROLLSTREAM_..., and an unknown one stops our processes.
    """
    for name, pod in _pods(render(_values(example))):
        assert pod["enableServiceLinks"] is False, name
        assert pod["automountServiceAccountToken"] is False, name
        assert pod["securityContext"]["runAsNonRoot"] is True, name
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert set(container["resources"]) == {"requests", "limits"}, name


def test_long_lived_pods_have_probes_on_ports_they_open() -> None:
    """Each long-lived process has a startup and a liveness probe, and every probe names a port of its container."""
    for name, pod in _pods(render()):
        for container in pod["containers"]:
            probes = {key: value for key, value in container.items() if key.endswith("Probe")}
            ports = {port["name"] for port in container.get("ports", [])}

            assert name.endswith("-topics") or {"startupProbe", "livenessProbe"} <= set(probes), name
            for probe in probes.values():
                assert (probe.get("httpGet") or probe["tcpSocket"])["port"] in ports


def test_ports_in_settings_are_the_ports_of_the_containers() -> None:
    """What a process is told to listen on is what the pod opens."""
    for name, pod in _pods(render()):
        for container in pod["containers"]:
            told = [entry["value"] for entry in container["env"] if entry["name"].endswith("PORT")]

            assert [str(port["containerPort"]) for port in container.get("ports", [])] == told, name


def test_secrets_come_from_existing_secrets_only() -> None:
    """The chart holds no password: it names Secrets that somebody else keeps."""
    manifests = render(_values(CHART / "examples" / "full.yaml"))
    secret = {"ROLLSTREAM_GATEWAY__KEY_SECRET", "ROLLSTREAM_GATEWAY__ADMIN_KEY", "ROLLSTREAM_SINK__CLICKHOUSE"}
    secret |= {"ROLLSTREAM_SINK__S3", "ROLLSTREAM_KAFKA__PROPERTIES"}

    entries = [e for _, pod in _pods(manifests) for c in pod["containers"] for e in c["env"] if e["name"] in secret]

    assert "Secret" not in {manifest["kind"] for manifest in manifests}
    assert {entry["name"] for entry in entries} == secret
    assert all("secretKeyRef" in entry["valueFrom"] for entry in entries)


def test_default_pipeline_is_the_projects_own() -> None:
    """The copy inside the chart, where Helm can read it, equals pipelines/default.yaml."""
    copy = yaml.safe_load((CHART / "files" / "pipeline.yaml").read_text("utf-8"))

    assert yaml.safe_load((ROOT / "pipelines" / "default.yaml").read_text("utf-8")) == copy


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_pipeline_in_the_chart_is_one_that_processors_load(example: Path | None, tmp_path: Path) -> None:
    """What lands in the ConfigMap starts the processors."""
    config = next(manifest for manifest in render(_values(example)) if manifest["kind"] == "ConfigMap")
    file = tmp_path / "pipeline.yaml"
    file.write_text(config["data"]["pipeline.yaml"], "utf-8")

    assert load_pipeline(file).config.name == yaml.safe_load(file.read_text("utf-8"))["name"]


def test_processors_restart_when_the_pipeline_changes() -> None:
    """A changed pipeline changes the pods' template; other pods stay."""
    before = {m["metadata"]["name"]: m for m in render() if "template" in m.get("spec", {})}

    after = {m["metadata"]["name"]: m for m in render({"pipeline": "name: other"}) if "template" in m.get("spec", {})}

    assert [name for name in before if before[name] != after[name]] == ["demo-rollstream-processor"]


def test_chart_version_is_the_packages() -> None:
    """One release, one version."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text("utf-8"))

    from rollstream import __version__

    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)
