"""Every request body of the HTTP API in one place; each is defined beside its result in `schemas/http`."""

from schemas.http.account import AuthTokenRequest
from schemas.http.admin import AddBaseModelRequest
from schemas.http.base import RequestModel
from schemas.http.custom_losses import CreateCustomLossRequest
from schemas.http.futures import CancelFutureRequest, RetrieveFutureRequest, RetrieveFuturesRequest
from schemas.http.limits import SetLimitsRequest
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
from schemas.http.tenancy import (
    CreateKeyRequest,
    CreateProjectRequest,
    CreateUserRequest,
    RotateKeyRequest,
    SetMemberRequest,
)
from schemas.http.tensors import EncodedTextChunk, ModelInput, TensorData
from schemas.http.tokenize import TokenizeRequest
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
    ImportCheckpointRequest,
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
    "CreateKeyRequest",
    "CreateModelRequest",
    "CreateProjectRequest",
    "CreateSamplingSessionRequest",
    "CreateSessionRequest",
    "CreateUserRequest",
    "Datum",
    "DimuonParams",
    "EncodedTextChunk",
    "FinishReason",
    "FinishSessionRequest",
    "ForwardBackwardInput",
    "ForwardBackwardRequest",
    "GetInfoRequest",
    "ImportCheckpointRequest",
    "JoinSamplingSessionRequest",
    "LoadWeightsRequest",
    "LoraConfig",
    "ModelInput",
    "OptimStepRequest",
    "OptimizerConfig",
    "RequestModel",
    "RetrieveFutureRequest",
    "RetrieveFuturesRequest",
    "RotateKeyRequest",
    "SampleRequest",
    "SamplingParams",
    "SaveWeightsExternalRequest",
    "SaveWeightsForSamplerRequest",
    "SaveWeightsRequest",
    "SessionHeartbeatRequest",
    "SessionSearchRequest",
    "SetLimitsRequest",
    "SetMemberRequest",
    "SetSessionProjectRequest",
    "SetTtlRequest",
    "TelemetryRequest",
    "TensorData",
    "TokenizeRequest",
    "UnloadModelRequest",
    "WeightsInfoRequest",
    "ZeroGradRequest",
]
