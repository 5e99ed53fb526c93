"""A recipe: one experiment as a YAML file, checked field by field."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

from unflip import data
from unflip.data.registry import in_words
from unflip.hints import known
from unflip.uses import refuse_code, use_all

if TYPE_CHECKING:
    from unflip.methods import Method

WEIGHTS = "a .safetensors file of the network's weights"
OTHER_WEIGHTS = (".pt", ".pth", ".ckpt", ".bin", ".npz", ".onnx", ".unflip")
MAKE_WEIGHTS = (
    "safetensors.torch.save_file(torch.load(FILE, weights_only=True), 'weights.safetensors') makes one of a state dict "
    "of torch"
)


NAMES = ("name", "about", "expected")  # fields that say nothing about how a network is trained
STEP_FIELDS = ("data", "epochs", "batch_size", "precision")


def is_weights(name: str | Path) -> bool:
    """Whether a start is a file of weights, not a recipe or a run."""
    return Path(name).suffix == ".safetensors"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Percent = Annotated[float, Field(ge=0, le=100)]


class Data(BaseModel):
    """A registered data set and its options. ``validation``: how many training images are held out; the run is then
    tested on these instead of the test images."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str
    validation: Annotated[int, Field(ge=0)] = 0

    @field_validator("name")
    @classmethod
    def _known(cls, value: str) -> str:
        return known(value, data.names(), "data set")

    @model_validator(mode="after")
    def _known_options(self) -> Data:
        fields = [*type(self).model_fields, *data.option_names(self.name)]
        for option in self.options:
            known(option, fields, f"option of data set {self.name!r}")
        return self

    @property
    def options(self) -> dict[str, Any]:
        """The options of the data set that the recipe sets."""
        return dict(self.model_extra or {})

    def load(self, folder: Path | None) -> data.Dataset:
        """All images, before any are held out."""
        return data.load(self.name, folder, **self.options)

    def of(self, images: data.Dataset) -> data.Dataset:
        """The images as a run sees them: with those held out that the recipe holds out."""
        return images.split(self.validation) if self.validation else images

    def __str__(self) -> str:
        return in_words(self.model_dump())


