"""launch/kubernetes.yaml: what can be wrong with it without a cluster."""

from __future__ import annotations

import re

import yaml
from torch.distributed.run import get_args_parser

from maml.config.cli import parse
from tests.launching import REPO


def test_the_example_fits_together() -> None:
    """Its numbers and names agree, and torchrun and the program take their flags."""
    text = (REPO / "launch" / "kubernetes.yaml").read_text()
    service, job = yaml.safe_load_all(text)
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"]
    (container,) = pod["containers"]
    assert re.fullmatch(r"[\w./-]+@sha256:[0-9a-f]{64}", container["image"])
    python, *launcher = container["command"][:3]
    assert (python, launcher) == ("python", ["-m", "torch.distributed.run"])
    # The cluster puts each pod's number in its place.
    words = [word.replace("$(JOB_COMPLETION_INDEX)", "1") for word in container["command"][3:]]
    torchrun = get_args_parser().parse_args(words)
    assert torchrun.nnodes == str(spec["completions"]) and torchrun.node_rank == 1
    assert torchrun.nproc_per_node == str(container["resources"]["limits"]["nvidia.com/gpu"])
    assert pod["subdomain"] == service["metadata"]["name"]
    assert torchrun.master_addr == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert torchrun.training_script == "train_maml.py"
    config = parse(torchrun.training_script_args)
    assert config.strategy == "allreduce"
    # What it names is mounted.
    places = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert {config.data_root, "/runs"} <= places.keys()
    assert set(places.values()) == {volume["name"] for volume in pod["volumes"]}
