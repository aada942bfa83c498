"""Validated JSON requests to the operations that workers execute, where that is more than copying fields."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from app.codec.batch import MAX_TOKEN_ID, checked_tokens
from app.codec.limits import CodecLimits
from app.codec.tensors import CellBudget, tensor_from_json
from schemas.errors import InvalidRequest
from schemas.http.models import LoraConfig
from schemas.http.sampling import SampleRequest
from schemas.http.tensors import TensorData
from schemas.http.training import DimuonParams, OptimStepRequest
from schemas.operations import (
    DimuonStepParams,
    Int64,
    LoraSpec,
    OptimStep,
    OptimStepParams,
    Sample,
    SamplingParams,
    TrainBatch,
)

NOT_ASKED = -1
"""In `target_prompt_logprobs`: this cell wants no logprob."""


@dataclass(frozen=True, slots=True)
class ParsedSample:
    """An operation, and whether its `target_prompt_logprobs` came as CSR, so that the answer must be CSR too."""

    operation: Sample
    sparse_targets: bool


def optim_step_operation(request: OptimStepRequest) -> OptimStep:
    """All hyperparameters are set: a step never depends on an earlier one's."""
    dimuon = request.optimizer_params
    if isinstance(dimuon, DimuonParams):
        given = DimuonStepParams(
            lr=dimuon.learning_rate,
            beta1=dimuon.beta1,
            damping=dimuon.damping,
            rank_lr_correction_exponent=dimuon.rank_lr_correction_exponent,
        )
        return OptimStep(given, max(dimuon.grad_clip_norm, 0.0))
    params = OptimStepParams(
        lr=request.learning_rate,
        betas=(request.beta1, request.beta2),
        eps=request.eps,
        weight_decay=request.weight_decay,
    )
    return OptimStep(params, request.grad_clip_norm)


def lora_spec(config: LoraConfig, draw_seed: Callable[[], int]) -> LoraSpec:
    """The geometry asked for; `draw_seed` is called if the client gave no seed."""
    return LoraSpec(
        rank=config.rank,
        seed=draw_seed() if config.seed is None else config.seed,
        train_attn=config.train_attn,
        train_mlp=config.train_mlp,
        train_unembed=config.train_unembed,
    )


def sample_operation(
    request: SampleRequest, *, adapter_folder: str | None, limits: CodecLimits | None = None
) -> ParsedSample:
    """The operation of an `asample`.

    Args:
        adapter_folder: the weights of the sampling session; None = the plain base model.

    Raises:
        InvalidRequest: the prompt is too long, or `target_prompt_logprobs` does not fit it.
    """
    limits = limits or CodecLimits()
    parts = [np.array(chunk.tokens, dtype=np.int64) for chunk in request.prompt.chunks]
    prompt = checked_tokens(np.concatenate(parts), "prompt", limits)
    wanted = request.target_prompt_logprobs
    params = request.sampling_params
    stop = None if params.stop is None else (params.stop,) if isinstance(params.stop, str) else tuple(params.stop)
    operation = Sample(
        prompt=prompt,
        params=SamplingParams(
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            seed=params.seed,
            stop=stop,  # type: ignore[arg-type]  # all strings or all integers, as the model says
        ),
        num_samples=request.num_samples,
        adapter_folder=adapter_folder,
        prompt_logprobs=bool(request.prompt_logprobs),
        topk_prompt_logprobs=request.topk_prompt_logprobs,
        topk_sample_logprobs=request.topk_sample_logprobs,
        target_prompt_logprobs=None if wanted is None else _targets(wanted, prompt.size, limits),
        prompt_alt_tokens_k=request.prompt_alt_tokens_k,
        prompt_logprobs_last_n=request.prompt_logprobs_last_n,
        plain_logprobs=bool(request.record_stability_info),
    )
    return ParsedSample(operation, wanted is not None and wanted.sparse_crow_indices is not None)


def check_tokens(operation: TrainBatch | Sample, vocab_size: int) -> None:
    """Raises InvalidRequest naming the first token id that the base model's vocabulary lacks."""
    if isinstance(operation, Sample):
        targets = operation.target_prompt_logprobs
        _check_vocabulary(operation.prompt, "prompt", vocab_size)
        if targets is not None:
            _check_vocabulary(targets, "target_prompt_logprobs", vocab_size)
        return
    for i, datum in enumerate(operation.datums):
        _check_vocabulary(datum.tokens, f"data[{i}].model_input", vocab_size)
        field = f"data[{i}].loss_fn_inputs.target_tokens"
        _check_vocabulary(datum.inputs["target_tokens"].astype(np.int64, copy=False), field, vocab_size)


def _targets(wanted: TensorData, length: int, limits: CodecLimits) -> Int64:
    """Dense int64 [L-1, K] with -1 where nothing is asked. Listed cells of a CSR tensor must ask for something, so that
    its layout can be told from the dense form."""
    field = "target_prompt_logprobs"
    values = tensor_from_json(wanted, field, CellBudget(limits.max_tensor_cells), unlisted=NOT_ASKED)
    if values.dtype != np.int64:
        raise InvalidRequest(f"{field} must hold integers (token ids), but holds floats", field=field)
    if values.ndim != 2 or values.shape[0] != length - 1 or values.shape[1] < 1:
        raise InvalidRequest(
            f"{field} has shape {list(values.shape)}; a prompt of {length} tokens takes [{length - 1}, K]", field=field
        )
    sparse = wanted.sparse_crow_indices is not None
    lowest = 0 if sparse else NOT_ASKED
    listed = np.array(wanted.data, dtype=np.int64) if sparse else values
    if listed.size and (listed.min() < lowest or listed.max() > MAX_TOKEN_ID):
        accepted = "leave out cells that ask nothing" if sparse else "-1 = not asked"
        raise InvalidRequest(
            f"{field} holds {listed.min()} to {listed.max()}; a token id is 0 to {MAX_TOKEN_ID} ({accepted})",
            field=field,
        )
    return values.astype(np.int64, copy=False)


def _check_vocabulary(ids: Int64, field: str, vocab_size: int) -> None:
    if ids.size and ids.max() >= vocab_size:
        at = int(np.flatnonzero(ids >= vocab_size)[0])
        raise InvalidRequest(
            f"{field} holds token id {ids.flat[at]} at index {at}; this model's vocabulary has {vocab_size} "
            f"(0 to {vocab_size - 1})",
            field=field,
        )
