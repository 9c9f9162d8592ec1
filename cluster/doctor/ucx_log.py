"""Which transport did UCX read with? From what it logs when `UCX_PROTO_INFO=used`.

As an endpoint ends, UCX then draws one table for each kind of operation that was used, with the count of
uses and the transports by range of sizes:

    | agent intra-node cfg#1                                            |
    | remote memory read by ucp_get*(multi) into host memory from host |
    | Count | Range  | Description | Config     |
    |     3 | 0..inf | zero-copy   | cma/memory |
"""

from __future__ import annotations

import re

QUIETLY_TOLD = {"UCX_PROTO_INFO": "used", "UCX_LOG_LEVEL": "info"}
"""Beside a UCX_LOG_FILE: what is parsed here, and which UCX it is."""
_READ = "remote memory read"
_VERSION = re.compile(r"UCX +INFO +Version (\S+)")
_TRANSPORT = re.compile(r"[a-z][\w]*/[\w:.-]+")


def read_transport(log: str) -> str:
    """Transports of the table of reads that was used most, as `cma/memory`; empty when there is none."""
    best_count, best = 0, ""
    is_table_of_reads = False
    for line in log.splitlines():
        cells = [cell.strip() for cell in line.partition("|")[2].rstrip().rstrip("|").split("|")]
        if len(cells) == 1 and "by ucp_" in cells[0]:
            is_table_of_reads = cells[0].startswith(_READ)
        elif is_table_of_reads and len(cells) == 4 and cells[0].isdigit() and int(cells[0]) > best_count:
            best_count, best = int(cells[0]), " + ".join(dict.fromkeys(_TRANSPORT.findall(cells[3])))
    return best


def ucx_version(log: str) -> str:
    """Empty when it does not say."""
    found = _VERSION.search(log)
    return found[1] if found else ""
