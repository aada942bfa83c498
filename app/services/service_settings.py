"""What the services read of the settings, and how runtimes work by them. Not responsible for where settings come from
(`app/settings`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from schemas.limits import LimitName
from workers.runtime_options import RuntimeOptions
from workers.snapshots import SnapshotPolicy


class ServiceSettings(Protocol):
    """What the services read of the settings (units: seconds unless the name says otherwise)."""

    @property
    def data_dir(self) -> Path: ...
    @property
    def scratch_dir(self) -> Path:
        """A folder of this server alone."""
        ...

    @property
    def base_models(self) -> dict[str, str | None]:
        """Served name -> source (a local folder, a hub id, or None for the built-in default)."""
        ...

    @property
    def tokenizers(self) -> dict[str, str]:
        """Served name -> what get_info reports as tokenizer_id, for names that should not be derived."""
        ...

    @property
    def artifacts_url(self) -> str | None: ...
    @property
    def artifacts_endpoint(self) -> str | None: ...
    @property
    def artifacts_region(self) -> str | None: ...
    @property
    def artifacts_timeout(self) -> float: ...
    @property
    def artifacts_cache_bytes(self) -> int: ...
    @property
    def engine(self) -> str: ...
    @property
    def max_rank(self) -> int: ...
    @property
    def max_adapters(self) -> int: ...
    @property
    def default_limits(self) -> Mapping[LimitName, float]:
        """Of every project that has none of its own."""
        ...

    @property
    def max_request_tokens(self) -> int: ...
    @property
    def max_custom_loss_mib(self) -> int:
        """Of one project."""
        ...

    @property
    def max_sample_rows(self) -> int: ...
    @property
    def max_sample_tokens(self) -> int: ...
    @property
    def max_waiting_samples(self) -> int: ...
    @property
    def decode_slice(self) -> int: ...
    @property
    def turn_timeout(self) -> float:
        """0 = no limit."""
        ...

    @property
    def restart_limit(self) -> int: ...
    @property
    def death_limit(self) -> int: ...
    @property
    def snapshot_operations(self) -> int: ...
    @property
    def snapshot_seconds(self) -> float: ...
    @property
    def snapshot_mib(self) -> int: ...
    @property
    def snapshot_share(self) -> float:
        """Part of the time, 0 to 1."""
        ...

    @property
    def gap_timeout(self) -> float: ...
    @property
    def poll_hold(self) -> float: ...
    @property
    def session_timeout(self) -> float: ...
    @property
    def keep_delivered(self) -> float: ...
    @property
    def keep_undelivered(self) -> float: ...
    @property
    def log_retention(self) -> float: ...
    @property
    def stability_retention(self) -> float: ...
    @property
    def sweep_interval(self) -> float: ...
    @property
    def edge_lease(self) -> float: ...
    @property
    def token_lifetime(self) -> float: ...
    @property
    def worker_start_timeout(self) -> float: ...
    @property
    def shutdown_grace(self) -> float: ...


def runtime_options(settings: ServiceSettings) -> RuntimeOptions:
    """How every runtime works."""
    return RuntimeOptions(
        gap_timeout=settings.gap_timeout,
        max_adapters=settings.max_adapters,
        max_sample_rows=settings.max_sample_rows,
        decode_slice=settings.decode_slice,
        turn_timeout=settings.turn_timeout or None,
        restart_limit=settings.restart_limit,
        death_limit=settings.death_limit,
        snapshots=SnapshotPolicy(
            operations=settings.snapshot_operations,
            seconds=settings.snapshot_seconds,
            size_bytes=settings.snapshot_mib << 20,
            share=settings.snapshot_share,
        ),
    )
