"""Checks the Dockerfile (hadolint) and the manifests (Kubernetes' own schemas): `make lint-docker`.

Runs in an environment of its own (docker/lint-requirements.txt). A RayService is none of Kubernetes' kinds; its pods
are, and they are checked as such. Overlays are rendered where `kubectl` is installed, and left out, with a word, where
not.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

DOCKER = Path(__file__).parent
KUBERNETES = "1.34"
"""The version whose schemas count: manifests of it are understood by newer ones."""


def pods(service: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The pods of a RayService, as Kubernetes would see them."""
    cluster = service["spec"]["rayClusterConfig"]
    templates = {"head": cluster["headGroupSpec"]["template"]}
    templates |= {group["groupName"]: group["template"] for group in cluster["workerGroupSpecs"]}
    for name, template in templates.items():
        metadata = {"name": name, **template["metadata"]}
        yield {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def problems(text: str, place: str) -> Iterator[str]:
    """What is wrong with the manifests of a text."""
    for document in filter(None, yaml.safe_load_all(text)):
        kind = document["kind"]
        if document["apiVersion"].startswith("kustomize."):
            continue
        for one in pods(document) if kind == "RayService" else [document]:
            try:
                kubernetes_validate.validate(one, KUBERNETES, strict=True)
            except kubernetes_validate.ValidationError as error:
                where = ".".join(str(part) for part in error.path)
                yield f"{place}: {kind} {one['metadata']['name']}: {where}: {error.message}"


def main() -> int:
    hadolint = Path(sys.executable).with_name("hadolint")
    status = subprocess.run([hadolint, DOCKER / "Dockerfile"], check=False).returncode
    found = []
    for file in sorted((DOCKER / "kubernetes" / "base").glob("*.yaml")):
        found += problems(file.read_text(encoding="utf-8"), file.name)
    kubectl = shutil.which("kubectl")
    for overlay in sorted((DOCKER / "kubernetes" / "overlays").iterdir()):
        if kubectl is None:
            sys.stderr.write(f"not rendered, for there is no kubectl: overlay {overlay.name}\n")
            continue
        rendered = subprocess.run([kubectl, "kustomize", overlay], capture_output=True, text=True, check=False)
        found += [f"{overlay.name}: {rendered.stderr}"] if rendered.returncode else []
        found += problems(rendered.stdout, overlay.name)
    sys.stderr.writelines(f"{line}\n" for line in found)
    return 1 if found or status else 0


if __name__ == "__main__":
    sys.exit(main())
