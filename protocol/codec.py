"""Between the frozen dataclasses and their protobuf messages: one `x_to_wire`/`x_from_wire` pair each.

Unknown enum values and missing sub-messages raise `ValueError`: doubtful data fail closed.
"""

from __future__ import annotations

from protocol.errors import SplitserveError, error_classes
from protocol.generation import (
    FinishReason,
    GenerationRequest,
    Receipt,
    SamplingParams,
    Token,
    TokenDelta,
)
from protocol.handoff import Credit, Fingerprint, PoolDescription, Ticket, TransportEndpoint
from protocol.ids import BlockId, RequestId, Role, TicketId, WorkerId, WorkerIdentity
from protocol.membership import Load, WorkerRecord
from protocol.wire import splitserve_pb2 as pb

_EMPTY_RECEIPT = Receipt()


def sampling_to_wire(params: SamplingParams) -> pb.Sampling:
    return pb.Sampling(
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        seed=params.seed,
        logprobs=params.logprobs,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        min_tokens=params.min_tokens,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=dict(params.logit_bias),
        prompt_logprobs=params.prompt_logprobs,
        bad_words=[pb.TokenIds(token_ids=word) for word in params.bad_words],
    )


def sampling_from_wire(wire: pb.Sampling) -> SamplingParams:
    return SamplingParams(
        max_tokens=wire.max_tokens,
        temperature=wire.temperature,
        top_p=wire.top_p,
        top_k=wire.top_k,
        min_p=wire.min_p,
        seed=wire.seed,
        logprobs=wire.logprobs if wire.HasField("logprobs") else None,
        stop_token_ids=tuple(wire.stop_token_ids),
        ignore_eos=wire.ignore_eos,
        min_tokens=wire.min_tokens,
        presence_penalty=wire.presence_penalty,
        frequency_penalty=wire.frequency_penalty,
        repetition_penalty=wire.repetition_penalty,
        logit_bias=tuple(sorted(wire.logit_bias.items())),
        prompt_logprobs=wire.prompt_logprobs if wire.HasField("prompt_logprobs") else None,
        bad_words=tuple(tuple(word.token_ids) for word in wire.bad_words),
    )


def request_to_wire(request: GenerationRequest) -> pb.Request:
    return pb.Request(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        sampling=sampling_to_wire(request.sampling),
        output_token_ids=request.output_token_ids,
        deadline_s=request.deadline_s,
        priority=request.priority,
        cache_salt=request.cache_salt,
        n=request.n,
        index=request.index,
    )


def request_from_wire(wire: pb.Request) -> GenerationRequest:
    return GenerationRequest(
        request_id=RequestId(wire.request_id),
        prompt_token_ids=tuple(wire.prompt_token_ids),
        sampling=sampling_from_wire(wire.sampling),
        output_token_ids=tuple(wire.output_token_ids),
        deadline_s=wire.deadline_s,
        priority=wire.priority,
        cache_salt=wire.cache_salt,
        n=wire.n or 1,
        index=wire.index,
    )


def token_to_wire(token: Token) -> pb.Token:
    return pb.Token(
        token_id=token.token_id,
        logprob=token.logprob,
        top_logprobs=[pb.TopLogprob(token_id=t, logprob=p) for t, p in token.top_logprobs],
    )


def token_from_wire(wire: pb.Token) -> Token:
    return Token(
        token_id=wire.token_id,
        logprob=wire.logprob if wire.HasField("logprob") else None,
        top_logprobs=tuple((t.token_id, t.logprob) for t in wire.top_logprobs),
    )


def receipt_to_wire(receipt: Receipt) -> pb.Receipt:
    return pb.Receipt(
        prefill_queue_s=receipt.prefill_queue_s,
        prefill_s=receipt.prefill_s,
        decode_queue_s=receipt.decode_queue_s,
        fetch_s=receipt.fetch_s,
        fetched_bytes=receipt.fetched_bytes,
        num_cached_tokens=receipt.num_cached_tokens,
    )


