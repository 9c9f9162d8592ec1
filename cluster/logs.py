"""Where do the log records of a replica go? Into its Ray Serve log file, flushed one by one."""

from __future__ import annotations

import logging

PACKAGES = ("cluster", "decode_worker", "engine", "kv_transfer", "prefill_worker", "router", "rpc")


def log_to_serve() -> None:
    """Give our loggers the handlers that Serve gave its own. In a replica's process, before it is built.

    Without this a fault's traceback would go to a standard error stream that dies with the process.
    """
    serve_handlers = logging.getLogger("ray.serve").handlers
    for name in PACKAGES:
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.handlers = list(serve_handlers)
        logger.propagate = not serve_handlers
