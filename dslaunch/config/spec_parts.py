"""Shared pieces of the run file's spec: the base model and the field types."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag


class Section(BaseModel):
    """One mapping of the run file: unknown keys are errors, values are frozen, types are strict."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, defer_build=True)


def _one_as_many(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


def _path_as_mapping(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


def _device_as_mapping(value: Any) -> Any:
    return {"device": value} if isinstance(value, str) else value


def _sources_as_tuple(value: Any) -> Any:
    if isinstance(value, (str, Mapping)):
        value = (value,)
    return tuple(_path_as_mapping(item) for item in value) if isinstance(value, tuple) else value


PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
# fp32 ends at 3.4e38, and optimizers multiply two of these and divide by 1 - beta; it begins at 1.2e-38.
FP32_MOST, FP32_LEAST = 1e15, 1.2e-38
Rate = Annotated[float, Field(gt=0, le=FP32_MOST)]
Weight = Annotated[float, Field(ge=0, le=FP32_MOST)]
Epsilon = Annotated[float, Field(ge=FP32_LEAST, le=FP32_MOST)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, Field(min_length=1)]
Port = Annotated[int, Field(ge=1, le=65535)]
Names = Annotated[tuple[Text, ...], BeforeValidator(_one_as_many)]
# A name, a list of them, or one for each key; the tags keep pydantic's errors to the branch that was meant.
NamesByHost = Annotated[
    Annotated[Names, Tag("names")] | Annotated[dict[Text, Text], Tag("by host")],
    Discriminator(lambda value: "by host" if isinstance(value, Mapping) else "names"),
]
OneAsMany = BeforeValidator(_one_as_many)
PathAsMapping = BeforeValidator(_path_as_mapping)
DeviceAsMapping = BeforeValidator(_device_as_mapping)
SourcesAsTuple = BeforeValidator(_sources_as_tuple)
