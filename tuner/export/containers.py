"""Exports for containers: Docker Compose, Kubernetes manifests, Helm values of the vLLM production stack."""

from __future__ import annotations

import math
import re

import yaml

from tuner.export.deployment import PREFIX, Deployment
from tuner.export.text import head

PORT = 8000
_HEALTH = "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=5)"
_MODEL_MOUNT = "/models/model"
_CACHE_MOUNT = "/root/.cache"
_PROBE_PERIOD_S = 10


def compose(deployment: Deployment) -> str:
    """`docker compose -f compose.yaml up`."""
    service: dict[str, object] = {
        "image": image(deployment),
        "entrypoint": ["vllm", "serve"],
        "command": _words(deployment),
        "ports": [f"127.0.0.1:{PORT}:{PORT}"],
        "ipc": "host",  # vLLM's processes share memory
        "environment": {
            **_variables(deployment),
            "HF_TOKEN": "${HF_TOKEN:-}",
            "VLLM_API_KEY": "${VLLM_API_KEY:-}",
        },
        "volumes": [
            "vllm-cache:" + _CACHE_MOUNT,
            *([_bind(deployment.model_folder)] if deployment.model_folder else []),
        ],
        "healthcheck": {
            "test": ["CMD", "python3", "-c", _HEALTH],
            "interval": "10s",
            "timeout": "6s",
            "retries": 3,
            "start_period": f"{_patience_s(deployment)}s",
        },
        "restart": "unless-stopped",
    }
    if deployment.gpus:
        device = {"driver": "nvidia", "count": deployment.gpus, "capabilities": ["gpu"]}
        service["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
    return _yaml(deployment, {"services": {"vllm": service}, "volumes": {"vllm-cache": {}}})


def kubernetes(deployment: Deployment) -> str:
    """Deployment, Service and the claim for the model cache; `kubectl apply -f kubernetes.yaml`."""
    name = dns_label(f"vllm-{deployment.model.rstrip('/').rpartition('/')[2]}")
    labels = {"app.kubernetes.io/name": "vllm", "app.kubernetes.io/instance": name}
    local = deployment.model_folder
    resources = {"nvidia.com/gpu": str(deployment.gpus)} if deployment.gpus else {}
    container = {
        "name": "vllm",
        "image": image(deployment),
        "command": ["vllm", "serve"],
        "args": _words(deployment),
        "env": [
            *({"name": key, "value": value} for key, value in _variables(deployment).items()),
            *(
                {
                    "name": key,
                    "valueFrom": {"secretKeyRef": {"name": "vllm-secrets", "key": key, "optional": True}},
                }
                for key in ("HF_TOKEN", "VLLM_API_KEY")
            ),
        ],
        "ports": [{"name": "http", "containerPort": PORT}],
        # Nothing is killed for being slow to start: compilation takes minutes on a new node.
        "startupProbe": _probe(math.ceil(_patience_s(deployment) / _PROBE_PERIOD_S)),
        "readinessProbe": _probe(3),
        "livenessProbe": _probe(6),
        **({"resources": {"limits": resources, "requests": resources}} if resources else {}),
        "volumeMounts": [
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "cache", "mountPath": _CACHE_MOUNT},
            *([{"name": "model", "mountPath": _MODEL_MOUNT, "readOnly": True}] if local else []),
        ],
    }
    pod = {
        "terminationGracePeriodSeconds": 60,
        "containers": [container],
        "volumes": [
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
            {"name": "cache", "persistentVolumeClaim": {"claimName": name}},
            *([{"name": "model", "hostPath": {"path": local, "type": "Directory"}}] if local else []),
        ],
    }
    documents = [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": name, "labels": labels},
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "resources": {"requests": {"storage": f"{_cache_gib(deployment)}Gi"}},
            },
        },
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": name, "labels": labels},
            "spec": {
                "replicas": 1,
                # A rolling update would need a second set of free GPUs.
                "strategy": {"type": "Recreate"},
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": pod},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name, "labels": labels},
            "spec": {"selector": labels, "ports": [{"name": "http", "port": PORT, "targetPort": "http"}]},
        },
    ]
    return _yaml(deployment, *documents)


