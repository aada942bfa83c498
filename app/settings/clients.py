"""How clients talk to the server, as it tells them."""

from __future__ import annotations

from pydantic import Field

from app.settings.values import Count, Theme


class Clients(Theme):
    """Ways of the protocol that clients take because the server says so."""

    heading = "What clients are told"

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
