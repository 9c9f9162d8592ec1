"""Which secret do the workers and routers of a deployed cluster show each other?

The one in the environment; else the one that this user's first `splitserve deploy` made here. It stays
the same, since another one would replace all replicas.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from cluster.environment import read_environment
from cluster.serve_state import write_private
from protocol.errors import StartupError


def cluster_token() -> str:
    """The secret, made now if there is none. Raises `StartupError` when it cannot be kept."""
    token = read_environment().cluster_token or kept_token()
    if token is not None:
        return token
    token = secrets.token_hex(32)
    try:
        write_private(_file(), token)
    except OSError as error:
        raise StartupError(
            f"cannot keep the cluster's token for later commands: {error}; set XDG_CACHE_HOME to a folder"
            " where files can be written, or SPLITSERVE_CLUSTER_TOKEN to a secret of yours"
        ) from error
    return token


def kept_token() -> str | None:
    """What an earlier deployment from here has made; None if there was none."""
    try:
        return _file().read_text(encoding="ascii").strip() or None
    except OSError:
        return None


def _file() -> Path:
    return read_environment().run_dir / "cluster-token"
