"""How long the server waits for things, and keeps them."""

from __future__ import annotations

from pydantic import Field

from app.settings.values import Seconds, Theme


class Lifetimes(Theme):
    """Polls, sessions, results, tokens, and the stop of the server."""

    heading = "Waiting and keeping"

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
        "of a request from a new one and make the timeline of its trace. Lines of requests without a session (samples "
        "of OpenAI's and Anthropic's clients, copies, imports) go so long after their outcome. Custom losses go with "
        "the lines of their session. Usage and the audit log stay.",
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
