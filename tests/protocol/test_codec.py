"""Dataclass -> wire bytes -> dataclass is the identity; doubtful messages are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import codec
from protocol.generation import FinishReason, GenerationRequest, Receipt, SamplingParams, Token, TokenDelta
from protocol.handoff import Credit, Fingerprint, PoolDescription, Ticket, TransportEndpoint
from protocol.ids import BlockId, Role, WorkerIdentity
from protocol.membership import Load, WorkerRecord
from protocol.wire import splitserve_pb2 as pb

u32 = st.integers(0, 2**32 - 1)
real = st.floats(allow_nan=False)
text = st.text(max_size=8)
name = st.text(min_size=1, max_size=8)
identities = st.builds(WorkerIdentity, name, name)
samplings = st.builds(
    SamplingParams,
    max_tokens=u32,
    temperature=real,
    top_p=real,
    top_k=u32,
    min_p=real,
    seed=st.integers(0, 2**64 - 1),
    logprobs=st.none() | u32,
    stop_token_ids=st.lists(u32).map(tuple),
    ignore_eos=st.booleans(),
    min_tokens=u32,
    presence_penalty=real,
    frequency_penalty=real,
    repetition_penalty=real,
    logit_bias=st.dictionaries(u32, real).map(lambda d: tuple(sorted(d.items()))),
    prompt_logprobs=st.none() | u32,
    bad_words=st.lists(st.lists(u32).map(tuple)).map(tuple),
)
requests = st.builds(
    GenerationRequest,
    request_id=text,
    prompt_token_ids=st.lists(u32).map(tuple),
    sampling=samplings,
    output_token_ids=st.lists(u32).map(tuple),
    deadline_s=real,
    priority=st.integers(-(2**31), 2**31 - 1),
    cache_salt=text,
    n=st.integers(1, 2**32 - 1),
    index=u32,
)
tokens = st.builds(Token, u32, st.none() | real, st.lists(st.tuples(u32, real)).map(tuple))
receipts = st.builds(Receipt, real, real, real, real, st.integers(0, 2**64 - 1), u32)
deltas = st.builds(
    TokenDelta, text, st.lists(tokens).map(tuple), st.none() | st.sampled_from(FinishReason), receipts, u32
)
fingerprints = st.builds(
    Fingerprint, text, text, text, text, u32, u32, u32, u32, text, u32, u32, wire_version=u32
)
tickets = st.builds(Ticket, text, identities, text, st.lists(u32.map(BlockId)).map(tuple), u32, u32, real)
loads = st.builds(Load, u32, u32, u32, u32, u32, u32, u32, st.integers(0, 2**64 - 1))
records = st.builds(
    WorkerRecord, identities, st.sampled_from(Role), text, fingerprints, u32, loads, st.booleans(), text
)
pools = st.builds(PoolDescription, u32, st.integers(0, 2**64 - 1))
ranks = st.builds(TransportEndpoint, text, text, pools, st.binary(max_size=16))
endpoints = st.builds(
    TransportEndpoint, text, text, pools, st.binary(max_size=16), st.lists(ranks, max_size=3).map(tuple)
)


@given(requests)
def test_a_request_survives_the_wire(request: GenerationRequest) -> None:
    wire = pb.Request.FromString(codec.request_to_wire(request).SerializeToString())
    assert codec.request_from_wire(wire) == request


@given(deltas)
def test_a_delta_survives_the_wire(delta: TokenDelta) -> None:
    wire = pb.TokenDelta.FromString(codec.delta_to_wire(delta).SerializeToString())
    assert codec.delta_from_wire(wire) == delta


@given(tickets)
def test_a_ticket_survives_the_wire(ticket: Ticket) -> None:
    wire = pb.Ticket.FromString(codec.ticket_to_wire(ticket).SerializeToString())
    assert codec.ticket_from_wire(wire) == ticket


def test_a_credit_survives_the_wire() -> None:
    credit = Credit(blocks=7, num_submissions=2**40)
    assert codec.credit_from_wire(codec.credit_to_wire(credit)) == credit


@given(records)
def test_a_worker_record_survives_the_wire(record: WorkerRecord) -> None:
    wire = pb.WorkerRecord.FromString(codec.record_to_wire(record).SerializeToString())
    assert codec.record_from_wire(wire) == record


@given(endpoints)
def test_an_endpoint_survives_the_wire(endpoint: TransportEndpoint) -> None:
    wire = pb.TransportEndpoint.FromString(codec.endpoint_to_wire(endpoint).SerializeToString())
    assert codec.endpoint_from_wire(wire) == endpoint


def test_a_ticket_without_an_owner_is_refused() -> None:
    with pytest.raises(ValueError, match="identity"):
        codec.ticket_from_wire(pb.Ticket(ticket_id="t"))


def test_unknown_enum_values_are_refused() -> None:
    with pytest.raises(ValueError, match="overseer"):
        codec.record_from_wire(
            pb.WorkerRecord(identity=pb.Identity(worker_id="w", incarnation="i"), role="overseer")
        )
    with pytest.raises(ValueError, match="bored"):
        codec.delta_from_wire(pb.TokenDelta(finish_reason="bored"))


def test_fingerprint_differences_name_both_values() -> None:
    mine = Fingerprint("m", "r", "float32", "float32", 30, 3, 64, 16)
    theirs = Fingerprint("m", "r", "bfloat16", "bfloat16", 30, 3, 64, 32)
    assert mine.differences(mine) == []
    assert mine.differences(theirs) == [
        "dtype: 'float32' here, 'bfloat16' there",
        "kv_dtype: 'float32' here, 'bfloat16' there",
        "block_size: 16 here, 32 there",
    ]
