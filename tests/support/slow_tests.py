"""What of the suite of families is run by `make test-slow` only.

Every family keeps a test of each law: in the model's own attention, in float32 and bfloat16. What
is left out repeats one of these for another attention, for a cut of another size, or for a second
model of the same family. The families of `families/test_core.py` leave out nothing.
"""

from __future__ import annotations

import pytest

from support import FamilyTests

WHOLE = "test_core"
REPEATED = {
    "test_cuts_every_few_tokens",
    "test_other_attention",
    "test_other_attention_in_other_dtype",
}
# Second models of a family: another tower, window or processor. What these could change is answers,
# cuts, what is reused and how messages are rendered; how memories are used is the family's.
SECOND = {
    "TestGemma3Crops",
    "TestGemma3Sliding",
    "TestGemma4Vision",
    "TestMiniCPMFine",
    "TestPaliGemma2",
    "TestPixtral",
    "TestVideoLlama3Merged",
}
OF_MEMORIES = {
    "test_after_a_restart",
    "test_interleaved_conversations_do_not_meet",
    "test_other_dtype",
    "test_rows_of_a_batch",
    "test_stock_generate_from_packages",
    "test_the_tower_runs_once",
}


def mark_repetitions_slow(items: list[pytest.Item]) -> None:
    """Mark them, and refuse names that no test has any more."""
    for name in REPEATED | OF_MEMORIES:
        assert hasattr(FamilyTests, name), f"slow_tests.py names {name}, which is no test"
    for item in items:
        suite = getattr(item, "cls", None)
        if suite is None or not issubclass(suite, FamilyTests) or item.path.stem == WHOLE:
            continue
        repeated = item.name in REPEATED
        called = item.parent.name if item.parent is not None else ""
        if repeated or (called in SECOND and item.name in OF_MEMORIES):
            item.add_marker(pytest.mark.slow)
