"""The error tree: complete, documented, and the same error after any journey."""

from __future__ import annotations

import pickle

import pytest

from protocol import codec, errors
from protocol.ids import RequestId

CLASSES = sorted(errors.error_classes().items())


@pytest.mark.parametrize(("name", "kind"), CLASSES)
def test_every_error_survives_pickling_and_the_wire(name: str, kind: type[errors.SplitserveError]) -> None:
    error = kind("what went wrong", param="top_p", code="some_code", retry_after_s=1.5)
    copies = [
        pickle.loads(pickle.dumps(error)),
        codec.failure_from_wire(codec.failure_to_wire(RequestId("r"), error)),
    ]
    for copy in copies:
        assert type(copy) is kind
        assert (copy.message, copy.param, copy.code) == ("what went wrong", "top_p", "some_code")
        assert copy.retry_after_s == 1.5


@pytest.mark.parametrize(("name", "kind"), CLASSES)
def test_every_error_is_documented_and_drawn(name: str, kind: type[errors.SplitserveError]) -> None:
    assert kind.__doc__
    assert name in (errors.__doc__ or "")
    assert 400 <= kind.http_status < 600


def test_an_error_kind_of_a_newer_version_is_still_an_error() -> None:
    wire = codec.failure_to_wire(RequestId("r"), errors.EngineFault("x"))
    wire.kind = "FromTheFuture"
    assert type(codec.failure_from_wire(wire)) is errors.SplitserveError
