"""What a schedule may say: one entry per operation, and what makes it fire."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, SerializerFunctionWrapHandler, Strict, model_serializer

from instar.config.section import Fraction, PositiveInt, Section


class Sparse(Section):
    """A section that is written with the keys it was given, and no others."""

    @model_serializer(mode="wrap")
    def _given(self, whole: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in whole(self).items() if key in self.model_fields_set}


class Plateau(Sparse):
    """A validation loss that hardly falls any more."""

    window: Annotated[int, Field(ge=2)] = Field(
        description="evaluations to which a line is fitted, all since the last operation"
    )
    slope: Annotated[float, Field(ge=0)] = Field(
        description="a fall of at most so much is none, nats per 1,000 steps"
    )
    patience: PositiveInt = Field(1, description="evaluations in a row at which it must be so")


class When(Sparse):
    """A trigger; of several keys all must hold."""

    loss_below: float | None = Field(None, description="the validation loss is less than this")
    waited: PositiveInt | None = Field(
        None, description="so many steps have passed since the last operation"
    )
    at_step: Annotated[int, Field(ge=0)] | None = Field(
        None, description="so many steps have been made"
    )
    at_tokens: PositiveInt | str | None = Field(
        None, description="so many tokens have been trained on: a number, or text such as 50Mtok"
    )
    at_fraction: Fraction | None = Field(
        None, description="this share of the run's budget is used up"
    )
    plateau: Plateau | None = Field(None, description="the validation loss hardly falls any more")
    any: Annotated[tuple[When, ...], Strict(False)] | None = Field(
        None, description="one of these triggers fires"
    )
    all: Annotated[tuple[When, ...], Strict(False)] | None = Field(
        None, description="all of these triggers fire"
    )


class ScheduledOperation(Sparse):
    """One operation of a schedule. Keys that are not described here are the operation's options."""

    # which options there are is the operation's matter, and checked with it
    model_config = ConfigDict(extra="allow")

    name: str = Field(description="the operation, e.g. change_lr or widen_mlp")
    value: Any = Field(None, description="a factor, a number, a list …: as the operation wants it")
    trigger_loss: float | None = Field(
        None, description="fires when the validation loss is less than this …"
    )
    max_wait_iters: PositiveInt | None = Field(
        None, description="… or when so many steps have passed since the last operation"
    )
    when: When | None = Field(None, description="a trigger, instead of these two")
    min_steps: PositiveInt | None = Field(
        None, description="fires only when so many steps have passed since the last operation"
    )
    max_params: PositiveInt | None = Field(
        None, description="fails if the model would have more parameters than this"
    )
    reevaluate: bool = Field(False, description="evaluate at once afterwards")
    on_failure: Literal["stop", "skip"] = Field(
        "stop", description="stop the run, or go on without this operation"
    )
    allow_inexact: bool = Field(
        False, description="go on although an exact operation is measured to be otherwise"
    )
