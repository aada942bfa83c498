"""Compose files and manifests: every option exists, nothing of Ray is exposed, secrets are references, containers are
confined."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.settings import ENV_PREFIX, Settings
from tests.docker.dockerfile import stages

DOCKER = Path(__file__).parents[2] / "docker"
COMPOSE = sorted(DOCKER.glob("compose*.yaml"))
MANIFESTS = sorted((DOCKER / "kubernetes" / "base").glob("*.yaml"))
RAY_PORTS = {6379, 8265, 10001, 52365}


def _documents(files: list[Path]) -> Iterator[dict[str, Any]]:
    for file in files:
        yield from (document for document in yaml.safe_load_all(file.read_text()) if document)


def _of_kind(kind: str) -> dict[str, Any]:
    [found] = [document for document in _documents(MANIFESTS) if document["kind"] == kind]
    return found


def _pods() -> dict[str, dict[str, Any]]:
    """The pod templates of the RayService."""
    cluster = _of_kind("RayService")["spec"]["rayClusterConfig"]
    groups = {group["groupName"]: group["template"] for group in cluster["workerGroupSpecs"]}
    return {"head": cluster["headGroupSpec"]["template"], **groups}


@pytest.mark.parametrize(
    "file", [DOCKER / "Dockerfile", *COMPOSE, *MANIFESTS], ids=lambda file: file.relative_to(DOCKER).as_posix()
)
def test_every_option_exists(file: Path) -> None:
    known = set(Settings.model_fields)
    text = "\n".join(line.partition("#")[0] for line in file.read_text().splitlines())
    variables = set(re.findall(rf"\b{ENV_PREFIX}([A-Z_]+)\b", text)) - {"IMAGE", "TORCH_BACKEND"}
    assert {name.lower() for name in variables} <= known
    for command in re.findall(r"tinsmith serve((?:\s+(?!&&|\||;|- )\S+)*)", text):
        options = re.findall(r"--([a-z-]+)", command)
        assert {name.replace("-", "_") for name in options} <= known
    for pod in _pods().values() if file.name == "rayservice.yaml" else ():
        for container in pod["spec"]["containers"]:
            options = [word for word in container.get("args", ()) if word.startswith("--")]
            assert {name.removeprefix("--").replace("-", "_") for name in options} <= known


def test_the_cluster_files_use_what_a_cluster_has() -> None:
    """So that the test above cannot pass over an empty set."""
    [server] = [one for one in _pods()["head"]["spec"]["containers"] if one["name"] == "server"]
    assert server["args"][:2] == ["serve", "--ray"]
    compose = yaml.safe_load((DOCKER / "compose.cluster.yaml").read_text())
    assert "--ray" in compose["services"]["server"]["command"][0]
    assert "--artifacts-url" in compose["services"]["server"]["command"][0]


def test_settings_of_the_config_map_are_accepted() -> None:
    values = {name.removeprefix(ENV_PREFIX).lower(): value for name, value in _of_kind("ConfigMap")["data"].items()}
    assert Settings.model_validate(values).artifacts_url == values["artifacts_url"]


@pytest.mark.parametrize("name", sorted(_pods()))
def test_pods_are_confined(name: str) -> None:
    pod = _pods()[name]["spec"]
    assert pod["enableServiceLinks"] is False
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == 10001
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    for container in pod["containers"]:
        confined = container["securityContext"]
        assert confined["readOnlyRootFilesystem"] is True
        assert confined["allowPrivilegeEscalation"] is False
        assert confined["capabilities"] == {"drop": ["ALL"]}
        assert "memory" in container["resources"]["limits"]
        for mount in container["volumeMounts"]:
            volume = volumes[mount["name"]]
            assert mount["mountPath"] == "/data" or "emptyDir" in volume
    assert not pod.get("hostNetwork")


def test_ray_is_private_and_asks_for_a_token() -> None:
    cluster = _of_kind("RayService")["spec"]["rayClusterConfig"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["headGroupSpec"]["serviceType"] == "ClusterIP"
    assert not cluster["headGroupSpec"].get("enableIngress")
    service = _of_kind("Service")["spec"]
    assert service["type"] == "ClusterIP"
    assert [port["targetPort"] for port in service["ports"]] == ["http"]
    policy = _of_kind("NetworkPolicy")["spec"]
    labels = policy["podSelector"]["matchLabels"].items()
    assert all(labels <= pod["metadata"]["labels"].items() for pod in _pods().values())
    anyone = [rule for rule in policy["ingress"] if "from" not in rule]
    assert [[port["port"] for port in rule["ports"]] for rule in anyone] == [[8410]]
    assert not [document["kind"] for document in _documents(MANIFESTS) if document["kind"] == "Ingress"]
    compose = yaml.safe_load((DOCKER / "compose.cluster.yaml").read_text())
    assert compose["networks"]["private"] == {"internal": True}
    assert "--include-dashboard=false" in compose["services"]["server"]["command"][0]
    for name in ("server", "node"):
        assert compose["services"][name]["environment"]["RAY_AUTH_MODE"] == "token"


@pytest.mark.parametrize("file", COMPOSE, ids=lambda file: file.name)
def test_compose_opens_one_port_to_this_machine_only(file: Path) -> None:
    services = yaml.safe_load(file.read_text())["services"]
    opened = {name: service["ports"] for name, service in services.items() if "ports" in service}
    assert [ports for ports in opened.values() if ports != ["127.0.0.1:8410:8410"]] == []
    for service in services.values():
        if "tinsmith" in service.get("image", "") and "volumes" in service:
            assert service["read_only"] is True
            assert service["cap_drop"] == ["ALL"]


def test_secrets_are_references() -> None:
    secret = re.compile(r"(?i)password|secret|token|database_url|access_key")
    for pod in _pods().values():
        for container in pod["spec"]["containers"]:
            for variable in container.get("env", ()):
                if secret.search(variable["name"]) and not variable["name"].endswith("_MODE"):
                    assert set(variable) == {"name", "valueFrom"}, variable["name"]
    assert not any(secret.search(name) for name in _of_kind("ConfigMap")["data"])
    assert "Secret" not in {document["kind"] for document in _documents(MANIFESTS)}
    for file in COMPOSE:
        for service in yaml.safe_load(file.read_text())["services"].values():
            for name, value in service.get("environment", {}).items():
                if secret.search(name) and not name.endswith("_MODE"):
                    assert re.search(r"\$\{[A-Z_]+:\?", value), name


def test_images_are_pinned_and_run_as_nobody_in_particular() -> None:
    for torch in ("cpu", "cuda"):
        found = stages(DOCKER / "Dockerfile", TORCH=torch)
        assert found["build"].parent == f"torch-{torch}"
        assert re.fullmatch(r"python:\d+\.\d+\.\d+-slim-[a-z]+", found["base"].parent)
        assert found["server"].parent == "base"
        assert found["server"].last("USER") == "10001:10001"
        assert "/readyz" in found["server"].last("HEALTHCHECK")
    for file in COMPOSE:
        for service in yaml.safe_load(file.read_text())["services"].values():
            assert re.search(r":[^:]*\d|tinsmith:(cpu|cuda)", service["image"]), service["image"]
            assert "latest" not in service["image"]
