"""The manifests for Kubernetes are valid, and fit to each other."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

MANIFESTS = Path(__file__).parents[2] / "conf" / "kubernetes"
# The oldest version that Kubernetes and most sites still support is newer.
VERSIONS = ("1.27", "1.32")


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((MANIFESTS / name).read_text()))


ALL = [each for path in sorted(MANIFESTS.iterdir()) for each in documents(path.name)]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("document", ALL, ids=lambda each: each["kind"])
def test_each_manifest_fits_the_schema(document: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(document, version, strict=True)


def test_a_mistake_in_a_manifest_is_noticed() -> None:
    (service, daemons) = documents("monarch.yaml")
    service["spec"]["clusterIp"] = service["spec"].pop("clusterIP")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(service, VERSIONS[-1], strict=True)
    del daemons["spec"]["selector"]
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(daemons, VERSIONS[-1], strict=True)


def test_the_members_are_the_pods_behind_the_service() -> None:
    service, daemons = documents("monarch.yaml")
    template = daemons["spec"]["template"]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"]
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    (container,) = template["spec"]["containers"]
    arguments = container["args"]
    name = service["metadata"]["name"]
    assert arguments[arguments.index("--peers") + 1] == f"dns:{name}"
    (waiting,) = template["spec"]["initContainers"]
    program = waiting["command"][-1]
    ast.parse(program)
    assert f'getaddrinfo("{name}"' in program
    # The secret is in no command line.
    sources = {each["name"]: each.get("valueFrom", {}) for each in container["env"]}
    assert "secretKeyRef" in sources["MONARCH_PEERS_SECRET"]
    assert "SECRET" not in " ".join(arguments)
