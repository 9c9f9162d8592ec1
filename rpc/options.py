"""Which channel options do both ends of a connection share?

The numbers belong together: a client that pings faster than its server allows is cut off, so the
server accepts pings at any rate and both ends send them every `KEEPALIVE_S`.
"""

from __future__ import annotations

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""A prompt of a million tokens is at most 5 MB on the wire; a frame of a slow session is smaller."""

KEEPALIVE_S = 2.0
"""A silent cut is found within twice this: one period until the ping, one until it is missed."""

Options = list[tuple[str, int]]


def common_options(keepalive_s: float) -> Options:
    """Size limits and keepalive, for servers and channels alike."""
    return [
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", round(keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", round(keepalive_s * 1000)),
        # This one decides when a ping counts as missed; the one above alone leaves it at a minute.
        ("grpc.http2.ping_timeout_ms", round(keepalive_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def server_options(keepalive_s: float) -> Options:
    """Refuse a port that is taken, and never punish a peer for its keepalive pings."""
    return [
        *common_options(keepalive_s),
        ("grpc.so_reuseport", 0),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 10),
    ]


def channel_options(keepalive_s: float) -> Options:
    """Reconnect fast, share no connection with other channels, and bypass any HTTP proxy."""
    return [
        *common_options(keepalive_s),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1000),
        ("grpc.max_reconnect_backoff_ms", 2000),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
    ]
