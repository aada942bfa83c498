"""Sampling sessions and samples."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request

from app.dependencies import PrincipalDep, ServicesDep, SettingsDep
from app.routes.bodies import codec_limits, read_model
from app.services.paths import session_of
from app.services.sampling import sequence_ids
from schemas.requests import CreateSamplingSessionRequest, JoinSamplingSessionRequest, SampleRequest
from schemas.responses import (
    CreateSamplingSessionResponse,
    JoinSamplingSessionResponse,
    SamplerResponse,
    UntypedPromise,
)

router = APIRouter(tags=["sampling"])


@router.post("/create_sampling_session", operation_id="create_sampling_session")
async def create_sampling_session(
    request: Request, principal: PrincipalDep, services: ServicesDep, settings: SettingsDep
) -> CreateSamplingSessionResponse:
    """Open a sampler on a checkpoint or a base model. Answers at once."""
    body = await read_model(request, settings, CreateSamplingSessionRequest)
    sampler_id = await services.samplers.open(principal.project_id, body)
    services.housekeeping.touch(body.session_id)
    return CreateSamplingSessionResponse(sampling_session_id=sampler_id)


@router.get("/samplers/{sampler_id}", operation_id="get_sampler", response_model_exclude_none=True)
async def get_sampler(
    sampler_id: Annotated[str, Path(max_length=300, description="The sampling session.")],
    principal: PrincipalDep,
    services: ServicesDep,
) -> SamplerResponse:
    """Which weights a sampler samples."""
    sampler = await services.samplers.view(principal.project_id, sampler_id)
    return SamplerResponse(sampler_id=sampler.sampler_id, base_model=sampler.base_model, model_path=sampler.model_path)


@router.post("/join_sampling_session", operation_id="join_sampling_session")
async def join_sampling_session(
    request: Request, principal: PrincipalDep, services: ServicesDep, settings: SettingsDep
) -> JoinSamplingSessionResponse:
    """Get a number for a copy of a sampling client."""
    body = await read_model(request, settings, JoinSamplingSessionRequest)
    number = await services.samplers.join(principal.project_id, body.sampling_session_id)
    services.housekeeping.touch(session_of(body.sampling_session_id))
    return JoinSamplingSessionResponse(client_counter=number)


@router.post("/asample", operation_id="asample", response_model_exclude_none=True)
async def asample(
    request: Request, principal: PrincipalDep, services: ServicesDep, settings: SettingsDep
) -> UntypedPromise:
    """Continue a prompt, or score it."""
    body = await read_model(request, settings, SampleRequest)
    record = await services.sampling.sample(principal.project_id, body, codec_limits(settings))
    services.housekeeping.touch(session_of(body.sampling_session_id))
    return UntypedPromise(request_id=record.request_id, sample_sequence_ids=sequence_ids(record, body.num_samples))