def receipt_from_wire(wire: pb.Receipt) -> Receipt:
    return Receipt(
        prefill_queue_s=wire.prefill_queue_s,
        prefill_s=wire.prefill_s,
        decode_queue_s=wire.decode_queue_s,
        fetch_s=wire.fetch_s,
        fetched_bytes=wire.fetched_bytes,
        num_cached_tokens=wire.num_cached_tokens,
    )


def delta_to_wire(delta: TokenDelta) -> pb.TokenDelta:
    wire = pb.TokenDelta()
    write_delta(delta, wire)
    return wire


def write_delta(delta: TokenDelta, wire: pb.TokenDelta) -> None:
    """Fill an empty message that lies in its frame already: this runs once per token."""
    wire.request_id = delta.request_id
    for token in delta.tokens:
        wire_token = wire.tokens.add()
        wire_token.token_id = token.token_id
        if token.logprob is not None:
            wire_token.logprob = token.logprob
        for token_id, logprob in token.top_logprobs:
            wire_token.top_logprobs.add(token_id=token_id, logprob=logprob)
    if delta.finish_reason is not None:
        wire.finish_reason = delta.finish_reason.value
    if delta.index:
        wire.index = delta.index
    if delta.receipt != _EMPTY_RECEIPT:
        wire.receipt.CopyFrom(receipt_to_wire(delta.receipt))


def delta_from_wire(wire: pb.TokenDelta) -> TokenDelta:
    return TokenDelta(
        request_id=RequestId(wire.request_id),
        tokens=tuple(token_from_wire(t) for t in wire.tokens),
        finish_reason=FinishReason(wire.finish_reason) if wire.finish_reason else None,
        receipt=receipt_from_wire(wire.receipt),
        index=wire.index,
    )


def failure_to_wire(request_id: RequestId, error: SplitserveError) -> pb.Failure:
    return pb.Failure(
        request_id=request_id,
        kind=type(error).__name__,
        message=error.message,
        param=error.param or "",
        code=error.code or "",
        retry_after_s=error.retry_after_s,
    )


def failure_from_wire(wire: pb.Failure) -> SplitserveError:
    """The error as it was raised; a kind that this version does not know is a `SplitserveError`."""
    kind = error_classes().get(wire.kind, SplitserveError)
    return kind(
        wire.message,
        param=wire.param or None,
        code=wire.code or None,
        retry_after_s=wire.retry_after_s if wire.HasField("retry_after_s") else None,
    )


def identity_to_wire(identity: WorkerIdentity) -> pb.Identity:
    return pb.Identity(worker_id=identity.worker_id, incarnation=identity.incarnation)


def identity_from_wire(wire: pb.Identity) -> WorkerIdentity:
    if not wire.worker_id or not wire.incarnation:
        raise ValueError("a worker's identity needs a worker id and an incarnation")
    return WorkerIdentity(WorkerId(wire.worker_id), wire.incarnation)


def fingerprint_to_wire(fingerprint: Fingerprint) -> pb.Fingerprint:
    return pb.Fingerprint(
        model=fingerprint.model,
        revision=fingerprint.revision,
        dtype=fingerprint.dtype,
        kv_dtype=fingerprint.kv_dtype,
        num_layers=fingerprint.num_layers,
        num_kv_heads=fingerprint.num_kv_heads,
        head_dim=fingerprint.head_dim,
        block_size=fingerprint.block_size,
        kv_layout=fingerprint.kv_layout,
        tensor_parallel_size=fingerprint.tensor_parallel_size,
        pipeline_parallel_size=fingerprint.pipeline_parallel_size,
        wire_version=fingerprint.wire_version,
    )


