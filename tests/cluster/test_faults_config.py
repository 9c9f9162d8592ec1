"""Faults on purpose: only where they are allowed, and exactly those that there are."""

from __future__ import annotations

from typing import get_args

import pytest

from cluster.config import load_config
from cluster.environment import ALLOW_FAULTS
from cluster.faults import check_faults, dial_of
from cluster.faults_config import CallFault, ReadFault
from kv_transfer import FaultKind
from protocol.errors import StartupError
from rpc import CallFaultKind, FaultyDial, open_channel

SOME = {"faults.reads": {"fail": 0.1}, "faults.calls": {"Renew": {"drop": 0.5}}}


def test_every_kind_has_its_key() -> None:
    assert set(get_args(ReadFault)) == {kind.value for kind in FaultKind}
    assert set(get_args(CallFault)) == {kind.value for kind in CallFaultKind}


def test_faults_are_refused_unless_the_environment_allows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(None, SOME)
    monkeypatch.delenv(ALLOW_FAULTS, raising=False)
    with pytest.raises(StartupError, match=ALLOW_FAULTS):
        check_faults(config)
    monkeypatch.setenv(ALLOW_FAULTS, "1")
    check_faults(config)


def test_a_cluster_without_faults_is_none_the_wiser() -> None:
    config = load_config(None, {})
    check_faults(config)
    assert dial_of(config, "router") is open_channel
    assert isinstance(dial_of(load_config(None, SOME), "router"), FaultyDial)


@pytest.mark.parametrize(
    ("faults", "complaint"),
    [
        ({"faults.reads": {"fail": 0.7, "stall": 0.7}}, "faults.reads"),
        ({"faults.calls": {"Renews": {"drop": 0.1}}}, "no method 'Renews'"),
        ({"faults.calls": {"Serve": {"duplicate": 0.1}}}, "is a stream"),
    ],
)
def test_faults_that_cannot_be_are_refused(faults: dict[str, object], complaint: str) -> None:
    with pytest.raises(StartupError, match=complaint):
        check_faults(load_config(None, faults))
