"""A laptop's configuration becomes a cluster's, and what Serve gets is our own configuration again."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from cluster.cli import app
from cluster.config import load_config
from cluster.rendering import clustered, render_files, serve_arguments, serve_config
from cluster.rendering.clustered import ALL_ADDRESSES
from protocol.errors import StartupError


def test_a_cluster_listens_where_others_reach_it() -> None:
    config = clustered(load_config(None, {}))
    assert (config.http.through, config.http.host) == ("proxy", ALL_ADDRESSES)
    assert (config.prefill.host, config.decode.host) == ("auto", "auto")
    assert config.prefill.resources == {"splitserve_prefill": 1}
    assert config.decode.resources == {"splitserve_decode": 1}
    assert config.ray.address == "auto"


def test_what_the_file_says_about_places_stays() -> None:
    said: dict[str, object] = {"decode.resources": {"fast_memory": 2}, "http.host": "10.0.0.1"}
    config = clustered(load_config(None, said))
    assert config.decode.resources == {"fast_memory": 2}
    assert config.http.host == "10.0.0.1"


def test_the_arguments_are_the_configuration_without_how_it_is_deployed() -> None:
    said: dict[str, object] = {"deploy.image": "registry.example/s:1", "decode.kv_cache_memory": "4GiB"}
    here = clustered(load_config(None, said))
    arguments = serve_arguments(here)
    assert "deploy" not in arguments
    assert load_config(None, arguments) == here.model_copy(update={"deploy": load_config(None).deploy})


@pytest.mark.parametrize(("key", "value"), [("http.port", 0), ("kv_transfer.transport", "loopback")])
def test_what_works_on_no_cluster_is_refused(key: str, value: object) -> None:
    with pytest.raises(StartupError, match=key):
        serve_config(load_config(None, {key: value}))


def test_the_command_writes_to_the_terminal_or_into_a_folder(tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["render", "serve", "--set", "decode.num_workers=3"])
    assert shown.exit_code == 0
    assert yaml.safe_load(shown.stdout)["applications"][0]["args"]["decode"]["num_workers"] == 3
    written = CliRunner().invoke(app, ["render", "serve", "-o", str(tmp_path / "out")])
    assert written.exit_code == 0, written.output
    text = (tmp_path / "out" / "serve.yaml").read_text(encoding="utf-8")
    assert text == render_files("serve", load_config(None))["serve.yaml"]