def fingerprint_from_wire(wire: pb.Fingerprint) -> Fingerprint:
    return Fingerprint(
        model=wire.model,
        revision=wire.revision,
        dtype=wire.dtype,
        kv_dtype=wire.kv_dtype,
        num_layers=wire.num_layers,
        num_kv_heads=wire.num_kv_heads,
        head_dim=wire.head_dim,
        block_size=wire.block_size,
        kv_layout=wire.kv_layout,
        tensor_parallel_size=wire.tensor_parallel_size,
        pipeline_parallel_size=wire.pipeline_parallel_size,
        wire_version=wire.wire_version,
    )


def ticket_to_wire(ticket: Ticket) -> pb.Ticket:
    return pb.Ticket(
        ticket_id=ticket.ticket_id,
        owner=identity_to_wire(ticket.owner),
        owner_address=ticket.owner_address,
        block_ids=ticket.block_ids,
        num_tokens=ticket.num_tokens,
        tokens_ready=ticket.tokens_ready,
        lease_s=ticket.lease_s,
    )


def ticket_from_wire(wire: pb.Ticket) -> Ticket:
    return Ticket(
        ticket_id=TicketId(wire.ticket_id),
        owner=identity_from_wire(wire.owner),
        owner_address=wire.owner_address,
        block_ids=tuple(BlockId(b) for b in wire.block_ids),
        num_tokens=wire.num_tokens,
        tokens_ready=wire.tokens_ready,
        lease_s=wire.lease_s,
    )


def load_to_wire(load: Load) -> pb.Load:
    return pb.Load(
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_held=load.num_held,
        num_waiting_tokens=load.num_waiting_tokens,
        blocks_total=load.blocks_total,
        blocks_free=load.blocks_free,
        blocks_cached=load.blocks_cached,
        progress=load.progress,
    )


def load_from_wire(wire: pb.Load) -> Load:
    return Load(
        num_running=wire.num_running,
        num_waiting=wire.num_waiting,
        num_held=wire.num_held,
        num_waiting_tokens=wire.num_waiting_tokens,
        blocks_total=wire.blocks_total,
        blocks_free=wire.blocks_free,
        blocks_cached=wire.blocks_cached,
        progress=wire.progress,
    )


def credit_to_wire(credit: Credit) -> pb.Credit:
    return pb.Credit(blocks=credit.blocks, num_submissions=credit.num_submissions)


def credit_from_wire(wire: pb.Credit) -> Credit:
    return Credit(blocks=wire.blocks, num_submissions=wire.num_submissions)


def record_to_wire(record: WorkerRecord) -> pb.WorkerRecord:
    return pb.WorkerRecord(
        identity=identity_to_wire(record.identity),
        role=record.role.value,
        address=record.address,
        fingerprint=fingerprint_to_wire(record.fingerprint),
        max_model_len=record.max_model_len,
        load=load_to_wire(record.load),
        draining=record.draining,
        ops=record.ops,
    )


def record_from_wire(wire: pb.WorkerRecord) -> WorkerRecord:
    return WorkerRecord(
        identity=identity_from_wire(wire.identity),
        role=Role(wire.role),
        address=wire.address,
        fingerprint=fingerprint_from_wire(wire.fingerprint),
        max_model_len=wire.max_model_len,
        load=load_from_wire(wire.load),
        draining=wire.draining,
        ops=wire.ops,
    )


def endpoint_to_wire(endpoint: TransportEndpoint) -> pb.TransportEndpoint:
    return pb.TransportEndpoint(
        transport=endpoint.transport,
        agent=endpoint.agent,
        pool=pb.PoolDescription(num_blocks=endpoint.pool.num_blocks, block_bytes=endpoint.pool.block_bytes),
        metadata=endpoint.metadata,
        others=[endpoint_to_wire(other) for other in endpoint.others],
    )


def endpoint_from_wire(wire: pb.TransportEndpoint) -> TransportEndpoint:
    return TransportEndpoint(
        transport=wire.transport,
        agent=wire.agent,
        pool=PoolDescription(wire.pool.num_blocks, wire.pool.block_bytes),
        metadata=wire.metadata,
        others=tuple(endpoint_from_wire(other) for other in wire.others),
    )
