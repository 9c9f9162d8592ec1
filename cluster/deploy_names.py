"""What may things be called where the cluster is brought to? Types of keys, with errors in words.

What is refused here would otherwise come back from `kubectl apply`, from a shell on a host, or never.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Annotated

from pydantic import AfterValidator, Field

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$")]
"""Of an object in Kubernetes."""
Namespace = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]
"""Of Kubernetes: without dots."""

_PART = r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
_DOMAIN = r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?"
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]*")
_RESOURCE = re.compile(rf"{_DOMAIN}/{_PART}")
_LABEL = re.compile(rf"({_DOMAIN}/)?{_PART}")
_LABEL_VALUE = re.compile(rf"({_PART})?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_RAY_RESOURCE = re.compile(r"[A-Za-z_][A-Za-z0-9_.:-]*")
_RAYS_OWN = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "", "object_store_memory": ""}
"""What Ray refuses among custom resources, and the keys for it."""
_HOST = re.compile(r"[A-Za-z0-9_.:-]+")


def _one(pattern: re.Pattern[str], what: str) -> Callable[[str], str]:
    def check(text: str) -> str:
        if not pattern.fullmatch(text):
            raise ValueError(f"must be {what}")
        return text

    return check


def _require(texts: Iterable[str], pattern: re.Pattern[str], what: str) -> None:
    for text in texts:
        if not pattern.fullmatch(text):
            raise ValueError(f"must be {what}, not {text!r}")


def _labels(found: dict[str, str]) -> dict[str, str]:
    _require(found, _LABEL, "labels such as example.com/gpu: h100")
    _require(
        found.values(), _LABEL_VALUE, "labels, whose values are up to 63 letters, digits, '.', '_', '-'"
    )
    return found


def _taints(found: list[str]) -> list[str]:
    _require(found, _LABEL, "keys of taints such as example.com/gpu")
    return found


def _ray_resources(found: dict[str, float]) -> dict[str, float]:
    _require(found, _RAY_RESOURCE, "names of letters, digits, '_', '.', ':' and '-'")
    for name, amount in found.items():
        if name in _RAYS_OWN:
            key = _RAYS_OWN[name]
            raise ValueError(f"must be custom resources, not {name}" + (f": use {key}" if key else ""))
        if amount < 0:
            raise ValueError(f"must be amounts of 0 or more, not {amount:g} of {name}")
    return found


def _variables(found: dict[str, str]) -> dict[str, str]:
    _require(found, _VARIABLE, "variables with names of letters, digits and '_'")
    return found


def _hosts(found: list[str]) -> list[str]:
    _require(found, _HOST, "names or addresses of hosts")
    if twice := sorted({host for host in found if found.count(host) > 1}):
        raise ValueError(f"names {', '.join(twice)} twice, whose share of the workers it would lack")
    return found


Image = Annotated[str, AfterValidator(_one(_IMAGE, "an image such as registry.example/name:tag"))]
DeviceResource = Annotated[
    str, AfterValidator(_one(_RESOURCE, "what a device plugin offers, such as nvidia.com/gpu"))
]
Host = Annotated[str, AfterValidator(_one(re.compile(rf"({_HOST.pattern})?"), "a name or an address"))]
"""Or nothing."""
Hosts = Annotated[list[str], AfterValidator(_hosts)]
Labels = Annotated[dict[str, str], AfterValidator(_labels)]
RayResources = Annotated[dict[str, float], AfterValidator(_ray_resources)]
"""Custom ones, and how much of them."""
Taints = Annotated[list[str], AfterValidator(_taints)]
Variables = Annotated[dict[str, str], AfterValidator(_variables)]
