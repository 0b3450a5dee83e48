"""The manifests for Kubernetes are valid, and fit to each other."""

from __future__ import annotations

import os
import socket
import time
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
    # The secret is in no command line.
    sources = {each["name"]: each.get("valueFrom", {}) for each in container["env"]}
    assert "secretKeyRef" in sources["MONARCH_PEERS_SECRET"]
    assert "SECRET" not in " ".join(arguments)


@pytest.mark.parametrize("own", ["10.0.0.1", "fd00::1"])
def test_a_pod_waits_for_an_address_of_its_family_of_each_pod(
    own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, daemons = documents("monarch.yaml")
    (waiting,) = daemons["spec"]["template"]["spec"]["initContainers"]
    python, option, program = waiting["command"]
    assert (python, option) == ("python", "-c")
    known = {each["name"]: each.get("value", own) for each in waiting["env"]}
    monkeypatch.setattr(os, "environ", known)
    monkeypatch.setattr(os, "makedirs", lambda path: None)
    # With ipFamilyPolicy: PreferDualStack the name has two addresses of each pod.
    pods: list[str] = []
    asked: list[str] = []

    def resolve(name: str, port: None, family: int = 0) -> list[Any]:
        asked.append(name)
        both = {socket.AF_INET: "10.0.0.", socket.AF_INET6: "fd00::"}
        wanted = [both[socket.AddressFamily(family)]] if family else both.values()
        if not pods:
            raise socket.gaierror(socket.EAI_NONAME, "not known")
        return [(0, 0, 0, "", (f"{before}{pod}", 0)) for before in wanted for pod in pods]

    def sleep(seconds: float) -> None:
        # One pod more gets its addresses.
        if asked:
            pods.append(str(len(pods) + 1))

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(time, "sleep", sleep)
    exec(compile(program, "init container", "exec"), {})
    assert len(pods) == int(known["MEMBERS"])
    assert set(asked) == {service["metadata"]["name"]}
