"""Every option of the server, in one typed model.

Each field is an option of `tinsmith serve`, an environment variable `TINSMITH_<NAME>` and a key of one TOML file, in
this precedence: command line, environment, file, default. Unknown keys are refused in all three. Not responsible for
parsing the command line (`app/cli.py`) or for the documentation table (`app/settings_docs.py`); both are made from
this model. Imports nothing heavy: `tinsmith serve --help` goes through here.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import socket
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from engines.registry import ENGINES, capabilities, sampler_kind
from schemas.errors import InvalidRequest

DEFAULT_BASE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
ENV_PREFIX = "TINSMITH_"
OTHER_ENV = frozenset({"TINSMITH_CONFIG", "TINSMITH_URL", "TINSMITH_KEY", "TINSMITH_FAIL_AT"})
"""Variables with our prefix that are not settings of the server: the config file, what `tinsmith demo` reads, and where
a test of crashes lets a process die."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?(:[A-Za-z0-9._-]+)?")

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


_LOCAL = ("/", "~", ".")
"""How a path begins, as opposed to a hub id."""


class SettingsError(Exception):
    """The configuration cannot be used. The text has one line for each problem, with where the value came from."""


class BaseModelSource(BaseModel):
    """One base model to serve: the name that clients use, and where its files are."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    path: str | None = None
    tokenizer_id: str | None = None

    @field_validator("name")
    @classmethod
    def _plain_name(cls, value: str) -> str:
        if value.startswith(_LOCAL):
            raise ValueError(f"{value!r} is a folder without a name; write NAME=PATH, for example org/model={value}")
        if not _NAME.fullmatch(value) or len(value) > 128:
            raise ValueError(
                f"{value!r} is not a model name; write a name such as org/model, or NAME=PATH for a folder"
            )
        return value

    @property
    def source(self) -> str | None:
        """A local folder or a hub id; None for the built-in default model."""
        if self.path is not None:
            local = self.path.startswith(_LOCAL)
            return str(Path(self.path).expanduser().absolute()) if local else self.path
        return None if self.name == DEFAULT_BASE_MODEL else self.name


class Settings(BaseSettings):
    """The options. Building one directly reads neither environment nor file (`load_settings` does)."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", frozen=True, validate_default=True)

    host: str = Field("127.0.0.1", description="Address to listen on. 0.0.0.0 serves the whole network.")
    port: int = Field(8410, ge=0, le=65535, description="TCP port to listen on. 0 takes any free one.")
    allowed_hosts: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="Host names, besides `host`, loopback names and plain IP addresses, that requests may be addressed "
        "to (protection against DNS rebinding). `*` allows all.",
    )
    public_url: str | None = Field(
        None,
        pattern=r"^https?://[^/]+(/.*)?$",
        description="Address under which clients reach the server, if it is not the one they send requests to (a "
        "proxy). Download addresses begin with it.",
    )
    data_dir: Path = Field(
        Path("~/.local/share/tinsmith"),
        description="Folder of everything that survives a restart: database, request bodies, checkpoints, development "
        "key. Created if it is missing.",
    )
    artifacts_url: str | None = Field(
        None,
        pattern=r"^s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9._-]+)*$",
        description="S3-compatible storage of checkpoints, as `s3://BUCKET/PREFIX`; unset: the data folder. "
        "Credentials come from the usual AWS variables or files. Needs the extra `s3`. See docs/durability.md.",
    )
    artifacts_endpoint: str | None = Field(
        None,
        pattern=r"^https?://[^/@?#]+/?$",
        description="Address of that storage, if it is not AWS. Unset: `AWS_ENDPOINT_URL`, else AWS.",
    )
    artifacts_region: str | None = Field(
        None,
        pattern=r"^[a-z0-9-]{1,64}$",
        description="Region of that storage. Unset: `AWS_REGION`, else us-east-1.",
    )
    artifacts_timeout: Seconds = Field(
        30.0,
        description="Seconds that one request to that storage gets, its repeats included; large files are sent in "
        "requests of 8 MiB.",
    )
    artifacts_cache_gib: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        20.0,
        description="GiB in the data folder for copies of checkpoints that are in that storage; the ones unused for "
        "longest give way, those in use stay.",
    )
    database_url: str | None = Field(
        None,
        description="Database of everything that is a row. Unset: SQLite, in the data folder. "
        "postgresql+asyncpg://USER@HOST/DATABASE: PostgreSQL, which several servers may share (docs/postgres.md); a "
        "password is better given in the environment variable, or in a file that PGPASSFILE names.",
    )
    edge_lease: float = Field(
        15.0,
        ge=2,
        le=600,
        allow_inf_nan=False,
        description="Seconds without a sign of life after which other servers on the same PostgreSQL database take "
        "over what a server was doing.",
    )
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
    worker_start_timeout: Seconds = Field(600.0, description="Seconds a worker may take to load its base model.")
    restart_limit: int = Field(
        3, ge=0, description="How often in a row a worker that died is started again before its base model fails."
    )
    death_limit: Count = Field(
        3,
        description="How often in a row the whole server may be killed while it executes an operation before that "
        "operation fails: it may be what takes the machine down.",
    )
    turn_timeout: float = Field(
        900.0,
        ge=0,
        allow_inf_nan=False,
        description="Seconds after which a turn of training or sampling counts as hung: its worker is ended and "
        "started again, and what was under way runs again. A turn takes seconds; on a machine that swaps it may take "
        "minutes. 0: no limit.",
    )
    snapshot_operations: Count = Field(
        64,
        description="Operations that change a training run until a snapshot of its whole state is due. After a crash a "
        "run goes on from its newest snapshot, and what came after it is executed again.",
    )
    snapshot_seconds: Seconds = Field(
        120.0, description="Seconds after a change of a training run until a snapshot of it is due."
    )
    snapshot_mib: Count = Field(
        256, description="MiB of requests that change a training run until a snapshot of it is due."
    )
    snapshot_share: float = Field(
        0.05,
        gt=0,
        le=1,
        allow_inf_nan=False,
        description="Part of the time that may be spent on taking and writing snapshots, one at a time; with many "
        "training runs they are then taken later than they are due.",
    )
    max_adapters: Count = Field(
        1024,
        description="Training runs that are live at once on each base model, in memory or idle on disk; names of one "
        "folder share it.",
    )
    max_rank: Count = Field(256, description="Largest LoRA rank that a client may ask for.")
    max_sample_rows: Count = Field(64, description="Sequences that are generated at once on each base model.")
    max_sample_tokens: Count = Field(
        131_072,
        description="Tokens (prompts and what is drawn) that all sequences being generated may hold at once on each "
        "base model; the default model keeps 46 kB of memory for each in float32. Samples that do not fit wait.",
    )
    max_waiting_samples: Count = Field(
        4096,
        description="Samples of one project that may wait on each base model. Beyond it `asample` answers 429, on "
        "which clients pause and send the sample again until it is taken.",
    )
    decode_slice: Count = Field(
        8,
        description="Tokens of each sequence that a turn of sampling generates at least; new samples join, and "
        "cancelled ones leave, between turns. Training and sampling get equal shares of time if both have work.",
    )
    sample_logprobs: Literal["tempered", "plain"] = Field(
        "tempered",
        description="Log-probabilities of sampled tokens: of the distribution that was drawn from (scaled by the "
        "temperature), or of the plain model at temperature 1.",
    )
    sampler: str = Field(
        "torch",
        pattern=r"^(torch|vllm|https?://[^/]+/(.*/)?v1/?)$",
        description="What draws samples. torch: the trainer's own copy of the weights. vllm: vLLM, in an environment "
        "and a process of its own, with a second copy. An address that ends in /v1: an OpenAI-compatible server that "
        "has the same base model and answers with token ids. See docs/vllm.md.",
    )
    sampler_python: Path | None = Field(
        None,
        description="Python interpreter of the environment that has vLLM. Unset: the one that "
        "`make engine-venv NAME=vllm` makes.",
    )
    sampler_memory_gib: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None,
        description="Key-value cache of sampler vllm in GiB. Unset: 2 on a CPU; on a GPU what fits, with vLLM's copy "
        "of the weights, within 40 % of its memory.",
    )
    sampler_max_rank: Annotated[int, Field(ge=1, le=512)] = Field(
        64, description="Largest LoRA rank that sampler vllm takes; it reserves memory for it."
    )
    sample_max_concurrent_requests: Count = Field(
        512,
        description="Samples that one client keeps outstanding, each with a connection of its own, if "
        "`sample_use_retrieve_futures` is off.",
    )
    sample_use_retrieve_futures: bool = Field(
        True, description="Clients wait for all their samples with one request, instead of with one for each."
    )
    sample_join_sampling_session: bool = Field(
        True, description="Copies of a sampling client ask for a number of their own, instead of drawing one at random."
    )
    sample_cancel_enabled: bool = Field(
        True, description="Clients tell the server about samples that they do not wait for any more."
    )
    custom_loss_server_side: bool = Field(
        True,
        description="Clients upload the losses that they made with `create_custom_loss`, to be run here in one pass, "
        "instead of running them themselves between two passes.",
    )
    metadata_only_above_kib: Count = Field(
        1024, description="Results of more KiB are announced with their size before they are sent."
    )
    max_request_tokens: Count = Field(
        262_144, description="Tokens of all datums of one training request. Longer ones are refused before any work."
    )
    max_body_mib: Count = Field(64, description="Largest request body in MiB, before and after decompression.")
    poll_hold: float = Field(
        30.0, ge=0, le=40, allow_inf_nan=False, description="Seconds that a poll for a result is held open."
    )
    seq_gap_timeout: Seconds = Field(
        60.0, description="Seconds that a training request waits for a request before it in order that never came."
    )
    session_timeout: float = Field(
        7200.0,
        ge=180,
        allow_inf_nan=False,
        description="Seconds of silence (no heartbeat, no request) after which a session ends and its adapters are "
        "freed.",
    )
    result_retention_delivered: float = Field(
        3600.0, ge=600, allow_inf_nan=False, description="Seconds that a result is kept after it was first delivered."
    )
    result_retention_undelivered: float = Field(
        172800.0, ge=600, allow_inf_nan=False, description="Seconds that a result nobody has fetched is kept."
    )
    log_retention: float = Field(
        604800.0,
        ge=600,
        allow_inf_nan=False,
        description="Seconds after the end of a session until the lines of its operations go, which tell a late repeat "
        "of a request from a new one and make the timeline of its trace. Usage and the audit log stay.",
    )
    stability_retention: float = Field(
        172800.0,
        ge=600,
        allow_inf_nan=False,
        description="Seconds that the statistics of samples made with `record_stability_info` are kept.",
    )
    sweep_interval: Seconds = Field(30.0, description="Seconds between two searches for what has expired.")
    pjwt_auth_enabled: bool = Field(
        False,
        description="Whether clients exchange their key for a short-lived token first, which carries their identity "
        "(`tinker auth whoami` needs it). Plain keys go on working.",
    )
    token_lifetime: float = Field(
        3600.0, ge=120, le=86400, allow_inf_nan=False, description="Seconds that such a token is valid."
    )
    shutdown_grace: float = Field(
        30.0, ge=0, allow_inf_nan=False, description="Seconds that accepted work may still take once asked to stop."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe level to log.")
    log_format: Literal["text", "json"] = Field("text", description="Log lines for people or for machines.")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what is passed in; `load_settings` layers the rest, so that a test's `Settings(...)` is just that."""
        return (init_settings,)

    @field_validator("allowed_hosts", mode="before")
    @classmethod
    def _split_hosts(cls, value: object) -> object:
        return _split(value)

    @field_validator("base_model", mode="before")
    @classmethod
    def _parse_models(cls, value: object) -> object:
        entries = _split(value)
        if not isinstance(entries, list | tuple):
            return entries
        return tuple(_parse_model(entry) if isinstance(entry, str) else entry for entry in entries)

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

    @field_validator("ranks", "device", "sampler")
    @classmethod
    def _engine_can(cls, value: Any, info: ValidationInfo) -> Any:
        if "engine" in info.data:  # else that is what is refused
            can = capabilities(info.data["engine"])
            try:
                if info.field_name == "ranks":
                    can.check_ranks(value)
                elif info.field_name == "device":
                    can.check_device(value)
                else:
                    can.check_sampler(sampler_kind(value))
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

    @field_validator("data_dir")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        return value.expanduser().absolute()

    # -- the same facts in the form in which the services read them -----------------------------------------------
    @property
    def base_models(self) -> dict[str, str | None]:
        """Served name -> local folder or hub id; None for the built-in default model."""
        return {entry.name: entry.source for entry in self.base_model}

    @property
    def tokenizers(self) -> dict[str, str]:
        """Served name -> tokenizer id to report, where one was configured."""
        return {entry.name: entry.tokenizer_id for entry in self.base_model if entry.tokenizer_id}

    @property
    def sampler_counts(self) -> tuple[int, int]:
        """The least and the largest number of `samplers` of a base model; (0, 0) where there are none."""
        least, _, most = (self.samplers or "0").partition(":")
        return int(least), int(most or least)

    @property
    def artifacts_cache_bytes(self) -> int:
        """`artifacts_cache_gib` in bytes."""
        return int(self.artifacts_cache_gib * 2**30)

    @property
    def gap_timeout(self) -> float:
        """`seq_gap_timeout`, seconds."""
        return self.seq_gap_timeout

    @property
    def keep_delivered(self) -> float:
        """`result_retention_delivered`, seconds."""
        return self.result_retention_delivered

    @property
    def keep_undelivered(self) -> float:
        """`result_retention_undelivered`, seconds."""
        return self.result_retention_undelivered

    @property
    def scratch_dir(self) -> Path:
        """What this server alone works with: the data folder, or a part of it where other servers share that."""
        from store.postgres import is_postgres  # not for every command: it takes a moment

        if not is_postgres(self.database_url):
            return self.data_dir
        return self.data_dir / "edges" / f"{socket.gethostname()}-{self.port or os.getpid()}"

    @property
    def metadata_only_above(self) -> int:
        """`metadata_only_above_kib` in bytes."""
        return self.metadata_only_above_kib * 1024

    @property
    def max_body_bytes(self) -> int:
        """`max_body_mib` in bytes."""
        return self.max_body_mib * 1024 * 1024


def load_settings(
    cli: Mapping[str, Any] | None = None,
    *,
    config: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """Layer command line over environment over file over defaults.

    Args:
        cli: options given on the command line, by field name; None values count as not given.
        config: the TOML file; without it `TINSMITH_CONFIG` names one, if set.
        environ: the environment to read; default is that of the process.

    Raises:
        SettingsError: for an unreadable file, an unknown key, or a value that is not accepted.
    """
    env = os.environ if environ is None else environ
    layers: list[tuple[str, dict[str, Any]]] = [("default", {})]
    file = config or (Path(env["TINSMITH_CONFIG"]) if env.get("TINSMITH_CONFIG") else None)
    if file is not None:
        layers.append((f"file {file}", _read_file(file)))
    layers.append(("environment", _read_env(env)))
    layers.append(("command line", {key: value for key, value in (cli or {}).items() if value is not None}))
    merged: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for name, values in layers:
        merged.update(values)
        origin.update(dict.fromkeys(values, name))
    try:
        return Settings(**merged)
    except ValidationError as error:
        raise SettingsError(_explain(error, origin)) from None


def check_folders(settings: Settings) -> None:
    """Raise `SettingsError` for a base model whose folder is missing: a worker would find out only after it started."""
    for model in settings.base_model:
        missing_folder(model)


def missing_folder(model: BaseModelSource) -> None:
    """Raise `SettingsError` if a base model has a folder that is not there."""
    if model.path is not None and model.path.startswith(_LOCAL) and not Path(model.source or "").is_dir():
        raise SettingsError(f"base_model {model.name}: there is no folder {model.path!r}")


def _read_file(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"config file {file}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"config file {file} is not valid TOML: {error}") from None


def _read_env(env: Mapping[str, str]) -> dict[str, Any]:
    known = {ENV_PREFIX + name.upper(): name for name in Settings.model_fields}
    for variable in sorted(env):
        if variable.startswith(ENV_PREFIX) and variable not in known and variable not in OTHER_ENV:
            raise SettingsError(
                f"environment variable {variable} is not a setting{_closest(variable, known)} "
                "(on Kubernetes, `enableServiceLinks: false` keeps it from setting variables of its own)"
            )
    source = EnvSettingsSource(Settings)
    source.env_vars = {key.lower(): value for key, value in env.items() if value}  # empty means not given
    try:
        return source()
    except ValueError as error:
        raise SettingsError(f"environment: {error}") from None


def _split(value: object) -> object:
    """Text from the environment: a JSON list, or items separated by commas."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        try:
            return json.loads(value)
        except ValueError as error:
            raise ValueError(f"{value!r} begins like a JSON list but is not one ({error})") from None
    return [item.strip() for item in value.split(",") if item.strip()]


def _parse_model(text: str) -> dict[str, str]:
    name, separator, path = text.partition("=")
    if separator and not path:
        raise ValueError(f"{text!r} has nothing after '='; write NAME or NAME=PATH")
    return {"name": name, "path": path} if separator else {"name": name}


def _closest(word: str, known: Mapping[str, str] | list[str]) -> str:
    match = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {match[0]}?" if match else ""


def _explain(error: ValidationError, origin: Mapping[str, str]) -> str:
    lines: list[str] = []
    for item in error.errors(include_url=False, include_context=False):
        name = str(item["loc"][0]) if item["loc"] else "settings"
        where = origin.get(name, "default")
        path = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden" and len(item["loc"]) == 1:
            lines.append(f"{name} ({where}) is not a setting{_closest(name, list(Settings.model_fields))}")
            continue
        if item["type"] == "too_short" and len(error.errors()) > 1:
            continue  # only because the entries that are named on the other lines were left out
        message = item["msg"].removeprefix("Value error, ")
        message = message[:1].lower() + message[1:]
        lines.append(f"{path} = {_short(item['input'])} ({where}): {message}")
    return "\n".join(lines)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
