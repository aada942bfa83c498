"""Futures: what came of a submitted request.

A poll is held until there is an outcome, or for a while. A failed job is a success of HTTP: clients would retry a 5xx
for ever, and a 4xx tells them nothing about the job.
"""

from __future__ import annotations

import asyncio

import orjson
from fastapi import APIRouter, Request, Response

from app.codec import proto_result_to_json
from app.codec.forward_backward import JSON, PROTOBUF
from app.dependencies import PrincipalDep, ServicesDep, SettingsDep
from app.routes.bodies import read_model
from app.services.futures import Announced, Failed, Pending, Ready
from app.services.paths import session_of
from app.services.runs import session_of_scope
from app.services.waiting import Disconnected
from schemas.requests import CancelFutureRequest, RetrieveFutureRequest, RetrieveFuturesRequest
from schemas.responses import (
    CompleteMetadata,
    FailedFuture,
    FutureFailed,
    FutureFinished,
    RetrieveFuturesResponse,
    TryAgain,
)
from store.records import Completion

router = APIRouter(tags=["futures"])

QUICK_BYTES = 16 * 1024
"""A result up to which its JSON is written in less than it takes to hand it to a thread and back."""


@router.post("/retrieve_future", operation_id="retrieve_future", response_model=None)
async def retrieve_future(
    request: Request, principal: PrincipalDep, services: ServicesDep, settings: SettingsDep
) -> Response:
    """The outcome of a request, as often as it is asked for until it expires."""
    body = await read_model(request, settings, RetrieveFutureRequest)

    outcome = await services.futures.retrieve(
        principal.project_id,
        body.request_id,
        settings.poll_hold,
        _disconnection(request),
        announce_above=settings.metadata_only_above if body.allow_metadata_only else None,
    )
    services.housekeeping.touch(session_of_scope(outcome.record.scope))
    match outcome:
        case Pending(record, unread):
            queue = services.operations.queue_state(record.request_id)
            reason = unread or queue.reason
            again = TryAgain(request_id=record.request_id, queue_state=queue.state, queue_state_reason=reason)
            return Response(again.model_dump_json(), 408, media_type=JSON)
        case Failed(record, error):
            failed = FailedFuture(
                error=f"{error.message} ({error.hint})" if error.hint else error.message,
                category=error.category,
                code=error.code,
                field=error.field,
                hint=error.hint,
                request_id=record.request_id,
            )
            return Response(failed.model_dump_json(exclude_none=True), 200, media_type=JSON)
        case Announced(_, size):
            announced = CompleteMetadata(response_payload_size=size)
            return Response(announced.model_dump_json(), 200, media_type=JSON)
        case Ready():
            return await _deliver(outcome, request.headers.get("accept", ""))


@router.post("/retrieve_futures", operation_id="retrieve_futures")
async def retrieve_futures(
    request: Request, principal: PrincipalDep, services: ServicesDep, settings: SettingsDep
) -> RetrieveFuturesResponse:
    """Which requests of a sampling client were completed since its last look, as soon as there is one."""
    body = await read_model(request, settings, RetrieveFuturesRequest)
    hold = settings.poll_hold if body.timeout is None else min(body.timeout, settings.poll_hold)
    sampler_id = body.target.sampling_session_id
    page = await services.completions.poll(
        principal.project_id,
        sampler_id,
        body.target.cloned_sampler_id,
        body.prev_cursor,
        body.retrieved_request_ids,
        hold,
        _disconnection(request),
    )
    services.housekeeping.touch(session_of(sampler_id))
    return RetrieveFuturesResponse(completions=[_completion(each) for each in page.completions], cursor=page.cursor)


@router.post("/cancel_future", operation_id="cancel_future", status_code=204)
async def cancel_future(
    request: Request, principal: PrincipalDep, services: ServicesDep, settings: SettingsDep
) -> Response:
    """Drop a sample that nobody wants any more. One that is finished stays as it is."""
    body = await read_model(request, settings, CancelFutureRequest)
    await services.futures.cancel(principal.project_id, body.request_id)
    return Response(status_code=204)


def _disconnection(request: Request) -> Disconnected:
    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    return disconnected


def _completion(completion: Completion) -> FutureFinished | FutureFailed:
    if not completion.finished:
        return FutureFailed(request_id=completion.request_id)
    return FutureFinished(request_id=completion.request_id, response_payload_uncompressed_size=completion.size or 0)


async def _deliver(outcome: Ready, accept: str) -> Response:
    if outcome.content_type != PROTOBUF or PROTOBUF in accept:
        return Response(outcome.data, 200, media_type=outcome.content_type)
    quick = len(outcome.data) <= QUICK_BYTES
    text = _as_json(outcome) if quick else await asyncio.to_thread(_as_json, outcome)
    return Response(text, 200, media_type=JSON)


def _as_json(outcome: Ready) -> bytes:
    return orjson.dumps(proto_result_to_json(outcome.record.kind, outcome.data))
