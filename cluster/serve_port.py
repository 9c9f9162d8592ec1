"""Is the public port free before anything is started, and does it answer afterwards?"""

from __future__ import annotations

import errno
import http.client
import socket
from urllib.parse import urlsplit

import psutil

from cluster.config import ClusterConfig
from protocol.errors import StartupError


def with_free_port(config: ClusterConfig) -> ClusterConfig:
    """The configuration with a real port in the place of 0.

    Raises `StartupError` when the port is taken or the host is no address of this machine. The proxies
    of a Serve that runs already on a cluster that we join are no strangers, and are not looked at.
    """
    if config.ray.address is not None and config.http.through == "proxy":
        return config
    host, port = config.http.host, config.http.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except PermissionError as error:
            raise StartupError(f"port {port} needs root; choose one above 1023 with --port") from error
        except socket.gaierror as error:
            raise StartupError(f"{host!r} is no address; choose one of this machine with --host") from error
        except OSError as error:
            raise StartupError(_explain(host, port, error)) from error
        free_port = probe.getsockname()[1]
    return config.model_copy(update={"http": config.http.model_copy(update={"port": free_port})})


def http_answers(url: str, path: str, timeout_s: float = 2.0) -> bool:
    """Whether GET says 200."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _explain(host: str, port: int, error: OSError) -> str:
    owner = _owner(port)
    if owner is None and error.errno != errno.EADDRINUSE:
        return f"cannot listen on {host}:{port}: {error.strerror}; choose this machine's --host"
    by = f" by {owner}" if owner else ""
    return f"port {port} on {host} is taken{by}; stop that program, or choose another: --port {port + 1}"


def _owner(port: int) -> str | None:
    """Name and pid of the process that listens on `port`, where the system tells it."""
    try:
        listeners = (c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN)
        pid = next((c.pid for c in listeners if c.laddr.port == port), None)
        return f"{psutil.Process(pid).name()!r} (pid {pid})" if pid else None
    except psutil.Error:
        return None
