"""Every request body of the HTTP API in one place; each is defined beside its result in `schemas/http`."""

from schemas.http.base import RequestModel
from schemas.http.futures import CancelFutureRequest, RetrieveFutureRequest
from schemas.http.models import CreateModelRequest, GetInfoRequest, LoraConfig, OptimizerConfig
from schemas.http.sampling import CreateSamplingSessionRequest, SampleRequest, SamplingParams
from schemas.http.server import ClientConfigRequest, TelemetryRequest
from schemas.http.sessions import CreateSessionRequest, FinishReason, FinishSessionRequest, SessionHeartbeatRequest
from schemas.http.tensors import EncodedTextChunk, ModelInput, TensorData
from schemas.http.training import (
    AdamParams,
    Datum,
    DimuonParams,
    ForwardBackwardInput,
    ForwardBackwardRequest,
    OptimizerParams,
    OptimStepRequest,
    ZeroGradRequest,
)
from schemas.http.weights import (
    LoadWeightsRequest,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
    SetTtlRequest,
    WeightsInfoRequest,
)

__all__ = [
    "AdamParams",
    "CancelFutureRequest",
    "ClientConfigRequest",
    "CreateModelRequest",
    "CreateSamplingSessionRequest",
    "CreateSessionRequest",
    "Datum",
    "DimuonParams",
    "EncodedTextChunk",
    "FinishReason",
    "FinishSessionRequest",
    "ForwardBackwardInput",
    "ForwardBackwardRequest",
    "GetInfoRequest",
    "LoadWeightsRequest",
    "LoraConfig",
    "ModelInput",
    "OptimStepRequest",
    "OptimizerConfig",
    "OptimizerParams",
    "RequestModel",
    "RetrieveFutureRequest",
    "SampleRequest",
    "SamplingParams",
    "SaveWeightsExternalRequest",
    "SaveWeightsForSamplerRequest",
    "SaveWeightsRequest",
    "SessionHeartbeatRequest",
    "SetTtlRequest",
    "TelemetryRequest",
    "TensorData",
    "WeightsInfoRequest",
    "ZeroGradRequest",
]
