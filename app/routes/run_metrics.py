"""What a training run measured: as a document, as a table for spreadsheets, and as it happens."""

from __future__ import annotations

import csv
import io
from collections.abc import AsyncGenerator, Iterable
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Response
from fastapi.responses import StreamingResponse

from app.dependencies import PrincipalDep, ServicesDep
from app.routes.runs import RunId
from app.services.doors.sse import KEEP_ALIVE, event
from app.services.run_metrics import News, Step
from schemas.http.run_metrics import MetricPoint, RunMetricsResponse
from schemas.responses import ErrorResponse

router = APIRouter(tags=["training runs"])

CSV = "text/csv"
_TOO_MANY: dict[int | str, dict[str, Any]] = {
    429: {"model": ErrorResponse, "description": "Too many streams of the project are open."}
}
_COLUMNS = tuple(MetricPoint.model_fields)
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""What a spreadsheet takes for the beginning of a formula."""


@router.get(
    "/training_runs/{training_run_id}/metrics",
    operation_id="get_run_metrics",
    response_model=RunMetricsResponse,
    response_model_exclude_none=True,
    responses={200: {"content": {CSV: {"schema": {"type": "string"}}}, "description": "The steps of the run."}},
)
async def get_run_metrics(
    training_run_id: RunId,
    principal: PrincipalDep,
    services: ServicesDep,
    format: Annotated[Literal["json", "csv"], Query(description="`csv`: a table for spreadsheets.")] = "json",
) -> RunMetricsResponse | Response:
    """Loss, gradient norm, step size, tokens and times of each optimizer step."""
    run = await services.runs.owned(principal.project_id, training_run_id, field="training_run_id")
    points = [point_of(step) for step in await services.run_metrics.series(run.model_id)]
    if format == "json":
        return RunMetricsResponse(training_run_id=run.model_id, points=points)
    headers = {"Content-Disposition": 'attachment; filename="metrics.csv"'}
    return Response(_table(run.model_id, points), media_type=CSV, headers=headers)


@router.get(
    "/training_runs/{training_run_id}/events",
    operation_id="follow_run_metrics",
    response_class=StreamingResponse,
    responses={
        200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}, "description": "The events."},
        **_TOO_MANY,
    },
)
async def follow_run_metrics(
    training_run_id: RunId,
    principal: PrincipalDep,
    services: ServicesDep,
    after: Annotated[int, Query(ge=0, le=2**53, description="Leave out the steps up to this one.")] = 0,
) -> StreamingResponse:
    """The same as it happens: server-sent events `points` (a step may be told again, changed) and `state`.

    Ends after five minutes, or when the run does; ask again from the last step.
    """
    run = await services.runs.owned(principal.project_id, training_run_id, field="training_run_id")
    news = services.run_metrics.follow(principal.project_id, run.model_id, after)
    first = await anext(news)  # what refuses the stream is an answer of its own
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(_events(first, news), media_type="text/event-stream", headers=headers)


def point_of(step: Step) -> MetricPoint:
    """A step as clients see it."""
    return MetricPoint(
        step=step.step,
        done=step.done,
        merged=step.merged,
        time=step.at,
        batches=step.batches,
        tokens=step.tokens,
        loss=step.loss,
        loss_per_token=step.loss_per_token,
        grad_norm=step.grad_norm,
        learning_rate=step.learning_rate,
        logprob_gap=step.gap,
        kl=step.kl,
        waited_seconds=step.waited,
        run_seconds=step.seconds,
    )


def safe_cell(value: Any) -> str:
    """A cell that no spreadsheet computes: text that looks like a formula gets an apostrophe in front."""
    if value is None:
        return ""
    if not isinstance(value, str):
        return str(value)
    return f"'{value}" if value.startswith(_FORMULA) else value


def _table(run_id: str, points: Iterable[MetricPoint]) -> str:
    text = io.StringIO()
    table = csv.writer(text)
    table.writerow(("training_run_id", *_COLUMNS))
    for point in points:
        values = point.model_dump(mode="json")
        table.writerow([safe_cell(value) for value in (run_id, *(values[name] for name in _COLUMNS))])
    return text.getvalue()


async def _events(first: News | None, rest: AsyncGenerator[News | None]) -> AsyncGenerator[bytes]:
    try:
        for each in _shown(first):
            yield each
        async for news in rest:
            for each in _shown(news):
                yield each
    finally:
        await rest.aclose()


def _shown(news: News | None) -> list[bytes]:
    if news is None:
        return [KEEP_ALIVE]
    found = []
    if news.steps:
        points = [point_of(step).model_dump(mode="json", exclude_none=True) for step in news.steps]
        found.append(event({"points": points}, "points"))
    if news.state is not None:
        found.append(event({"state": news.state}, "state"))
    return found
