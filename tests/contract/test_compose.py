"""The compose file and the image: no engine runs here to try them, so what they say is checked against the code."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from rollstream import __version__
from rollstream.settings import PREFIX, load_settings, setting_names
from tests.contract.checkout import FOLDERS, ROOT, pyproject
from tests.contract.test_helm import assert_command

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text("utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = {name: service for name, service in SERVICES.items() if "build" in service}
DOCKERFILE = (ROOT / "Dockerfile").read_text("utf-8")


def _plain(value: str) -> str:
    """The value where no variable is set: `${NAME:-default}` → `default`."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value)


def _environment(service: dict[str, Any]) -> dict[str, str]:
    return {name: _plain(value) for name, value in service["environment"].items()}


def test_compose_runs_every_process_of_ours() -> None:
    """Gateway, processor, both sinks and the topics job."""
    assert sorted(OURS) == ["gateway", "processor", "sink-clickhouse", "sink-objects", "topics"]


@pytest.mark.parametrize("name", sorted(OURS))
def test_service_runs_a_command_that_exists(name: str) -> None:
    """The arguments are those of the `rollstream` command line."""
    assert_command(OURS[name]["command"])


@pytest.mark.parametrize("name", sorted(OURS))
def test_service_has_known_settings_that_load(name: str) -> None:
    """No process of ours stops over an unknown or wrong setting."""
    environment = _environment(OURS[name])

    assert set(environment) - set(setting_names()) == set()
    load_settings(environ=environment)


def test_every_image_is_pinned() -> None:
    """No service follows a moving tag, and ours has this version."""
    for name, service in SERVICES.items():
        tag = service["image"].rpartition(":")[2]

        assert re.fullmatch(r"\d+(\.\d+)+", tag), name
    assert {service["image"] for service in OURS.values()} == {f"rollstream/rollstream:{__version__}"}


def test_kafka_is_the_version_that_the_tests_run() -> None:
    """The compose file's broker is the one that delivery and restarts are tested on."""
    pom = ElementTree.parse(ROOT / "tests" / "services" / "kafka" / "pom.xml")
    space = {"m": "http://maven.apache.org/POM/4.0.0"}
    versions = {
        found.findtext("m:artifactId", namespaces=space): found.findtext("m:version", namespaces=space)
        for found in pom.iterfind(".//m:dependency", space)
    }

    assert SERVICES["kafka"]["image"] == f"apache/kafka:{versions['kafka_2.13']}"


def test_every_address_names_a_service_and_a_port_it_has() -> None:
    """Kafka, ClickHouse and S3 are addressed where the compose file puts them."""
    kafka = SERVICES["kafka"]["environment"]
    listeners = dict(part.split("://") for part in kafka["KAFKA_ADVERTISED_LISTENERS"].split(","))
    sinks = {name: load_settings(environ=_environment(OURS[name])).sink for name in OURS if name.startswith("sink")}

    assert {_environment(service)[f"{PREFIX}KAFKA__BOOTSTRAP"] for service in OURS.values()} == {listeners["INSIDE"]}
    assert kafka["KAFKA_LISTENERS"].startswith(f"INSIDE://:{listeners['INSIDE'].rpartition(':')[2]},")
    user, password = (_environment(SERVICES["clickhouse"])[f"CLICKHOUSE_{part}"] for part in ("USER", "PASSWORD"))
    assert sinks["sink-clickhouse"].clickhouse == f"http://{user}:{password}@clickhouse:8123/rollstream"
    assert "-s3.port=8333" in SERVICES["seaweedfs"]["command"]
    assert sinks["sink-objects"].s3["endpoint"] == "http://seaweedfs:8333"
    assert sinks["sink-objects"].objects.startswith("s3://rollstream/")
    assert "s3.bucket.create -name rollstream" in SERVICES["bucket"]["command"][0]
    claims = {name: load_settings(environ=_environment(OURS[name])).claims for name in OURS if name != "topics"}
    assert {("s3://rollstream", "http://seaweedfs:8333")} == {(c.store, c.s3["endpoint"]) for c in claims.values()}


def test_published_ports_are_on_the_loopback_address_and_open() -> None:
    """Nothing is reachable from outside the machine, and the gateway's port is the one it listens on."""
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}

    assert all(port.startswith("127.0.0.1:") for ports in published.values() for port in ports)
    gateway = load_settings(environ=_environment(OURS["gateway"])).gateway
    assert published["gateway"] == [f"127.0.0.1:{gateway.port}:{gateway.port}"]
    assert gateway.public_url == f"http://localhost:{gateway.port}"


def test_long_lived_services_have_health_checks_on_their_ports() -> None:
    """A process that hangs is seen."""
    for name, service in SERVICES.items():
        if name in ("topics", "bucket"):
            continue
        check = " ".join(service["healthcheck"]["test"])
        settings = load_settings(environ=_environment(service)) if name in OURS else None
        ports = {
            "gateway": settings and settings.gateway.port,
            "processor": settings and settings.processor.metrics_port,
            "sink-clickhouse": settings and settings.sink.metrics_port,
            "sink-objects": settings and settings.sink.metrics_port,
        }

        assert f"localhost:{ports.get(name) or ''}" in check, name


def test_dependencies_name_services() -> None:
    """Nobody waits for a service that is not there, nor for the health of one that never reports it."""
    for service in SERVICES.values():
        for name, wanted in service.get("depends_on", {}).items():
            assert wanted["condition"] != "service_healthy" or "healthcheck" in SERVICES[name]


def test_image_is_built_from_folders_and_extras_that_exist() -> None:
    """The image copies every package folder and installs extras that pyproject.toml has."""
    copied = set(re.findall(r"^COPY (\w+) /src/\w+$", DOCKERFILE, re.MULTILINE))
    extras = re.findall(r"'\.\[([\w,]+)\]'", DOCKERFILE)
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines() if line.startswith("!")}

    assert set(FOLDERS) == copied
    assert set(extras[0].split(",")) <= set(pyproject()["project"]["optional-dependencies"])
    assert {*FOLDERS, "pipelines", "pyproject.toml", "constraints.txt", "README.md", "LICENSE"} == kept
    assert 'ENTRYPOINT ["rollstream"]' in DOCKERFILE


def test_image_and_chart_agree_on_the_user() -> None:
    """The image's user is the one that the chart's pods run as."""
    helpers = (ROOT / "helm" / "rollstream" / "templates" / "_helpers.tpl").read_text("utf-8")
    user = re.search(r"--uid (\d+)", DOCKERFILE)

    assert user is not None
    assert f"USER {user[1]}:{user[1]}" in DOCKERFILE
    assert f"runAsUser: {user[1]}" in helpers
