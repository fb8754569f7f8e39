"""Requests and answers, as the OpenAPI description shows them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rkr.core.infer import FALSE_ALARMS

PICTURE = "iVBORw0KGgoAAAANSUhEUgAAAAIAAAACCAIAAAD91JpzAAAAFElEQVR4nGP8z8DAwMDAxMDAwMAAAA0GAQMDe3pkAAAAAElFTkSuQmCC"


class Strict(BaseModel):
    """Unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)


class PredictRequest(Strict):
    """Pictures to classify."""

    pictures: list[str] = Field(min_length=1, description="Picture files in base64.", examples=[[PICTURE]])
    task: str | None = Field(
        None, description='A task\'s name, or "auto" to infer it. Not needed if there is one task.', examples=["birds"]
    )
    top: int = Field(1, ge=1, le=1000, description="How many classes to name for each picture.")
    false_alarms: float = Field(
        FALSE_ALARMS,
        gt=0,
        lt=1,
        description='With "auto": share of the tasks\' own pictures that may be called none of the tasks.',
    )


class Answer(BaseModel):
    """A class and its probability."""

    model_config = ConfigDict(populate_by_name=True)
    class_: str = Field(alias="class", examples=["robin"])
    probability: float = Field(examples=[0.93])


class Predicted(BaseModel):
    """The answer for one picture."""

    picture: str = Field(description="The file's name, or the number of the picture.", examples=["a.jpg"])
    task: str | None = Field(description="The task; null if the picture is unlike all tasks.", examples=["birds"])
    answers: list[Answer]
    task_probability: float | None = Field(None, description="Of the task, if it was inferred.")


class Predictions(BaseModel):
    """The answers in order of the pictures."""

    predictions: list[Predicted]


class Task(BaseModel):
    """A task that is served."""

    name: str = Field(examples=["birds"])
    classes: list[str] = Field(examples=[["robin", "wren"]])
    pictures: int | None = Field(description="That it was learned from.", examples=[240])
    accuracy: float | None = Field(description="On the validation part, 0 to 1.", examples=[0.94])
    bytes: int = Field(description="Of its file.", examples=[843_112])
    date: str | None = Field(description="When it was learned.", examples=["2026-11-19T08:00:00+00:00"])
    fingerprint: str | None = Field(
        description="A hash of all that it computes with: equal fingerprints, equal answers. Null until its file was "
        "read.",
        examples=["5d41402abc4b2a76b9719d911017c592"],
    )
    damaged: str | None = Field(None, description="Why its file cannot be used.")


class TaskList(BaseModel):
    """All tasks."""

    network: str = Field(description="The base that they share.", examples=["efficientnet-lite0"])
    tasks: list[Task]
    changes: bool = Field(description="Whether tasks can be added, dropped and learned.")
    trouble: str | None = Field(None, description="Why changes of the folder cannot be taken over.")


class LearningJob(BaseModel):
    """A task that is learned, or was."""

    task: str = Field(examples=["flowers"])
    state: Literal["waiting", "learning", "learned", "failed", "cancelled"]
    done: float = Field(description="Share of the training that is done.", examples=[0.4])
    doing: str = Field(examples=["epoch 8 of 20"])
    accuracy: float | None = Field(description="On the validation part.", examples=[0.91])
    seconds_left: float | None = Field(examples=[35.0])
    error: str | None = Field(description="Why it failed.")
    started: float = Field(description="Seconds since 1970.", examples=[1_795_000_000.0])


class Jobs(BaseModel):
    """All that are known, the last one first."""

    jobs: list[LearningJob]


class Live(BaseModel):
    """The last seconds."""

    seconds: float
    requests_per_second: float
    pictures_per_second: float
    median_ms: float | None
    p99_ms: float | None
    batch_pictures: float = Field(description="Mean number of pictures in a batch.")
    batch_tasks: float = Field(description="Mean number of tasks in a batch.")
    waiting: int = Field(description="Pictures that wait for an answer.")
    tasks: int


class Health(BaseModel):
    """Whether the server is well."""

    status: str = Field(examples=["ok"])


class Error(BaseModel):
    """What is wrong, in one sentence."""

    error: str = Field(examples=["There is no task 'cars'."])


_FILE = {"type": "string", "format": "binary"}
PREDICT_BODY: dict[str, Any] = {
    "required": True,
    "content": {
        "application/json": {
            "schema": PredictRequest.model_json_schema(),
            "example": {"pictures": [PICTURE], "task": "birds", "top": 2},
        },
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["pictures"],
                "properties": {
                    "pictures": {"type": "array", "items": _FILE, "minItems": 1, "description": "Picture files."},
                    "task": {"type": "string", "description": 'A task\'s name, or "auto".', "examples": ["birds"]},
                    "top": {"type": "integer", "minimum": 1, "maximum": 1000, "default": 1},
                    "false_alarms": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
                },
            }
        },
    },
}
TASK_BODY: dict[str, Any] = {"required": True, "content": {"application/octet-stream": {"schema": _FILE}}}
ZIP_BODY: dict[str, Any] = {"required": True, "content": {"application/zip": {"schema": _FILE}}}
