"""The router: OpenAI's HTTP API, request life cycle, routing policies, admission.

The face is loaded on first use, so that naming a router's settings costs no HTTP or gRPC library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from router.app import build_app
    from router.policy import LeastOutstandingWork, RoutingPolicy
    from router.router import Router
    from router.settings import RouterSettings
    from router.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "LeastOutstandingWork",
    "Router",
    "RouterSettings",
    "RoutingPolicy",
    "Tokenizer",
    "build_app",
    "load_tokenizer",
]

_HOME = {
    "LeastOutstandingWork": "router.policy",
    "Router": "router.router",
    "RouterSettings": "router.settings",
    "RoutingPolicy": "router.policy",
    "Tokenizer": "router.tokenizer",
    "build_app": "router.app",
    "load_tokenizer": "router.tokenizer",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'router' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