def helm(deployment: Deployment) -> str:
    """Values for the chart `vllm/vllm-stack`: `helm install NAME vllm/vllm-stack -f values.yaml`."""
    repository, _, tag = image(deployment).rpartition(":")
    model = {
        "name": dns_label(deployment.model.rstrip("/").rpartition("/")[2]),
        "repository": repository,
        "tag": tag,
        "modelURL": deployment.source,
        "replicaCount": 1,
        "requestCPU": max(2, 2 * deployment.gpus),
        "requestMemory": f"{max(16, _cache_gib(deployment))}Gi",
        "requestGPU": deployment.gpus,
        "pvcStorage": f"{_cache_gib(deployment)}Gi",
        # Where this is not true the chart passes --no-enable-prefix-caching, whatever vLLM's own default, and in a
        # spelling that 0.33 does not know. The words below come later on the command line and decide.
        "vllmConfig": {"enablePrefixCaching": True, "extraArgs": [*deployment.prefix_words, *_other_words(deployment)]},
        "env": [{"name": key, "value": value} for key, value in _variables(deployment).items()],
    }
    startup = {
        "initialDelaySeconds": 15,
        "periodSeconds": _PROBE_PERIOD_S,
        "failureThreshold": math.ceil(_patience_s(deployment) / _PROBE_PERIOD_S),
        "httpGet": {"path": "/health", "port": PORT},
    }
    return _yaml(deployment, {"servingEngineSpec": {"modelSpec": [model], "startupProbe": startup}})


def image(deployment: Deployment) -> str:
    """vLLM's own image of the version that was measured, for GPUs or for CPUs."""
    version = re.match(r"\d+(\.\d+)*", deployment.environment.vllm_version)
    tag = f"v{version[0]}" if version else "latest"
    return f"vllm/vllm-openai{'' if deployment.gpus else '-cpu'}:{tag}"


def dns_label(text: str) -> str:
    """At most 63 lower-case letters, digits and dashes (RFC 1123), as Kubernetes names must be."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:63].rstrip("-") or "vllm"


def _probe(failures: int) -> dict[str, object]:
    return {
        "httpGet": {"path": "/health", "port": "http"},
        "periodSeconds": _PROBE_PERIOD_S,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def _words(deployment: Deployment) -> list[str]:
    folder = deployment.model_folder
    model = [_MODEL_MOUNT, "--served-model-name", deployment.model] if folder else [deployment.model]
    return [_dollars(word) for word in (*model, *deployment.words, "--host", "0.0.0.0", "--port", str(PORT))]


def _other_words(deployment: Deployment) -> list[str]:
    return [_dollars(word) for flag in deployment.flags if flag.name != PREFIX for word in flag.words]


def _variables(deployment: Deployment) -> dict[str, str]:
    return {name: _dollars(value) for name, value in deployment.variables.items()}


def _bind(folder: str) -> dict[str, object]:
    """A mount in Compose's long form: in the short one a colon in the path ends it."""
    return {"type": "bind", "source": _dollars(folder), "target": _MODEL_MOUNT, "read_only": True}


def _patience_s(deployment: Deployment) -> int:
    """How long a start may take: five times the longest one measured (a first start has no compile cache)."""
    return max(300, math.ceil(5 * deployment.startup_s))


def _cache_gib(deployment: Deployment) -> int:
    """Room for the weights twice (a download is complete before the old one goes) and the compile cache."""
    return 10 + math.ceil(2 * (deployment.weights_bytes or 20 * 2**30) / 2**30)


def _dollars(text: str) -> str:
    """Compose substitutes variables; so does Kubernetes in arguments and variables, where it writes `$(NAME)`."""
    return text.replace("$", "$$")


class _Plain(yaml.SafeDumper):
    """Writes equal parts out instead of referring from one to the other, which people rarely read well."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _yaml(deployment: Deployment, *documents: object) -> str:
    comment = "".join(f"# {line}".rstrip() + "\n" for line in head(deployment, every_flag=True).splitlines())
    return comment + yaml.dump_all(documents, Dumper=_Plain, sort_keys=False, width=1000, allow_unicode=True)
