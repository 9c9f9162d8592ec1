"""Are the answers of prefill + decode, of a lone engine and of transformers the same?"""

from cluster.verification.cases import Case, greedy_cases, seeded_cases
from cluster.verification.compare import Comparison, Mismatch, compare
from cluster.verification.report import Verification, verify_answers

__all__ = [
    "Case",
    "Comparison",
    "Mismatch",
    "Verification",
    "compare",
    "greedy_cases",
    "seeded_cases",
    "verify_answers",
]
