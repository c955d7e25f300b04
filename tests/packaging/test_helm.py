"""The Helm chart, rendered by Helm itself for several sets of values and validated against schemas of Kubernetes."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.cluster.kubernetes import KINDS
from tests.cli.test_wrong_use import COMMANDS

helm = pytest.importorskip("helm_python", reason="Helm is missing: pip install 'penstock[charts]'")
kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="pip install 'penstock[charts]'")

CHART = Path(__file__).parents[2] / "packaging" / "helm"
VERSIONS = ("1.28", "1.33", "1.37")
KEY = {"fleetKey": "secret"}
SECRET = {"existingSecret": "keys"}
LWS = {"engine": {"ranksOverMachines": 2, "arguments": ["--distributed-executor=ray", "--tensor-parallel-size=8"]}}
VALUES: dict[str, dict[str, Any]] = {
    "least": KEY,
    "secret": SECRET,
    "large": SECRET | {"engine": {"replicas": 8, "arguments": ["--max-model-len", "8192"]}, "server": {"replicas": 4}},
    "claim": KEY | {"engine": {"weights": {"claim": "weights"}}},
    "node cache": KEY | {"engine": {"weights": {"nodePath": "/var/cache/weights"}}},
    "gpus": SECRET
    | {
        "engine": {
            "resources": {"limits": {"nvidia.com/gpu": 1, "memory": "64Gi"}},
            "nodeSelector": {"gpu": "h100"},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        }
    },
    "over machines": KEY | LWS,
    "autoscaler": SECRET | {"autoscaling": {"mode": "penstock", "least": 0, "most": 8}},
    "autoscaler over machines": KEY | LWS | {"autoscaling": {"mode": "penstock", "standby": 1}},
    "hpa": KEY | {"autoscaling": {"mode": "hpa", "most": 6}},
    "keda": KEY | {"autoscaling": {"mode": "keda"}},
    "monitored": KEY
    | {
        "monitoring": {"serviceMonitor": True},
        "networkPolicy": False,
        "server": {"service": {"type": "LoadBalancer"}},
    },
}
# Kinds whose schemas are not Kubernetes' own.
OTHERS = {"LeaderWorkerSet", "ScaledObject", "ServiceMonitor"}


def rendered(values: dict[str, Any]) -> list[dict[str, Any]]:
    with helm.Chart.load(CHART) as chart:
        chart.validate_schema(values)
        files = chart.render(values, name="llm", namespace="models")
    texts = [text for path, text in files.items() if not path.endswith((".txt", ".tpl"))]
    return [document for text in texts for document in yaml.safe_load_all(text) if document]


def found(documents: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (one,) = [each for each in documents if each["kind"] == kind and each["metadata"]["name"] == name]
    return one


@pytest.mark.parametrize("name", VALUES)
def test_it_is_valid(name: str) -> None:
    documents = rendered(VALUES[name])
    assert len({(each["kind"], each["metadata"]["name"]) for each in documents}) == len(documents) >= 6
    for document in documents:
        if document["kind"] not in OTHERS:
            for version in VERSIONS:
                kubernetes_validate.validate(document, version, strict=True)
    for pod in [each["spec"]["template"]["spec"] for each in documents if each["kind"] == "Deployment"]:
        assert pod["securityContext"]["runAsNonRoot"]
        (container,) = pod["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
        check_arguments(container["args"])


def check_arguments(arguments: list[str]) -> None:
    """The command of the image has these flags."""
    path = "fleet scale" if arguments[:2] == ["fleet", "scale"] else arguments[0]
    known = {flag for param in COMMANDS[path].params for flag in param.opts}
    flags = {argument.partition("=")[0] for argument in arguments if argument.startswith("--")}
    assert flags <= known, flags - known


def test_the_autoscaler_may_do_what_it_does() -> None:
    """Its rights are those of the requests in cluster/kubernetes.py, and its target is the one that exists."""
    for values in (VALUES["autoscaler"], VALUES["autoscaler over machines"]):
        documents = rendered(values)
        scaler = found(documents, "Deployment", "llm-autoscaler")["spec"]["template"]["spec"]
        (on,) = [each for each in scaler["containers"][0]["args"] if each.startswith("--on=")]
        namespace, kind, name = on.removeprefix("--on=kubernetes:").split("/")
        group, plural = KINDS[kind]
        (target,) = [each for each in documents if each["kind"].lower() == kind and each["metadata"]["name"] == name]
        assert namespace == "models" and f"apis/{target['apiVersion']}" == group
        assert "replicas" not in target["spec"] or kind == "leaderworkerset", "helm would undo the scale"
        rules = found(documents, "Role", "llm-autoscaler")["rules"]
        assert [rule["verbs"] for rule in rules if f"{plural}/scale" in rule["resources"]] == [["get", "update"]]
        assert scaler["serviceAccountName"] == "llm-autoscaler"


def test_values_that_contradict_each_other_are_refused() -> None:
    reversed_limits = {"mode": "penstock", "least": 5, "most": 2}
    with helm.Chart.load(CHART) as chart:
        for values, words in (
            ({}, "set fleetKey, or existingSecret"),
            (KEY | {"autoscaling": reversed_limits}, "least is 5, more than autoscaling.most"),
        ):
            with pytest.raises(Exception, match=re.escape(words)):
                chart.render(values, name="llm", namespace="models")
        for values, words in (
            (KEY | {"autoscaling": {"mode": "hpa and penstock"}}, "/autoscaling/mode"),
            (KEY | {"autoscaling": {"mode": "hpa", "least": 0}}, "/autoscaling/least"),
            (KEY | {"engine": {"replica": 2}}, "'replica' not allowed"),
        ):
            with pytest.raises(Exception, match=words):
                chart.validate_schema(values)


def test_lint_finds_nothing() -> None:
    report = helm.chart.lint(CHART, values=VALUES["least"])
    assert not report["errors"] and all(message["severity"] < 2 for message in report["messages"]), report
