"""What clients that take a model of pydantic ask for."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field


class Shape(BaseModel):
    """A shape in a picture."""

    colour: Literal["red", "green", "blue"]
    sides: int = Field(ge=0, le=9)
