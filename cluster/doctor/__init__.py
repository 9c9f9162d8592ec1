"""Finds what would go wrong before traffic does.

facts      plain data: what is known of nodes, cluster, reads         findings   what is said about it
node       what is asked of a node (`ray_nodes`: of others)           live       what runs already
doctor     gathers, and the list of all checks                        report     table and JSON
versions gpus rdma ucx shm limits memory model ports clock: a probe and its check each
pools placement service workers reads: checks of more than one node
read_plan read_agent read_process ucx_log: who reads from whom, one timed read, and what UCX used for it
"""

from cluster.doctor.doctor import Diagnosis, diagnose
from cluster.doctor.findings import Finding, Severity, exit_code
from cluster.doctor.report import as_json, print_table

__all__ = ["Diagnosis", "Finding", "Severity", "as_json", "diagnose", "exit_code", "print_table"]
