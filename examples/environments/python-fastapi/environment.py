"""Rewards for the quick start's sums: 1 where the last number of a response is the label, else 0; and whether it was worked."""

import re

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from pydantic import BaseModel

NUMBER = re.compile(r"[-+]?\d{1,40}(?:\.\d{1,40})?", re.ASCII)
app = FastAPI()


class Sample(BaseModel):
    response: str
    label: str | None = None  # only there where it is not the group's


class Group(BaseModel):  # the fields that this environment needs; the others of a request are ignored
    label: str | None
    samples: list[Sample]


@app.get("/describe")
def describe() -> dict:
    return {"protocol": 1, "name": "arithmetic-python", "verbs": ["score"], "timeout": 5}


@app.post("/score", responses={400: {"description": "the label is no number"}})
def score(group: Group):
    try:
        answers = [float(sample.label if "label" in sample.model_fields_set else group.label) for sample in group.samples]
    except (TypeError, ValueError):
        return JSONResponse({"error": "a sum needs its label"}, status_code=400)
    return {"rewards": [reward(sample.response, answer) for sample, answer in zip(group.samples, answers, strict=True)]}


def reward(response: str, answer: float) -> dict[str, float]:
    numbers = NUMBER.findall(response)
    return {"reward": float(bool(numbers) and float(numbers[-1]) == answer), "worked": float(response.startswith("("))}
