"""What the tests of stores share."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture(autouse=True)
def _loud(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="keepsight")


@pytest.fixture
def _nobody_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a row says is there and is not, no writer is about to put there: nobody waits for it."""
    monkeypatch.setattr("keepsight.store.disk._UNDER_WAY", 0.0)