class Model(BaseModel):
    """A registered network and its options."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str

    @field_validator("name")
    @classmethod
    def _known(cls, value: str) -> str:
        from unflip import models  # needs torch, which reading this file must not

        return known(value, models.names(), "model")

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class Optimizer(_Part):
    """``latent_lr`` is for the latent weights of binary layers; ``lr`` if it is not given. ``decayed``: the parameters
    that ``weight_decay`` is for, all of them or the weights of one kind of layer."""

    name: Literal["sgd", "adam"] = "sgd"
    lr: Positive
    latent_lr: Positive | None = None
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    weight_decay: NotNegative = 0.0
    decayed: Literal["all", "convolutions", "linear"] = "all"


Fraction = Annotated[float, Field(gt=0, lt=1)]


DROP = 0.1  # what a learning rate is multiplied with, unless a recipe says otherwise


class Schedule(_Part):
    """The factor on every learning rate in each epoch. ``factors``, if given, has one for each of ``at``. In the first
    ``warmup`` epochs the rates rise in a line; cosine and linear begin to fall after them."""

    name: Literal["constant", "cosine", "linear", "step"] = "constant"
    every: Count | None = None
    at: tuple[Count, ...] = ()
    factor: Fraction = DROP
    factors: tuple[Fraction, ...] = ()
    warmup: Annotated[int, Field(ge=0)] = 0

    @model_serializer(mode="wrap")
    def _without_no_warmup(self, values: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {k: v for k, v in values(self).items() if k != "warmup" or v}

    @model_validator(mode="after")
    def _steps(self) -> Schedule:
        if self.name == "step" and bool(self.every) == bool(self.at):
            raise ValueError("schedule 'step' needs either every or at")
        if self.name != "step" and (self.every or self.at):
            raise ValueError(
                f"every and at belong to schedule 'step', but the name is {self.name!r}"
            )
        if self.factors and len(self.factors) != len(self.at):
            raise ValueError(
                f"{len(self.factors)} factors do not fit {len(self.at)} steps: give one for each of at, or factor"
            )
        if self.factors and self.factor != DROP:
            raise ValueError(
                f"factor={self.factor} has no effect beside factors: remove one of them"
            )
        return self

    def never_falls(self, epochs: int) -> str | None:
        """What to say if all steps come after the last epoch."""
        if not self.at or min(self.at) < epochs:
            return None
        return f"the learning rate never falls, because schedule.at={list(self.at)} and epochs={epochs}"

    def factor_at(self, epoch: int, epochs: int) -> float:
        """For epoch 0 .. epochs - 1."""
        if epoch < self.warmup:
            return (epoch + 1) / (self.warmup + 1)
        fallen = (epoch - self.warmup) / (epochs - self.warmup)
        if self.name == "cosine":
            return 0.5 * (1 + math.cos(math.pi * fallen))
        if self.name == "linear":
            return 1 - fallen
        if self.name == "step":
            drops = epoch // self.every if self.every else sum(epoch >= at for at in self.at)
            return float(math.prod(self.factors[:drops]) if self.factors else self.factor**drops)
        return 1.0


class Distill(_Part):
    """Learn also from the logits of a finished run of the recipe ``teacher``; see ``train/teacher.py``."""

    teacher: str
    temperature: Positive = 2.0
    weight: Annotated[float, Field(gt=0, le=1)] = 0.5


class Recipe(_Part):
    """One experiment. See ``docs/training.md`` for each field.

    ``expected`` is the test accuracy, in percent, of our own runs after some epochs: training warns if it is far below.
    It holds for exactly this recipe, so a copy with other values (:meth:`model_copy`, overrides) has none.
    """

    name: str
    about: str = ""
    uses: tuple[str, ...] = ()  # before the names that these modules make known
    data: Data
    model: Model
    method: str | dict[str, Any] = "float"
    ends: Literal["float", "int8"] = "float"
    shortcuts: Literal["float", "int8"] = "float"
    start: str | None = None
    distill: Distill | None = None
    epochs: Count
    batch_size: Count = 128
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    optimizer: Optimizer
    schedule: Schedule = Schedule()
    precision: Literal["float16", "float32"] = "float16"
    sync_batchnorm: bool = False
    allow_no_flips: bool = False
    expected: dict[Count, Percent] = Field(default_factory=dict)
    _folders: dict[str, Path] = PrivateAttr(default_factory=dict)

    @field_validator("name")
    @classmethod
    def _is_a_folder(cls, value: str) -> str:
        """Runs go to a folder of that name, which must stay below --out."""
        if value in ("", ".", "..") or "/" in value:
            raise ValueError(
                "should be the name of a folder for its runs: not empty, and without /"
            )
        return value

    @field_validator("uses", mode="before")
    @classmethod
    def _one_or_more(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("uses")
    @classmethod
    def _import(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        """``info.context`` is the run that the recipe is from, if it may be a stranger's."""
        if info.context is not None:
            refuse_code(value, str(info.context))
        use_all(value)
        return value

    def __setstate__(self, state: dict[Any, Any]) -> None:
        """Another process, which gets the recipe pickled, has not imported its modules yet."""
        super().__setstate__(state)
        use_all(self.uses)

    @model_serializer(mode="wrap")
    def _without_empty_fields(self, values: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave these fields out where they are empty, or the default."""
        left_out = {"uses": [], "expected": {}, "label_smoothing": 0.0}
        left_out |= {"ends": "float", "shortcuts": "float"}
        return {
            k: v for k, v in values(self).items() if k not in left_out or (v and v != left_out[k])
        }

    @field_validator("expected")
    @classmethod
    def _in_order(cls, value: dict[int, float]) -> dict[int, float]:
        return dict(sorted(value.items()))

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Recipe:
        """A copy with other values. What was measured with the old ones is not expected of it."""
        changed = any(
            getattr(self, key) != value for key, value in (update or {}).items() if key not in NAMES
        )
        kept = {} if changed else self.expected
        return super().model_copy(update={"expected": kept, **(update or {})}, deep=deep)

    @field_validator("start")
    @classmethod
    def _recipe_or_weights(cls, value: str | None) -> str | None:
        if value and Path(value).suffix in OTHER_WEIGHTS:
            raise ValueError(f"should name a recipe, or {WEIGHTS}; {MAKE_WEIGHTS}")
        return value

    @field_validator("method")
    @classmethod
    def _method(cls, value: str | dict[str, Any]) -> str | dict[str, Any]:
        if value in ("float", {"name": "float"}):
            return "float"
        from unflip import methods

        try:
            return methods.resolve(value).options()
        except TypeError as error:  # pydantic reports ValueErrors alone
            raise ValueError(f"{error} in {value}") from None

    @model_validator(mode="after")
    def _has_the_start_that_its_method_needs(self) -> Recipe:
        reason = None if self.method == "float" else self.resolved_method().needs_start()
        if reason and self.start is None:
            raise ValueError(f"{reason}: give start, the recipe whose run it starts from")
        return self

    @model_validator(mode="after")
    def _has_8_bits_in_a_binary_network(self) -> Recipe:
        for field in ("ends", "shortcuts"):
            value = getattr(self, field)
            if value != "float" and self.method == "float":
                raise ValueError(
                    f"{field}={value} is for binary networks, but method is float: remove {field}, or give a method"
                )
        return self

    @model_validator(mode="after")
    def _has_epochs_after_its_warmup(self) -> Recipe:
        if self.schedule.warmup >= self.epochs:
            raise ValueError(
                f"schedule.warmup={self.schedule.warmup} leaves no epoch of epochs={self.epochs}: make it smaller"
            )
        return self

    @model_validator(mode="after")
    def _smooths_labels_that_it_uses(self) -> Recipe:
        if self.label_smoothing and self.distill is not None and self.distill.weight == 1:
            raise ValueError(
                f"label_smoothing={self.label_smoothing} has no effect, because distill.weight=1 learns from the "
                "teacher alone: remove it, or make distill.weight smaller"
            )
        return self

    def resolved_method(self) -> Method:
        """The method as an object; not for ``float``."""
        from unflip import methods

        return methods.resolve(self.method)

    @property
    def steps_together(self) -> tuple[Any, ...]:
        """What runs that are trained side by side must have in common."""
        return tuple(getattr(self, field) for field in STEP_FIELDS)

    def beside(self, field: str) -> Path:
        """The folder from which a path in ``start`` or ``distill`` is taken: that of the recipe file which names it,
        or the current folder where an override does."""
        return self._folders.get(field, Path())

    def found_in(self, folder: Path, *overridden: str) -> None:
        """Note that it was read from a file in ``folder``; ``overridden`` fields came from an override."""
        fields = (field for field in ("start", "distill") if field not in overridden)
        self._folders.update(dict.fromkeys(fields, folder))

    def plain(self) -> dict[str, Any]:
        """The recipe as JSON values, every default filled in."""
        return self.model_dump(mode="json")
