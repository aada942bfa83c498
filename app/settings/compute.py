"""What is served, and with what it is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator
from pydantic_settings import NoDecode

from app.settings.base_models import DEFAULT_BASE_MODEL, BaseModelSource, parse_model
from app.settings.values import Count, Seconds, Theme, split
from engines.registry import ENGINES, capabilities
from schemas.errors import InvalidRequest


class Compute(Theme):
    """Base models, engine, processes, types and memory."""

    heading = "Base models and how they are computed"

    base_model: Annotated[tuple[BaseModelSource, ...], NoDecode] = Field(
        (BaseModelSource(name=DEFAULT_BASE_MODEL),),
        min_length=1,
        description="Base models to serve, each NAME or NAME=PATH (a folder with config.json, safetensors and "
        "tokenizer). Repeat the option for several; in the file a list of strings or of tables "
        "{name, path, tokenizer_id}.",
    )
    engine: str = Field(
        "torch",
        json_schema_extra={"choices": list(ENGINES)},
        description="Library that computes. torch: one process for each base model. The others: as many processes as "
        "`ranks` says, each with its slices of the model. See docs/engines.md.",
    )
    engine_python: Path | None = Field(
        None,
        description="Python interpreter of the environment that has the engine's library. Unset: for an engine with an "
        "environment of its own the one that `make engine-venv NAME=ENGINE` makes, else the server's.",
    )
    ranks: Annotated[int, Field(ge=1, le=1024)] = Field(
        1,
        description="Processes that compute each base model together, on a GPU each or on the CPU (not engine torch).",
    )
    rank_timeout: Seconds = Field(
        120.0,
        description="Seconds that a rank waits for the others before all of them are ended and started again. It must "
        "be longer than the slowest pass.",
    )
    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = Field(
        1,
        description="How many neighbouring ranks share the tensors of one copy of a base model; a divisor of `ranks` "
        "(engine megatron).",
    )
    ray: str | None = Field(
        None,
        pattern=r"^(auto|local|[^:/\s]+:\d+)$",
        description="Run each base model on a Ray cluster, as a deployment of Ray Serve: HOST:PORT of a cluster, or "
        "`local` to start one on this machine (which `--ray` alone means too); `auto` where the edge is a deployment "
        "itself. Needs the extra `ray`, and a data folder that every node sees under the same path. Unset: worker "
        "processes of this server. See docs/cluster.md.",
    )
    samplers: str | None = Field(
        None,
        pattern=r"^[1-9]\d{0,3}(:[1-9]\d{0,3})?$",
        description="Sampling replicas of each base model on the Ray cluster, each with a copy of the weights: N, or "
        "LEAST:MOST for as many in between as there is work for. Needs `ray`. Unset: samples are drawn on the "
        "trainer's own copy. See docs/cluster.md.",
    )
    samplers_up_delay: Annotated[float, Field(gt=0, le=3600, allow_inf_nan=False)] = Field(
        10.0, description="Seconds that more sampling replicas must be needed before one is added."
    )
    samplers_down_delay: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        300.0, description="Seconds that fewer sampling replicas must be enough before one is removed."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="Type of the frozen base weights; everything else is float32. auto: bfloat16 on CPUs with AMX "
        "tiles and on GPUs of compute capability 8.0 or more, else float32. On CPUs with avx512_bf16 but without AMX, "
        "bfloat16 can be asked for: its products are about twice as fast.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where to compute. auto: a GPU if there is one.")
    threads: Count | None = Field(
        None,
        description="CPU threads of each worker. Unset: `OMP_NUM_THREADS` of the server's environment, else all cores "
        "that the server may use (affinity and quota of its control group).",
    )
    batch_invariant: bool = Field(
        True,
        description="Whether what a training request computes is bit for bit the same whatever other requests are "
        "computed beside it. Off is a little faster.",
    )
    micro_batch_tokens: Count | None = Field(
        None,
        description="Tokens that one turn takes from all training runs together. More fill the machine better, fewer "
        "let other work in earlier. Unset: 512 on a CPU in float32, 1,024 in bfloat16, 8,192 on a GPU.",
    )
    gradient_checkpointing: Literal["off", "on", "auto"] = Field(
        "auto",
        description="Compute the activations of a training pass twice instead of keeping them: the same numbers, a "
        "third more time, much less memory. auto: for those passes that would not fit otherwise.",
    )
    adapter_memory_gib: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None,
        description="Memory for live training runs on each base model, in GiB; idle ones beyond it wait on disk, in "
        "the data folder. Unset: half of what is free when the base model is loaded.",
    )

    @field_validator("base_model", mode="before")
    @classmethod
    def _parse_models(cls, value: object) -> object:
        entries = split(value)
        if not isinstance(entries, list | tuple):
            return entries
        return tuple(parse_model(entry) if isinstance(entry, str) else entry for entry in entries)

    @field_validator("base_model")
    @classmethod
    def _unique_models(cls, value: tuple[BaseModelSource, ...]) -> tuple[BaseModelSource, ...]:
        names = [entry.name for entry in value]
        doubled = sorted({name for name in names if names.count(name) > 1})
        if doubled:
            raise ValueError(f"{doubled[0]!r} is given twice; every base model needs a name of its own")
        return value

    @field_validator("engine")
    @classmethod
    def _known_engine(cls, value: str) -> str:
        if value not in ENGINES:
            raise ValueError(f"it must be one of {', '.join(ENGINES)}")
        return value

    @field_validator("ranks", "device")
    @classmethod
    def _engine_can(cls, value: Any, info: ValidationInfo) -> Any:
        if "engine" in info.data:  # else that is what is refused
            can = capabilities(info.data["engine"])
            try:
                if info.field_name == "ranks":
                    can.check_ranks(value)
                else:
                    can.check_device(value)
            except InvalidRequest as error:
                raise ValueError(error.message.partition("; ")[2]) from None
        return value

    @field_validator("samplers", mode="before")
    @classmethod
    def _number_of_samplers(cls, value: object) -> object:
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else value

    @field_validator("samplers")
    @classmethod
    def _samplers_need_a_cluster(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None:
            return None
        least, _, most = value.partition(":")
        if int(least) > int(most or least):
            raise ValueError(f"the least number is larger than the largest; write {most}:{least}")
        if "ray" in info.data and info.data["ray"] is None:
            raise ValueError("sampling replicas run on a Ray cluster; give the setting ray too")
        return value

    @field_validator("tensor_parallel")
    @classmethod
    def _whole_copies(cls, value: int, info: ValidationInfo) -> int:
        ranks = info.data.get("ranks", value)
        if ranks % value:
            raise ValueError(f"it must be a divisor of the {ranks} ranks")
        return value
