"""The container and the example for Kubernetes name what there is. Neither is run."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import yaml
from packaging.requirements import Requirement

from vtoken.vllm.serve import build_parser, initial_patch

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
OBJECTS = {
    o["kind"]: o for o in yaml.safe_load_all((ROOT / "examples/kubernetes/vtoken.yaml").read_text())
}
SERVE = ["vtoken", "serve"]


def entry_point() -> list[str]:
    (words,) = re.findall(r"^ENTRYPOINT (.*)$", DOCKERFILE, re.MULTILINE)
    return list(json.loads(words))


def pod() -> dict[str, Any]:
    return dict(OBJECTS["Deployment"]["spec"]["template"])


def test_the_image_is_of_a_vllm_that_is_supported() -> None:
    (version,) = re.findall(r"^FROM vllm/vllm-openai:v(.*)$", DOCKERFILE, re.MULTILINE)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert version in Requirement(extras["optional-dependencies"]["cuda"][0]).specifier


def test_the_server_takes_the_arguments_of_the_image_and_of_the_deployment() -> None:
    (container,) = pod()["spec"]["containers"]
    words = [*entry_point(), *container["args"]]
    assert words[:2] == SERVE
    arguments, others = build_parser().parse_known_args(words[2:])
    assert not [word for word in others if word.startswith("--vtoken")]
    initial_patch(arguments)
    assert arguments.vtoken_state_dir in re.findall(r"^VOLUME (.*)$", DOCKERFILE, re.MULTILINE)
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    token = Path(arguments.vtoken_control_token_file)
    assert {arguments.vtoken_state_dir, str(token.parent)} <= mounts
    page = (ROOT / "docs" / "install.md").read_text()
    (secret,) = re.findall(r"secret generic ([\w-]+) --from-literal=([\w.]+)=", page)
    volumes = {volume["name"]: volume for volume in pod()["spec"]["volumes"]}
    assert secret == (volumes["token"]["secret"]["secretName"], token.name)


def test_the_objects_refer_to_each_other() -> None:
    (container,) = pod()["spec"]["containers"]
    (port,) = container["ports"]
    (served,) = [word for word in container["args"] if word.startswith("--port=")]
    assert served == f"--port={port['containerPort']}"
    probes = [container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")]
    assert all(probe == {"path": "/health", "port": port["name"]} for probe in probes)
    labels = pod()["metadata"]["labels"]
    service, deployment = OBJECTS["Service"]["spec"], OBJECTS["Deployment"]["spec"]
    assert service["selector"] == deployment["selector"]["matchLabels"] == labels
    assert [one["targetPort"] for one in service["ports"]] == [port["name"]]
    volumes = {volume["name"]: volume for volume in pod()["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
    claim = volumes["state"]["persistentVolumeClaim"]["claimName"]
    assert claim == OBJECTS["PersistentVolumeClaim"]["metadata"]["name"]
