"""What the tests of stores share."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture(autouse=True)
def _loud(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="keepsight")
