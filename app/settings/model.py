"""Every option of the server, in one typed model that is put together from themes."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from app.settings.capacity import Capacity
from app.settings.clients import Clients
from app.settings.compute import Compute
from app.settings.durability import Durability
from app.settings.lifetimes import Lifetimes
from app.settings.limits import Limits
from app.settings.network import Network
from app.settings.observation import Observation
from app.settings.sampling import Sampling
from app.settings.storage import Storage
from app.settings.values import Theme
from schemas.limits import LIMIT_NAMES, LimitName

ENV_PREFIX = "TINSMITH_"


class Settings(
    # From last to first: pydantic collects fields from the last base class to the first one.
    Observation,
    Lifetimes,
    Limits,
    Clients,
    Sampling,
    Capacity,
    Durability,
    Compute,
    Storage,
    Network,
    BaseSettings,
):
    """The options. Building one directly reads neither environment nor file (`load_settings` does)."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", frozen=True, validate_default=True)

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

    # -- the same facts in the form in which the services read them -----------------------------------------------
    @property
    def base_models(self) -> dict[str, str | None]:
        """Served name -> local folder or hub id; None for the built-in default model."""
        return {entry.name: entry.source for entry in self.base_model}

    @property
    def default_limits(self) -> dict[LimitName, float]:
        """The limits of every project that has none of its own."""
        found = {name: getattr(self, f"limit_{name}", None) for name in LIMIT_NAMES}
        return {name: value for name, value in found.items() if value is not None}

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
    def own_log_file(self) -> Path | None:
        """`log_file`, or the file in the data folder; None where there is neither."""
        from store.postgres import is_postgres

        if self.log_file is not None:
            return None if self.log_file == Path(os.devnull) else self.log_file
        return None if is_postgres(self.database_url) else self.data_dir / "server.log"

    @property
    def metadata_only_above(self) -> int:
        """`metadata_only_above_kib` in bytes."""
        return self.metadata_only_above_kib * 1024

    @property
    def max_import_bytes(self) -> int:
        """`max_import_mib` in bytes."""
        return self.max_import_mib * 1024 * 1024

    @property
    def max_body_bytes(self) -> int:
        """`max_body_mib` in bytes."""
        return self.max_body_mib * 1024 * 1024


THEMES = tuple(base for base in reversed(Settings.__bases__) if issubclass(base, Theme))
"""In the order of the documentation, of the options, and in which values are checked."""
