"""Every request body of the HTTP API in one place; each is defined beside its result in `schemas/http`."""

from schemas.http.account import AuthTokenRequest
from schemas.http.admin import AddBaseModelRequest
from schemas.http.base import RequestModel
from schemas.http.custom_losses import CreateCustomLossRequest
from schemas.http.futures import CancelFutureRequest, RetrieveFutureRequest, RetrieveFuturesRequest
from schemas.http.models import CreateModelRequest, GetInfoRequest, LoraConfig, OptimizerConfig
from schemas.http.sampling import (
    CreateSamplingSessionRequest,
    JoinSamplingSessionRequest,
    SampleRequest,
    SamplingParams,
)
from schemas.http.server import ClientConfigRequest, TelemetryRequest
from schemas.http.sessions import (
    CreateSessionRequest,
    FinishReason,
    FinishSessionRequest,
    SessionHeartbeatRequest,
    SessionSearchRequest,
    SetSessionProjectRequest,
)
from schemas.http.tensors import EncodedTextChunk, ModelInput, TensorData
from schemas.http.training import (
    AdamOptimizerParams,
    AdamParams,
    Datum,
    DimuonParams,
    ForwardBackwardInput,
    ForwardBackwardRequest,
    OptimStepRequest,
    ZeroGradRequest,
)
from schemas.http.weights import (
    CopyWeightsRequest,
    LoadWeightsRequest,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
    SetTtlRequest,
    UnloadModelRequest,
    WeightsInfoRequest,
)

__all__ = [
    "AdamOptimizerParams",
    "AdamParams",
    "AddBaseModelRequest",
    "AuthTokenRequest",
    "CancelFutureRequest",
    "ClientConfigRequest",
    "CopyWeightsRequest",
    "CreateCustomLossRequest",
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
    "JoinSamplingSessionRequest",
    "LoadWeightsRequest",
    "LoraConfig",
    "ModelInput",
    "OptimStepRequest",
    "OptimizerConfig",
    "RequestModel",
    "RetrieveFutureRequest",
    "RetrieveFuturesRequest",
    "SampleRequest",
    "SamplingParams",
    "SaveWeightsExternalRequest",
    "SaveWeightsForSamplerRequest",
    "SaveWeightsRequest",
    "SessionHeartbeatRequest",
    "SessionSearchRequest",
    "SetSessionProjectRequest",
    "SetTtlRequest",
    "TelemetryRequest",
    "TensorData",
    "UnloadModelRequest",
    "WeightsInfoRequest",
    "ZeroGradRequest",
]
