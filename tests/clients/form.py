"""The form that clients with pydantic ask for."""

from pydantic import BaseModel


class Sum(BaseModel):
    sum: int
