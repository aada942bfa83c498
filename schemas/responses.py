"""Every result of the HTTP API in one place; each is defined beside its request in `schemas/http`."""

from schemas.http.base import ResponseModel
from schemas.http.futures import CompleteMetadata, FailedFuture, TryAgain, UntypedPromise
from schemas.http.models import CreateModelResult, GetInfoResponse, ModelData, OptimizerConfigResult
from schemas.http.sampling import (
    CreateSamplingSessionResponse,
    SampledSequenceResult,
    SampleResponse,
    SamplerResponse,
    TopAlternatives,
)
from schemas.http.server import (
    ClientConfigResponse,
    ClientDynamicConfigResponse,
    ErrorInfo,
    ErrorResponse,
    HealthResponse,
    ModelReadiness,
    ReadyResponse,
    ServerCapabilitiesResponse,
    SupportedModel,
    TelemetryResponse,
)
from schemas.http.sessions import (
    CreateSessionResponse,
    SessionHeartbeatResponse,
    SessionResponse,
    SessionsResponse,
)
from schemas.http.tensors import TensorDataResult
from schemas.http.training import ForwardBackwardOutput, OptimStepResult, ZeroGradResult
from schemas.http.weights import (
    Checkpoint,
    CheckpointsResponse,
    Cursor,
    ExternalWeightsUrls,
    LoadWeightsResult,
    SaveWeightsExternalResult,
    SaveWeightsForSamplerResult,
    SaveWeightsResult,
    TrainingRun,
    TrainingRunsResponse,
    WeightsInfoResponse,
)

__all__ = [
    "Checkpoint",
    "CheckpointsResponse",
    "ClientConfigResponse",
    "ClientDynamicConfigResponse",
    "CompleteMetadata",
    "CreateModelResult",
    "CreateSamplingSessionResponse",
    "CreateSessionResponse",
    "Cursor",
    "ErrorInfo",
    "ErrorResponse",
    "ExternalWeightsUrls",
    "FailedFuture",
    "ForwardBackwardOutput",
    "GetInfoResponse",
    "HealthResponse",
    "LoadWeightsResult",
    "ModelData",
    "ModelReadiness",
    "OptimStepResult",
    "OptimizerConfigResult",
    "ReadyResponse",
    "ResponseModel",
    "SampleResponse",
    "SampledSequenceResult",
    "SamplerResponse",
    "SaveWeightsExternalResult",
    "SaveWeightsForSamplerResult",
    "SaveWeightsResult",
    "ServerCapabilitiesResponse",
    "SessionHeartbeatResponse",
    "SessionResponse",
    "SessionsResponse",
    "SupportedModel",
    "TelemetryResponse",
    "TensorDataResult",
    "TopAlternatives",
    "TrainingRun",
    "TrainingRunsResponse",
    "TryAgain",
    "UntypedPromise",
    "WeightsInfoResponse",
    "ZeroGradResult",
]
