"""Reads the commands in the images and recipes of deploy, for the tests that run them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


def containers(file: str) -> dict[str, dict[str, Any]]:
    """The containers of the pods in a file of Kubernetes, by name."""
    found: dict[str, dict[str, Any]] = {}
    for document in yaml.safe_load_all((DEPLOY / "kubernetes" / file).read_text("utf-8")):
        pod = document["spec"].get("template", {}).get("spec", {})
        for container in (*pod.get("initContainers", ()), *pod.get("containers", ())):
            found[container["name"]] = container
    return found


def entrypoint(file: str) -> list[str]:
    """The ENTRYPOINT of a Containerfile."""
    lines = re.findall(r"^ENTRYPOINT (\[.*\])$", (DEPLOY / file).read_text("utf-8"), re.MULTILINE)
    (line,) = lines
    return json.loads(line)


def skypilot() -> dict[str, Any]:
    """The task of SkyPilot."""
    return yaml.safe_load((DEPLOY / "skypilot.yaml").read_text("utf-8"))


def server_commands() -> list[list[str]]:
    """The arguments of each SGLang server that a recipe starts."""
    found = [containers(file)["sglang"]["command"] for file in ("engines.yaml", "scheduler.yaml")]
    run = skypilot()["run"].replace("\\\n", " ")
    found += [
        line.partition(" > ")[0].split() for line in run.splitlines() if "launch_server" in line
    ]
    for command in found:
        assert command[:3] == ["python3", "-m", "sglang.launch_server"]
    return [command[3:] for command in found]
