"""The vocabulary that all parts share. Imports nothing but the standard library and protobuf.

Read in this order: `ids`, `generation`, `handoff`, `membership`, `errors`, `ports`; `codec` maps
them to the messages of `wire/splitserve.proto`.
"""
